"""Memory beside the pool: what sources take for the index of its blocks, and staging pages (`compute.reach`)."""

from copy import deepcopy
from typing import Any

from vllm.config import VllmConfig

from ...compute.attention.fp8 import CPU_FP8_NAMES, FP8
from ...compute.runtime import EvictionRuntime
from ...config import KVPolicyConfig, KVPolicyError
from ..engine.spec import host_blocks
from ..start import advice


def longer(kv_cache_config: Any, pages: int) -> Any:
    """Return a copy of vLLM's `KVCacheConfig`, with `pages` pages behind the blocks of the pool."""
    config = deepcopy(kv_cache_config)
    blocks = config.num_blocks
    config.num_blocks += pages
    for tensor in config.kv_cache_tensors:
        tensor.size = tensor.size // blocks * config.num_blocks
        # Since 0.32 layers lie one after the other in one allocation, or blocks do.
        if getattr(tensor, "layer_stride", 0) > getattr(tensor, "block_stride", 0):
            tensor.layer_stride = tensor.layer_stride // blocks * config.num_blocks
        if getattr(tensor, "offset", 0) and tensor.layer_stride > tensor.block_stride:
            tensor.offset = tensor.offset // blocks * config.num_blocks
    return config


def left_by_sources(
    vllm_config: VllmConfig, config: KVPolicyConfig, runtime: EvictionRuntime, block: int, available: int
) -> int:
    """Return the bytes of `available` that are left for a pool beside staging pages and the index of the pool.

    On a device the index of host blocks takes of the same memory; on a CPU it takes of the host's.

    Args:
        block: bytes of a block of the pool.

    Raises:
        KVPolicyError: no block is left.
    """
    model, on_device = vllm_config.model_config, runtime.ops.compiles
    dtype = FP8 if advice.cache_dtype(vllm_config) in CPU_FP8_NAMES else model.dtype
    keys = block if model.use_mla else block // 2  # all of a latent is a key
    index = sum(group.source.bytes_beside(keys, dtype) for group in runtime.groups)
    pages = max(group.source.staging for group in runtime.groups)
    of_host = host_blocks(vllm_config, config, block, runtime.groups[0].block_size) * index if on_device else 0
    left = (available - pages * block - of_host) * block // (block + index)
    if pages and left < block:
        also, less = (f" and an index of {of_host} bytes for the host", " or host") if on_device else ("", "")
        raise KVPolicyError(
            f"evict: host: {available} bytes for the KV cache hold no pool beside {pages} staging pages of {block} "
            f"bytes{also}; expected more; set --max-model-len{less} to less, or give the KV cache more memory"
        )
    return left

"""Memory beside the pool: staging pages for blocks of the host (`compute.reach`)."""

from copy import deepcopy
from typing import Any

from vllm.config import VllmConfig

from ...compute.attention.ops import CPU_FP8_NAMES
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

    The index of host blocks lies beside the pool's: on a CPU in the memory that the host has.

    Args:
        block: bytes of a block of the pool.

    Raises:
        KVPolicyError: no block is left.
    """
    part = next((part for part in config.classes.values() if part.reaches or part.sparse), None)
    if part is None:
        return available
    size, on_device = runtime.groups[0].block_size, runtime.ops.compiles
    pages = max(group.source.staging for group in runtime.groups)
    index = _index_bytes(vllm_config, part, block, size)
    of_host = host_blocks(vllm_config, config, block, size) * index if on_device else 0
    left = (available - pages * block - of_host) * block // (block + index)
    if pages and left < block:
        also, less = (f" and an index of {of_host} bytes for the host", " or host") if on_device else ("", "")
        raise KVPolicyError(
            f"evict: host: {available} bytes for the KV cache hold no pool beside {pages} staging pages of {block} "
            f"bytes{also}; expected more; set --max-model-len{less} to less, or give the KV cache more memory"
        )
    return left


def _index_bytes(vllm_config: VllmConfig, config: KVPolicyConfig, block: int, size: int) -> int:
    """Return the bytes that stand for a block of `size` tokens under `index`."""
    if config.index == "box":
        return _box_bytes(vllm_config, block, size)
    # A key's signs and its token's scale, and a centre.
    dims = vllm_config.model_config.get_head_size()
    item = 1 if advice.cache_dtype(vllm_config) in CPU_FP8_NAMES else vllm_config.model_config.dtype.itemsize
    return _halves_of_keys(vllm_config) * block * (16 * dims + size * (dims + 16)) // (16 * size * dims * item)


def _box_bytes(vllm_config: VllmConfig, block: int, size: int) -> int:
    """Return the bytes of a block's box of keys: two vectors of its keys."""
    wide = 4 if advice.cache_dtype(vllm_config) in CPU_FP8_NAMES else 1  # of fp8 caches in float32
    return _halves_of_keys(vllm_config) * wide * block // size


def _halves_of_keys(vllm_config: VllmConfig) -> int:
    """Return how many halves of a block are keys: of a block of latents both."""
    return 2 if vllm_config.model_config.use_mla else 1

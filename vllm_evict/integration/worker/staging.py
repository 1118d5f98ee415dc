"""Memory beside the pool: staging pages for blocks of the host (`compute.reach`), and bounds of keys."""

from copy import deepcopy
from typing import Any

from vllm.config import VllmConfig

from ...compute.attention.ops import CPU_FP8_NAMES
from ...compute.kernels.bounds import bounds_width
from ...config import KVPolicyConfig, KVPolicyError
from ...core.mechanisms.reach import staging_blocks
from ..engine.spec import host_blocks
from ..start import advice


def longer(kv_cache_config: Any, pages: int) -> Any:
    """Return a copy of vLLM's `KVCacheConfig` of one KV group, with `pages` pages behind the blocks of the pool."""
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


def bound_bytes(vllm_config: VllmConfig, config: KVPolicyConfig, block: int) -> int:
    """Return the bytes on the device of bounds of host blocks' keys; `block`: of a block of the pool."""
    if config.evict != "host" or config.recall == "none":
        return 0
    boxes = host_blocks(vllm_config, config, block) * _box_bytes(vllm_config, block)
    dims = vllm_config.model_config.get_head_size()
    return boxes * bounds_width(config.recall_bounds, dims) // (2 * dims)


def left_by_reach(vllm_config: VllmConfig, config: KVPolicyConfig, block: int, available: int) -> int:
    """Return the bytes of `available` that are left for a pool beside staging pages and the index of the pool.

    The index of host blocks lies beside these, in the memory that the host has.

    Args:
        block: bytes of a block of the pool.

    Raises:
        KVPolicyError: no block is left.
    """
    if not config.reaches:
        return available
    pages = staging_blocks(vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size)
    left = (available - pages * block) * block // (block + _index_bytes(vllm_config, config, block))
    if left < block:
        raise KVPolicyError(
            f"evict: host: {available} bytes for the KV cache hold no pool beside {pages} staging pages of {block} "
            "bytes; expected more; set --max-model-len to less, or give the KV cache more memory"
        )
    return left


def _index_bytes(vllm_config: VllmConfig, config: KVPolicyConfig, block: int) -> int:
    """Return the bytes that stand for a block under `index`."""
    if config.index == "box":
        return _box_bytes(vllm_config, block)
    # A key's signs and its token's scale, and a centre; keys are half of a block.
    size, dims = vllm_config.cache_config.block_size, vllm_config.model_config.get_head_size()
    item = 1 if advice.cache_dtype(vllm_config) in CPU_FP8_NAMES else vllm_config.model_config.dtype.itemsize
    return block * (dims + size * (dims // 16 + 1)) // (size * dims * item)


def _box_bytes(vllm_config: VllmConfig, block: int) -> int:
    """Return the bytes of a block's box of keys: two vectors of its keys, which are half of it."""
    wide = 4 if advice.cache_dtype(vllm_config) in CPU_FP8_NAMES else 1  # of fp8 caches in float32
    return wide * block // vllm_config.cache_config.block_size

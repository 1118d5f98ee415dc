"""Pages behind the pool's, into which blocks of the host are copied for prompts (`compute.reach`)."""

from copy import deepcopy
from typing import Any


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

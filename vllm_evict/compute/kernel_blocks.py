"""Views for attention backends whose kernels read smaller blocks than the pool's."""

from copy import copy
from typing import Any

import torch


class KernelBlockViews:
    """Views of one metadata builder, by the blocks that its kernels read.

    vLLM splits blocks that are larger than a backend's kernels take, and gives the backend's builder a table of kernel
    blocks: block b of the pool is kernel blocks n * b to n * b + n - 1. Holes, scores and decisions are of the pool's
    blocks, so a view is made of these and then split in the same way.

    Args:
        group: `GroupRuntime` of the KV group.
        size: tokens of a kernel block, a divisor of the pool's.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group, self._count = group, group.block_size // size
        self._offsets = torch.arange(self._count, dtype=torch.int32, device=group.device)
        self._memory: torch.Tensor | None = None
        #: Arguments of the step's `_split`.
        self._step: tuple[torch.Tensor, int] | None = None

    def view(self, metadata: Any) -> tuple[Any, Any, Any]:
        """Return `GroupRuntime.view` by the pool's blocks, the same metadata by kernel blocks, and the step's work.

        Args:
            metadata: vLLM's `CommonAttentionMetadata` with a table of kernel blocks, int32 [R, n * W].
        """
        group, split = self._group, metadata.block_table_tensor
        if not group.in_step and group.batch.graph is None:  # a dummy step
            return metadata, metadata, None
        whole = self._whole(metadata)
        viewed, work = group.view(whole)
        read, table = copy(viewed), viewed.block_table_tensor
        changed = table.data_ptr() != whole.block_table_tensor.data_ptr()
        self._step = (table, viewed.max_seq_len) if changed else None
        read.block_table_tensor = self._split(*self._step) if self._step else split
        return viewed, read, work

    def rewritten(self) -> None:
        """Split the step's view again, which a layer has written."""
        assert self._step is not None, "a layer has written into vLLM's own block table"
        self._split(*self._step)

    def drafting_view(self, metadata: Any) -> Any:
        """Return `GroupRuntime.drafting_view` by kernel blocks.

        Args:
            metadata: vLLM's `CommonAttentionMetadata` of a drafter's pass, with a table of kernel blocks.
        """
        whole = self._whole(metadata)
        viewed = self._group.drafting_view(whole)
        if viewed is whole:
            return metadata
        viewed.block_table_tensor = self._split(viewed.block_table_tensor, viewed.max_seq_len)
        return viewed

    def _whole(self, metadata: Any) -> Any:
        """Return the metadata with the table of the pool's blocks."""
        whole, split, group = copy(metadata), metadata.block_table_tensor, self._group
        if group.in_step:
            whole.block_table_tensor = group.views.table_of(group)[: len(split)]
        else:  # a dummy step that captures a graph may run before the runner has tables
            whole.block_table_tensor = split[:, :: self._count] // self._count
        return whole

    def _split(self, table: torch.Tensor, longest: int) -> torch.Tensor:
        """Return kernel blocks of the pool's, in memory with a fixed address: int32 [R, n * W].

        Entries past the first `longest` tokens are undefined.
        """
        (rows, width), count = table.shape, self._count
        if self._memory is None or self._memory.shape[0] < rows or self._memory.shape[1] < count * width:
            most = max(rows, len(self._group.views.memory(self._group).table))
            self._memory = torch.zeros(most, count * width, dtype=torch.int32, device=table.device)
        split, used = self._memory[:rows, : count * width], min(-(-longest // self._group.block_size), width)
        out = split[:, : count * used].unflatten(1, (used, count))
        torch.add(self._offsets, table[:, :used, None], alpha=count, out=out)
        return split


def whole_blocks(kv_cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return a view of a cache in kernel blocks [n * num_blocks, block_size / n, C + R] by the pool's blocks.

    Raises:
        RuntimeError: a block's kernel blocks are not next to each other.
    """
    return kv_cache if kv_cache.shape[1] == block_size else kv_cache.view(-1, block_size, kv_cache.shape[-1])

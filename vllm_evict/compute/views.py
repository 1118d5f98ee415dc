"""Views of a worker's KV groups, in memory with fixed addresses that one launch fills once a step."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch

from .kernels.view import View, resident_view

#: Block tables are as wide as a multiple of so many tokens, as vLLM's are: FlashInfer's kernels take no others.
ALIGNED_TOKENS = 128


class Views:
    """Views of all KV groups. Built lazily: the first `of()` call in a step builds the views of all groups.

    Args:
        groups: `GroupRuntime`s, in vLLM's order.
        batch: the batch that the groups share.

    Attributes:
        tables: vLLM's block tables of this step, one for each group: int32 [at least R, W].
    """

    def __init__(self, groups: Sequence[Any], batch: Any) -> None:
        self.tables: Sequence[torch.Tensor] = ()
        self._groups, self._batch = list(groups), batch
        self._memory: dict[Any, View] = {}
        self._made: dict[Any, View] = {}

    def begin(self) -> None:
        """Drop the views of the last step."""
        self._made = {}

    def memory(self, group: Any, least: tuple[int, int] = (0, 0), drafting: bool = False) -> View:
        """Return the memory of one group's view, for the largest batch of the longest requests.

        Its addresses stay the same until vLLM's block table, of shape `least`, needs more rows or a greater width.
        `drafting`: that of a drafter's passes, where layers of the model write into the step's view.
        """
        rows, width = max(least[0], group.shape.max_requests), max(least[1], group.shape.max_blocks)
        step = ALIGNED_TOKENS // gcd(ALIGNED_TOKENS, group.block_size)
        width = -(-width // step) * step
        view = self._memory.get((group, drafting))
        if view is None or len(view.lens) < rows or view.table.shape[1] < width:
            shapes = ((rows, width), (rows,), (rows, width))
            view = View(*(torch.zeros(shape, dtype=torch.int32, device=group.device) for shape in shapes))
            self._memory[group, drafting] = view
        return view

    def warm_up(self, tables: Sequence[torch.Tensor]) -> None:
        """Compile the kernel for block tables like these, by a launch for a request without tokens."""
        lens = torch.zeros(1, dtype=torch.int32, device=tables[0].device)
        views = [self.memory(group, table.shape).of_rows(1) for group, table in zip(self._groups, tables)]
        resident_view([table[:1] for table in tables], lens, self._groups[0].block_size, views)

    def table_of(self, group: Any) -> torch.Tensor:
        """Return vLLM's block table of one group in this step: int32 [at least R, W]."""
        return self.tables[self._groups.index(group)]

    def of(self, group: Any, metadata: Any) -> View:
        """Return one group's view of this step: R rows, or all rows of the full graph that the step replays.

        Entries past the longest resident request of the batch are undefined.

        Args:
            group: a group with a view, or any group if the step replays a full graph.
            metadata: vLLM's `CommonAttentionMetadata` of the group.
        """
        own = self.table_of(group)
        assert own.data_ptr() == metadata.block_table_tensor.data_ptr(), "vLLM's builder got another block table"
        if not self._made:
            self._make(metadata)
        return self._made[group]

    def drafting(self, group: Any, metadata: Any, hidden: Sequence[tuple[int, range]] = ()) -> View:
        """Return one group's view in a drafter's pass after the step, in the memory of the step's view.

        Its logical blocks are still the step's. Where layers of the model write into the step's view, it has its own.

        Args:
            group: a group with holes.
            metadata: vLLM's `CommonAttentionMetadata` of the pass.
            hidden: rows, and logical blocks that are left out (see `Source.hidden`).
        """
        tables, block_size = metadata.block_table_tensor, self._groups[0].block_size
        view = self.memory(group, tables.shape, group.source.rewrites).of_rows(len(tables))
        if hidden:
            tables = tables.clone()
            for row, blocks in hidden:
                tables[row, blocks.start : blocks.stop] = 0
        width = min(-(-metadata.max_seq_len // block_size), tables.shape[1])
        resident_view([tables], metadata.seq_lens, block_size, [View(view.table[:, :width], view.lens)])
        return view

    def _make(self, metadata: Any) -> None:
        in_graph, live = self._batch.graph is not None, len(self._batch.req_ids)
        rows = len(metadata.block_table_tensor) if in_graph else live
        seq_lens = metadata.seq_lens_cpu_upper_bound[:live].numpy()
        seen, longest = [], 1
        for group, table in zip(self._groups, self.tables, strict=True):
            if in_graph or group.has_view:
                self._made[group] = self.memory(group, table.shape).of_rows(rows)
                longest = max(longest, int(group.resident_tokens(seq_lens).max()))
            seen.append(self._made.get(group))
        width = -(-longest // self._groups[0].block_size)
        seen = [view and view.of_width(width) for view in seen]
        tables = [table[:rows] for table in self.tables]
        resident_view(tables, metadata.seq_lens[:rows], self._groups[0].block_size, seen)

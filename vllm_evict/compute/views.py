"""Block tables without holes of a worker's KV groups: memory that stays, and the launch that fills it once a step."""

from collections.abc import Sequence
from typing import Any

import torch

from .kernels.view import View, resident_view


class Views:
    """Resident views of all KV groups. Whoever asks first in a step has them all made.

    Args:
        groups: `GroupRuntime`s, in vLLM's order.
        batch: theirs.

    Attributes:
        tables: vLLM's block tables of this step, by group: int32 [at least R, W].
    """

    def __init__(self, groups: Sequence[Any], batch: Any) -> None:
        self.tables: Sequence[torch.Tensor] = ()
        self._groups, self._batch = list(groups), batch
        self._memory: dict[Any, View] = {}
        self._made: dict[Any, View] = {}

    def begin(self) -> None:
        """A step begins."""
        self._made = {}

    def memory(self, group: Any, least: tuple[int, int] = (0, 0)) -> View:
        """Of one group, for the largest batch of the longest requests; addresses stay the same from step to step.

        Args:
            group: whose.
            least: rows and width of vLLM's block table, which may be wider than its requests ever are.
        """
        rows, width = max(least[0], group.max_requests), max(least[1], group.max_blocks)
        view = self._memory.get(group)
        if view is None or len(view.lens) < rows or view.table.shape[1] < width:
            shapes = ((rows, width), (rows,), (rows, width))
            view = View(*(torch.zeros(shape, dtype=torch.int32, device=group.device) for shape in shapes))
            self._memory[group] = view
        return view

    def warm_up(self, tables: Sequence[torch.Tensor]) -> None:
        """Launch what makes views of block tables like these, of a request without tokens."""
        lens = torch.zeros(1, dtype=torch.int32, device=tables[0].device)
        memory = (self.memory(group, table.shape) for group, table in zip(self._groups, tables))
        views = [View(*(each[:1] for each in view)) for view in memory]
        resident_view([table[:1] for table in tables], lens, self._groups[0].block_size, views)

    def of(self, group: Any, metadata: Any) -> View:
        """One group's view of this step: R rows, or as many as the full graph has that is replayed.

        Nothing may be read past the longest resident request of the batch: what former steps left is there.

        Args:
            group: one that lacks blocks, or any if a full graph is replayed.
            metadata: vLLM's `CommonAttentionMetadata` of the group.
        """
        own = self.tables[self._groups.index(group)]
        assert own.data_ptr() == metadata.block_table_tensor.data_ptr(), "vLLM's builders were given other block tables"
        if not self._made:
            self._make(metadata)
        return self._made[group]

    def _make(self, metadata: Any) -> None:
        in_graph, live = self._batch.graph is not None, len(self._batch.req_ids)
        rows = len(metadata.block_table_tensor) if in_graph else live
        seq_lens = metadata.seq_lens_cpu_upper_bound[:live].numpy()
        seen, longest = [], 1
        for group, table in zip(self._groups, self.tables, strict=True):
            if in_graph or group.with_holes:
                self._made[group] = View(*(each[:rows] for each in self.memory(group, table.shape)))
                longest = max(longest, int(group.held(seq_lens).max()))
            seen.append(self._made.get(group))
        width = -(-longest // self._groups[0].block_size)
        seen = [view and View(view.table[:, :width], view.lens, view.logical[:, :width]) for view in seen]
        tables = [table[:rows] for table in self.tables]
        resident_view(tables, metadata.seq_lens[:rows], self._groups[0].block_size, seen)

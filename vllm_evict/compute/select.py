"""Query-aware selection: decodes attend to the best resident blocks of each layer, by bounds of keys.

Bounds are Quest's (Tang et al., ICML 2024, arXiv:2406.10774), with one choice for all heads of a layer. Filter layers
are OmniKV's (Hao et al., ICLR 2025), a choice that holds for some steps is Recycled Attention's (Xu et al., 2024).
Each tensor-parallel rank chooses for its own heads: nothing is freed, so ranks need not agree.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..config import KVPolicyConfig
from ..core.offload import Copy
from .holes import Start
from .kernels.bounds import bound_scores, key_bounds
from .kernels.logits import logits_of
from .offload import empty_bounds
from .parts import Room
from .probes import LayerCall
from .source import NO_ROWS, Source, StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import to_device


@dataclass(slots=True)
class _Held:
    """The choice of one request that holds for some steps.

    Attributes:
        steps: steps that attended to it so far.
        blocks: place of a layer -> physical blocks between sinks and recent blocks, in order.
    """

    steps: int = 0
    blocks: dict[int, torch.Tensor] = field(default_factory=dict)


class Selection(Source):
    """Bounds of all blocks of one KV group, and choices of its requests.

    A block's bounds are computed in the step that fills it, and live as long as its content. So a request that hits a
    cached prefix has the bounds of its blocks.

    Args:
        config: policy of the group's heads; its field `select` is above 0.
        block_size: tokens.
        layers: of the model, the layer of each place in the KV group; no layer has two places.
        store: KV cache of the group.
        device: where the cache is.

    Attributes:
        block_size: tokens.
        blocks: blocks that a decode attends to; requests with more resident blocks select.
        sinks, recent: leading and trailing blocks of them that are always selected.
    """

    reads_all = False

    def __init__(
        self, config: KVPolicyConfig, block_size: int, layers: Sequence[int], store: Store, device: torch.device
    ) -> None:
        self.blocks, self.sinks, self.recent = config.selected(block_size)
        self._config, self._kind = config, config.select_bounds
        self._every, self.block_size, self._store, self._device = config.select_every, block_size, store, device
        #: Places of layers that choose, and of layers that attend to a choice.
        self._choosers, self._sparse = (
            frozenset(place for place, layer in enumerate(layers) if layer in chosen)
            for chosen in config.selecting(max(layers) + 1)
        )
        self._bounds: list[torch.Tensor] = []
        self._scratch: torch.Tensor | None = None
        self._held: dict[str, _Held] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the bounds on their device."""
        return sum(bounds.nbytes for bounds in self._bounds)

    @property
    def requests(self) -> Iterable[str]:
        """Requests whose choice holds."""
        return self._held.keys()

    def allocate(self, room: Room) -> None:
        """Allocate bounds for all blocks of the pool."""
        self._bounds = empty_bounds(self._store, room.blocks, self._device, self._kind)

    def copied(self, copies: Sequence[Copy]) -> None:
        """Compute the bounds of full blocks that copies have written."""
        if not (blocks := [copy.physical for copy in copies if copy.kind == "fetch"]):
            return
        where = to_device(np.array(blocks, np.int64), self._device)
        for (keys, _), bounds in zip(self._store.read(where, False), self._bounds):
            bounds[where] = key_bounds(keys, kind=self._kind)

    def begin(self, start: Start) -> None:
        """Choose anew for requests that ended, started, lost blocks or got some back."""
        for req_ids in (start.gone, start.started, start.changed) if self._held else ():
            for req_id in req_ids:
                self._held.pop(req_id, None)

    def step(self, batch: StepBatch) -> StepSource:
        reads_less = self._config.reads_less(batch.queries, batch.resident_tokens, self.block_size)
        rows, filled = np.flatnonzero(reads_less), batch.filled(self.block_size)
        if filled is None and not len(rows):
            return super().step(batch)
        choices = []
        for row in rows.tolist():
            its = self._held.setdefault(batch.req_ids[row], _Held())
            if its.steps == self._every:
                its.steps, its.blocks = 0, {}
            its.steps += 1
            resident = batch.table[row, : -(-int(batch.resident_tokens[row]) // self.block_size)]
            choices.append(_Choice(row, int(batch.starts[row]), resident, its))
        return SelectStep(self, choices, filled, batch)

    def choose(self, choice: "_Choice", layer: Any, place: int, query: torch.Tensor) -> torch.Tensor:
        """Return the blocks between sinks and recent blocks that a request attends to: int32, in order.

        Args:
            choice: of the request.
            layer: that attends.
            place: of the layer.
            query: [T, H, D].
        """
        blocks = choice.held.blocks.get(place)
        if blocks is None:
            resident = choice.resident
            # All but the newest block are full, so their bounds are known.
            bounds = self._gathered(place, resident[:-1])
            own = query[choice.query : choice.query + 1]
            scores = bound_scores(own, bounds, layer.impl.scale, **logits_of(layer))
            candidates = scores[self.sinks : len(resident) - self.recent]
            best = candidates.topk(self.blocks - self.sinks - self.recent, sorted=False).indices.sort().values
            blocks = choice.held.blocks[place] = resident[best + self.sinks]
        return blocks

    def _gathered(self, place: int, blocks: torch.Tensor) -> torch.Tensor:
        """Copy the bounds of some blocks into memory that layers share; fresh memory would cost more than the copy."""
        bounds, scratch = self._bounds[place], self._scratch
        if scratch is None or len(scratch) < len(blocks) or scratch.shape[1:] != bounds.shape[1:]:
            scratch = self._scratch = bounds.new_empty((2 * len(blocks), *bounds.shape[1:]))
        return torch.index_select(bounds, 0, blocks, out=scratch[: len(blocks)])

    def fill(self, ops: Any, layer: Any, place: int, kv_cache: Any, filled: torch.Tensor) -> None:
        """Compute the bounds of blocks that the step has filled, in one layer."""
        keys, _ = ops.read(layer, kv_cache, filled, False)
        self._bounds[place][filled] = key_bounds(keys, kind=self._kind)

    def chooses(self, place: int) -> bool:
        """Return whether a layer chooses blocks."""
        return place in self._choosers

    def is_sparse(self, place: int) -> bool:
        """Return whether a layer attends to chosen blocks."""
        return place in self._sparse


@dataclass(slots=True)
class _Choice:
    """One request that selects in a step: row of the batch, its query, its resident blocks, what it holds."""

    row: int
    query: int
    resident: torch.Tensor
    held: _Held


class SelectStep(StepSource):
    """Selection of one step. One table serves all layers in turn: layers that choose write it, others read it.

    Args:
        selection: of the KV group.
        choices: requests that select.
        filled: physical blocks that the step fills.
        batch: of the step.
    """

    is_plain = False

    def __init__(
        self, selection: Selection, choices: list[_Choice], filled: torch.Tensor | None, batch: StepBatch
    ) -> None:
        super().__init__(batch.lens)
        self._selection, self._choices, self._filled = selection, choices, filled
        self._metadata: tuple[Any, Any] = (None, None)
        self.rows = NO_ROWS
        if not choices:
            return
        self.rows = rows = np.array([choice.row for choice in choices], np.int64)
        # Rows beside them that the plugin's kernel attends for are decodes with no more blocks than are selected.
        (count, width), table = (len(batch.resident_tokens), selection.blocks), batch.table
        self._table = torch.zeros((count, width), dtype=torch.int32, device=table.device)
        self._table[:, : table.shape[1]] = table[:count, :width]
        for choice in choices:
            self._table[choice.row, -selection.recent :] = choice.resident[-selection.recent :]
        size = selection.block_size
        lens = (width - 1) * size + (batch.resident_tokens[rows] - 1) % size + 1
        where, lens = (to_device(each, table.device) for each in (rows, lens.astype(np.int32)))
        self._lens = batch.lens[:count].index_copy(0, where, lens)

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Compute the bounds of blocks that filled, and the layer's choice; return what the layer reads."""
        selection, place = self._selection, call.place
        if self._filled is not None:
            selection.fill(call.ops, call.layer, place, call.kv_cache, self._filled)
        if not self._choices:
            return super().table(call)
        if selection.chooses(place):
            between = slice(selection.sinks, selection.blocks - selection.recent)
            for choice in self._choices:
                self._table[choice.row, between] = selection.choose(choice, call.layer, place, call.query)
        if not selection.is_sparse(place):
            return super().table(call)
        if self._metadata[0] is not call.metadata:
            chosen = copy(call.metadata)
            chosen.block_table = self._table
            self._metadata = call.metadata, chosen
        return self._metadata[1], self._lens

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
from .host import empty_bounds
from .kernels.bounds import bound_scores, key_bounds
from .kernels.logits import logits_of
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


class Selection:
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
        blocks: blocks that a decode attends to; requests with more resident blocks select.
        sinks, recent: leading and trailing blocks of them that are always selected.
    """

    def __init__(
        self, config: KVPolicyConfig, block_size: int, layers: Sequence[int], store: Store, device: torch.device
    ) -> None:
        self.blocks, self.sinks, self.recent = config.selected(block_size)
        self._config, self._kind = config, config.select_bounds
        self._every, self._block_size, self._store, self._device = config.select_every, block_size, store, device
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

    def hold(self, pool: int) -> None:
        """Allocate bounds for a pool of this many blocks."""
        self._bounds = empty_bounds(self._store, pool, self._device, self._kind)

    def refresh(self, blocks: Sequence[int]) -> None:
        """Compute the bounds of full blocks that copies have written."""
        where = to_device(np.array(blocks, np.int64), self._device)
        for (keys, _), bounds in zip(self._store.read(where, False), self._bounds):
            bounds[where] = key_bounds(keys, kind=self._kind)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Choose anew for requests that ended, started or lost blocks."""
        for req_id in req_ids:
            self._held.pop(req_id, None)

    def rows(self, starts: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return the rows of the batch that select: int64 [n].

        Args:
            starts: int32 [R + 1], first query of each row.
            held: int32 [R], resident tokens.
        """
        return np.flatnonzero(self._config.reads_less(np.diff(starts), held, self._block_size))

    def filled(self, table: torch.Tensor, starts: np.ndarray, seq_lens: np.ndarray) -> torch.Tensor | None:
        """Return the physical blocks that the step fills: int64 [n]; None: it fills none.

        Args:
            table: int32 [R, W], block tables with holes.
            starts: int32 [R + 1].
            seq_lens: int32 [R], tokens with holes.
        """
        ends = seq_lens // self._block_size
        firsts = (seq_lens - np.diff(starts)) // self._block_size
        counts = ends - firsts
        if not counts.any():
            return None
        rows = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(firsts, counts)
        rows, places = (to_device(each.astype(np.int64), self._device) for each in (rows, places))
        return table[rows, places].long()

    def step(
        self,
        req_ids: Sequence[str],
        rows: np.ndarray,
        filled: torch.Tensor | None,
        table: torch.Tensor,
        starts: np.ndarray,
        held: np.ndarray,
    ) -> "SelectStep | None":
        """Return the work of one step; None: there is none.

        Args:
            req_ids: requests of the batch, in row order.
            rows: see `rows`.
            filled: see `filled`.
            table: int32 [R, W], resident blocks of each row.
            starts: int32 [R + 1].
            held: int32 [R], resident tokens.
        """
        if filled is None and not len(rows):
            return None
        choices = []
        for row in rows.tolist():
            its = self._held.setdefault(req_ids[row], _Held())
            if its.steps == self._every:
                its.steps, its.blocks = 0, {}
            its.steps += 1
            resident = table[row, : -(-int(held[row]) // self._block_size)]
            choices.append(_Choice(row, int(starts[row]), resident, its))
        return SelectStep(self, choices, filled, table, held)

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
        """Whether a layer chooses blocks."""
        return place in self._choosers

    def is_sparse(self, place: int) -> bool:
        """Whether a layer attends to chosen blocks."""
        return place in self._sparse


@dataclass(slots=True)
class _Choice:
    """One request that selects in a step: row of the batch, its query, its resident blocks, what it holds."""

    row: int
    query: int
    resident: torch.Tensor
    held: _Held


class SelectStep:
    """Selection of one step. One table serves all layers in turn: layers that choose write it, others read it.

    Args:
        selection: of the KV group.
        choices: requests that select.
        filled: physical blocks that the step fills.
        table: int32 [R, W], resident blocks of each row.
        held: int32 [R], resident tokens.
    """

    def __init__(
        self,
        selection: Selection,
        choices: list[_Choice],
        filled: torch.Tensor | None,
        table: torch.Tensor,
        held: np.ndarray,
    ) -> None:
        self._selection, self._choices, self._filled = selection, choices, filled
        self._metadata: tuple[Any, Any] = (None, None)
        if not choices:
            return
        rows = np.array([choice.row for choice in choices], np.int64)
        self._rows = to_device(rows.astype(np.int32), table.device)
        self._table = torch.zeros((len(held), selection.blocks), dtype=torch.int32, device=table.device)
        for choice in choices:
            self._table[choice.row, : selection.sinks] = choice.resident[: selection.sinks]
            self._table[choice.row, -selection.recent :] = choice.resident[-selection.recent :]
        lens = np.zeros(len(held), np.int32)
        size = selection._block_size
        lens[rows] = (selection.blocks - 1) * size + (held[rows] - 1) % size + 1
        self._lens = to_device(lens, table.device)

    def begin(self, ops: Any, layer: Any, place: int, query: torch.Tensor, kv_cache: Any) -> None:
        """Do what one layer does before it attends: bounds of blocks that filled, and its choice."""
        selection = self._selection
        if self._filled is not None:
            selection.fill(ops, layer, place, kv_cache, self._filled)
        if not self._choices or not selection.chooses(place):
            return
        between = slice(selection.sinks, selection.blocks - selection.recent)
        for choice in self._choices:
            self._table[choice.row, between] = selection.choose(choice, layer, place, query)

    def decode(
        self, ops: Any, layer: Any, place: int, query: torch.Tensor, kv_cache: Any, metadata: Any, output: Any
    ) -> bool:
        """Attend to the choice, in a layer that does; return whether it does."""
        if not self._choices or not self._selection.is_sparse(place):
            return False
        if self._metadata[0] is not metadata:
            chosen = copy(metadata)
            chosen.block_table = self._table
            self._metadata = metadata, chosen
        ops.decode(layer, query, kv_cache, self._metadata[1], output, self._rows, self._lens, None, None)
        return True

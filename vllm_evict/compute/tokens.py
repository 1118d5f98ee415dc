"""Token granularity: running sums of attention mass for each token and KV head."""

import logging
from collections.abc import Set
from typing import NamedTuple

import numpy as np
import torch

from ..core.plan import Scoring
from .kernels.put import put
from .probes import LayerCall, StepProbe
from .step_batch import StepBatch
from .sums import RunningSums

logger = logging.getLogger("vllm.evict")

#: Most steps in flight, and so most decisions that are due and not yet carried out.
IN_FLIGHT = 3
#: Growth when pages run out: one page for each `GROWTH` pages, and at least `LEAST` pages.
GROWTH, LEAST = 4, 16


class TokenBuffers(NamedTuple):
    """Memory that the layers of one step read and write to measure every resident token.

    Attributes:
        table: int32 [R, W], pages of each row of the batch (see `TokenSums`); 0 past its end and in rows that are not
            measured.
        weights: float32 [T], weight of each query.
        mass: float32 [R, Hkv, W * block_size], mass of one layer, zeros between layers.
    """

    table: torch.Tensor
    weights: torch.Tensor
    mass: torch.Tensor

    def part(self, requests: int, blocks: int | None = None) -> "TokenBuffers":
        """Return views of the memory for fewer requests, of fewer blocks; weights stay those of all queries."""
        tokens = None if blocks is None else self.mass.shape[2] // self.table.shape[1] * blocks
        return TokenBuffers(self.table[:requests, :blocks], self.weights, self.mass[:requests, :, :tokens])


class TokenStep(StepProbe):
    """Mass of one step's queries on every resident token.

    Args:
        pages: float32 [L, P, Hkv, block_size], see `TokenSums`.
        buffers: memory of R rows and W blocks.
        lens: int32 [R], resident tokens.
        last: see `StepProbe`.
    """

    takes_mass = per_token = True

    def __init__(
        self, pages: torch.Tensor, buffers: TokenBuffers, lens: torch.Tensor, last: torch.Tensor | None = None
    ) -> None:
        self._pages, self._buffers, self._lens, self.last = pages, buffers, lens, last
        self.weights = buffers.weights

    def out(self, call: LayerCall) -> torch.Tensor:
        return self._buffers.mass[:, : call.kv_heads]

    def add(self, call: LayerCall) -> None:
        """Put the layer's mass, which is zero afterwards, into its pages."""
        mass = self.out(call)
        put(self._pages[call.place, :, : mass.shape[1]], self._buffers.table, mass, self._lens)


class TokenSums(RunningSums):
    """Sums of attention mass by token, layer and KV head, for requests with token granularity.

    Sums lie in pages, one for each block that a request holds. Requests that share a block have a page each. Tokens are
    in the order in which a head holds them: first the tokens that decisions left, which differ between heads, then all
    later tokens.

    Args:
        requests: most requests at once.
        kv_heads: most KV heads of a layer on this rank.
        layers: layers of the KV group.
        block_size: tokens.
        blocks: most blocks that a request holds.
        device: device of the sums.
    """

    def __init__(
        self,
        requests: int,
        kv_heads: int,
        layers: int,
        block_size: int,
        blocks: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(requests, kv_heads, layers, 0, block_size, "sum", "sum", device)
        #: float32 [L, P, Hkv, block_size]. Page 0 is the null page: never allocated, always zero.
        self._pages = torch.zeros(layers, 1, kv_heads, block_size, device=device)
        self._unused: list[int] = []
        #: Whether requests needed more pages than `allocate` allocated.
        self.outgrown = self._told = False
        #: For each slot the pages of its request, in order, and their number.
        self._table = np.zeros((requests, blocks), np.int64)
        self._held = np.zeros(requests, np.int64)
        #: For each slot the number of tokens with sums, and the position of the newest one.
        self._lengths = np.zeros(requests, np.int64)
        self._newest = np.zeros(requests, np.int64)
        #: Slot -> positions of the tokens that decisions left, int32 [L, Hkv, n].
        self._left: dict[int, torch.Tensor] = {}
        #: Request -> {number of the decision: scores}, of decisions that are due.
        self._judged: dict[str, dict[int, torch.Tensor]] = {}

    @property
    def pages(self) -> int:
        """Number of pages without the null page."""
        return self._pages.shape[1] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return self._pages.nbytes

    @property
    def kept_bytes(self) -> int:
        return super().kept_bytes + self.nbytes

    def allocate(self, blocks: int) -> None:
        """Allocate `blocks` pages, before any request has one."""
        self._told = True
        layers, _, *page = self._pages.shape
        self._pages = self._pages.new_zeros(layers, blocks + 1, *page)
        self._unused = list(range(blocks, 0, -1))

    def warm_up(self, tests: bool) -> None:
        """Compile the kernel of layers, by a launch for a row without tokens."""
        device, (_, _, heads, block_size) = self._pages.device, self._pages.shape
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        put(self._pages[0], zero[None], torch.zeros(1, heads, block_size, device=device), zero)

    def start(self, req_id: str, scoring: Scoring) -> None:
        super().start(req_id, scoring)
        self._forget(req_id)

    def stop(self, req_id: str) -> None:
        if req_id in self._slots:
            self._forget(req_id)
        super().stop(req_id)

    def fit_graphs(self, req_ids: Set[str]) -> bool:
        """Return whether a decode step of these requests leaves the pages at the addresses that graphs captured."""
        if self.outgrown:
            return False
        slots = [self._slots[req_id] for req_id in req_ids & self.requests]
        # Each request may begin a block. A request without pages needs all its pages at once.
        return bool(self._held[slots].all()) and len(slots) <= len(self._unused)

    def token_buffers(self, requests: int, blocks: int, queries: int) -> TokenBuffers:
        """Allocate memory for decodes of so many queries each, none of them measured."""
        device, (_, _, *page) = self._pages.device, self._pages.shape
        table = torch.zeros(requests, blocks, dtype=torch.int32, device=device)
        mass = torch.zeros(requests, page[0], blocks * page[1], device=device)
        return TokenBuffers(table, torch.zeros(requests * queries, device=device), mass)

    def captured(self, memory: TokenBuffers, lens: torch.Tensor) -> TokenStep:
        """Return the step of a graph's capture, in which no query counts."""
        memory.table.zero_()
        memory.weights.zero_()
        return TokenStep(self._pages, memory, lens)

    def token_step(self, batch: StepBatch, memory: TokenBuffers | None = None) -> TokenStep | None:
        """Return what layers measure in this step; None if nothing.

        Args:
            batch: of the step.
            memory: memory of a graph, of R rows and W blocks; None allocates.
        """
        if memory is not None:
            memory.table.zero_()
            memory.weights.zero_()
        measured = self._measured(batch.req_ids)
        rows, slots = measured.rows, measured.slots
        if not len(rows):
            return None
        _, weights, counted = self._weigh(measured, batch, None)
        self._lengths[slots], self._newest[slots] = batch.resident_tokens[rows], batch.seq_lens[rows] - 1
        self._hold(slots, -(-self._lengths[slots] // self.block_size))
        self._fade(slots, counted[rows])
        if not counted.any():
            return None
        table = np.zeros((len(batch.req_ids), -(-int(batch.resident_tokens.max()) // self.block_size)), np.int32)
        table[rows] = self._table[slots, : table.shape[1]]
        last = self._last(weights, batch.starts)
        table, weights = self._to_device(table), self._to_device(weights)
        if memory is None:
            mass = torch.zeros(len(table), self._pages.shape[2], table.shape[1] * self.block_size, device=table.device)
            memory = TokenBuffers(table, weights, mass)
        else:
            memory.table.copy_(table)
            memory.weights[: len(weights)].copy_(weights)
        return TokenStep(self._pages, memory, batch.lens, last)

    def judge(self, req_id: str, number: int) -> None:
        """Copy the sums of a request for the decision of that number, which is due after this step."""
        slot = self._slots[req_id]
        judged = self._judged.setdefault(req_id, {})
        judged[number] = self._scores(slot)
        if len(judged) > IN_FLIGHT:
            del judged[min(judged)]  # that step led to no decision
        self._end_windows(np.array([slot]))

    def _empty(self, slots: np.ndarray) -> None:
        for slot in slots:
            self._pages.index_fill_(1, self._to_device(self._table[slot, : self._held[slot]]), 0)

    def judged(self, req_id: str, position: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `compaction.Judge` says."""
        return self._judged[req_id][number], self._positions(self._slots[req_id])

    def gather(self, req_id: str, number: int, first: int, count: int, keep: torch.Tensor) -> None:
        """Do as `compaction.Judge` says."""
        slot = self._slots[req_id]
        scores = gathered(self._scores(slot), first, count, keep)
        self._left[slot] = gathered(self._positions(slot), first, count, keep)
        self._lengths[slot] = scores.shape[2]
        self._hold(np.array([slot]), np.array([-(-scores.shape[2] // self.block_size)]))
        pages = self._to_device(self._table[slot, : self._held[slot]])
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[2] % self.block_size))
        self._pages[:, pages] = scores.unflatten(2, (-1, self.block_size)).transpose(1, 2)
        # Later decisions that are due use their own copies, without the evicted tokens.
        later = {each: scores for each, scores in self._judged[req_id].items() if each > number}
        self._judged[req_id] = {each: gathered(scores, first, count, keep) for each, scores in later.items()}

    def _forget(self, req_id: str) -> None:
        """Drop all sums of a request."""
        slot = self._slots[req_id]
        self._hold(np.array([slot]), np.array([0]))
        self._lengths[slot] = 0
        self._left.pop(slot, None)
        self._judged.pop(req_id, None)

    def _hold(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """Give each slot as many pages as its request has blocks. New pages are zeros."""
        taken = []
        for slot, wanted in zip(slots[blocks != self._held[slots]], blocks[blocks != self._held[slots]]):
            held = self._held[slot]
            self._unused.extend(self._table[slot, wanted:held].tolist())
            self._table[slot, wanted:held] = 0
            for place in range(held, wanted):
                if not self._unused:
                    self._grow()
                self._table[slot, place] = self._unused.pop()
            taken.append(self._table[slot, held:wanted])
            self._held[slot] = wanted
        if taken and sum(map(len, taken)):
            self._pages.index_fill_(1, self._to_device(np.concatenate(taken)), 0)

    def _grow(self) -> None:
        """Allocate more pages, for requests that share blocks of the pool."""
        if not self.outgrown and self._told:
            logger.warning(
                "Requests share so many blocks that sums by token take more memory than was set aside; decodes of this "
                "worker replay no full CUDA graphs from now on"
            )
        self.outgrown = True
        layers, pages, *page = self._pages.shape
        more = max(pages // GROWTH, LEAST)
        self._pages = torch.cat((self._pages, self._pages.new_zeros(layers, more, *page)), 1)
        self._unused.extend(range(pages + more - 1, pages - 1, -1))

    def _fade(self, slots: np.ndarray, counted: np.ndarray) -> None:
        """Decay exponential means by the number of queries that count in each slot, int64 [K]."""
        for slot, count in zip(slots[self._decay[slots] > 0], counted[self._decay[slots] > 0]):
            pages = self._to_device(self._table[slot, : self._held[slot]])
            self._pages[:, pages] *= float(self._decay[slot] ** count)

    def _scores(self, slot: int) -> torch.Tensor:
        """Return a copy of a request's sums: float32 [L, Hkv, n]."""
        pages = self._to_device(self._table[slot, : self._held[slot]])
        return self._pages[:, pages].transpose(1, 2).flatten(2)[..., : self._lengths[slot]]

    def _positions(self, slot: int) -> torch.Tensor:
        """Return the positions of a request's tokens: int32 [L, Hkv, n]."""
        layers, _, kv_heads, _ = self._pages.shape
        left = self._left.get(slot)
        known = 0 if left is None else left.shape[2]
        newest, length = int(self._newest[slot]), int(self._lengths[slot])
        since = torch.arange(newest - length + 1 + known, newest + 1, dtype=torch.int32, device=self._pages.device)
        since = since.expand(layers, kv_heads, -1)
        return since if left is None else torch.cat((left, since), 2)


def gathered(values: torch.Tensor, first: int, count: int, keep: torch.Tensor) -> torch.Tensor:
    """Replace the `count` entries from `first` on by those in `keep`, int64 [L, Hkv, kept].

    Returns:
        [L, Hkv, n - count + kept] for values [L, Hkv, n].
    """
    chosen = values[:, :, first : first + count].gather(2, keep)
    return torch.cat((values[:, :, :first], chosen, values[:, :, first + count :]), 2)

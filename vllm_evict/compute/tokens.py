"""Token granularity: sums of each token and KV head, the choice of kept tokens, and their compaction."""

import logging
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.plan import Compaction, Scoring
from ..policies import CACHED, RUNNING, Blocks
from .cached import OF_VALUES, AllReduce
from .kernels.keys import token_scores
from .kernels.put import put
from .measure import Weigh
from .merge import Merger
from .store import Store
from .sums import RunningSums
from .transfer import fetched, to_device

logger = logging.getLogger("vllm.evict")

#: Most steps in flight, and so most decisions that are due and not yet carried out.
IN_FLIGHT = 3
#: Tokens of one layer whose keys are rotated at once, since float32 copies take several times their memory.
TURNED = 1024
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
        """Return views of the memory for fewer requests, of fewer blocks."""
        tokens = None if blocks is None else self.mass.shape[2] // self.table.shape[1] * blocks
        return TokenBuffers(self.table[:requests, :blocks], self.weights[:requests], self.mass[:requests, :, :tokens])


class TokenStep:
    """Mass of one step's queries on every resident token. A model may call a layer any number of times in a step.

    Args:
        pages: float32 [L, P, Hkv, block_size], see `TokenSums`.
        buffers: memory of R rows and W blocks.
        lens: int32 [R], resident tokens.
        last: as in `MassStep`.
    """

    def __init__(
        self, pages: torch.Tensor, buffers: TokenBuffers, lens: torch.Tensor, last: torch.Tensor | None = None
    ) -> None:
        self._pages, self._buffers, self._lens, self.last = pages, buffers, lens, last

    def add(self, weigh: Weigh, kv_heads: int, place: int) -> None:
        """Add one layer of `kv_heads` KV heads.

        Args:
            weigh: adds the mass of each token to its argument, float32 [R, kv_heads, W * block_size].
            place: index of the layer in `Store`.
        """
        mass = self._buffers.mass[:, :kv_heads]
        weigh(self._buffers.weights, mass)
        put(self._pages[place, :, :kv_heads], self._buffers.table, mass, self._lens)


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
        #: Whether requests needed more pages than `hold` allocated.
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

    def hold(self, blocks: int) -> None:
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
        """Whether a decode step of these requests leaves the pages at the addresses that graphs captured."""
        if self.outgrown:
            return False
        slots = [self._slots[req_id] for req_id in req_ids & self.requests]
        # Each request may begin a block. A request without pages needs all its pages at once.
        return bool(self._held[slots].all()) and len(slots) <= len(self._unused)

    def token_buffers(self, requests: int, blocks: int) -> TokenBuffers:
        """Allocate memory for decodes, none of them measured."""
        device, (_, _, *page) = self._pages.device, self._pages.shape
        table = torch.zeros(requests, blocks, dtype=torch.int32, device=device)
        mass = torch.zeros(requests, page[0], blocks * page[1], device=device)
        return TokenBuffers(table, torch.zeros(requests, device=device), mass)

    def captured(self, memory: TokenBuffers, lens: torch.Tensor) -> TokenStep:
        """Return the step of a graph's capture, in which no query counts."""
        memory.table.zero_()
        memory.weights.zero_()
        return TokenStep(self._pages, memory, lens)

    def token_step(
        self,
        req_ids: list[str],
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        lens: np.ndarray,
        resident: torch.Tensor,
        memory: TokenBuffers | None = None,
        settled: np.ndarray | None = None,
    ) -> TokenStep | None:
        """Return what layers measure in this step; None if nothing.

        Args:
            req_ids, query_start_loc, seq_lens, settled: as for `RunningSums.step`.
            lens: int32 [R], resident tokens.
            resident: the same on the device of the sums.
            memory: memory of a graph, of R rows and W blocks; None allocates.
        """
        if memory is not None:
            memory.table.zero_()
            memory.weights.zero_()
        batch = self._batch_of(req_ids)
        rows, slots = batch.rows, batch.slots
        if not len(rows):
            return None
        _, weights, counted = self._weigh(rows, slots, np.diff(query_start_loc), seq_lens, settled)
        self._lengths[slots], self._newest[slots] = lens[rows], seq_lens[rows] - 1
        self._hold(slots, -(-self._lengths[slots] // self.block_size))
        self._fade(slots, counted[rows])
        if not counted.any():
            return None
        table = np.zeros((len(req_ids), -(-int(lens.max()) // self.block_size)), np.int32)
        table[rows] = self._table[slots, : table.shape[1]]
        last = self._last(weights, query_start_loc)
        table, weights = self._to_device(table), self._to_device(weights)
        if memory is None:
            mass = torch.zeros(len(table), self._pages.shape[2], table.shape[1] * self.block_size, device=table.device)
            memory = TokenBuffers(table, weights, mass)
        else:
            memory.table.copy_(table)
            memory.weights.copy_(weights)
        return TokenStep(self._pages, memory, resident, last)

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
        """Return scores (float32) and positions (int32), [L, Hkv, n] each, of the decision of that number.

        `position` is that of the newest computed token at the decision.
        """
        return self._judged[req_id][number], self._positions(self._slots[req_id])

    def gather(self, req_id: str, number: int, first: int, count: int, keep: torch.Tensor) -> None:
        """Drop the sums of evicted tokens, and close the gaps.

        Args:
            number: of the decision.
            first, count: range of the candidates.
            keep: int64 [L, Hkv, kept], indices of kept candidates in that range.
        """
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


def compact(
    plan: Compaction,
    store: Store,
    sums: Any,
    block_size: int,
    merger: Merger,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> None:
    """Choose the tokens that each KV head of a request keeps, and gather them.

    Policies run on the host, so this waits for a device once.

    Args:
        plan: request and blocks.
        store: KV cache of the group.
        sums: `TokenSums` of the group, or its `PromptScores` if the policy reconstructs; None if nothing is measured
            by token.
        block_size: tokens.
        merger: merger of the request.
        all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over tensor-parallel ranks.
        device: device of KV cache and sums.
    """
    device = torch.device(device)
    first, count = plan.first * block_size, plan.count * block_size
    resident, target = (to_device(np.array(blocks, np.int64), device) for blocks in (plan.resident, plan.target))
    judged = sums.judged(plan.req_id, plan.position, plan.judged) if plan.config.policy.measures & RUNNING else None
    scores = _importance(plan, store, judged, resident, slice(first, first + count))
    if plan.config.sets == "all":
        one = _reduced(scores, count, plan.config, all_reduce, device)
        scores = [one.expand(len(layer), -1) for layer in scores]
    keep = [_kept(layer, len(plan.target) * block_size) for layer in scores]
    source = slice(plan.first, plan.first + plan.count)
    merged = _merged(plan, store, merger, resident[source], scores, keep) if plan.config.merge else []
    on_host = (torch.tensor(blocks, dtype=torch.int32) for blocks in (plan.resident[source], plan.target))
    store.compact(next(on_host), [layer.int() for layer in keep], next(on_host))
    for layer, (keys, values) in enumerate(merged):
        store.write(layer, target, *(_in_blocks(x, block_size) for x in (keys, values)))
    if judged is not None and keep:
        heads = judged[0].shape[1]
        # Padding for layers with fewer heads; those rows are never read.
        full = [torch.cat([layer, layer[:1].expand(heads - len(layer), -1)]) for layer in keep]
        sums.gather(plan.req_id, plan.judged, first, count, torch.stack(full))


def _importance(
    plan: Compaction,
    store: Store,
    judged: tuple[torch.Tensor, torch.Tensor] | None,
    resident: torch.Tensor,
    candidates: slice,
) -> list[torch.Tensor]:
    """Return the policy's importance of each candidate: for each layer float64 [Hkv, count]."""
    policy, config, kv_heads = plan.config.policy, plan.config, store.kv_heads()
    if not kv_heads:
        return []
    # Name -> for each layer float64 [Hkv, count].
    statistics: dict[str, list[torch.Tensor]] = {name: [] for name in sorted(policy.measures)}
    if policy.measures & CACHED:
        for keys, values in store.read(resident, bool(policy.measures & OF_VALUES)):
            for name, of_tokens in token_scores(keys, values, plan.length, policy.measures & CACHED).items():
                statistics[name].append(of_tokens[:, candidates].double())
    places = torch.arange(candidates.start, candidates.stop, device=resident.device)
    positions = [places.expand(heads, -1) for heads in kv_heads]
    if judged is not None:
        (name,) = policy.measures & RUNNING
        mass, positions = (
            [of_layer[:heads, candidates] for of_layer, heads in zip(of_layers, kv_heads)] for of_layers in judged
        )
        statistics[name] = [of_layer.double() for of_layer in mass]
        if config.accumulate == "mean":
            ages = [_age(of_layer, plan.position, config.every) for of_layer in positions]
            statistics[name] = [drawn / age for drawn, age in zip(statistics[name], ages)]
    # One copy: [statistics and positions, heads of all layers, count].
    numbers = fetched(torch.stack([torch.cat(layers).double() for layers in (*statistics.values(), positions)]))
    importance = []
    sound = np.isfinite(numbers).all((0, 2))
    if not sound.all():
        logger.warning_once(  # type: ignore[attr-defined]  # vLLM adds it
            "KV policy %s got NaN or inf as scores of tokens of request %s; expected finite numbers; look for NaN in "
            "the model. All tokens of such heads weigh the same, so the oldest go first. Said once a request.",
            config.name,
            plan.req_id,
        )
    for (*of_head, at), is_sound in zip(numbers.swapaxes(0, 1), sound):
        tokens = Blocks(at.astype(np.int64), config, dict(zip(statistics, of_head)), plan.position + 1, 0)
        importance.append(policy.importance(tokens) if is_sound else np.zeros(len(at)))
    return list(to_device(np.array(importance, np.float64), resident.device).split(kv_heads))


def _merged(
    plan: Compaction,
    store: Store,
    merger: Merger,
    source: torch.Tensor,
    scores: list[torch.Tensor],
    keep: list[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Merge evicted tokens into kept ones: for each layer keys and values, float32 [Hkv, kept, D] each."""
    merged = []
    for layer, (keys, values) in enumerate(store.read(source, True)):
        tokens = (x.transpose(0, 1).flatten(1, 2) for x in (keys, values))
        merged.append(merger.merge(plan.config, layer, *tokens, scores[layer], keep[layer]))
    return merged


def _in_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Reshape [Hkv, n * block_size, D] to [n, Hkv, block_size, D]."""
    return tokens.unflatten(1, (-1, block_size)).transpose(0, 1)


def _age(positions: torch.Tensor, newest: int, every: int) -> torch.Tensor:
    """Return the number of counted queries that saw each token, at least 1: float64, of the shape of `positions`."""
    counted_before = lambda position: -(-position // every)  # noqa: E731  (multiples of `every` below it)
    return (counted_before(newest + 1) - counted_before(positions)).double().clamp(min=1)


def _kept(importance: torch.Tensor, kept: int) -> torch.Tensor:
    """Indices of the `kept` most important tokens, int64 [Hkv, kept], ascending; of equal tokens the newest."""
    order = importance.argsort(dim=1, stable=True)
    return order[:, importance.shape[1] - kept :].sort(dim=1).values


def _reduced(
    layers: list[torch.Tensor],
    count: int,
    config: Any,
    all_reduce: AllReduce,
    device: torch.device,
) -> torch.Tensor:
    """Reduce importance over all heads, layers and ranks: float64 [count]."""
    # A rank without heads of the KV group takes part with zeros.
    of_layers = [torch.zeros(count, dtype=torch.float64, device=device)] if not layers else []
    for layer in layers:
        of_layers.append(layer.amax(0) if config.heads == "max" else layer.sum(0))
    stacked = torch.stack(of_layers)
    one = stacked.amax(0) if config.layers == "max" else stacked.sum(0)
    return all_reduce(one, config.heads == "max")

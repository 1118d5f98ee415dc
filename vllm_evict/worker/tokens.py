"""Token granularity: what every token of every KV head drew, which tokens each head keeps, and where they go."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..attention.keys import token_scores
from ..core.plan import Compaction, Scoring
from ..policies import CACHED, RUNNING, Blocks
from .cached import OF_VALUES
from .merge import Merger
from .sums import RunningSums, Weigh

#: Steps in flight at most, and with them decisions that are due and not yet carried out.
IN_FLIGHT = 3


class Store(Protocol):
    """The KV cache of one KV group on this rank, layer by layer."""

    def read(self, blocks: torch.Tensor, values: bool) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """See `cached.ReadBlocks`."""
        ...

    def compact(self, source: torch.Tensor, keep: list[torch.Tensor], target: torch.Tensor) -> None:
        """Gather kept tokens of each layer, int32 [Hkv, kept] each (see `attention.compact`)."""
        ...

    def write(self, layer: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite blocks of one layer; keys and values [n, Hkv, block_size, D]."""
        ...


@dataclass(slots=True)
class TokenState:
    """One request's measured tokens, in the order in which each head holds them.

    Attributes:
        scores: float32 [L, Hkv, capacity], what adds up.
        positions: int32 [L, Hkv, capacity], where each token stands in the request.
        length: tokens that are known.
    """

    scores: torch.Tensor
    positions: torch.Tensor
    length: int = 0

    def grow(self, length: int, position: int) -> None:
        """Know `length` resident tokens, of which the newest is at `position`."""
        new = length - self.length
        if new <= 0:
            return
        capacity = self.scores.shape[2]
        if length > capacity:
            more = (0, max(length, 2 * capacity) - capacity)
            self.scores = torch.nn.functional.pad(self.scores, more)
            self.positions = torch.nn.functional.pad(self.positions, more)
        self.scores[:, :, self.length : length] = 0
        self.positions[:, :, self.length : length] = torch.arange(position - new + 1, position + 1, dtype=torch.int32)
        self.length = length

    def gather(self, first: int, count: int, keep: torch.Tensor) -> None:
        """Take `keep` (int64 [L, Hkv, kept]) of the `count` tokens from `first` on; later ones move up."""
        self.scores, self.positions = (gathered(x, first, count, keep) for x in (self.scores, self.positions))
        self.length -= count - keep.shape[2]

    @property
    def newest(self) -> int:
        """Position of the newest token that is known."""
        return int(self.positions[0, 0, self.length - 1])


def gathered(values: torch.Tensor, first: int, count: int, keep: torch.Tensor) -> torch.Tensor:
    """`keep` (int64 [L, Hkv, kept]) of the `count` entries from `first` on, and all others. [L, Hkv, n] -> less."""
    chosen = values[:, :, first : first + count].gather(2, keep)
    return torch.cat((values[:, :, :first], chosen, values[:, :, first + count :]), 2)


class TokenStep:
    """Mass of one step's queries on every resident token; layers are taken in, in order.

    Attributes:
        rows: int64 [K], batch rows that are measured.
        states: of these requests.
        weights: float32 [T], how much each query counts; None if all count as one.
        lens: int32 [K], resident tokens.
    """

    def __init__(
        self,
        rows: np.ndarray,
        states: list[TokenState],
        weights: torch.Tensor | None,
        lens: np.ndarray,
        shape: tuple[int, int, int],
    ) -> None:
        """`shape`: rows of the batch, most KV heads of a layer, most resident tokens of a row."""
        self.rows, self.states, self.weights, self.lens = rows, states, weights, lens
        self._buffer = torch.zeros(shape)
        self._layer = 0

    def add(self, weigh: Weigh, kv_heads: int) -> None:
        """Take in one layer; `weigh` gets float32 [R, kv_heads, W] to add the mass of each token to."""
        out = self._buffer[:, :kv_heads].zero_()
        weigh(self.weights, out)
        for row, state, length in zip(self.rows.tolist(), self.states, self.lens.tolist()):
            state.scores[self._layer, :kv_heads, :length] += out[row, :, :length]
        self._layer += 1


class TokenSums(RunningSums):
    """Sums of attention mass by token, layer and KV head, for requests of token granularity.

    Args:
        requests: most requests at once.
        kv_heads: most of any layer on this rank.
        layers: of the KV group.
        block_size: tokens.
    """

    def __init__(self, requests: int, kv_heads: int, layers: int, block_size: int) -> None:
        super().__init__(requests, kv_heads, layers, 0, block_size, "sum", "sum")
        self.shape = (layers, kv_heads)
        self._states: dict[int, TokenState] = {}
        #: Request -> {position of its newest token: scores}, of steps that called for a decision.
        self._judged: dict[str, dict[int, torch.Tensor]] = {}

    def start(self, req_id: str, scoring: Scoring) -> None:
        super().start(req_id, scoring)
        empty = (*self.shape, 0)
        self._states[self._slots[req_id]] = TokenState(torch.zeros(empty), torch.zeros(empty, dtype=torch.int32))
        self._judged.pop(req_id, None)

    def stop(self, req_id: str) -> None:
        self._states.pop(self._slots.get(req_id), None)
        self._judged.pop(req_id, None)
        super().stop(req_id)

    def token_step(
        self, req_ids: list[str], query_start_loc: np.ndarray, seq_lens: np.ndarray, lens: np.ndarray
    ) -> TokenStep | None:
        """What to measure in this step; None if nothing.

        Args:
            req_ids, query_start_loc, seq_lens: as for `RunningSums.step`.
            lens: int32 [R], resident tokens.
        """
        rows, slots = self._rows(req_ids)
        if not len(rows):
            return None
        weights, counted = self._weights(rows, slots, np.diff(query_start_loc), seq_lens)
        states = [self._states[slot] for slot in slots.tolist()]
        for state, row, slot, count in zip(states, rows.tolist(), slots.tolist(), counted.tolist()):
            state.grow(int(lens[row]), int(seq_lens[row]) - 1)
            if self._decay[slot]:
                state.scores *= float(self._decay[slot] ** count)
        if not counted.any():
            return None
        shape = (len(req_ids), self.shape[1], int(lens.max()))
        return TokenStep(rows, states, torch.from_numpy(weights), lens[rows], shape)

    def judge(self, req_id: str) -> None:
        """Keep what has added up until now for the decision that this step calls for."""
        slot = self._slots[req_id]
        state, judged = self._states[slot], self._judged.setdefault(req_id, {})
        judged[state.newest] = state.scores[:, :, : state.length].clone()
        if len(judged) > IN_FLIGHT:
            del judged[min(judged)]  # it led to nothing
        if self._window[slot]:
            state.scores.zero_()  # the next window starts empty

    def judged(self, req_id: str, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a decision goes by, when `position` was the newest: scores (float32), positions (int32), [L, Hkv, n]."""
        return self._judged[req_id][position], self._states[self._slots[req_id]].positions

    def gather(self, req_id: str, position: int, first: int, count: int, keep: torch.Tensor) -> None:
        """Tokens went: what is known of the others moves up with them (see `TokenState.gather`)."""
        self._states[self._slots[req_id]].gather(first, count, keep)
        # Decisions that are due already go by what was known before, of the tokens that are left.
        later = {newest: scores for newest, scores in self._judged[req_id].items() if newest > position}
        self._judged[req_id] = {newest: gathered(scores, first, count, keep) for newest, scores in later.items()}


def compact(
    plan: Compaction,
    store: Store,
    sums: TokenSums | None,
    block_size: int,
    merger: Merger,
    all_reduce: Callable[[torch.Tensor, bool], torch.Tensor],
) -> None:
    """Choose what each KV head keeps of a request's tokens, and gather it.

    Args:
        plan: whose, and which blocks.
        store: the KV cache.
        sums: what was measured; None if nothing is.
        block_size: tokens.
        merger: of the request.
        all_reduce: (float64 tensor, whether to take the maximum) -> the same over tensor-parallel ranks.
    """
    resident = torch.tensor(plan.resident)
    first, count = plan.first * block_size, plan.count * block_size
    kept = len(plan.target) * block_size
    judged = sums.judged(plan.req_id, plan.position) if plan.config.policy.measures & RUNNING else None
    scores = _importance(plan, store, judged, resident, first, count, block_size)
    if plan.config.sets == "all":
        one = _reduced(scores, count, plan.config, all_reduce)
        scores = [one.expand(len(layer), -1) for layer in scores]
    keep = [_kept(layer, kept) for layer in scores]
    source = resident[plan.first : plan.first + plan.count].int()
    merged = _merged(plan, store, merger, source, scores, keep) if plan.config.merge else []
    store.compact(source, [layer.int() for layer in keep], torch.tensor(plan.target, dtype=torch.int32))
    for layer, (keys, values) in enumerate(merged):
        store.write(layer, torch.tensor(plan.target), *(_in_blocks(x, block_size) for x in (keys, values)))
    if judged is not None and keep:
        heads = judged[0].shape[1]
        # Rows of heads that a layer does not have are never read.
        full = [torch.cat([layer, layer[:1].expand(heads - len(layer), -1)]) for layer in keep]
        sums.gather(plan.req_id, plan.position, first, count, torch.stack(full).long())


def _importance(
    plan: Compaction,
    store: Store,
    judged: tuple[torch.Tensor, torch.Tensor] | None,
    resident: torch.Tensor,
    first: int,
    count: int,
    block_size: int,
) -> list[torch.Tensor]:
    """What the policy thinks of each candidate -> for each layer float64 [Hkv, count]."""
    policy, config = plan.config.policy, plan.config
    layers = []
    for layer, (keys, values) in enumerate(store.read(resident, bool(policy.measures & OF_VALUES))):
        heads = keys.shape[1]
        statistics = {
            name: of_tokens[:, first : first + count].double()
            for name, of_tokens in token_scores(keys, values, plan.length, policy.measures & CACHED).items()
        }
        positions = torch.arange(first, first + count).expand(heads, count)
        if judged is not None:
            mass, of_tokens = judged
            positions = of_tokens[layer, :heads, first : first + count].long()
            (name,) = policy.measures & RUNNING
            statistics[name] = mass[layer, :heads, first : first + count].double()
            if config.accumulate == "mean":
                statistics[name] = statistics[name] / _age(positions, plan.position, config.every)
        importance = []
        for head in range(heads):
            of_head = {name: values[head].numpy() for name, values in statistics.items()}
            tokens = Blocks(positions[head].numpy(), config, of_head, plan.position + 1, 0)
            importance.append(torch.from_numpy(np.ascontiguousarray(policy.importance(tokens), np.float64)))
        layers.append(torch.stack(importance))
    return layers


def _merged(
    plan: Compaction,
    store: Store,
    merger: Merger,
    source: torch.Tensor,
    scores: list[torch.Tensor],
    keep: list[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Kept keys and values of each layer, with those that go merged into them. float32 [Hkv, kept, D] each"""
    merged = []
    for layer, (keys, values) in enumerate(store.read(source.long(), True)):
        tokens = (x.transpose(0, 1).flatten(1, 2) for x in (keys, values))
        merged.append(merger.merge(plan.config, layer, *tokens, scores[layer], keep[layer]))
    return merged


def _in_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[Hkv, n * block_size, D] -> [n, Hkv, block_size, D]"""
    return tokens.unflatten(1, (-1, block_size)).transpose(0, 1)


def _age(positions: torch.Tensor, newest: int, every: int) -> torch.Tensor:
    """Counted queries that saw each token, at least 1. float64, as `positions`."""
    counted_before = lambda position: -(-position // every)  # noqa: E731  (multiples of `every` below it)
    return (counted_before(newest + 1) - counted_before(positions)).double().clamp(min=1)


def _kept(importance: torch.Tensor, kept: int) -> torch.Tensor:
    """Places of the `kept` most important tokens, ascending; of equal ones the newest stay. int64 [Hkv, kept]"""
    order = importance.argsort(dim=1, stable=True)
    return order[:, importance.shape[1] - kept :].sort(dim=1).values


def _reduced(
    layers: list[torch.Tensor], count: int, config: Any, all_reduce: Callable[[torch.Tensor, bool], torch.Tensor]
) -> torch.Tensor:
    """One importance for all heads and layers. float64 [count]"""
    # A rank may have no heads of a KV group, and takes part all the same.
    of_layers = [torch.zeros(count, dtype=torch.float64)] if not layers else []
    for layer in layers:
        of_layers.append(layer.amax(0) if config.heads == "max" else layer.sum(0))
    stacked = torch.stack(of_layers)
    one = stacked.amax(0) if config.layers == "max" else stacked.sum(0)
    return all_reduce(one, config.heads == "max")

"""Token granularity: the choice of the tokens that each KV head keeps, and their compaction."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..core.actions import Compaction
from ..core.blocks import counted_before
from ..policies import CACHED, RUNNING, Blocks
from .cached import OF_VALUES
from .holes import Start
from .kernels.keys import token_scores
from .merge import Merger
from .needs import AT_A_TIME, OF_DIMENSION, Needs
from .parts import AllReduce, Mover
from .shape import Shape
from .store import Store
from .transfer import fetched, to_device

logger = logging.getLogger("vllm.evict")

#: Bytes that a decision by token takes for each candidate: float64 numbers and their inputs.
OF_CANDIDATE = 72


class Judge(Protocol):
    """The part of a worker that knows the scores of a request's tokens."""

    def judged(self, req_id: str, position: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (float32) and positions (int32), [L, Hkv, n] each, of the decision of that number.

        `position` is that of the newest computed token at the decision.
        """
        ...

    def gather(self, req_id: str, number: int, first: int, count: int, keep: torch.Tensor) -> None:
        """Drop the scores of evicted tokens, and close the gaps.

        Args:
            number: of the decision.
            first, count: range of the candidates.
            keep: int64 [L, Hkv, kept], indices of kept candidates in that range.
        """
        ...


class Compactor(Mover):
    """Carries out `Compaction`s of one KV group.

    Args:
        store: KV cache of the group.
        judges: whether a policy reconstructs prompts -> what knows its scores by token, if any does.
        block_size: tokens.
        merges: whether evicted tokens may be merged into kept ones.
        device: device of KV cache and scores.

    Attributes:
        mergers: request -> its merger, of requests whose tokens were gathered.
    """

    kind = Compaction

    def __init__(
        self, store: Store, judges: dict[bool, Judge], block_size: int, merges: bool, device: torch.device
    ) -> None:
        self._store, self._judges, self._block_size = store, judges, block_size
        self._merges, self._device = merges, device
        self.mergers: dict[str, Merger] = {}

    def begin(self, start: Start) -> None:
        for req_id in start.gone if self.mergers else ():
            self.mergers.pop(req_id, None)

    def obey(self, orders: Sequence[Compaction], all_reduce: AllReduce) -> None:
        for each in orders:
            merger = self.mergers.setdefault(each.req_id, Merger())
            judge = self._judges.get(each.config.policy.reconstructs)
            compact(each, self._store, judge, self._block_size, merger, all_reduce, self._device)

    def needs(self, shape: Shape) -> Needs:
        decision = shape.layers * shape.tokens * OF_CANDIDATE + AT_A_TIME
        if self._merges:
            decision += shape.layers * shape.keys * 8  # kept keys and values of all layers
        return Needs(between=decision + shape.keys * (2 * shape.itemsize + OF_DIMENSION))


def compact(
    order: Compaction,
    store: Store,
    judge: Judge | None,
    block_size: int,
    merger: Merger,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> None:
    """Choose the tokens that each KV head of a request keeps, and gather them.

    Policies run on the host, so this waits for a device once.

    Args:
        order: request and blocks.
        store: KV cache of the group.
        judge: of the request; None if nothing is measured by token.
        block_size: tokens.
        merger: merger of the request.
        all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over tensor-parallel ranks.
        device: device of KV cache and sums.
    """
    device = torch.device(device)
    first, count = order.first * block_size, order.count * block_size
    resident, target = (to_device(np.array(blocks, np.int64), device) for blocks in (order.source, order.target))
    judge = judge if order.config.policy.measures & RUNNING else None
    judged = None if judge is None else judge.judged(order.req_id, order.position, order.judged)
    scores = _importance(order, store, judged, resident, slice(first, first + count))
    scores = _shared(scores, count, order.config, all_reduce, device)
    keep = [_kept(layer, len(order.target) * block_size, order.config.unit) for layer in scores]
    source = slice(order.first, order.first + order.count)
    merged = _merged(order, store, merger, resident[source], scores, keep) if order.config.merge else []
    on_host = (torch.tensor(blocks, dtype=torch.int32) for blocks in (order.source[source], order.target))
    store.compact(next(on_host), [layer.int() for layer in keep], next(on_host))
    for layer, (keys, values) in enumerate(merged):
        store.write(layer, target, *(_in_blocks(x, block_size) for x in (keys, values)))
    if judge is not None and judged is not None and keep:
        heads = judged[0].shape[1]
        # Padding for layers with fewer heads; those rows are never read.
        full = [torch.cat([layer, layer[:1].expand(heads - len(layer), -1)]) for layer in keep]
        judge.gather(order.req_id, order.judged, first, count, torch.stack(full))


def _importance(
    order: Compaction,
    store: Store,
    judged: tuple[torch.Tensor, torch.Tensor] | None,
    resident: torch.Tensor,
    candidates: slice,
) -> list[torch.Tensor]:
    """Return the policy's importance of each candidate: for each layer float64 [Hkv, count]."""
    policy, config, kv_heads = order.config.policy, order.config, store.kv_heads()
    if not kv_heads:
        return []
    # Name -> for each layer float64 [Hkv, count].
    statistics: dict[str, list[torch.Tensor]] = {name: [] for name in sorted(policy.measures)}
    if policy.measures & CACHED:
        for keys, values in store.read(resident, bool(policy.measures & OF_VALUES)):
            for name, of_tokens in token_scores(keys, values, order.length, policy.measures & CACHED).items():
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
            ages = [_age(of_layer, order.position, config.every) for of_layer in positions]
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
            order.req_id,
        )
    for (*of_head, at), is_sound in zip(numbers.swapaxes(0, 1), sound):
        tokens = Blocks(at.astype(np.int64), config, dict(zip(statistics, of_head)), order.position + 1, 0)
        importance.append(policy.importance(tokens) if is_sound else np.zeros(len(at)))
    return list(to_device(np.array(importance, np.float64), resident.device).split(kv_heads))


def _merged(
    order: Compaction,
    store: Store,
    merger: Merger,
    source: torch.Tensor,
    scores: list[torch.Tensor],
    keep: list[torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Merge evicted tokens into kept ones: for each layer keys and values, float32 [Hkv, kept, D] each."""
    merged = []
    for layer, (keys, values) in enumerate(store.read(source, True)):
        keys, values = _in_order(keys), _in_order(values)
        merged.append(merger.merge(order.config, layer, keys, values, scores[layer], keep[layer]))
    return merged


def _in_order(blocks: Any) -> torch.Tensor:
    """Reshape [n, Hkv, block_size, D] to [Hkv, n * block_size, D]."""
    return blocks.transpose(0, 1).flatten(1, 2)


def _in_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Reshape [Hkv, n * block_size, D] to [n, Hkv, block_size, D]."""
    return tokens.unflatten(1, (-1, block_size)).transpose(0, 1)


def _age(positions: torch.Tensor, newest: int, every: int) -> torch.Tensor:
    """Return the number of counted queries that saw each token, at least 1: float64, of the shape of `positions`."""
    return (counted_before(newest + 1, every) - counted_before(positions, every)).double().clamp(min=1)


def _kept(importance: torch.Tensor, kept: int, unit: int) -> torch.Tensor:
    """Return the indices of the `kept` tokens in the most important units; of equal ones the newest.

    Args:
        importance: float64 [Hkv, count].
        kept, unit: tokens; `unit` divides `kept` and `count`.

    Returns:
        int64 [Hkv, kept], ascending.
    """
    ranked = importance.unflatten(1, (-1, unit)).sum(2).argsort(dim=1, stable=True)
    units = ranked[:, ranked.shape[1] - kept // unit :].sort(dim=1).values
    return (units[:, :, None] * unit + torch.arange(unit, device=units.device)).flatten(1)


def _shared(
    layers: list[torch.Tensor],
    count: int,
    config: Any,
    all_reduce: AllReduce,
    device: torch.device,
) -> list[torch.Tensor]:
    """Give heads that share a set one importance, reduced over them and over ranks: for each layer [Hkv, count]."""
    if config.sets == "head":
        return layers
    # A rank without heads of the KV group takes part with zeros.
    of_layers = [torch.zeros(count, dtype=torch.float64, device=device)] if not layers else []
    for layer in layers:
        of_layers.append(layer.amax(0) if config.heads == "max" else layer.sum(0))
    stacked = torch.stack(of_layers)
    if config.sets == "all":
        stacked = stacked.amax(0, keepdim=True) if config.layers == "max" else stacked.sum(0, keepdim=True)
    reduced = all_reduce(stacked, config.heads == "max").expand(len(of_layers), -1)
    return [one.expand(len(layer), -1) for one, layer in zip(reduced, layers)]

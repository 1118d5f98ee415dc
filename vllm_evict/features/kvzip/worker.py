"""Scores of reconstructed prompts by token and KV head (`kvzip` with `granularity: token`)."""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch

from ...compute.holes import Start
from ...compute.kernels.logits import logits_of, probabilities, soft_capped
from ...compute.needs import OF_DIMENSION, OF_TOKEN, Needs
from ...compute.probes import LayerCall, Probe, StepProbe
from ...compute.shape import Shape
from ...compute.step_batch import StepBatch
from ...compute.tokens import gathered
from ...compute.transfer import to_device
from .plan import Repetition, Repetitions

#: Bytes of attention probabilities in memory at once.
SCRATCH = 8 << 20


@dataclass(slots=True)
class Tokens:
    """One request's scores, in the order in which each head holds its tokens.

    Attributes:
        prompt: float32 [L, Hkv, n], scores of the prompt's tokens. Later tokens weigh 0.
        scores: float32 [L, Hkv, held], scores of the held tokens up to `newest`.
        positions: int32 [L, Hkv, held], positions of these tokens.
        newest: position of the newest token so far.
    """

    prompt: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    newest: int = -1

    def grow(self, position: int) -> None:
        """Append the tokens up to `position`."""
        new = position - self.newest
        if new <= 0:
            return
        own = self.prompt[:, :, self.newest + 1 : position + 1]
        places = torch.arange(self.newest + 1, position + 1, dtype=torch.int32, device=own.device)
        self.scores = torch.cat((self.scores, torch.nn.functional.pad(own, (0, new - own.shape[2]))), 2)
        self.positions = torch.cat((self.positions, places.expand(*own.shape[:2], new)), 2)
        self.newest = position


class PromptScores(Probe):
    """Scores of reconstructed prompts, and of requests with such a prompt, by token, layer and KV head of this rank.

    A token's score is the largest share of attention that a query of the repetition pays to it, over all query heads of
    the KV head. Softmax runs over the sinks, the repeated part and all tokens after the prompt (Kim et al. 2025,
    arXiv:2505.23416, section 3.3 and algorithm 1).

    Args:
        kv_heads: most KV heads of a layer on this rank.
        layers: layers of the KV group.
        block_size: tokens.
        device: device of the scores.
    """

    def __init__(self, kv_heads: int, layers: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.shape, self.block_size, self.device = (layers, kv_heads), block_size, torch.device(device)
        #: Number of a prompt -> scores, float32 [L, Hkv, tokens].
        self._prompts: dict[int, torch.Tensor] = {}
        #: Running shadow -> what it repeats.
        self._repeating: dict[str, Repetition] = {}
        self._requests: dict[str, Tokens] = {}

    @property
    def is_active(self) -> bool:
        """Whether a shadow runs."""
        return bool(self._repeating)

    @property
    def is_empty(self) -> bool:
        """Whether no shadow and no request has state here."""
        return not self._repeating and not self._requests

    @property
    def numbers(self) -> set[int]:
        """Numbers of prompts with scores."""
        return set(self._prompts)

    def begin(self, start: Start) -> None:
        """Apply a plan: drop requests that are gone, start repetitions, assign scores to requests, drop prompts."""
        for req_id in () if self.is_empty else start.gone | start.resumed:
            self._repeating.pop(req_id, None)
            self._requests.pop(req_id, None)
        if (told := Repetitions.within(start.plan)) is None:
            return
        for req_id, repetition in told.repeats.items():
            self._repeating[req_id] = repetition
            if repetition.prompt not in self._prompts:
                self._prompts[repetition.prompt] = torch.zeros(*self.shape, repetition.length, device=self.device)
        for req_id, (prompt, length) in told.scored.items():
            self._requests[req_id] = self._tokens(self._prompts[prompt][:, :, :length])
        for prompt in told.forgotten:
            self._prompts.pop(prompt, None)

    def fits_graph(self, requests: Set[str]) -> bool:
        return not self.is_active

    def step(self, batch: StepBatch) -> "PromptStep | None":
        """Return what layers measure in this step; None if nothing. Shadows have no holes."""
        repeats = []
        for req_id, repetition in self._repeating.items():
            if req_id in batch.req_ids:
                row = batch.req_ids.index(req_id)
                end, length = int(batch.starts[row + 1]), int(batch.seq_lens[row])
                queries = min(length - repetition.length, end - int(batch.starts[row]))
                if queries > 0:
                    scores = self._prompts[repetition.prompt][:, :, repetition.start : repetition.end]
                    repeats.append(self._repeat(row, range(end - queries, end), length, repetition, scores))
        return PromptStep(repeats) if repeats else None

    def needs(self, shape: Shape) -> Needs:
        block = OF_TOKEN * shape.layers * shape.kv_heads * shape.block_size
        return Needs(step=shape.keys * (shape.itemsize + OF_DIMENSION) + 4 * SCRATCH, block=block)

    def judged(self, req_id: str, position: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `compute.compaction.Judge` says."""
        if req_id not in self._requests:  # no reconstruction: all scores are 0, so the oldest tokens go first
            self._requests[req_id] = self._tokens(torch.zeros(*self.shape, 0, device=self.device))
        tokens = self._requests[req_id]
        tokens.grow(position)
        return tokens.scores, tokens.positions

    def gather(self, req_id: str, number: int, first: int, count: int, keep: torch.Tensor) -> None:
        """Do as `compute.compaction.Judge` says."""
        tokens = self._requests[req_id]
        tokens.scores, tokens.positions = (gathered(x, first, count, keep) for x in (tokens.scores, tokens.positions))

    def _tokens(self, prompt: torch.Tensor) -> Tokens:
        nothing = torch.zeros(*self.shape, 0, device=self.device)
        return Tokens(prompt, nothing, nothing.int())

    def _repeat(self, row: int, queries: range, length: int, repetition: Repetition, scores: torch.Tensor) -> "_Repeat":
        """Describe one step of a shadow, which has `length` tokens so far, for its `queries` of the batch."""
        sinks, part = np.arange(min(repetition.sink, repetition.length)), np.arange(repetition.start, repetition.end)
        places = np.concatenate((np.union1d(sinks, part), np.arange(repetition.length, length)))
        blocks, which = np.unique(places // self.block_size, return_inverse=True)
        first = int(np.searchsorted(places, repetition.start))
        return _Repeat(
            row,
            queries,
            to_device(blocks, self.device),
            to_device(which * self.block_size + places % self.block_size, self.device),
            range(first, first + len(part)),
            scores,
        )


@dataclass(slots=True)
class _Repeat:
    """One shadow's part of a step.

    Attributes:
        row: row of the batch.
        queries: range of the batch's tokens.
        blocks: int64 [n], logical blocks with the keys.
        keys: int64 [N], token slots in these blocks, ascending; the last ones belong to the queries.
        part: range of `keys` that is repeated.
        scores: float32 [L, Hkv, len(part)], the largest shares so far.
    """

    row: int
    queries: range
    blocks: torch.Tensor
    keys: torch.Tensor
    part: range
    scores: torch.Tensor


class PromptStep(StepProbe):
    """Measures the repetitions of one step, layer by layer, in float32."""

    def __init__(self, repeats: list[_Repeat]) -> None:
        self._repeats = repeats

    def add(self, call: LayerCall) -> None:
        layer = call.layer
        for repeat in self._repeats:
            blocks = call.metadata.block_table[repeat.row, repeat.blocks].long()
            keys, _ = call.ops.read(layer, call.kv_cache, blocks, False)
            keys = keys.transpose(0, 1).flatten(1, 2)[:, repeat.keys].float()
            queries = call.query[repeat.queries.start : repeat.queries.stop].float() * layer.impl.scale
            shares = _largest_shares(queries, keys, repeat.part, **logits_of(layer))
            scores = repeat.scores[call.place, : len(keys)]
            torch.maximum(scores, shares, out=scores)


def _largest_shares(
    query: torch.Tensor, keys: torch.Tensor, wanted: range, soft_cap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the largest share of attention that any query pays to each of some keys.

    Args:
        query: float32 [Q, H, D], scaled, of the last Q keys. A query sees all keys up to its own.
        keys: float32 [Hkv, N, D].
        wanted: range of keys.
        soft_cap, sinks: see `kernels.logits`; sinks are [H].

    Returns:
        float32 [Hkv, len(wanted)]
    """
    kv_heads, count, _ = keys.shape
    before, query = count - len(query), query.unflatten(1, (kv_heads, -1))  # [Q, Hkv, G, D]
    at_once = max(SCRATCH // (4 * query.shape[1] * query.shape[2] * count), 1)
    largest = torch.zeros(kv_heads, len(wanted), device=keys.device)
    places = torch.arange(count, device=keys.device)
    of_heads = None if sinks is None else sinks.view(*query.shape[1:3], 1, 1)
    for first in range(0, len(query), at_once):
        some = query[first : first + at_once]
        own = before + first
        hidden = places > places[own : own + len(some), None]
        logits = soft_capped(torch.einsum("qhgd,hnd->hgqn", some, keys), soft_cap)
        shares = probabilities(logits.masked_fill_(hidden, -torch.inf), of_heads)
        torch.maximum(largest, shares[..., wanted.start : wanted.stop].amax((1, 2)), out=largest)
    return largest

"""Replays a request's engine steps with block eviction between them.

Shapes: Q queries of a step, N tokens computed so far, L layers, H query heads,
G KV heads, nb logical blocks so far.
"""

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Config:
    """A request's eviction settings; sizes are in tokens."""

    policy: str = "full"  # "full" | "sink-window" | "h2o"
    block_size: int = 16
    budget: int = 128
    buffer: int = 0
    sink: int = 0
    recent: int = 0
    # h2o only:
    accumulate: str = "sum"  # "sum" | "mean" | "ema" | "last"
    decay: float = 0.9  # of "ema"
    window: int = 32  # of "last"
    every: int = 1
    heads: str = "sum"  # "sum" | "mean" | "max"
    layers: str = "sum"

    def __post_init__(self):
        assert self.policy in ("full", "sink-window", "h2o"), self.policy
        assert self.accumulate in ("sum", "mean", "ema", "last"), self.accumulate
        assert self.heads in REDUCE and self.layers in REDUCE
        assert self.every >= 1

    @property
    def budget_blocks(self):
        return math.ceil(self.budget / self.block_size)

    @property
    def trigger_blocks(self):
        return math.ceil((self.budget + self.buffer) / self.block_size)

    @property
    def sink_blocks(self):
        return math.ceil(self.sink / self.block_size)


REDUCE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
}


@dataclass
class Decision:
    """What was decided after a step that left more than the trigger held."""

    step: int  # index into the steps
    n: int  # tokens computed by then
    importance: dict  # every block held before the decision -> importance
    candidates: list  # blocks that could go, by index
    evicted: list  # blocks that went, by index
    gap: float  # lowest importance kept - highest evicted, among candidates
    relative_gap: float  # gap over the larger magnitude of the two
    # Both gaps are inf where no candidate was left to choose between.


@dataclass
class Replay:
    evicted: list = field(default_factory=list)  # per step, sorted logical blocks
    held: list = field(default_factory=list)  # after each step, sorted logical blocks
    decisions: list = field(default_factory=list)
    logits: torch.Tensor = None  # [tokens of all steps, vocab]


def select(importance, n, evicted, config):
    """The decision after a step, if there is one.

    importance: block -> importance, for every held block. n: tokens computed.
    evicted: blocks evicted before. Returns (blocks to evict in order of
    importance, the other candidates in that order), or None below the trigger.
    """
    size = config.block_size
    held = [b for b in range(math.ceil(n / size)) if b not in evicted]
    if config.policy == "full" or len(held) <= config.trigger_blocks:
        return None
    last = (n - config.recent) // size  # this block or a later one: recent
    candidates = [b for b in held if config.sink_blocks <= b < last]
    candidates.sort(key=lambda b: (importance[b], b))
    excess = len(held) - config.budget_blocks
    return candidates[:excess], candidates[excess:]


class Request:
    """One sequence being served: `step` computes tokens, then maybe evicts."""

    def __init__(self, model, config, prefix=()):
        """prefix: tokens whose K/V came from a prefix cache (full causal context)."""
        self.model, self.config = model, config
        self.cache = model.new_cache()
        self.start = self.n = len(prefix)
        self.evicted = set()
        self.sums = torch.zeros(model.kv_heads, 0, dtype=torch.float64)  # S: [G, nb]
        self.replay = Replay()
        if len(prefix):
            causal = torch.ones(self.n, self.n, dtype=torch.bool).tril()
            model.forward(prefix, self.cache, causal)

    def step(self, ids):
        """Compute the next tokens and decide; returns their logits [Q, vocab]."""
        first, self.n = self.n, self.n + len(ids)
        logits, probs = self.model.forward(
            ids, self.cache, self.mask(first), self.config.policy == "h2o"
        )
        if probs is not None:
            self.accumulate(probs, first)
        self.decide()
        self.replay.held.append(self.held())
        return logits

    def blocks(self):
        return math.ceil(self.n / self.config.block_size)

    def held(self):
        return [b for b in range(self.blocks()) if b not in self.evicted]

    def mask(self, first):
        """Queries first .. n-1 see earlier tokens of resident blocks: bool [Q, N]."""
        tokens = torch.arange(self.n)
        resident = torch.tensor([b not in self.evicted for b in range(self.blocks())])
        causal = tokens <= tokens[first:, None]
        return causal & resident[tokens // self.config.block_size]

    def counted(self, first):
        """Which of the queries first .. n-1 count for the importance: bool [Q]."""
        config = self.config
        position = torch.arange(first, self.n)
        counted = position % config.every == 0
        if config.accumulate == "last":
            if len(self.held()) > config.trigger_blocks:
                decision = self.n - 1
            else:  # the first token of the block that will be one too many
                decision = (config.trigger_blocks + len(self.evicted)) * config.block_size
            counted &= (position > decision - config.window) & (position <= decision)
        return counted

    def accumulate(self, probs, first):
        """Add a step's attention [L, H, Q, N] to the blocks' sums."""
        config, size = self.config, self.config.block_size
        counted = self.counted(first)
        weight, keep = counted.double(), 1.0
        if config.accumulate == "ema":
            k = int(counted.sum())
            later = k - counted.cumsum(0)  # counted queries after this one
            weight = weight * (1 - config.decay) * config.decay ** later.double()
            keep = config.decay**k
        mass = torch.einsum("lhqn,q->lhn", probs.double(), weight)
        mass = mass.unflatten(1, (self.model.kv_heads, -1)).sum(2)  # [L, G, N]
        pad = self.blocks() * size - self.n
        mass = torch.nn.functional.pad(mass, (0, pad)).unflatten(2, (-1, size)).sum(3)
        new = mass.shape[2] - self.sums.shape[1]
        self.sums = torch.nn.functional.pad(self.sums, (0, new))
        self.sums = keep * self.sums + REDUCE[config.layers](mass)

    def ages(self):
        """Per block, the mean over its tokens t of the counted queries p >= t: [nb]."""
        token = torch.arange(self.n)
        query = torch.arange(self.start, self.n)
        query = query[query % self.config.every == 0]
        seen = (query >= token[:, None]).sum(1).double()  # [N]
        ages = torch.stack([block.mean() for block in seen.split(self.config.block_size)])
        return ages.clamp_min(1)

    def importance(self):
        """Held block -> importance, now."""
        if self.config.policy != "h2o":
            return {b: float(b) for b in self.held()}
        value = REDUCE[self.config.heads](self.sums)
        if self.config.accumulate == "mean":
            value = value / self.ages()
        return {b: value[b].item() for b in self.held()}

    def decide(self):
        importance = self.importance()
        choice = select(importance, self.n, self.evicted, self.config)
        if choice is None:
            self.replay.evicted.append([])
            return
        gone, kept = choice
        gap = relative = math.inf
        if gone and kept:
            low, high = importance[gone[-1]], importance[kept[0]]
            gap = high - low
            relative = gap / max(abs(low), abs(high), 1e-300)
        self.replay.decisions.append(
            Decision(
                step=len(self.replay.evicted),
                n=self.n,
                importance=importance,
                candidates=sorted(gone + kept),
                evicted=sorted(gone),
                gap=gap,
                relative_gap=relative,
            )
        )
        self.replay.evicted.append(sorted(gone))
        self.evicted |= set(gone)
        if self.config.accumulate == "last":
            self.sums.zero_()


def replay(model, token_ids, steps, config, start=0):
    """Serve `token_ids` in the given steps; returns a `Replay`.

    steps: tokens computed by each step; with `start` they add up to at most
    len(token_ids) (a sampled last token is never computed). start: leading
    tokens taken from a prefix cache: present, but their queries do not count.
    """
    token_ids = list(token_ids)
    assert all(c > 0 for c in steps) and start + sum(steps) <= len(token_ids)
    request = Request(model, config, token_ids[:start])
    logits = [request.step(token_ids[request.n : request.n + c]) for c in steps]
    request.replay.logits = torch.cat(logits)
    return request.replay


def generate(model, prompt, chunks, new_tokens, config, start=0):
    """Greedy decoding after a prompt computed in `chunks`.

    Returns (the new tokens, the `Replay` of chunks and single decode steps).
    """
    assert start + sum(chunks) == len(prompt)
    tokens = list(prompt)
    request = Request(model, config, tokens[:start])
    logits = [request.step(tokens[request.n : request.n + c]) for c in chunks]
    tokens.append(logits[-1][-1].argmax().item())
    while len(tokens) < len(prompt) + new_tokens:
        logits.append(request.step(tokens[-1:]))
        tokens.append(logits[-1][-1].argmax().item())
    request.replay.logits = torch.cat(logits)
    return tokens[len(prompt) :], request.replay


def margin(result):
    """The smallest relative gap over a `Replay`'s decisions (inf without any)."""
    return min((d.relative_gap for d in result.decisions), default=math.inf)


def replay_told(model, token_ids, steps, config, told, decided, start=0):
    """Serve with evictions that were decided elsewhere and took effect later.

    told: per step, blocks that are missing from that step on. decided: per
    step, blocks chosen after it by whoever serves. Returns a `Replay` whose
    `evicted` holds what the policy chooses at the same points, given all that
    had been decided before.
    """
    request = Request(model, config, list(token_ids)[:start])
    gone, logits = set(), []
    for count, missing, chosen in zip(steps, told, decided, strict=True):
        request.evicted |= set(missing)
        first, request.n = request.n, request.n + count
        ids = token_ids[first : request.n]
        step_logits, probs = model.forward(ids, request.cache, request.mask(first), config.policy == "h2o")
        if probs is not None:
            request.accumulate(probs, first)
        logits.append(step_logits)
        request.replay.held.append(request.held())
        told_so_far, request.evicted = request.evicted, set(gone)
        request.decide()  # as if all that was decided had taken effect
        request.evicted = told_so_far
        gone |= set(chosen)
    request.replay.logits = torch.cat(logits)
    return request.replay

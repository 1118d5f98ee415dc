"""Replays a request's engine steps with block eviction between them.

Shapes: Q queries of a step, N tokens computed so far, L layers, H query heads,
G KV heads, nb logical blocks so far.
"""

import math
import struct
import zlib
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Config:
    """A request's eviction settings; sizes are in tokens."""

    policy: str = "full"  # one of POLICIES
    block_size: int = 16
    budget: int = 128
    buffer: int = 0
    sink: int = 0
    recent: int = 0
    protect: bool = True
    accumulate: str = "sum"  # "sum" | "mean" | "ema" | "last"
    decay: float = 0.9  # of "ema"
    window: int = 32  # of "last"
    every: int = 1
    heads: str = "sum"  # "sum" | "mean" | "max"
    layers: str = "sum"
    kernel: int = 3  # snapkv: blocks
    mix: float = 0.1  # rkv: weight of the attention
    seed: int = 0  # random
    prompt: tuple = ()  # random: token ids
    context: int = 2**62  # farthest that a query looks back
    ahead: int = 0  # tokens that may come before another decision
    whole: int = 0  # tokens before which nothing is evicted
    unit: int = 1  # by token: tokens that stay or go together

    def __post_init__(self):
        assert self.policy in POLICIES, self.policy
        if self.policy == "tova":
            object.__setattr__(self, "window", 1)
        if self.policy in ("tova", "snapkv", "scissorhands", "rkv"):
            object.__setattr__(self, "accumulate", "last")
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
        return math.ceil(self.sink / self.block_size) if self.protect else 0

    @property
    def wants_probs(self):
        return self.policy in ("h2o", "tova", "snapkv", "scissorhands", "rkv")


POLICIES = (
    "full", "sink-window", "strided", "h2o", "scissorhands", "tova", "snapkv", "rkv", "knorm", "keydiff",
    "pagedeviction", "keybound", "random", "kvzip",
)  # fmt: skip

REDUCE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
}


def stride(block):
    """The largest power of two that divides a block's index; of 0 more than any."""
    if block == 0:
        return 2**62
    power = 1
    while block % (2 * power) == 0:
        power *= 2
    return power


def chance(seed, prompt, block):
    """53 bits of SplitMix64, of the prompt's CRC-32 and the block in the seed's stream."""
    key = zlib.crc32(struct.pack(f"<{len(prompt)}q", *prompt))
    return splitmix((splitmix((splitmix(seed) + key) % 2**64) + block) % 2**64) >> 11


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def cosine(a, b):
    """[A, D], [B, D] -> [A, B]."""
    return unit(a) @ unit(b).T


def redundancy(keys):
    """R-KV: how alike each key is to the others, as a distribution over them. [T, D] -> [T]."""
    similar = cosine(keys, keys).fill_diagonal_(0)
    for i, row in enumerate(similar > 0.5):
        alike = torch.where(row)[0]
        if len(alike):
            similar[i, alike[-1]] = 0  # of those alike to i, the most recent is spared
    return similar.mean(0).softmax(0)


@dataclass
class Decision:
    """The decision after a step that left more than the trigger held."""

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
    moves: list = field(default_factory=list)  # steps after which gaps were closed
    logits: torch.Tensor = None  # [tokens of all steps, vocab]
    closest: float = math.inf  # scissorhands: how near (relative) a block's mass came to its share


def candidates_of(n, evicted, config):
    """Held blocks that may go, ascending: no sinks, not recent, not the one being filled."""
    size = config.block_size
    # This block or a later one holds recent tokens.
    last = (n - (config.recent if config.protect else 0)) // size
    return [b for b in range(math.ceil(n / size)) if b not in evicted and config.sink_blocks <= b < last]


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
    candidates = candidates_of(n, evicted, config)
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
        self.places = {}  # block -> the block for which its keys are rotated, where it is another
        self.sums = torch.zeros(model.kv_heads, 0, dtype=torch.float64)  # S: [G, nb]
        self.replay = Replay()
        self.drafts = 0  # of the step, that became tokens
        self.absent = None  # blocks that are missing where keys are measured; None: the evicted ones
        if len(prefix):
            causal = torch.ones(self.n, self.n, dtype=torch.bool).tril()
            model.forward(prefix, self.cache, causal)

    def step(self, ids, settled=None):
        """Compute the next tokens and decide; returns their logits [Q, vocab].

        settled: leading tokens that were known before the step; drafts that were accepted follow them. None: all were.
        """
        first = self.begin(len(ids), settled)
        logits, probs = self.model.forward(ids, self.cache, self.mask(first), self.config.wants_probs)
        if probs is not None:
            self.accumulate(probs, first)
        self.decide()
        self.replay.held.append(self.held())
        return logits

    def begin(self, count, settled=None):
        """Take in a step's tokens; returns the first of them."""
        first, self.n, self.drafts = self.n, self.n + count, 0 if settled is None else count - settled
        return first

    def blocks(self):
        return math.ceil(self.n / self.config.block_size)

    def held(self):
        return [b for b in range(self.blocks()) if b not in self.evicted]

    def measured(self):
        """Blocks whose keys are measured: those that are there, without blocks of accepted drafts alone."""
        absent = self.evicted if self.absent is None else self.absent
        return [b for b in range(math.ceil((self.n - self.drafts) / self.config.block_size)) if b not in absent]

    def mask(self, first):
        """Queries first .. n-1 see earlier tokens of resident blocks: bool [Q, N]."""
        tokens = torch.arange(self.n)
        resident = torch.tensor([b not in self.evicted for b in range(self.blocks())])
        causal = tokens <= tokens[first:, None]
        return causal & resident[tokens // self.config.block_size]

    def counted(self, first):
        """Which of the queries first .. n-1 count for the importance: bool [Q]. Those of drafts do not."""
        config, end = self.config, self.n - self.drafts
        position = torch.arange(first, self.n)
        counted = (position % config.every == 0) & (position < end)
        if config.accumulate == "last":
            if end <= config.whole:
                decision = config.whole - 1
            elif math.ceil(end / config.block_size) - len(self.evicted) > config.trigger_blocks:
                decision = end - 1
            else:  # the first token of the block that will be one too many
                decision = (config.trigger_blocks + len(self.evicted)) * config.block_size
            counted &= (position > decision - config.window) & (position <= decision)
        return counted

    def accumulate(self, probs, first):
        """Add a step's attention [L, H, Q, N] to the blocks' sums. Layers with sliding windows have no part in it."""
        config, size = self.config, self.config.block_size
        probs, counted = probs[self.model.full], self.counted(first)
        if config.policy == "scissorhands":
            self.add_to_sums(self.pivots(probs, first, counted))
            return
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
        self.add_to_sums(mass, keep)

    def add_to_sums(self, new, keep=1.0):
        """new: [L, G, nb]."""
        self.sums = torch.nn.functional.pad(self.sums, (0, new.shape[2] - self.sums.shape[1]))
        self.sums = keep * self.sums + REDUCE[self.config.layers](new)

    def pivots(self, probs, first, counted):
        """By layer, KV head and block, the counted queries that find the block pivotal: [L, G, nb].

        A query that sees t tokens finds a block of which it sees s tokens pivotal if it gives it more than s / t.
        """
        seen = getattr(self.model, "seen_by", self.mask)(first)
        by_head = probs.double().unflatten(1, (self.model.kv_heads, -1)).mean(2)  # [L, G, Q, N]
        counts = torch.zeros(*by_head.shape[:2], self.blocks(), dtype=torch.float64)
        for q in torch.where(counted)[0].tolist():
            t = int(seen[q].sum())
            for b, tokens in enumerate(torch.arange(self.n).split(self.config.block_size)):
                s = int(seen[q, tokens].sum())
                if s:
                    mass = by_head[:, :, q, tokens].sum(-1)
                    counts[:, :, b] += mass > s / t
                    off = (mass * t / s - 1).abs().min().item()
                    self.replay.closest = min(self.replay.closest, off)
        return counts

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
        config, held = self.config, self.held()
        if config.policy in ("full", "sink-window"):
            return {b: float(b) for b in held}
        if config.policy == "strided":
            return {b: stride(b) / (self.blocks() - b) for b in held}
        if config.policy == "random":
            return {b: chance(config.seed, config.prompt, b) for b in held}
        if config.policy == "knorm":
            return self.by_keys(lambda k, v: -k.norm(dim=1))
        if config.policy == "pagedeviction":
            return self.by_keys(lambda k, v: v.norm(dim=1) / k.norm(dim=1))
        if config.policy == "keybound":
            return self.by_bounds()
        if config.policy == "keydiff":
            return self.by_keys(lambda k, v: -cosine(k, unit(k).mean(0, keepdim=True))[:, 0])
        value = REDUCE[config.heads](self.sums)
        if config.accumulate == "mean":
            value = value / self.ages()
        mass = {b: value[b].item() for b in held}
        candidates = candidates_of(self.n, self.evicted, config)
        if config.policy == "snapkv":
            near = config.kernel // 2
            return mass | {b: max(mass[c] for c in candidates if abs(b - c) <= near) for b in candidates}
        if config.policy == "rkv":
            # Of what is subtracted, a maximum over heads or layers takes the least.
            spared = self.by_keys(lambda k, v: -redundancy(k), torch.sum)
            all_mass = sum(mass[b] for b in candidates)
            all_spared = sum(spared[b] for b in candidates)
            share = lambda b: config.mix * mass[b] / all_mass - (1 - config.mix) * spared[b] / all_spared  # noqa: E731
            return {b: share(b) if b in candidates else 0.0 for b in held}
        return mass

    def by_keys(self, score, of_tokens=torch.mean):
        """Held block -> `score(k, v)` of its tokens, reduced; k, v [T, D] are a head's resident tokens, no drafts."""
        size, measured = self.config.block_size, self.measured()
        resident = [t for t in range(self.n - self.drafts) if t // size in measured]
        layers = []
        for keys, values in (self.cache[layer] for layer in self.model.full):
            heads = []
            for g in range(self.model.kv_heads):
                scores = score(keys[resident, g].double(), values[resident, g].double())
                heads.append(torch.stack([of_tokens(part) for part in scores.split(size)]))
            layers.append(torch.stack(heads))
        value = REDUCE[self.config.heads](REDUCE[self.config.layers](torch.stack(layers)))
        return dict(zip(measured, value.tolist(), strict=True))

    def by_bounds(self):
        """Held block -> the share that the last query may pay it, by the least and largest keys: all heads' and
        layers'.

        Drafts do not count.
        """
        size, held, end = self.config.block_size, self.measured(), self.n - self.drafts
        total = dict.fromkeys(held, 0.0)
        for layer in self.model.full:
            keys, group = self.cache[layer][0].double(), self.model.heads // self.model.kv_heads
            for h, q in enumerate(self.model.queries[layer][-1 - self.drafts].double()):
                of_head = (keys[b * size : min((b + 1) * size, end), h // group] for b in held)
                most = [(q * torch.where(q > 0, k.amax(0), k.amin(0))).sum() for k in of_head]
                shares = (torch.stack(most) / self.model.head_dim**0.5).softmax(0)
                for b, share in zip(held, shares.tolist()):
                    total[b] += share
        return total

    def due(self):
        """Whether a decision follows the step."""
        return len(self.held()) > self.config.trigger_blocks and self.n >= self.config.whole

    def forgets(self):
        """Whether the last queries are forgotten: those of a prompt at whose end nothing was decided."""
        return self.config.accumulate == "last" and self.n == self.config.whole

    def decide(self):
        if self.config.policy == "full" or not self.due():
            self.replay.evicted.append([])
            if self.forgets():
                self.sums.zero_()
            return
        importance = self.importance()
        choice = select(importance, self.n, self.evicted, self.config)
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
        self.move_up()

    def move_up(self):
        """Close all gaps, once the first token is almost out of the context: blocks end at the newest one."""
        config, held = self.config, self.held()
        if self.n - self.places.get(held[0], held[0]) * config.block_size + config.ahead > config.context:
            self.close_gaps()
            self.replay.moves.append(len(self.replay.evicted) - 1)

    def close_gaps(self):
        """Held blocks follow one another up to the newest; their keys are those of these places."""
        config, held = self.config, self.held()
        shift = torch.zeros(self.n, dtype=torch.long)
        for place, block in zip(range(self.blocks() - len(held), self.blocks()), held):
            by = place - self.places.get(block, block)
            shift[block * config.block_size : (block + 1) * config.block_size] = by * config.block_size
            self.places[block] = place
        self.model.turn(self.cache, shift)


def replay(model, token_ids, steps, config, start=0, settled=None):
    """Serve `token_ids` in the given steps; returns a `Replay`.

    steps: tokens computed by each step; with `start` they add up to at most
    len(token_ids) (a sampled last token is never computed). start: leading
    tokens taken from a prefix cache: present, but their queries do not count.
    settled: for each step its leading tokens that were no drafts; None: all.
    """
    token_ids = list(token_ids)
    assert all(c > 0 for c in steps) and start + sum(steps) <= len(token_ids)
    request = Request(model, config, token_ids[:start])
    settled = settled or [None] * len(steps)
    logits = [
        request.step(token_ids[request.n : request.n + c], known) for c, known in zip(steps, settled, strict=True)
    ]
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


def replay_told(model, token_ids, steps, config, told, decided, start=0, moved=(), settled=None):
    """Serve with evictions that were decided elsewhere and took effect later.

    told: per step, blocks that are missing from that step on. decided: per
    step, blocks chosen after it by whoever serves. moved: steps before which
    what was kept closed its gaps. settled: as for `replay`; with it a window of
    queries begins anew with a step that is told of holes, too, as whoever
    measures does not know earlier whether anything was decided. Returns a `Replay` whose
    `evicted` holds what the policy chooses at the same points, given all that
    had been decided before.
    """
    request = Request(model, config, list(token_ids)[:start])
    gone, logits = set(), []
    known = settled or [None] * len(steps)
    for step, (count, missing, chosen, before) in enumerate(zip(steps, told, decided, known, strict=True)):
        request.evicted |= set(missing)
        if settled is not None and missing and config.accumulate == "last":
            request.sums.zero_()
        if step in moved:
            request.close_gaps()
        first = request.begin(count, before)
        ids = token_ids[first : request.n]
        step_logits, probs = model.forward(ids, request.cache, request.mask(first), config.wants_probs)
        if probs is not None:
            request.accumulate(probs, first)
        logits.append(step_logits)
        request.replay.held.append(request.held())
        told_so_far = request.absent = request.evicted
        request.evicted = set(gone)
        request.decide()  # as if all that was decided had taken effect
        request.evicted = told_so_far
        gone |= set(chosen)
    request.replay.logits = torch.cat(logits)
    return request.replay

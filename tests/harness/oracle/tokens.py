"""Replays a request whose KV heads keep tokens of their own: as many as each other, which ones each head chooses.

A decision counts blocks as at block granularity: so many blocks of tokens have to go. Candidates are the tokens that the
blocks outside sinks and recent window hold; what stays of them moves up, so the last of these blocks become holes.
"""

import math

import torch

from .replay import REDUCE, Replay, Request, candidates_of, cosine, redundancy, unit


class TokenRequest(Request):
    """heads: bool [L, G], those of its KV group; sets: "head", "layer" or "all", whose heads keep the same tokens.
    merge: the plugin's fields for merging, or None. scores: of a reconstructed prompt, float64 [L, G, n]; ready: steps
    before the first decision by them.
    """

    def __init__(self, model, config, heads=None, sets="head", merge=None, scores=None, ready=0):
        super().__init__(model, config)
        self.scores, self.ready = scores, ready
        shape = (model.layers, model.kv_heads)
        self.heads = torch.zeros(shape, dtype=torch.bool) if heads is None else torch.as_tensor(heads)
        if heads is None:
            self.heads[model.full] = True
        self.sets, self.merge, self.thresholds = sets, merge, {}
        self.gone = torch.zeros(*shape, 0, dtype=torch.bool)  # [L, G, N]
        self.drawn = torch.zeros(*shape, 0, dtype=torch.float64)
        self.closest = math.inf  # relative gap between the last that went and the first that stayed, at its smallest
        self.seen = None  # what queries know to be gone, where that is not `gone`
        self.decided = {}  # position of the newest token -> `gone` after the decision
        self.kept = []  # after each decision, {(layer, head): positions}

    def grow(self):
        new = self.n - self.gone.shape[2]
        self.gone = torch.nn.functional.pad(self.gone, (0, new))
        self.drawn = torch.nn.functional.pad(self.drawn, (0, new))

    def token_mask(self, first):
        """bool [L, G, Q, N]"""
        self.grow()
        tokens = torch.arange(self.n)
        gone = self.gone
        if self.seen is not None:  # decided, but not told yet
            gone = torch.nn.functional.pad(self.seen, (0, self.n - self.seen.shape[2]))
        return (tokens <= tokens[first:, None]) & ~gone[:, :, None]

    def accumulate(self, probs, first):
        config, counted = self.config, self.counted(first)
        weight, keep = counted.double(), 1.0
        if config.accumulate == "ema":
            k = int(counted.sum())
            weight = weight * (1 - config.decay) * config.decay ** (k - counted.cumsum(0)).double()
            keep = config.decay**k
        mass = torch.einsum("lhqn,q->lhn", probs.double(), weight)
        self.drawn = keep * self.drawn + mass.unflatten(1, (self.model.kv_heads, -1)).sum(2)

    def decide(self):
        config, size = self.config, self.config.block_size
        if not self.due() or len(self.replay.evicted) < self.ready:
            self.replay.evicted.append([])
            if self.forgets():
                self.drawn.zero_()
            return
        blocks = candidates_of(self.n, self.evicted, config)
        spare = min(len(self.held()) - config.budget_blocks, len(blocks))
        if config.policy == "sink-window":  # whole blocks, the oldest first
            going = torch.isin(torch.arange(self.n) // size, torch.tensor(blocks[:spare]))
            self.gone[self.heads] |= going
            self.replay.evicted.append(blocks[:spare])
            self.evicted |= set(blocks[:spare])
            return
        first, count = config.sink_blocks * size, len(blocks) * size
        places, values = {}, {}
        for layer, head in torch.nonzero(self.heads).tolist():
            resident = torch.nonzero(~self.gone[layer, head])[:, 0]
            places[layer, head] = resident[first : first + count]
            values[layer, head] = self.token_importance(layer, head, resident, places[layer, head])
        if self.sets != "head":
            layers = {
                layer: REDUCE[config.heads](torch.stack([values[at] for at in values if at[0] == layer]))
                for layer in range(self.model.layers)
                if self.heads[layer].any()
            }
            if self.sets == "all":
                layers = dict.fromkeys(layers, REDUCE[config.layers](torch.stack(list(layers.values()))))
            values = {at: layers[at[0]] for at in values}
        for (layer, head), value in values.items():
            runs = torch.tensor([sum(value[i : i + config.unit].tolist()) for i in range(0, len(value), config.unit)])
            order, lost = runs.argsort(stable=True), spare * size // config.unit
            going = torch.tensor([i for i in range(len(value)) if i // config.unit in set(order[:lost].tolist())])
            if lost < len(order):
                low, high = runs[order[lost - 1 : lost + 1]].tolist()
                if high > low:  # pooling makes neighbours equal: then the oldest go, here as there
                    self.closest = min(self.closest, (high - low) / max(abs(low), abs(high)))
            if self.merge:
                self.merge_tokens(layer, head, places[layer, head], value, going)
            self.gone[layer, head, places[layer, head][going]] = True
        if config.accumulate == "last":
            self.drawn.zero_()
        self.replay.evicted.append(blocks[len(blocks) - spare :])
        self.evicted |= set(self.replay.evicted[-1])
        self.decided[self.n - 1] = self.gone.clone()
        self.kept.append({at: torch.nonzero(~self.gone[at])[:, 0].tolist() for at in values})

    def merge_tokens(self, layer, head, places, importance, going):
        """By the papers' formulas, one token after the other."""
        keys, values = self.cache[layer]
        staying = sorted(set(range(len(places))) - set(going.tolist()))
        going = sorted(going.tolist())
        if self.merge["merge"] == "ems":
            going = sorted(sorted(going, key=lambda i: (importance[i].item(), i))[-len(staying) :])
        likeness = cosine(keys[places[going], head], keys[places[staying], head]).tolist()
        best = {i: max(zip(row, staying), key=lambda pair: pair[0]) for i, row in zip(going, likeness)}
        mean = sum(likeness for likeness, _ in best.values()) / len(best)
        if self.merge["merge"] == "ems":
            threshold = self.merge.get("merge_threshold", 0.6)
        else:
            before, decay = self.thresholds.get((layer, head)), self.merge.get("merge_decay", 0.7)
            threshold = mean if before is None else decay * mean + (1 - decay) * before
            self.thresholds[layer, head] = threshold
        self.closest = min([self.closest, *(abs(likeness - threshold) for likeness, _ in best.values())])
        positive = bool((importance > 0).all())
        for j in staying:
            merged = [(i, likeness) for i, (likeness, into) in best.items() if into == j and likeness >= threshold]
            if self.merge["merge"] == "d2o":
                weights = [math.e, *(math.exp(likeness) for _, likeness in merged)]
            elif positive:
                weights = [importance[j].item(), *(importance[i].item() for i, _ in merged)]
            else:
                weights = [1.0] * (1 + len(merged))
            tokens = [places[j], *(places[i] for i, _ in merged)]
            for x in (keys, values):
                old = x[:, head].clone()
                x[places[j], head] = sum(w * old[t] for w, t in zip(weights, tokens)) / sum(weights)

    def token_importance(self, layer, head, resident, candidates):
        """float64 [candidates]"""
        config = self.config
        keys = self.cache[layer][0][resident, head].double()
        at = torch.isin(resident, candidates)
        mass = self.drawn[layer, head, candidates]
        if config.policy == "kvzip":
            known = self.scores.shape[2]
            return torch.where(candidates < known, self.scores[layer, head, candidates.clamp(max=known - 1)], 0.0)
        if config.policy == "knorm":
            return -keys.norm(dim=1)[at]
        if config.policy == "keydiff":
            return -cosine(keys, unit(keys).mean(0, keepdim=True))[at, 0]
        if config.policy == "rkv":
            alike = redundancy(keys)[at]
            return config.mix * mass / mass.sum() - (1 - config.mix) * alike / alike.sum()
        if config.policy == "snapkv":
            near = (candidates[:, None] - candidates).abs() <= config.kernel // 2
            return torch.where(near, mass, -torch.inf).amax(1)
        if config.accumulate == "mean":
            queries = torch.arange(self.start, self.n)
            queries = queries[queries % config.every == 0]
            mass = mass / (queries >= candidates[:, None]).sum(1).clamp_min(1)
        return mass


def kvzip_scores(model, prompt, parts, instruction=(), sink=0, overlap=8):
    """Kim et al. 2025, algorithm 1: float64 [L, G, n], the largest share of attention that a token of a part draws.

    Shares are of the sinks, the part and all that follows the prompt: those of the whole softmax, made to add up to 1.
    """
    n, group = len(prompt), model.heads // model.kv_heads
    scores = torch.zeros(model.layers, model.kv_heads, n, dtype=torch.float64)
    for start, end in parts:
        ids = [*prompt, *instruction, *prompt[max(start - overlap, 0) : start], *prompt[start:end]]
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        _, probs = model.forward(ids, model.new_cache(), causal, want_probs=True)
        tokens = torch.arange(len(ids))
        seen = (tokens < sink) | ((tokens >= start) & (tokens < end)) | (tokens >= n)
        shares = probs[:, :, n:].double() * seen
        shares /= shares.sum(-1, keepdim=True)
        scores[:, :, start:end] = shares[..., start:end].unflatten(1, (-1, group)).amax((2, 3))
    return scores


def replay_tokens(
    model, token_ids, steps, groups, start=0, sets="head", merge=None, told=None, scores=None, ready=0, settled=None
):
    """Serve `token_ids` in the given steps; returns the finished requests, one for each group.

    groups: (Config, heads bool [L, G] or None) of each. start: leading tokens out of a prefix cache.
    told: for each step the decisions, by the position of their newest token, that take effect with it; None: at once.
    scores, ready: see `TokenRequest`. settled: for each step its leading tokens that were no drafts; None: all.
    """
    requests = [TokenRequest(model, config, heads, sets, merge, scores, ready) for config, heads in groups]
    cache, done, logits = model.new_cache(), start, []
    if start:
        model.forward(token_ids[:start], cache, torch.ones(start, start, dtype=torch.bool).tril())
    for request in requests:
        request.cache, request.n, request.start, request.replay = cache, start, start, Replay()
    for step, count in enumerate(steps):
        for request in requests if told is not None else ():
            for position in told[step]:
                request.seen = request.decided[position]
            if request.seen is None:
                request.seen = torch.zeros_like(request.gone)
        mask = torch.zeros(model.layers, model.heads, count, done + count, dtype=torch.bool)
        group = model.heads // model.kv_heads
        for request in requests:
            request.n = done + count
            mine = request.heads.repeat_interleave(group, 1)
            mask[mine] = request.token_mask(done).repeat_interleave(group, 1)[mine]
        out, probs = model.forward(token_ids[done : done + count], cache, mask, want_probs=True)
        logits.append(out)
        for request in requests:
            request.drafts = 0 if settled is None else count - settled[step]
            request.accumulate(probs, done)
            request.decide()
        done += count
    for request in requests:
        request.replay.logits = torch.cat(logits)
    return requests

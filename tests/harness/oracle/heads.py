"""Replays a request whose KV heads are split in KV groups, each with blocks and a policy of its own."""

import numpy as np
import torch

from .replay import REDUCE, Replay, Request


class GroupRequest(Request):
    """One KV group of a request.

    heads: bool [L, G], those of the group.
    """

    def __init__(self, model, config, heads):
        super().__init__(model, config)
        self.heads = torch.as_tensor(np.asarray(heads))

    def of_query_heads(self):
        """bool [L, H]"""
        return self.heads.repeat_interleave(self.model.heads // self.model.kv_heads, 1)

    def by_keys(self, score, of_tokens=torch.mean):
        assert self.config.heads == self.config.layers == "sum"
        total = 0
        for layer, (keys, values) in enumerate(self.cache):
            size, resident = (
                self.config.block_size,
                [t for t in range(self.n) if t // self.config.block_size not in self.evicted],
            )
            for g in torch.where(self.heads[layer])[0].tolist():
                scores = score(keys[resident, g].double(), values[resident, g].double())
                total = total + REDUCE["sum"](torch.stack([of_tokens(part) for part in scores.split(size)])[None])
        return dict(zip(self.held(), total.tolist(), strict=True))


def replay_heads(model, token_ids, steps, groups, prefix=0, prefix_holes=None, told=None, settled=None):
    """Serve `token_ids` in the given steps; returns a `Replay` for each group, all with the same logits.

    groups: (Config, heads bool [L, G]) of each; together they have every head once that is no sliding window's.
    prefix: leading tokens out of a prefix cache; prefix_holes: of each group, the blocks of it that were not taken.
    told: of each group and step, blocks that are missing from then on. Then nothing is decided here.
    settled: as of `replay`.
    """
    requests = [GroupRequest(model, config, heads) for config, heads in groups]
    covered = sum(request.heads.int() for request in requests)
    assert (covered[model.full] == 1).all() and covered.sum() == len(model.full) * model.kv_heads
    cache, token_ids, logits = model.new_cache(), list(token_ids), []
    if prefix:
        model.forward(token_ids[:prefix], cache, torch.ones(prefix, prefix, dtype=torch.bool).tril())
    for group, request in enumerate(requests):
        request.cache, request.n, request.start = cache, prefix, prefix
        request.evicted = set(prefix_holes[group]) if prefix_holes else set()
    done = prefix
    for step, count in enumerate(steps):
        for group, request in enumerate(requests):
            request.n = done
            request.begin(count, settled and settled[step])
            request.evicted |= set(told[group][step]) if told else set()
        mask = torch.zeros(model.layers, model.heads, count, done + count, dtype=torch.bool)
        for request in requests:
            mask[request.of_query_heads()] = request.mask(done)
        out, probs = model.forward(token_ids[done : done + count], cache, mask, want_probs=True)
        logits.append(out)
        for request in requests:
            if request.config.wants_probs:
                request.accumulate(probs * request.of_query_heads()[:, :, None, None], done)
            if told is None:
                request.decide()
            request.replay.held.append(request.held())
        done += count
    for request in requests:
        request.replay.logits = torch.cat(logits)
    return [request.replay for request in requests]


__all__ = ["Replay", "replay_heads"]

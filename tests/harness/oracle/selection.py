"""Chooses the blocks that a decode attends to, layer by layer, by plain loops over queries and keys."""

import math

import torch

#: Tokens of a block.
BLOCK = 32


class Chooser:
    """What layers of a dense model see under a selection. Chooses by plain loops over its own queries and keys.

    Args:
        ranks: each chooses for its own heads.

    Attributes:
        closest: how near, relative to the larger, the shares of a chosen block and of another one came.
        chosen: number of choices.
    """

    def __init__(
        self,
        model,
        *,
        select,
        select_sink,
        select_recent,
        dense_layers=2,
        filter_layers=(),
        select_every=1,
        select_bounds="box",
        ranks=1,
    ):
        self.model, self.every, self.bounds = model, select_every, select_bounds
        self.recent = math.ceil((select_recent - 1) / BLOCK) + 1
        self.sinks, self.blocks = math.ceil(select_sink / BLOCK), math.ceil(select / BLOCK)
        self.dense, self.filters = dense_layers, filter_layers
        self.ranks = torch.arange(model.heads).chunk(ranks)
        self.steps, self.held, self.closest, self.chosen = 0, {}, math.inf, 0

    def mask(self, base, resident):
        """A step's mask. base: bool [Q, N] of all resident tokens; resident: logical blocks, ascending."""
        if len(base) > 1 or len(resident) <= self.blocks:
            self.held, self.steps = {}, 0
            return base
        if self.steps % self.every == 0:
            self.held = {}
        self.steps += 1
        latest = [None]

        def of_layer(layer, queries, keys):
            own = layer in self.filters if self.filters else layer >= self.dense
            if own:
                if layer not in self.held:
                    self.held[layer] = [self.choose(queries[0], keys, resident, each.tolist()) for each in self.ranks]
                latest[0] = self.held[layer]
            if latest[0] is None or layer in self.filters or (not self.filters and not own):
                return base
            of_block, always = torch.arange(base.shape[1]) // BLOCK, resident[: self.sinks] + resident[-self.recent :]
            seen = [torch.isin(of_block, torch.tensor(always + blocks)) for blocks in latest[0]]
            return base & torch.stack(seen).repeat_interleave(len(self.ranks[0]), 0)[:, None]

        return of_layer

    def choose(self, query, keys, resident, heads):
        """The best blocks for some query heads."""
        group = self.model.heads // self.model.kv_heads
        full, shares = resident[:-1], torch.zeros(len(resident) - 1, dtype=torch.float64)
        for h in heads:
            bounds = []
            for block in full:
                of_block = keys[block * BLOCK : (block + 1) * BLOCK, h // group].double()
                q = query[h].double()
                if self.bounds == "signs":
                    bounds.append(torch.logsumexp(_of_signs(of_block) @ q / self.model.head_dim**0.5, 0))
                    continue
                if self.bounds != "box":
                    centre = sum(of_block) / len(of_block)
                    radius = max((key - centre).norm() for key in of_block) if self.bounds == "sphere" else 0
                    bounds.append(q @ centre + q.norm() * radius)
                    continue
                bounds.append(torch.maximum(q * of_block.amax(0), q * of_block.amin(0)).sum())
            unit = 1 if self.bounds == "signs" else self.model.head_dim**0.5
            shares += (torch.stack(bounds) / unit).softmax(0)
        last = len(resident) - self.recent
        order = sorted(range(self.sinks, last), key=lambda place: -shares[place])
        count = self.blocks - self.sinks - self.recent
        kept, other = shares[order[count - 1]].item(), shares[order[count]].item()
        self.closest, self.chosen = min(self.closest, 1 - other / kept), self.chosen + 1
        return sorted(full[place] for place in order[:count])


def _of_signs(keys):
    """Keys [tokens, D] as their signs stand for them, by loops."""
    centre = (sum(keys) / len(keys)).bfloat16().double()
    taken = []
    for key in keys:
        length = ((key - centre).abs().sum() / len(key)).bfloat16().double()
        taken.append(centre + length * torch.where(key >= centre, 1.0, -1.0))
    return torch.stack(taken)

"""Chooses the blocks that a decode attends to, layer by layer, by plain loops over queries and keys."""

import math

import numpy as np
import torch

#: Tokens of a block.
BLOCK = 32
#: Tokens of a prompt that choose together.
TILE = 32
#: Of so many queries or more, shares count what the tile itself has; by signs a block's best token stands for it.
MANY = 16


class Chooser:
    """Masks of layers of a dense model that read a part of their blocks. Chooses by loops over its own queries and
    keys.

    Args:
        read, sink, recent, hold, index: fields of the policy.
        dense_layers: the first layers of the model, which see everything.
        leaders: each so manieth of the other layers scores blocks, and others choose by its scores; or the layers that
            see everything and score blocks for the layers after them.
        fetch: most blocks that come to the `rooms` of a layer with one choice; the best ones there stand for others.
        read_prompts: of the policy.
        tables: whether tiles by signs look up rounded sums, and weights of bits are rounded, as on CPUs.
        ranks: each chooses for its own heads.
        size: tokens of a block.

    Attributes:
        closest: how near, relative to the larger, the shares of a chosen block and of another one came.
        chosen: number of choices.
        rooms: for each layer [block, choice that read it last] in each place of its room.
        on_host: blocks that are in a room or on the host.
    """

    def __init__(
        self,
        model,
        *,
        read,
        sink,
        recent,
        hold=1,
        index=None,
        dense_layers=0,
        leaders=1,
        fetch=0,
        read_prompts=0,
        tables=True,
        ranks=1,
        size=BLOCK,
    ):
        self.model, self.index = model, index or ("signs" if read_prompts else "bits")
        self.every, self.until = (hold, 0.0) if isinstance(hold, int) else (1 << 30, hold)
        self.scale = getattr(model, "scale", model.head_dim**-0.5)
        self.recent, self.size = math.ceil((recent - 1) / size) + 1, size
        self.sinks, self.blocks = math.ceil(sink / size), math.ceil(read / size)
        self.tables, self.of_prompts = tables, math.ceil(read_prompts / size)
        self.ranks = torch.arange(model.heads).chunk(ranks)
        listed = not isinstance(leaders, int)
        first = leaders[0] if listed else dense_layers
        self.dense = {layer for layer in model.full if layer < first or (listed and layer in leaders)}
        others = [layer for layer in model.full if layer >= first]
        self.leads = set(leaders) if listed else set(others[::leaders])
        self.fetch, self.rooms, self.on_host, self._shares = fetch, {}, set(), {}
        self._moves, self._asked = {}, {}
        self.steps, self.held, self.closest, self.chosen = 0, {}, math.inf, 0
        self._resident = []

    def mask(self, base, resident, decodes=None, later=()):
        """A step's mask. base: bool [Q, N] of all resident tokens; resident: logical blocks, ascending.

        `decodes`: whether the step's queries choose; None: one does. All read the blocks `later`, which drafts begin.
        """
        decodes = len(base) == 1 if decodes is None else decodes
        if not decodes or len(resident) <= self.blocks:
            self.held, self.steps = {}, 0
            return self.of_prompt(base) if self.of_prompts and not decodes else base
        self.step(resident)
        of_block = torch.arange(base.shape[1]) // self.size
        always = resident[: self.sinks] + resident[-self.recent :]

        def of_layer(layer, queries, keys):
            if layer not in self.model.full:
                return base
            chosen = self.of_layer(layer, queries, keys, resident, [None] * len(self.ranks))
            if chosen is None:
                return base
            seen = [torch.isin(of_block, torch.tensor([*always, *later, *blocks])) for blocks in chosen]
            return base & torch.stack(seen).repeat_interleave(len(self.ranks[0]), 0)[:, None]

        return of_layer

    def of_prompt(self, base):
        """The mask of a chunk of a prompt, bool [Q, N], of which `TILE` tokens read the same blocks."""
        n, first = base.shape[1], base.shape[1] - len(base)
        tiles, start = [], first
        for seam in [*range(TILE, n, TILE), n]:
            if seam > max(first, self.of_prompts * self.size):
                tiles.append((max(start, self.of_prompts * self.size), seam))
            start = max(start, seam)
        shares = {}

        def of_layer(layer, queries, keys):
            if layer not in self.model.full:
                return base
            mask = base.repeat(self.model.heads, 1, 1)
            for rank, heads in enumerate(self.ranks):
                for begin, end in tiles:
                    own = list(range(begin // self.size + 1))
                    if layer in self.leads:
                        some = queries[begin - first : end - first]
                        shares[rank, begin] = self.shares(some, keys[:end], own, heads.tolist())
                    last = len(own) - self.recent
                    count = self.of_prompts - self.sinks - (math.ceil(end / self.size) - last)
                    order = sorted(range(self.sinks, last), key=lambda block: -shares[rank, begin][block])
                    kept, other = (shares[rank, begin][order[place]].item() for place in (count - 1, count))
                    self.closest, self.chosen = min(self.closest, 1 - other / kept), self.chosen + 1
                    for block in order[count:]:
                        unread = slice(block * self.size, (block + 1) * self.size)
                        mask[heads[0] : heads[-1] + 1, begin - first : end - first, unread] = False
            return mask

        return of_layer

    def assert_answered(self, logits, prompt, output, atol):
        """Assert that log-probabilities of an answer are those of the model's logits; return the number of choices.

        logits: [n, V], after tokens of the prompt that were computed, `prompt` of them, and of the answer.
        """
        from engine import logprobs_of

        logprobs = torch.log_softmax(logits.double(), -1)
        assert self.closest > 1e-5, "rounding could choose another block: take another prompt"
        want = [logprobs[prompt - 1 + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
        np.testing.assert_allclose(logprobs_of(output), want, atol=atol)
        return self.chosen

    def step(self, resident):
        """A decode begins: choices are made anew if they are old, if a block has begun, or if some are gone."""
        if self.steps % self.every == 0 or resident != self._resident:
            self.held, self.steps = {}, 0
        self._resident = resident
        self.steps += 1

    def of_layer(self, layer, queries, keys, resident, heads_of_ranks):
        """The blocks that each rank reads in a layer; None: all of them. Query heads of None are the rank's.

        Of several queries the one counts that may pay a block the most attention.
        """
        begins = layer not in self.held
        if begins:
            self.held[layer] = None if layer in self.dense else [None] * len(heads_of_ranks)
        for rank, heads in enumerate(heads_of_ranks):
            own = self.ranks[rank].tolist() if heads is None else heads
            if layer in self.leads:
                self._moves[rank] = begins or (self.until > 0 and self.moved(layer, rank, queries[0], own))
                if self._moves[rank]:
                    self._asked[layer, rank] = queries[0]
                    self._shares[rank] = self.shares(queries, keys, resident, own)
            if layer not in self.dense and (begins or self._moves[rank]):
                self.held[layer][rank] = self.choose(layer, rank, resident)
        return self.held[layer]

    def moved(self, layer, rank, query, heads):
        """Whether a query of a layer has moved from the one that chose last: its mean cosine is below `hold`."""
        both = [(query[h].double(), self._asked[layer, rank][h].bfloat16().double()) for h in heads]
        alike = sum(float(one @ other / (one @ one).sqrt() / (other @ other).sqrt()) for one, other in both) / len(both)
        self.closest = min(self.closest, abs(alike - self.until))
        return alike < self.until

    def choose(self, layer, rank, resident):
        """The best blocks by the last shares of a rank."""
        full, shares = resident[:-1], self._shares[rank]
        last = len(resident) - self.recent
        order = sorted(range(self.sinks, last), key=lambda place: -shares[place])
        count = self.blocks - self.sinks - self.recent
        if self.fetch:
            order = self._in_bounds(layer, [full[place] for place in order], count)
            self.chosen += 1
            return sorted(order[:count])
        kept, other = shares[order[count - 1]].item(), shares[order[count]].item()
        self.closest, self.chosen = min(self.closest, 1 - other / kept), self.chosen + 1
        return sorted(full[place] for place in order[:count])

    def _in_bounds(self, layer, order, count):
        """Blocks by rank, with those over the bound of blocks that come last; the room takes in what is read."""
        room, misses, kept, over = self.rooms[layer], 0, [], []
        for block in order:
            there = block not in self.on_host or any(block == held for held, _ in room)
            misses += not there
            (over if not there and misses > self.fetch else kept).append(block)
        chosen, now = (kept + over)[:count], self.chosen + 1
        come = [block for block in chosen if block in self.on_host and all(block != held for held, _ in room)]
        for place in room:
            if place[0] in chosen:
                place[1] = now
        free = sorted((place for place in room if place[0] not in chosen), key=lambda place: place[1])
        for place, block in zip(free, come):
            place[:] = block, now
        return kept + over

    def shares(self, queries, keys, resident, heads):
        """The share of attention that some heads of a query may pay to each full block, summed up; the largest one."""
        group, many = self.model.heads // self.model.kv_heads, len(queries) >= MANY
        full, shares = resident[:-1], torch.zeros(len(queries), len(resident) - 1, dtype=torch.float64)
        for h in heads:
            bounds = []
            for block in full:
                of_block = keys[block * self.size : (block + 1) * self.size, h // group].double()
                q = queries[:, h].double() * self.scale
                if self.index == "bits":
                    bounds.append(_products_of_bits(q, of_block, self.tables).logsumexp(1))
                elif many and self.index == "signs" and self.tables:
                    bounds.append(_best_of_signs(q, of_block))
                elif self.index == "signs":
                    products = q @ _of_signs(of_block).T
                    bounds.append(products.amax(1) if many else products.logsumexp(1))
                else:
                    boxes = [torch.maximum(q * box.amax(0), q * box.amin(0)).sum(1) for box in of_block.split(32)]
                    bounds.append(torch.stack(boxes).logsumexp(0))
            if many:  # all tokens after the full blocks, up to each query
                own = (queries[:, h] * self.scale).double() @ keys[len(full) * self.size :, h // group].double().T
                hidden = torch.ones(own.shape).triu(own.shape[1] - len(own) + 1).bool()
                bounds.append(own.masked_fill(hidden, -math.inf).logsumexp(1))
            shares += torch.stack(bounds, 1).softmax(1)[:, : len(full)]
        return shares.amax(0)


def _products_of_bits(queries, keys, rounded):
    """Products of queries [Q, D] with keys [tokens, D] at two bits a number: [Q, tokens], by loops over 32 tokens."""
    products = []
    for group in keys.split(32):
        least, most = group.amin(0), group.amax(0)
        middle, step = (least + most) / 2, (most - least) / 3
        of_middle, of_step = middle.abs().max() / 127, step.max() / 255
        middle, step = (middle / of_middle).round() * of_middle, (step / of_step).ceil().clamp(max=255) * of_step
        codes = ((group - middle) / step + 1.5).round().clamp(0, 3)
        for query in queries:
            weights = query * step
            if rounded:
                weights = (weights * 127 / weights.abs().max()).round() * weights.abs().max() / 127
            products.append((codes - 1.5) @ weights + query @ middle)
    return torch.cat([torch.stack(products[i :: len(queries)]).flatten() for i in range(len(queries))]).view(
        len(queries), -1
    )


def _of_signs(keys):
    """Keys [tokens, D] as their signs stand for them, by loops."""
    centre = _centre(keys)
    return torch.stack([centre + _length(key, centre) * _signs(key, centre) for key in keys])


def _best_of_signs(queries, keys):
    """The largest product of each query [Q, D] with keys as signs: sums of four dimensions are rounded, and lengths."""
    centre = _centre(keys)
    lengths, signs = (torch.stack([of(key, centre) for key in keys]) for of in (_length, _signs))
    unit = queries.abs().sum(1, keepdim=True) / (127 - keys.shape[1] // 8)
    fours = (queries[:, None] * signs).unflatten(2, (-1, 4)).sum(3)  # [Q, tokens, D / 4]
    words = (fours / unit[..., None]).round().sum(2) * (lengths / max(lengths) * 32767 + 0.5).floor()
    best = (words / 128 + 0.5).floor().amax(1)
    return queries @ centre + best * 128 / 32767 * max(lengths) * unit[:, 0]


def _centre(keys):
    return (sum(keys) / len(keys)).bfloat16().double()


def _length(key, centre):
    return ((key - centre).abs().sum() / len(key)).bfloat16().double()


def _signs(key, centre):
    return torch.where(key >= centre, 1.0, -1.0).double()

"""Scores of KV blocks on plain tensors of one request; higher stays.

Per layer: q [T, H, D] and k, v [T, G, D], rotated; query head h reads KV head h // (H / G). `seen` [T, T] is true where
a query attends to a token: causal, and the token was resident in the query's step. Blocks are lists of token indices.
Layers and heads are summed.
"""

import math

import torch
from oracle import replay


def attention(q, k, seen):
    """Probabilities [H, T, T], float64; zero where nothing is seen."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    rows = []
    for h in range(heads):
        logits = q[:, h].double() @ k[:, h // group].double().T / math.sqrt(q.shape[2])
        rows.append(torch.softmax(logits.masked_fill(~seen, -math.inf), -1))
    return torch.stack(rows)


def h2o(layers, seen, blocks, queries):
    """Zhang et al. 2023: a token's score is the sum of the attention that it was given."""
    total = sum(attention(q, k, seen)[:, queries].sum((0, 1)) for q, k, _ in layers)
    return [total[tokens].sum().item() for tokens in blocks]


def tova(layers, seen, blocks, last):
    """Oren et al. 2024: the attention of the last query."""
    total = sum(attention(q, k, seen)[:, last].sum(0) for q, k, _ in layers)
    return [total[tokens].sum().item() for tokens in blocks]


def snapkv(layers, seen, blocks, queries, size, kernel):
    """Li et al. 2024: the observation window's attention, max-pooled along the sequence, here in blocks."""
    mass = dict(zip([tokens[0] // size for tokens in blocks], h2o(layers, seen, blocks, queries)))
    near = range(-(kernel // 2), kernel // 2 + 1)
    return [max(mass[b + d] for d in near if b + d in mass) for b in mass]


def scissorhands(layers, seen, blocks, queries):
    """Liu et al. 2023: queries of the history window to which a token mattered, that is more than 1/t; here per block."""
    counts = [0] * len(blocks)
    for q, k, _ in layers:
        p = attention(q, k, seen)
        for group in p.split(q.shape[1] // k.shape[1]):
            for i in queries:
                t = seen[i].sum().item()
                for b, tokens in enumerate(blocks):
                    fair = seen[i, tokens].sum().item() / t
                    counts[b] += bool(fair) and group[:, i, tokens].sum().item() / len(group) > fair
    return counts


def knorm(layers, blocks):
    """Devoto et al. 2024: minus the L2 norm of the key."""
    return [-sum(k[t].double().norm(dim=-1).sum().item() for _, k, _ in layers for t in b) / len(b) for b in blocks]


def pagedeviction(layers, blocks):
    """Chitty-Venkata et al. 2025: ||V|| / ||K||, averaged over the page."""
    return [
        sum((v[t].double().norm(dim=-1) / k[t].double().norm(dim=-1)).sum().item() for _, k, v in layers for t in b)
        / len(b)
        for b in blocks
    ]


def keybound(layers, size, resident, query, blocks):
    """Tang et al. 2024: the softmax over pages of the least upper bound of a query's product with a page's keys.

    blocks: the numbers of the blocks that are judged; all resident ones, the newest included, share the softmax.
    """
    pages = sorted({t // size for t in resident})
    scores = dict.fromkeys(pages, 0.0)
    for q, k, _ in layers:
        for h in range(q.shape[1]):
            products = []
            for page in pages:
                keys = torch.stack([k[t, h * k.shape[1] // q.shape[1]].double() for t in resident if t // size == page])
                bound = sum(
                    max(a * low, a * high) for a, low, high in zip(q[query, h].double(), keys.amin(0), keys.amax(0))
                )
                products.append(bound / q.shape[2] ** 0.5)
            for page, share in zip(pages, torch.stack(products).softmax(0).tolist()):
                scores[page] += share
    return [scores[block] for block in blocks]


def keydiff(layers, blocks, resident):
    """Park et al. 2025: minus the cosine similarity to the anchor, the mean of the normalised resident keys."""
    scores = [0.0] * len(blocks)
    for _, k, _ in layers:
        for g in range(k.shape[1]):
            unit = [k[t, g].double() / k[t, g].double().norm() for t in resident]
            anchor = sum(unit) / len(unit)
            for b, tokens in enumerate(blocks):
                cosines = [torch.cosine_similarity(k[t, g].double(), anchor, 0).item() for t in tokens]
                scores[b] -= sum(cosines) / len(cosines)
    return scores


def redundancy(layers, blocks, resident):
    """Cai et al. 2025: softmax over tokens of the mean similarity to the others; T = 0.5, one similar key spared."""
    shares = [
        dict(zip(resident, replay.redundancy(keys.double()))) for _, k, _ in layers for keys in k[resident].unbind(1)
    ]
    return [sum(share[t].item() for share in shares for t in tokens) for tokens in blocks]


def rkv(layers, seen, blocks, queries, resident, mix):
    """Cai et al. 2025: lambda * importance - (1 - lambda) * redundancy, as shares of the blocks at hand."""
    mass, alike = h2o(layers, seen, blocks, queries), redundancy(layers, blocks, resident)
    return [mix * m / sum(mass) - (1 - mix) * a / sum(alike) for m, a in zip(mass, alike)]


def kvzip(layers, seen, blocks, repeated):
    """Kim et al. 2025: the attention that the queries of the repetition pay; summed over them, the paper maximises."""
    return h2o(layers, seen, blocks, repeated)

"""An index of a block's keys by signs, and the attention that the block may draw by this index.

The index takes a key for its block's centre plus, in each dimension, the sign of the difference times the mean size of
the key's differences. So a token takes a bit for each dimension and one scale. Self-Indexing KVCache (arXiv:2603.14224)
has such indexes; it centres keys otherwise and quantises their magnitudes too.
"""

import torch

from .logits import block_scores
from .mass import _C_cpu

#: Tokens whose signs of one dimension are one word.
WORD = 16
#: Queries of a row from which on it is a tile (`tile_scores`), and most dimensions of one.
TILE_QUERIES, TILE_DIMS = 16, 256
#: Dimensions whose bits pick one of 16 sums of a tile's query where kernels look them up, and steps of scales up to a
#: block's largest.
NIBBLE, SCALES = 4, 32767


def key_signs(keys: torch.Tensor) -> torch.Tensor:
    """Return the signs of the keys of full blocks.

    Args:
        keys: [n, Hkv, block_size, D], a multiple of 16 tokens.

    Returns:
        int16 [n, Hkv, D + block_size + block_size / 16 * D]: the bits of the centre and of each token's scale in
        bfloat16, then for each 16 tokens and dimension a word, whose bit i is of token i.
    """
    wide = keys.float()
    centre = wide.mean(2).bfloat16()
    rest = wide - centre.float()[:, :, None]
    scales = rest.abs().mean(-1).bfloat16()
    bits = (rest >= 0).int().unflatten(2, (-1, WORD)) << torch.arange(WORD, dtype=torch.int32, device=keys.device)[
        :, None
    ]
    words = bits.sum(3, dtype=torch.int32).to(torch.int16)
    return torch.cat((centre.view(torch.int16), scales.view(torch.int16), words.flatten(2)), -1)


def store_signs(index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, isa: str | None = None) -> None:
    """Write the signs of the keys of full blocks into an index.

    Args:
        index: int16 [blocks, Hkv, X] (see `key_signs`).
        blocks: int64 [n], their places in the index.
        keys: [n, Hkv, block_size, D], a multiple of 16 tokens and of 16 dimensions.
        isa: see `mass.block_mass`.

    Raises:
        ValueError: a shape is wrong, or a block out of range.
        TypeError: a dtype is wrong.
    """
    if index.device.type != "cpu":
        from ...triton_kernels.reach_signs import store_signs as on_device

        on_device(index, blocks, keys)
    elif _C_cpu is None:
        index[blocks] = key_signs(keys)
    else:
        _C_cpu.store_signs(index, blocks, keys.float().contiguous(), isa)


def tokens_of(signs: torch.Tensor, dims: int) -> int:
    """Return the tokens of a block, from signs [n, Hkv, X] of keys of `dims` dimensions."""
    return (signs.shape[2] - dims) * WORD // (dims + WORD)


def signed_keys(signs: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the keys of `dims` dimensions that signs [n, Hkv, X] stand for: float32 [n, Hkv, tokens, D]."""
    centre, scales, bits = parts_of(signs, dims)
    return centre[:, :, None] + scales[..., None] * (bits * 2 - 1)


def parts_of(signs: torch.Tensor, dims: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parts of signs [n, Hkv, X] of keys of `dims` dimensions.

    Returns:
        The centre, float32 [n, Hkv, D], scales, float32 [n, Hkv, tokens], and bits, int32 [n, Hkv, tokens, D].
    """
    tokens = tokens_of(signs, dims)
    centre, scales, words = signs.split((dims, tokens, tokens // WORD * dims), -1)
    centre, scales = (each.contiguous().view(torch.bfloat16).float() for each in (centre, scales))
    words = (
        words.int().unflatten(2, (-1, 1, dims)) >> torch.arange(WORD, dtype=torch.int32, device=signs.device)[:, None]
    )
    return centre, scales, (words & 1).flatten(2, 3)


def sign_scores(
    query: torch.Tensor,
    signs: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention that one query may pay to each block, summed up over heads: float32 [n].

    Args:
        query: [H, D].
        signs: int16 [n, Hkv, X] of `key_signs`.
        scale, soft_cap, sinks: as for `bounds.bound_scores`.
    """
    keys = signed_keys(signs, query.shape[1])
    heads = query.float().unflatten(0, (keys.shape[1], -1)) * scale  # [Hkv, G, D]
    own = None if sinks is None else sinks.view(*heads.shape[:2], 1)
    return block_scores(torch.einsum("hgd,nhtd->hgnt", heads, keys), soft_cap, own)


def tile_scores(
    query: torch.Tensor,
    signs: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tables: bool = True,
) -> torch.Tensor:
    """Return the most attention that one of many queries may pay to each block, summed up over heads: float32 [n].

    Here a block draws what its best token may.

    Args:
        query: [T, H, D].
        signs: int16 [n, Hkv, X] of `key_signs`.
        scale, soft_cap, sinks: as for `sign_scores`, but sinks are [T, H].
        tables: whether kernels look up sums, as on CPUs (`_looked_up`), or multiply.
    """
    centre, scales, bits = parts_of(signs, query.shape[2])
    heads = query.float().unflatten(1, (signs.shape[1], -1)) * scale  # [T, Hkv, G, D]
    if tables:
        best = _looked_up(heads, scales, bits)
    else:
        best = torch.einsum("qhgd,nhtd->qhgnt", heads, scales[..., None] * (bits * 2 - 1)).amax(-1)
    logits = best + torch.einsum("qhgd,nhd->qhgn", heads, centre)
    own = None if sinks is None else sinks.view(*heads.shape[:3], 1)
    return block_scores(logits[..., None], soft_cap, own).amax(0)


def _looked_up(heads: torch.Tensor, scales: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return the largest product of each query with a block's signs times their scales: float32 [T, Hkv, G, n].

    Signs of four dimensions pick one of 16 sums of a query's numbers, as fast scans of quantised vectors do (André et
    al., VLDB 2015). Sums are rounded, so that those of all dimensions are a byte, and with a scale a word of 16 bits.

    Args:
        heads: float32 [T, Hkv, G, D], scaled queries.
        scales, bits: of `parts_of`.
    """
    unit = heads.abs().sum(-1, keepdim=True) / (127 - heads.shape[3] // 8)
    places, powers = (torch.arange(count, device=heads.device) for count in (1 << NIBBLE, NIBBLE))
    either = (places[:, None] >> powers & 1).float() * 2 - 1  # [16, 4]
    sums = (heads.unflatten(-1, (-1, NIBBLE)) @ either.T / unit[..., None]).nan_to_num().round().flatten(-2)
    picked = (bits.unflatten(-1, (-1, NIBBLE)) << powers).sum(-1)
    picks = (picked[..., None] == places).float().flatten(-2)  # [n, Hkv, tokens, D / 4 * 16]
    largest = scales.amax(-1, keepdim=True)
    steps = (scales * (SCALES / largest) + 0.5).nan_to_num().floor()
    words = (torch.einsum("qhgs,nhts->qhgnt", sums, picks) * steps.transpose(0, 1)[:, None] / 128 + 0.5).floor()
    return words.amax(-1) * unit * (largest[..., 0].T[:, None] * (128 / SCALES))

"""Keys at two bits a number: each channel of a group of tokens has a middle and a step, and a number has a code.

A number is taken for its channel's middle + step * (code - 1.5). Keys of trained models have channels of unlike size,
which hardly change from token to token, so KIVI (Liu et al., ICML 2024, arXiv:2402.02750) packs them by channel.

Bytes of a head of a block are those of its groups, one after the other: of 32 tokens each, and of 16 if as many are
left. Those of a group of G tokens and D channels:

- `G / 16 * D / 16` lines of 64 bytes. Line `t / 16 * D / 16 + d / 16` has the code of token t and channel d in byte
  `t % 16 * 4 + d % 4`, in its bits `d % 16 / 4 * 2` and above. So each of 16 words of a line has a token's codes of 16
  channels, and shifts by 0, 2, 4 and 6 bits bring up those of four channels each, a byte for each channel.
- D middles, int8, and D steps, uint8.
- What one of the middles, and one of the steps, is a multiple of: two float32. They are NaN, and all else is 0, if the
  group has a number that is not finite, or whose difference from another one is not.
"""

import torch

from .mass import _C_cpu

#: Tokens that share middles and steps; those whose codes of a channel are one line; channels of a line.
GROUP, LINE, CHANNELS = 32, 16, 16
#: The largest middle and the largest step, in multiples of what they are multiples of; codes of a number.
MIDDLES, STEPS, CODES = 127, 255, 4


def packed_bytes(tokens: int, dims: int) -> int:
    """Return the bytes of a head of a block: of a multiple of 16 tokens, and of 16 dimensions."""
    return sum(group * dims // 4 + 2 * dims + 8 for group in _groups(tokens))


def packed_tokens(size: int, dims: int) -> int:
    """Return the tokens of a block whose heads take `size` bytes."""
    return size // packed_bytes(GROUP, dims) * GROUP + (LINE if size % packed_bytes(GROUP, dims) else 0)


def _groups(tokens: int) -> list[int]:
    """Return the tokens of each group of a block."""
    return [GROUP] * (tokens // GROUP) + [tokens % GROUP] * (tokens % GROUP > 0)


def pack_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return the keys of full blocks at two bits a number.

    Args:
        keys: [n, Hkv, block_size, D], a multiple of 16 tokens and of 16 dimensions.

    Returns:
        uint8 [n, Hkv, X], of `packed_bytes`.
    """
    return torch.cat([_pack(group) for group in keys.float().split(_groups(keys.shape[2]), 2)], -1)


def _pack(keys: torch.Tensor) -> torch.Tensor:
    """Return one group: float32 [n, Hkv, G, D] to uint8 [n, Hkv, X]."""
    least, most = keys.amin(2), keys.amax(2)
    middle, step = least * 0.5 + most * 0.5, (most - least) / (CODES - 1)
    units = torch.stack((middle.abs().amax(-1) / MIDDLES, step.amax(-1) / STEPS), -1)  # [n, Hkv, 2]
    finite = units.isfinite().all(-1, keepdim=True)
    units = units.where(finite, torch.nan)
    middles = (middle / units[..., :1]).nan_to_num(0).round()
    steps = (step / units[..., 1:]).nan_to_num(0).ceil().clamp(max=STEPS)
    own = (keys - (middles * units[..., :1])[:, :, None]) / (steps * units[..., 1:])[:, :, None] + (CODES - 1) / 2
    codes = own.nan_to_num(0).round().clamp(0, CODES - 1).to(torch.uint8)
    # [n, Hkv, lines of tokens, LINE, lines of channels, 4 shifts, 4 bytes]
    codes = codes.unflatten(3, (-1, CHANNELS // 4, 4)).unflatten(2, (-1, LINE))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=keys.device)[:, None]
    lines = (codes << shifts).sum(5, dtype=torch.uint8).transpose(3, 4)
    numbers = (middles.to(torch.int8).view(torch.uint8), steps.to(torch.uint8), units.contiguous().view(torch.uint8))
    return torch.cat((lines.flatten(2), *numbers), -1)


def parts_of(packed: torch.Tensor, dims: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parts of packed keys, of blocks of whole groups of G tokens.

    Args:
        packed: uint8 [n, Hkv, X], of keys of `dims` dimensions.

    Returns:
        Middles and steps, float32 [n, Hkv, groups, D], and codes, uint8 [n, Hkv, groups, G, D].
    """
    tokens = _groups(packed_tokens(packed.shape[-1], dims))[0]
    groups = packed.unflatten(-1, (-1, packed_bytes(tokens, dims)))
    lines, middles, steps, units = groups.split((tokens * dims // 4, dims, dims, 8), -1)
    units = units.contiguous().view(torch.float32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    lines = lines.unflatten(-1, (tokens // LINE, dims // CHANNELS, LINE, 1, 4)).transpose(-4, -3)
    codes = (lines >> shifts & CODES - 1).flatten(-3).flatten(-3, -2)
    return middles.view(torch.int8) * units[..., :1], steps * units[..., 1:], codes


def unpack_keys(packed: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the keys of `dims` dimensions that uint8 [n, Hkv, X] stand for: float32 [n, Hkv, tokens, D].

    Those of a group with a number that was not finite are NaN.
    """
    whole = packed_tokens(packed.shape[-1], dims) // GROUP * packed_bytes(GROUP, dims)
    keys = []
    for some in packed.split((whole, packed.shape[-1] - whole), -1):
        if some.shape[-1]:
            middles, steps, codes = parts_of(some, dims)
            keys.append((middles[..., None, :] + steps[..., None, :] * (codes - (CODES - 1) / 2)).flatten(2, 3))
    return torch.cat(keys, 2)


def store_codes(index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, isa: str | None = None) -> None:
    """Write the packed keys of full blocks into an index.

    Args:
        index: uint8 [blocks, Hkv, X] (see `pack_keys`).
        blocks: int64 [n], their places in the index.
        keys: [n, Hkv, block_size, D], a multiple of 16 tokens and of 16 dimensions.
        isa: see `mass.block_mass`.

    Raises:
        ValueError: a shape is wrong, or a block out of range.
        TypeError: a dtype is wrong.
    """
    if index.device.type != "cpu":
        from ...triton_kernels.reach_bits import store_codes as on_device

        on_device(index, blocks, keys)
    elif _C_cpu is None:
        index[blocks] = pack_keys(keys)
    else:
        _C_cpu.store_codes(index, blocks, keys.float().contiguous(), isa)

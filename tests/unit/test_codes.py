"""Keys at two bits a number: their bytes, what they stand for, and the scores of blocks by them."""

import pytest
import torch

from vllm_evict.compute.kernels.bits import bit_scores
from vllm_evict.compute.kernels.codes import pack_keys, packed_bytes, packed_tokens, unpack_keys

SIZES = [(16, 32), (32, 64), (48, 16), (128, 256), (80, 576)]


def keys_of(tokens, dims, blocks=4, heads=2):
    """Channels of unlike size and middle, one of them constant and one of zeros."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.rand(dims, generator=generator) ** 4 * 20
    channels[3] = 0
    keys = torch.randn(blocks, heads, tokens, dims, generator=generator) * channels + 3 * channels.roll(7)
    keys[..., 5] = 0
    return keys


@pytest.mark.parametrize("tokens, dims", SIZES)
def test_numbers_are_within_half_a_step_of_what_stands_for_them(tokens, dims):
    """Beside what the rounding of a middle moves them, half of a 127th of the largest one."""
    keys = keys_of(tokens, dims)
    packed = pack_keys(keys)
    assert packed.dtype == torch.uint8 and packed.shape == (4, 2, packed_bytes(tokens, dims))
    assert packed_tokens(packed.shape[2], dims) == tokens
    assert packed.nbytes <= 0.1 * 2 * keys.bfloat16().nbytes
    for its, group in zip(unpack_keys(packed, dims).split(32, 2), keys.split(32, 2)):
        least, most = group.amin(2, keepdim=True), group.amax(2, keepdim=True)
        step, middle = (most - least) / 3, ((most + least) / 2).abs()
        allowed = step / 2 + step.amax(3, keepdim=True) / 255 / 2 * 3 + middle.amax(3, keepdim=True) / 127 / 2
        assert ((its - group).abs() <= allowed * 1.0001).all()


def test_a_groups_bytes_are_where_the_layout_says():
    dims = 32
    packed = pack_keys(keys_of(48, dims))[2, 1]
    keys = unpack_keys(pack_keys(keys_of(48, dims)), dims)[2, 1]
    for first, tokens, at in ((0, 32, 0), (32, 16, packed_bytes(32, dims))):
        group = packed[at : at + packed_bytes(tokens, dims)]
        middles = group[tokens * dims // 4 :][:dims].view(torch.int8)
        steps = group[tokens * dims // 4 + dims :][:dims]
        of_middle, of_step = group[-8:].clone().view(torch.float32)
        for token in range(tokens):
            for dim in range(dims):
                line = token // 16 * (dims // 16) + dim // 16
                byte = int(group[64 * line + token % 16 * 4 + dim % 4])
                code = byte >> dim % 16 // 4 * 2 & 3
                want = middles[dim] * of_middle + steps[dim] * of_step * (code - 1.5)
                torch.testing.assert_close(keys[first + token, dim], want)


@pytest.mark.parametrize("soft_cap, sinks", [(0.0, None), (5.0, torch.tensor([0.5, -1.0, 2.0, 0.0]))])
@pytest.mark.parametrize("tokens, dims", SIZES)
def test_scores_are_attention_to_the_keys_that_codes_stand_for(tokens, dims, soft_cap, sinks):
    """One head at a time; weights that kernels round move the scores by little."""
    packed = pack_keys(keys_of(tokens, dims))
    query, keys = torch.randn(4, dims, generator=torch.Generator().manual_seed(1)), unpack_keys(packed, dims)
    want = torch.zeros(4)
    for head in range(4):
        logits = (keys[:, head // 2] @ query[head] * dims**-0.5).flatten()
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        own = torch.tensor([] if sinks is None else [sinks[head]])
        want += torch.cat((logits, own)).softmax(0)[: len(logits)].view(4, tokens).sum(1)
    torch.testing.assert_close(bit_scores(query, packed, dims**-0.5, soft_cap, sinks, rounded=False), want)
    torch.testing.assert_close(bit_scores(query, packed, dims**-0.5, soft_cap, sinks), want, atol=0.05, rtol=0.1)

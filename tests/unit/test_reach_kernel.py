"""The kernel that chooses, fetches and names blocks for a layer, against plain torch."""

from dataclasses import fields, replace

import pytest
import torch
from test_mass import each_isa

from vllm_evict.compute.kernels.bounds import key_bounds, key_boxes
from vllm_evict.compute.kernels.codes import pack_keys, store_codes, unpack_keys
from vllm_evict.compute.kernels.logits import UNKNOWN
from vllm_evict.compute.kernels.reach import (
    ReachRows,
    ReachState,
    copy_blocks,
    copy_reference,
    reach,
    reach_reference,
)
from vllm_evict.compute.kernels.signs import key_signs, sign_scores, signed_keys, store_signs

ROWS, WIDTH, ROOM, SLOTS, HEADS, KV_HEADS, DIM, POOL, HOST = 5, 40, 9, 8, 8, 2, 48, 300, 60


def tensors(record):
    """The tensors of a record."""
    return [value for each in fields(record) if isinstance(value := getattr(record, each.name), torch.Tensor)]


def changed(record, change):
    """The record with each tensor changed."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return replace(record, **{key: change(its) for key, its in values.items() if isinstance(its, torch.Tensor)})


def made(dtype, of_keys=key_bounds, **options):
    """Rows with blocks on the host, in the pool alone, and rooms of several sizes; the state of a layer, with `options`;
    its cache, its pages on the host, and its table."""
    generator = torch.Generator().manual_seed(0)

    def whole(least, below, *shape):
        return torch.randint(least, below, shape, generator=generator, dtype=torch.int32)

    full = whole(30, WIDTH, ROWS)
    numbers = torch.stack([torch.randperm(HOST, generator=generator)[:WIDTH] for _ in range(SLOTS)]).int()
    numbers[:, ::7] = -1
    # Each block of the pool once, as rooms are written.
    written = torch.randperm(POOL + 1, generator=generator)[: ROWS * (WIDTH + 1)].view(ROWS, WIDTH + 1).int()
    rooms = torch.tensor([9, 6, 9, 8, 7], dtype=torch.int32)
    slots, out_rows = (torch.randperm(n, generator=generator)[:ROWS].int() for n in (SLOTS, ROWS))
    # One query, or some of drafts too, which may begin blocks.
    counts = torch.tensor([1, 3, 1, 2, 1], dtype=torch.int32)
    blocks = torch.minimum(full + counts, torch.tensor(WIDTH)).int()
    known = (
        whole(0, 5, ROWS),
        counts,
        full,
        blocks,
        whole(0, 3, ROWS),
        full - whole(0, 3, ROWS),
        whole(3, 7, ROWS),
        rooms,
    )
    rows = ReachRows(*known, slots, out_rows, torch.ones(ROWS, dtype=torch.int32), written, POOL + 1, most=3)
    keys = torch.randn(POOL + 1 + HOST, KV_HEADS, 32, DIM, generator=generator).to(dtype)
    held, read, picked = (torch.full((SLOTS, ROOM), -1, dtype=torch.int32) for _ in range(3))
    cache, host = (torch.randn(n, KV_HEADS, 16, 2 * DIM, generator=generator).to(dtype) for n in (POOL + 1, HOST))
    table = torch.zeros(SLOTS, WIDTH, dtype=torch.int32)
    scores, counts = torch.zeros(SLOTS, WIDTH), torch.zeros(SLOTS, 3, dtype=torch.int32)
    options = {"scale": 0.125, **options}
    state = ReachState(of_keys(keys), numbers, held, read, picked, scores, counts, **options)
    return rows, state, cache, host, table


def several_boxes(keys):
    """The boxes of blocks of 96 tokens, three of each."""
    return key_boxes(torch.cat((keys, keys.roll(1, 0), keys.roll(2, 0) + 0.5), 2))


@each_isa
@pytest.mark.parametrize("soft_cap, sinks", [(0.0, None), (5.0, torch.linspace(-1, 2, HEADS))])
@pytest.mark.parametrize("of_keys", [pack_keys, key_signs, key_bounds, several_boxes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_does_what_plain_torch_does(isa, dtype, of_keys, soft_cap, sinks):
    """Several steps: rooms keep what is read again, and the rest is written over what was read longest ago.

    In odd steps two rows read what they chose before. From the third step on two blocks may come, and in the last two
    steps rows choose by scores that they have.
    """
    rows, state, cache, host, table = made(dtype, of_keys, soft_cap=soft_cap)
    other = changed(state, torch.clone), cache.clone(), table.clone()
    generator, counts = torch.Generator().manual_seed(1), state.counts
    for step in range(6):
        query = torch.randn(7, HEADS, DIM, generator=generator).to(dtype)
        rows.chooses[1:3] = step % 2 == 0
        for how, (its, pages, out) in zip((reach, reach_reference), ((state, cache, table), other)):
            out.zero_()
            if step == 2:
                its.counts.zero_()
            args = rows, replace(its, fetch=2 * (step > 1)), query, pages, host, out, sinks, step, step < 4
            how(*args, isa) if how is reach else how(*args)
        assert step < 2 or counts[:, 0].max() <= 2 * (step - 1)
        # A weight of codes at the seam of two steps may be rounded either way.
        close = {"atol": 1e-3, "rtol": 2e-3} if of_keys is pack_keys else {}
        torch.testing.assert_close(state.scores, other[0].scores, **close)
        other[0].scores.copy_(state.scores)
        assert all(
            torch.equal(*both) for both in zip((*tensors(state), cache, table), (*tensors(other[0]), *other[1:]))
        )
    assert counts[:, 1].sum() > 20 and counts[:, 2].any()


@each_isa
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", ["none", "heads", "queries"])
@pytest.mark.parametrize("size, dim", [(32, 48), (16, 256)])
def test_tiles_score_what_plain_torch_scores(isa, soft_cap, sinks, size, dim):
    """Rows of many queries, of more and less than vectors hold, and one of few beside them."""
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([64, 16, 3, 33, 50], dtype=torch.int32)
    rows, state, cache, host, table = made(torch.float32, scale=dim**-0.5, soft_cap=soft_cap)
    starts = (counts.cumsum(0) - counts).int()
    rows = replace(rows, queries=starts, query_counts=counts, blocks=rows.full + 1, most=64)
    index = key_signs(torch.randn(POOL + 1 + HOST, KV_HEADS, size, dim, generator=generator))
    state = replace(state, index=index)
    query = torch.randn(int(counts.sum()), HEADS, dim, generator=generator)
    query[7] = 0
    of_queries = torch.randn(len(query), HEADS, generator=generator)
    own = {"none": None, "heads": of_queries[0], "queries": of_queries}[sinks]
    other = changed(state, torch.clone)
    reach_reference(rows, other, query, cache.clone(), host, table.clone(), own)
    reach(rows, state, query, cache, host, table, own, isa=isa)
    # Numbers at the seam of two steps may be rounded either way.
    torch.testing.assert_close(state.scores, other.scores, atol=1e-4, rtol=2e-3)
    assert (state.scores != 0).any(1).sum() == ROWS


@each_isa
@pytest.mark.parametrize(
    "field, value",
    [
        ("full", WIDTH + 1),
        ("chosen", ROOM + 1),
        ("rooms", ROOM + 1),
        ("written", POOL + 1),
        ("queries", 7),
        ("query_counts", 0),
        ("blocks", WIDTH + 2),
        ("chooses", 0),
        ("slots", SLOTS),
        ("out_rows", -1),
    ],
)
def test_rows_out_of_range_are_refused_before_anything_is_written(isa, field, value):
    rows, state, cache, host, table = made(torch.float32)
    there = *tensors(state), cache, table
    before = [each.clone() for each in there]
    getattr(rows, field)[1] = value
    with pytest.raises(ValueError):
        reach(rows, state, torch.randn(7, HEADS, DIM), cache, host, table, isa=isa)
    assert all(torch.equal(one, other) for one, other in zip(there, before))


@pytest.mark.parametrize("dims", [32, 40])
def test_signs_keep_the_direction_of_each_key_from_its_centre(dims):
    keys = torch.randn(3, 2, 48, dims, generator=torch.Generator().manual_seed(0))
    taken, centre = signed_keys(key_signs(keys), dims), keys.mean(2, keepdim=True).bfloat16().float()
    rest = keys - centre
    want = centre + rest.sign() * rest.abs().mean(-1, keepdim=True).bfloat16().float()
    torch.testing.assert_close(taken, want, atol=1e-5, rtol=1e-5)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, dims", [(16, 16), (32, 48), (48, 256)])
def test_signs_are_stored_as_plain_torch_has_them(isa, dtype, size, dims):
    """Centres whose sums are rounded the other way are next to each other; NaN stays NaN."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(7, size, 2, dims, generator=generator).to(dtype).transpose(1, 2)
    keys[3, 1, 5, 2] = float("nan")
    want, places = key_signs(keys), torch.tensor([9, 0, 3, 11, 1, 2, 8])
    index = torch.zeros(12, *want.shape[1:], dtype=torch.int16)
    store_signs(index, places, keys, isa)
    assert (index[places] != want)[[0, 1, 2, 4, 5, 6]].float().mean() < 1e-3
    torch.testing.assert_close(
        signed_keys(index[places], dims), signed_keys(want, dims), atol=0.02, rtol=0.02, equal_nan=True
    )
    assert not index[[4, 5, 6, 7, 10]].any()
    for given in (places + 1, places.int(), places[:6]):
        with pytest.raises((ValueError, TypeError)):
            store_signs(index, given, keys, isa)


@each_isa
@pytest.mark.parametrize("size, dims", [(16, 16), (32, 48), (48, 256), (80, 576)])
def test_codes_are_stored_as_plain_torch_has_them(isa, size, dims):
    """Middles, steps and codes at the seam of two may be rounded either way."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(7, 2, size, dims, generator=generator) * torch.rand(dims, generator=generator) * 9 + 2
    keys[1, 0, :, 3] = 0
    keys[2, 1] = 0
    keys[3, 1, 5, 2], keys[6, 0, 1, 0] = float("nan"), -float("inf")
    want, places = pack_keys(keys), torch.tensor([9, 0, 3, 11, 1, 2, 8])
    index = torch.zeros(12, *want.shape[1:], dtype=torch.uint8)
    store_codes(index, places, keys, isa)
    assert (index[places] != want).float().mean() < 1e-3
    torch.testing.assert_close(unpack_keys(index[places], dims).isnan(), unpack_keys(want, dims).isnan())
    assert not index[[4, 5, 6, 7, 10]].any()
    for given in (places + 1, places.int(), places[:6]):
        with pytest.raises((ValueError, TypeError)):
            store_codes(index, given, keys, isa)


@each_isa
@pytest.mark.parametrize("soft_cap, sinks", [(0.0, None), (5.0, torch.linspace(-1, 2, HEADS))])
@pytest.mark.parametrize("of_keys", [pack_keys, key_signs, key_bounds])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_a_block_with_numbers_that_are_not_finite_comes_last(isa, of_keys, soft_cap, sinks, queries):
    """The scores of other blocks are those without it, by few queries, and by so many that they are a tile. One number
    of one KV head is enough."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(6, KV_HEADS, 32, DIM, generator=generator)
    one_head = keys.clone()
    one_head[5, 1, 31, 0] = float("inf")
    for block, odd in ((1, "nan"), (3, "inf"), (4, "-inf")):
        keys[block, :, 5 * block, 7] = float(odd)
    query = torch.randn(queries, HEADS, DIM, generator=generator)

    def scored(how, blocks, keys=keys):
        full, each = len(blocks), lambda value: torch.tensor([value], dtype=torch.int32)
        written = torch.tensor([[*blocks, 0]], dtype=torch.int32)
        known = map(each, (0, queries, full, full + 1, 0, full, 2, 2, 0, 0, 1))
        rows = ReachRows(*known, written, len(keys), most=queries)
        held, read, picked = (torch.full((1, 2), -1, dtype=torch.int32) for _ in range(3))
        scores, counts = torch.zeros(1, full), torch.zeros(1, 3, dtype=torch.int32)
        cache, table = torch.zeros(len(keys), 1, 2), torch.zeros(1, full + 1, dtype=torch.int32)
        numbers = torch.full((1, full), -1, dtype=torch.int32)
        state = ReachState(of_keys(keys), numbers, held, read, picked, scores, counts, 0.2, soft_cap)
        args = rows, state, query, cache, cache[:0], table, sinks
        how(*args, isa=isa) if how is reach else how(*args)
        return scores[0], picked[0].tolist()

    without, _ = scored(reach, [0, 2, 5])
    for how in (reach, reach_reference):
        scores, picked = scored(how, range(6))
        assert (scores[[1, 3, 4]] == UNKNOWN).all() and set(picked) <= {0, 2, 5}
        torch.testing.assert_close(scores[[0, 2, 5]], without, atol=1e-3, rtol=5e-3)
        assert (scored(how, range(6), one_head)[0] == UNKNOWN).tolist() == [False] * 5 + [True]


@each_isa
@pytest.mark.parametrize("of_keys", [pack_keys, key_signs, key_bounds])
def test_threads_share_out_one_row(isa, of_keys):
    """Its scores and choices are those of one thread, with a bound of what comes, too."""
    generator, full, threads = torch.Generator().manual_seed(0), 1500, torch.get_num_threads()
    keys = torch.randn(64, KV_HEADS, 32, DIM, generator=generator)
    index, each = of_keys(keys).repeat(2 * full // 64 + 1, 1, 1), lambda *values: torch.tensor(values).int()
    written = torch.randperm(full + 1, generator=generator).int()[None]
    known = map(each, (0, 2, full, full + 1, 1, full - 1, 90, 90, 0, 0, 1))
    rows = ReachRows(*known, written, full + 1, most=2)
    numbers = torch.randperm(full, generator=generator).int()[None]
    numbers[:, ::3] = -1
    cache, host = torch.zeros(full + 1, 1, 2), torch.zeros(full, 1, 2)
    query, found = torch.randn(2, HEADS, DIM, generator=generator), []
    held = torch.randperm(full, generator=generator)[:90].int()[None]
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for fetch in (0, 5, 80):
                scores, counts = torch.zeros(1, full), torch.zeros(1, 3, dtype=torch.int32)
                read, picked = (torch.full((1, 90), -1, dtype=torch.int32) for _ in range(2))
                table, its = torch.zeros(1, full + 1, dtype=torch.int32), held.clone()
                state = ReachState(index, numbers, its, read, picked, scores, counts, 0.2, fetch=fetch)
                want = changed(state, torch.clone)
                reach(rows, state, query, cache, host, table, step=1, isa=isa)
                found.append((scores, its, picked, counts, table))
                want.scores.copy_(scores)
                reach_reference(rows, want, query, cache, host, table.clone(), step=1, leads=False)
                assert all(torch.equal(*both) for both in zip(tensors(want), tensors(state)))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(found[:3], found[3:]):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_blocks_are_copied_between_pages_with_holes_between_them():
    target, source = torch.zeros(9, 2, 3, 5)[::2], torch.arange(8 * 30.0).view(8, 2, 3, 5)
    to, of = torch.tensor([4, -1, 0], dtype=torch.int32), torch.tensor([7, 100, 2], dtype=torch.int32)
    copy_blocks(target, source, to, of)
    want = torch.zeros_like(target)
    copy_reference(want, source, to, of)
    assert torch.equal(target, want) and torch.equal(target[4], source[7])
    for there, here in ((5, 0), (0, 8), (0, -1)):
        with pytest.raises(ValueError, match="blocks of target and source"):
            copy_blocks(target, source, torch.tensor([there]).int(), torch.tensor([here]).int())
    assert torch.equal(target, want)


def test_scores_are_attention_to_the_keys_that_signs_stand_for():
    """One head and block at a time."""
    generator = torch.Generator().manual_seed(0)
    signs, query = key_signs(torch.randn(5, 2, 16, 32, generator=generator)), torch.randn(4, 32, generator=generator)
    keys, want = signed_keys(signs, 32), torch.zeros(5)
    for head in range(4):
        shares = (keys[:, head // 2] @ query[head] * 0.2).flatten().softmax(0)
        want += shares.view(5, 16).sum(1)
    torch.testing.assert_close(sign_scores(query, signs, 0.2), want)

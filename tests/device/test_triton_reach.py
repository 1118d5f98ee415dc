"""The kernels that choose, fetch and name blocks for a layer on a device, against plain torch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_reach_kernel import DIM, HEADS, HOST, KV_HEADS, POOL, changed, made, several_boxes, tensors
from triton_batch import DEVICE, WHERE_KERNELS_RUN, interpreter_gaps  # noqa: F401  (a fixture)

from vllm_evict.compute.kernels.bounds import key_bounds
from vllm_evict.compute.kernels.codes import pack_keys
from vllm_evict.compute.kernels.logits import UNKNOWN
from vllm_evict.compute.kernels.moved import moved_reference
from vllm_evict.compute.kernels.reach import OF_ROWS, reach_reference
from vllm_evict.compute.kernels.signs import key_signs, parts_of

pytestmark = WHERE_KERNELS_RUN
SINKS = torch.linspace(-1, 2, HEADS)
CASES = [
    (torch.float32, key_signs, 0.0, None),
    (torch.bfloat16, key_signs, 5.0, SINKS),
    (torch.bfloat16, key_bounds, 5.0, None),
    (torch.float16, several_boxes, 0.0, SINKS),
    (torch.float32, pack_keys, 0.0, SINKS),
    (torch.float16, pack_keys, 5.0, None),
]

#: Index, tokens of a block, dimensions, sinks, soft cap.
TILES = [
    (key_signs, 32, 48, torch.float32, "queries", 0.0),
    (key_signs, 16, 128, torch.bfloat16, "heads", 5.0),
    (key_signs, 16, 256, torch.float16, "none", 0.0),
    (key_bounds, 32, 48, torch.bfloat16, "queries", 5.0),
    (pack_keys, 48, 48, torch.bfloat16, "queries", 5.0),
]


def moved_to(record):
    """A copy of a record on the device."""
    return changed(record, lambda tensor: tensor.to(DEVICE, copy=True))


def on_device(rows, state, cache, host, table):
    """All of it on the device, but for the host's pages, which are pinned there."""
    host = host if DEVICE == "cpu" else host.pin_memory()
    return moved_to(rows), moved_to(state), cache.to(DEVICE, copy=True), host, table.to(DEVICE, copy=True)


@pytest.mark.parametrize("dtype, of_keys, soft_cap, sinks", CASES)
def test_the_kernels_do_what_plain_torch_does(dtype, of_keys, soft_cap, sinks, monkeypatch):
    """Several steps as in test_reach_kernel.py; a row of padding is left alone, and launches take some rows at a time."""
    from vllm_evict.triton_kernels import reach as module

    monkeypatch.setattr(module, "SCRATCH", 4 * HEADS * 40 * 4)
    rows, *here = made(dtype, of_keys, soft_cap=soft_cap)
    padding = dict.fromkeys(OF_ROWS, 0) | {"query_counts": 1, "slots": -1, "chooses": 1}
    padded = {name: torch.cat((getattr(rows, name), torch.tensor([padding[name]]).int())) for name in OF_ROWS}
    there = on_device(replace(rows, **padded), *here)
    (state, cache, _, table), (_, own, *pages) = here, there
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        query = torch.randn(7, HEADS, DIM, generator=generator).to(dtype)
        subjects = (partial(reach_reference, tables=False), (rows, *here)), (module.reach, there)
        for run, (which, its, *of_layer) in subjects:
            which.chooses[1:3] = step % 2 == 0
            if step == 6:  # no row chooses
                which.chooses.zero_()
                which = replace(which, most=0)
            of_layer[2].zero_()
            args = which, replace(its, fetch=2 * (step > 1)), query.to(its.index.device), *of_layer
            run(*args, None if sinks is None else sinks.to(its.index.device), step, step < 4)
        torch.testing.assert_close(own.scores.cpu(), state.scores)
        own.scores.copy_(state.scores)
        want, got = (*tensors(state), cache, table), (*tensors(own), pages[0], pages[2])
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, want))


@pytest.mark.parametrize("of_keys, size, dim, dtype, sinks, soft_cap", TILES)
def test_tiles_score_what_plain_torch_scores(of_keys, size, dim, dtype, sinks, soft_cap, monkeypatch):
    """Rows of many queries, three at a time, and of few after them."""
    from vllm_evict.triton_kernels import reach as module

    monkeypatch.setattr(module, "SCRATCH", 4 * HEADS * 40 * 33 * 3)
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([32, 5, 16, 33, 2], dtype=torch.int32)
    rows, state, *of_layer = made(dtype, scale=dim**-0.5, soft_cap=soft_cap)
    starts = (counts.cumsum(0) - counts).int()
    rows = replace(rows, queries=starts, query_counts=counts, blocks=rows.full + 1, most=33, many=4, few=2)
    index = of_keys(torch.randn(POOL + 1 + HOST, KV_HEADS, size, dim, generator=generator).to(dtype))
    query = torch.randn(int(counts.sum()), HEADS + 1, dim, generator=generator).to(dtype)[:, 1:]
    query[7] = 0
    of_queries = torch.randn(len(query), HEADS, generator=generator)
    own = {"none": None, "heads": of_queries[0], "queries": of_queries}[sinks]
    here = rows, replace(state, index=index), *of_layer
    there = on_device(*here)
    for run, (which, its, *pages) in ((partial(reach_reference, tables=False), here), (module.reach, there)):
        of_queries = None if own is None else own.to(its.index.device)
        run(which, its, query.to(its.index.device), *pages, of_queries)
    # What a step and a code come to is rounded to bfloat16.
    close = {"rtol": 2e-2, "atol": 1e-5} if of_keys is pack_keys else {}
    torch.testing.assert_close(there[1].scores.cpu(), state.scores, **close)
    assert (state.scores != 0).any(1).sum() == len(counts)


@pytest.mark.parametrize(
    "dtype, tokens, dims", [(torch.bfloat16, 16, 128), (torch.float32, 48, 40), (torch.float16, 32, 576)]
)
def test_signs_are_stored_where_their_blocks_are(dtype, tokens, dims):
    """Sums may be rounded otherwise, and then a key near its block's centre has another sign."""
    from vllm_evict.triton_kernels.reach_signs import store_signs

    keys = torch.randn(5, tokens, 3, dims, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(1, 2)
    want, blocks = key_signs(keys), torch.tensor([7, 0, 3, 8, 2])
    index = torch.full((9, *want.shape[1:]), 5, dtype=torch.int16, device=DEVICE)
    store_signs(index, blocks.to(DEVICE), keys.to(DEVICE))
    index = index.cpu()
    assert (index[[1, 4, 5, 6]] == 5).all()
    got, want = (parts_of(each, dims) for each in (index[blocks], want))
    assert all((one != other).sum() <= 1 + one.numel() // 1000 for one, other in zip(got, want))


@pytest.mark.parametrize("tokens, dims", [(16, 128), (48, 48), (32, 576)])
def test_codes_are_stored_to_the_bit(tokens, dims):
    """One block has keys that are not finite, one a dimension that is the same in all keys."""
    from vllm_evict.triton_kernels.reach_bits import store_codes

    keys = torch.randn(5, tokens, 2, dims, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    keys[1, 0, 3, 5], keys[1, 1, 9, 7], keys[2, :, :, 4], keys[3] = torch.nan, torch.inf, 1.5, 0
    want, blocks = pack_keys(keys), torch.tensor([7, 0, 3, 8, 2])
    index = torch.full((9, *want.shape[1:]), 5, dtype=torch.uint8, device=DEVICE)
    store_codes(index, blocks.to(DEVICE), keys.to(DEVICE))
    index = index.cpu()
    assert (index[[1, 4, 5, 6]] == 5).all() and torch.equal(index[blocks], want)


@pytest.mark.parametrize("dtype, dims", [(torch.float32, 48), (torch.bfloat16, 128)])
def test_rows_whose_queries_have_moved_choose(dtype, dims):
    from vllm_evict.triton_kernels.moved import moved

    generator, (rows, *_) = torch.Generator().manual_seed(0), made(dtype)
    slots = torch.tensor([2, -1, 0, 9, 1], dtype=torch.int32)
    rows = replace(rows, slots=slots, chooses=torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32))
    asked = torch.randn(4, HEADS, dims, generator=generator).bfloat16()
    query = torch.randn(7, HEADS + 1, dims, generator=generator).to(dtype)[:, 1:]
    query[int(rows.queries[4])] = asked[1].to(dtype)
    there = moved_to(rows), query.to(DEVICE), asked.to(DEVICE, copy=True)
    want = moved_reference(rows, query, asked, 0.8)
    assert want.tolist() == [1, 0, 1, 1, 0] and torch.equal(moved(*there, 0.8).cpu(), want)
    assert torch.equal(there[2].cpu(), asked)


@pytest.mark.parametrize("of_keys", [key_signs, key_bounds, pack_keys])
def test_a_block_with_a_key_that_is_not_finite_takes_nothing_from_others(of_keys):
    from vllm_evict.triton_kernels.reach import reach

    known = rows, state, *_ = made(torch.float32, of_keys)
    odd = torch.randn(2, KV_HEADS, 32, DIM)
    odd[0, 1, 3, 5], odd[1, 0, 9, 7] = torch.nan, torch.inf
    for row in range(len(rows.queries)):  # of each row the third block and the fifth
        for block, of in zip((2, 4), of_keys(odd)):
            number = int(state.numbers[rows.slots[row], block])
            state.index[rows.pool + number if number >= 0 else rows.written[rows.out_rows[row], block]] = of
    there, query = on_device(*known), torch.randn(7, HEADS, DIM)
    for run, (which, its, *pages) in ((partial(reach_reference, tables=False), known), (reach, there)):
        run(which, its, query.to(its.index.device), *pages)
    torch.testing.assert_close(there[1].scores.cpu(), state.scores)
    assert (state.scores == UNKNOWN).sum() >= 2 * len(rows.queries)


@pytest.mark.parametrize("shape, transposed", [((2, 16, 40), False), ((3, 48, 20), True), ((16, 24), False)])
def test_blocks_are_copied_between_the_host_and_pages_of_any_layout(shape, transposed):
    from vllm_evict.triton_kernels.reach import copy_blocks

    host, pages = torch.randn(HOST, *shape), torch.randn(POOL, *shape)
    pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if transposed else pages
    there = pages.to(DEVICE, copy=True)
    pinned = host.clone() if DEVICE == "cpu" else host.pin_memory()
    to, of = torch.randperm(POOL)[:20].int(), torch.randperm(HOST)[:20].int()
    to[::4] = -1
    come = to >= 0
    pages[to[come].long()] = host[of[come].long()]
    copy_blocks(there, pinned, to.to(DEVICE), of.to(DEVICE))
    assert torch.equal(there.cpu(), pages)
    host[of[::2].long()] = pages[to[::2].abs().long()]
    copy_blocks(pinned, there, of[::2].contiguous().to(DEVICE), to[::2].abs().to(DEVICE))
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(pinned, host)

"""The kernel that chooses, fetches and names blocks for a layer, against plain torch."""

import pytest
import torch
from test_mass import each_isa

from vllm_evict.compute.kernels.reach import ReachRows, reach, reach_reference

ROWS, WIDTH, ROOM, SLOTS, HEADS, KV_HEADS, DIM, POOL, HOST = 5, 40, 9, 8, 8, 2, 48, 300, 60


def made(dtype):
    """Rows with blocks on the host, in the pool alone, and rooms of several sizes; and the state of a layer."""
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
    known = whole(0, 7, ROWS), full, whole(0, 3, ROWS), full - whole(0, 3, ROWS), whole(3, 7, ROWS), rooms
    rows = ReachRows(*known, slots, out_rows, torch.ones(ROWS, dtype=torch.int32), written, POOL + 1)
    boxes = POOL + 1 + HOST
    high = torch.randn(boxes, KV_HEADS, DIM, generator=generator)
    low = high - torch.randn(boxes, KV_HEADS, DIM, generator=generator).abs()
    state = [torch.full((SLOTS, ROOM), -1, dtype=torch.int32) for _ in range(3)]
    cache, host = (torch.randn(n, KV_HEADS, 16, 2 * DIM, generator=generator).to(dtype) for n in (POOL + 1, HOST))
    table = torch.zeros(SLOTS, WIDTH, dtype=torch.int32)
    return rows, torch.cat((high, low), -1).to(dtype), numbers, [*state, cache, table], host


@each_isa
@pytest.mark.parametrize("soft_cap, sinks", [(0.0, None), (5.0, torch.linspace(-1, 2, HEADS))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_does_what_plain_torch_does(isa, dtype, soft_cap, sinks):
    """Several steps: rooms keep what is read again, and the rest is written over what was read longest ago.

    In odd steps two rows read what they chose before.
    """
    rows, boxes, numbers, state, host = made(dtype)
    states = state, [each.clone() for each in state]
    generator, in_room = torch.Generator().manual_seed(1), 0
    for step in range(6):
        query = torch.randn(7, HEADS, DIM, generator=generator).to(dtype)
        rows.chooses[1:3] = step % 2 == 0
        counts = []
        for how, (*places, cache, table) in zip((reach, reach_reference), states):
            table.zero_()
            args = rows, query, boxes, numbers, *places, cache, host, table, 0.125, soft_cap, sinks, step
            counts.append(how(*args, isa) if how is reach else how(*args))
        assert counts[0] == counts[1]
        in_room += counts[0][1]
        assert all(torch.equal(one, other) for one, other in zip(*states))
    assert in_room > 20


@each_isa
@pytest.mark.parametrize(
    "field, value",
    [
        ("full", WIDTH + 1),
        ("chosen", ROOM + 1),
        ("rooms", ROOM + 1),
        ("written", POOL + 1),
        ("queries", 7),
        ("chooses", 0),
        ("slots", SLOTS),
        ("out_rows", -1),
    ],
)
def test_rows_out_of_range_are_refused_before_anything_is_written(isa, field, value):
    rows, boxes, numbers, state, host = made(torch.float32)
    before = [each.clone() for each in state]
    getattr(rows, field)[1] = value
    with pytest.raises(ValueError):
        *places, cache, table = state
        reach(rows, torch.randn(7, HEADS, DIM), boxes, numbers, *places, cache, host, table, 0.125, isa=isa)
    assert all(torch.equal(one, other) for one, other in zip(state, before))

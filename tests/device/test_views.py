"""Views of several KV groups: memory that stays, and one launch a step, whose cost follows what is resident."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import GARBAGE

from vllm_evict.compute import views
from vllm_evict.compute.kernels.view import resident_view
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.views import Views

BLOCK, REQUESTS = 16, 4
#: Of each request, and the blocks that it lacks in each of three groups.
LENGTHS = [100, 20]
HOLES = [[1, 3], [], [2, 3, 4]]
IN_GRAPH = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])


class Group:
    block_size, shape, device = BLOCK, Shape(BLOCK, REQUESTS, 0, 1, 1), "cpu"

    def __init__(self, holes):
        self.with_holes = {"r": holes} if holes else {}

    @property
    def has_view(self):
        return bool(self.with_holes)

    def resident_tokens(self, seq_lens):
        return seq_lens - np.array([BLOCK * len(self.with_holes.get("r", [])), 0], np.int32)


class Worker:
    """Three KV groups and a step of two requests; in a full graph with two rows of padding."""

    def __init__(self, in_graph, blocks):
        self.groups = [Group(holes) for holes in HOLES]
        self.batch = SimpleNamespace(req_ids=["r", "other"], graph=in_graph or None)
        self.views = Views(self.groups, self.batch)
        self.rows = REQUESTS if in_graph else 2
        self.views.tables = torch.arange(1, 1 + 3 * REQUESTS * blocks, dtype=torch.int32).view(3, REQUESTS, blocks)
        for table, holes in zip(self.views.tables, HOLES):
            table[0, holes] = 0
        for group, table in zip(self.groups, self.views.tables):
            self.views.memory(group, table.shape)
        self.views.begin()

    def of(self, group):
        lens = torch.tensor(LENGTHS + [0] * (self.rows - 2), dtype=torch.int32)
        table = self.views.tables[group][: self.rows]
        metadata = SimpleNamespace(block_table_tensor=table, seq_lens=lens, seq_lens_cpu_upper_bound=lens)
        return self.views.of(self.groups[group], metadata)


@IN_GRAPH
def test_whoever_asks_first_has_all_views_made(in_graph, monkeypatch):
    made = []
    monkeypatch.setattr(views, "resident_view", lambda *args: made.append(args) or resident_view(*args))
    worker = Worker(in_graph, blocks=9)
    groups = (2, 0, 1) if in_graph else (2, 0)
    for group in groups + groups:
        view = worker.of(group)
        for row, length in enumerate(LENGTHS):
            blocks = range(-(-length // BLOCK))
            kept = [block for block in blocks if row or block not in HOLES[group]]
            assert view.logical[row, : len(kept)].tolist() == kept
            assert view.table[row, : len(kept)].tolist() == worker.views.tables[group][row, kept].tolist()
            assert view.lens[row] == length - BLOCK * (len(blocks) - len(kept))
        assert len(view.lens) == worker.rows and not view.lens[2:].any()
        assert view.table.data_ptr() == worker.of(group).table.data_ptr()
    ((_, _, _, given),) = made
    assert [each is not None for each in given] == [True, in_graph, True], "who lacks nothing needs no view"
    worker.views.begin()
    assert worker.of(0).table.data_ptr() == given[0].table.data_ptr() and len(made) == 2


@IN_GRAPH
@pytest.mark.parametrize("blocks", [7, 65537])
def test_what_is_written_follows_what_is_resident(in_graph, blocks):
    """However long a request may get."""
    worker = Worker(in_graph, blocks)
    longest = 7 if in_graph else 5
    for group in (0, 1, 2) if in_graph else (0, 2):
        view = worker.of(group)
        assert (view.table != GARBAGE).sum() == (view.logical != GARBAGE).sum() == worker.rows * longest
        assert (view.table[:, :longest] != GARBAGE).all()


def test_builders_that_are_given_other_tables_are_not_obeyed():
    worker = Worker(False, blocks=9)
    with pytest.raises(AssertionError, match="another block table"):
        worker.views.of(worker.groups[0], SimpleNamespace(block_table_tensor=worker.views.tables[0].clone()))

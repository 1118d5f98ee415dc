"""Places of KV heads: every head once, ranks in balance, groups of one width, and the published patterns' padding."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vllm_evict.config import HeadPattern, HeadsError
from vllm_evict.core.arrange import PADDING, Place, arrange

PATTERNS = Path(__file__).parents[2] / "configs" / "heads"
#: (file, sparsity, ranks, width, groups, padding = padding of the retrieval groups in percent)
PUBLISHED = [
    ("Llama-3-8B-Instruct-Gradient-1048k", 0.5, 1, 128, (1, 1), 0.00),
    ("Llama-3-8B-Instruct-Gradient-1048k", 0.5, 2, 64, (1, 1), 0.00),
    ("Llama-3-8B-Instruct-Gradient-1048k", 0.5, 4, 32, (1, 1), 0.00),
    ("Llama-3-8B-Instruct-Gradient-1048k", 0.5, 8, 16, (1, 1), 0.00),
    ("Llama-2-7B-32K-Instruct", 0.75, 1, 263, (1, 3), 2.66),
    ("Llama-2-7B-32K-Instruct", 0.75, 2, 132, (1, 3), 3.03),
    ("Llama-2-7B-32K-Instruct", 0.75, 4, 66, (1, 3), 3.03),
    ("Llama-2-7B-32K-Instruct", 0.75, 8, 33, (1, 3), 3.03),
]


@st.composite
def patterns(draw):
    """(retrieval, ranks) that go together, ranks with copies among them."""
    heads = draw(st.sampled_from((1, 2, 4, 6, 8)))
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16) if heads % n == 0 or n % heads == 0]))
    layers = draw(st.integers(1, 12))
    return draw(arrays.arrays(bool, (layers, heads))), ranks


def heads_of(retrieval, ranks, made, rank, layer):
    """Old heads of one rank's layer, in their new order: what vLLM gives the rank."""
    heads = retrieval.shape[1]
    distinct = min(heads, ranks)
    each, place = heads // distinct, rank * distinct // ranks
    return made.order[layer, place * each : (place + 1) * each]


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_every_head_has_one_place_and_classes_do_not_mix(case):
    retrieval, ranks = case
    made = arrange(retrieval, ranks)
    assert made.order.dtype == np.int64
    assert (np.sort(made.order, axis=1) == np.arange(retrieval.shape[1])).all()
    assert len(made.places) == ranks and all(len(rank) == len(retrieval) for rank in made.places)
    for rank in range(ranks):
        for layer, row in enumerate(retrieval):
            own = heads_of(retrieval, ranks, made, rank, layer)
            keep, stream = made.places[rank][layer]
            assert keep.heads + stream.heads == len(own)
            assert row[own].tolist() == [True] * keep.heads + [False] * stream.heads
            for part in (own[: keep.heads], own[keep.heads :]):
                assert (np.diff(part) > 0).all(), "each class in the old order"


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_ranks_are_in_balance(case):
    retrieval, ranks = case
    made = arrange(retrieval, ranks)
    counts = np.array([[keep.heads for keep, _ in rank] for rank in made.places])  # [rank, layer]
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    so_far = counts.cumsum(axis=1)
    assert (so_far.max(axis=0) - so_far.min(axis=0) <= 1).all(), "spare heads go where there are fewest"


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_groups_are_filled_layer_by_layer_within_their_width(case):
    retrieval, ranks = case
    made = arrange(retrieval, ranks)
    most = 0
    for rank in made.places:
        for which, groups in enumerate(made.groups):
            group, filled = 0, 0
            for place in (layer[which] for layer in rank):
                if place.group != group:
                    assert place.group == group + 1
                    group, filled = place.group, 0
                assert place.first == filled, "no gap and no overlap"
                filled += place.heads
                assert filled <= made.width
                most = max(most, filled)
            assert group == max(groups - 1, 0)
    assert most == made.width, "no wider than the fullest group"


@settings(max_examples=100, deadline=None)
@given(patterns())
def test_padding_is_what_is_empty_of_all_slots(case):
    retrieval, ranks = case
    made = arrange(retrieval, ranks)
    for value, classes in ((made.padding, (0, 1)), (made.retrieval_padding, (0,))):
        slots = made.width * sum(made.groups[which] for which in classes)
        used = [sum(layer[which].heads for layer in rank for which in classes) for rank in made.places]
        assert value == (max((slots - n) / slots for n in used) if slots else 0)


def all_cuts(counts):
    """(size of the largest group, number of groups) of every way to cut one class's layers."""
    layers = counts.shape[1]
    for ends in range(1 << (layers - 1)):
        groups = np.split(counts, [at + 1 for at in range(layers - 1) if ends >> at & 1], axis=1)
        sizes = [group.sum(axis=1).max() for group in groups]
        if min(sizes) and len(groups) <= 8:
            yield max(sizes), len(groups)


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(bool, (5, 4)), st.sampled_from((1, 2, 4)))
def test_no_other_cut_is_better(retrieval, ranks):
    """Against every cut of every number of groups."""
    made = arrange(retrieval, ranks)
    if 0 in made.groups:
        return
    counts = np.array([[[place.heads for place in layer] for layer in rank] for rank in made.places])
    used, kept = counts.sum(axis=(1, 2)).min(), counts[:, :, 0].sum(axis=1).min()
    options = []
    for width_0, groups_0 in all_cuts(counts[:, :, 0]):
        for width_1, groups_1 in all_cuts(counts[:, :, 1]):
            width, groups = max(width_0, width_1), groups_0 + groups_1
            worst = max(1 - used / (width * groups), 1 - kept / (width * groups_0))
            options.append((groups, worst))
    worst = max(made.padding, made.retrieval_padding)
    good = [groups for groups, other in options if other <= PADDING + 1e-9]
    if good:
        assert worst <= PADDING and sum(made.groups) == min(good)
    else:
        assert worst == pytest.approx(min(other for _, other in options))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kept, groups", [(True, (1, 0)), (False, (0, 1))])
def test_one_class_alone_is_one_group_and_keeps_its_order(kept, groups, ranks):
    made = arrange(np.full((3, 4), kept), ranks)
    assert made.groups == groups
    assert (made.order == np.arange(4)).all()
    assert made.width == 3 * max(4 // ranks, 1)
    assert made.padding == made.retrieval_padding == 0


def test_one_rank_has_retrieval_heads_first():
    made = arrange(np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=bool))
    assert made.order.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [layer[0].heads for layer in made.places[0]] == [2, 0, 3]


def test_ranks_beyond_the_heads_hold_copies():
    retrieval = np.array([[False, True], [True, True]])
    made = arrange(retrieval, 4)
    assert made.places[0] == made.places[1] and made.places[2] == made.places[3]
    assert made.order.tolist() == [[1, 0], [0, 1]], "the one retrieval head goes to the lowest rank"
    assert made.places[0] == ((Place(0, 0, 1), Place(0, 0, 0)), (Place(0, 1, 1), Place(0, 0, 0)))
    assert made.places[2] == ((Place(0, 0, 0), Place(0, 0, 1)), (Place(0, 0, 1), Place(0, 1, 0)))


@pytest.mark.parametrize(
    "retrieval, ranks, words",
    [
        (np.ones((2, 6)), 4, "6 KV heads can't be divided among 4 tensor-parallel ranks"),
        (np.ones((2, 4)), 6, "4 KV heads can't be divided among 6"),
        (np.ones((2, 4)), 0, "among 0"),
        (np.ones(4), 1, r"not the shape \(4,\)"),
        (np.ones((0, 4)), 1, r"not the shape \(0, 4\)"),
    ],
)
def test_what_cannot_be_arranged_is_refused(retrieval, ranks, words):
    with pytest.raises(HeadsError, match=words):
        arrange(retrieval, ranks)


@pytest.mark.parametrize("folder, sparsity, ranks, width, groups, percent", PUBLISHED)
def test_published_patterns_fit(folder, sparsity, ranks, width, groups, percent):
    made = arrange(HeadPattern.read(PATTERNS / folder, sparsity=sparsity).retrieval, ranks)
    assert (made.width, made.groups) == (width, groups)
    assert max(made.padding, made.retrieval_padding) <= PADDING
    assert [round(100 * value, 2) for value in (made.padding, made.retrieval_padding)] == [percent, percent]


def test_large_models_are_arranged_at_once_and_always_alike():
    retrieval = np.random.default_rng(0).random((80, 8)) < 0.3
    start = time.process_time()
    made = arrange(retrieval, 8)
    assert time.process_time() - start < 0.5
    again = arrange(retrieval, 8)
    assert (again.order == made.order).all() and again.places == made.places

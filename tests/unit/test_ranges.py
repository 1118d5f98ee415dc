"""Images whose tokens attend to each other: where they lie in views, and what their queries see."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_evict.compute.images import seen_ahead, with_ranges

SIZE = 16


def metadata(ranges, rows):
    """Of rows of (tokens, queries)."""
    starts = np.cumsum([0, *(queries for _, queries in rows)])
    lens = torch.tensor([tokens for tokens, _ in rows])
    return SimpleNamespace(
        mm_req_doc_ranges=ranges, query_start_loc_cpu=torch.from_numpy(starts), seq_lens_cpu_upper_bound=lens
    )


def test_an_image_moves_by_the_holes_before_it_and_past_images_are_left_out():
    """Against masks by logical positions, for images behind holes, cut by one, across the chunk's start, and past."""
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens, queries = 160, int(random.integers(1, 64))
        first = int(random.integers(1, 90))
        image = first, first + int(random.integers(1, 60))
        computed = tokens - queries
        holes = {block for block in range(computed // SIZE) if random.random() < 0.4}
        before = metadata({0: [image], 1: [], 2: [(3, 9)]}, [(tokens, queries), (40, 1), (20, 20)])
        after = with_ranges(before, [holes or None, None, None].__getitem__, SIZE)
        assert before.mm_req_doc_ranges[0] == [image] and after.mm_req_doc_ranges[2] == [(3, 9)]
        resident = [token for token in range(tokens) if token // SIZE not in holes]
        within = {place for place, token in enumerate(resident) if image[0] <= token <= image[1]}
        if image[1] < computed and holes:
            assert after.mm_req_doc_ranges[0] == []
            continue
        ((begin, end),) = after.mm_req_doc_ranges[0]
        assert within == set(range(begin, end + 1)).intersection(range(len(resident)))
        after.seq_lens_cpu_upper_bound = torch.tensor([len(resident), 40, 20])
        ahead = seen_ahead(after)
        wanted = [0] * (queries + 21)
        for place in within:
            query = place - (len(resident) - queries)
            if query >= 0:
                wanted[query] = max(within) - place
        wanted[queries + 1 + 3 : queries + 1 + 10] = range(6, -1, -1)
        assert ahead.tolist() == wanted


def test_a_decode_that_chooses_what_it_reads_has_no_images():
    before = metadata({0: [(3, 9)], 1: [(3, 9)]}, [(40, 1), (40, 1)])
    assert with_ranges(before, [set(), None].__getitem__, SIZE).mm_req_doc_ranges == {0: [], 1: [(3, 9)]}


def test_metadata_without_images_stay_as_they_are():
    for ranges in (None, {}, {0: []}):
        plain = metadata(ranges, [(20, 4)])
        assert with_ranges(plain, [{0}].__getitem__, SIZE) is plain and seen_ahead(plain) is None
    assert seen_ahead(metadata({0: [(2, 9)]}, [(20, 4)])) is None

"""Parts in which kvzip repeats a prompt, the scores of prompts, and who is given up for them."""

import numpy as np
import pytest
import test_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import papers
from test_kvzip import SERVER, SIZE

from vllm_evict.config import NEVER, KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.plan import Report, Scoring
from vllm_evict.features.kvzip.engine import OVERLAP, Scores, parts

# ---- What is repeated, what is kept


@pytest.mark.parametrize(
    "prompt, chunk, instruction, longest, want",
    [
        (600, 2048, 5, 2048, [(0, 600)]),
        (600, 250, 5, 2048, [(0, 250), (250, 500), (500, 600)]),
        (1021, 2048, 5, 2048, [(0, 1021)]),
        (1022, 2048, 5, 2048, [(0, 1012), (1012, 1022)]),
        (1500, 2048, 5, 2048, [(0, 534), (534, 1068), (1068, 1500)]),
        (1900, 2048, 5, 2048, []),
        (2047, 2048, 5, 2048, []),
    ],
)
def test_parts_cover_the_prompt_and_fit(prompt, chunk, instruction, longest, want):
    got = parts(prompt, chunk, instruction, longest)
    assert got == want
    for start, end in got:
        assert prompt + instruction + min(start, OVERLAP) + end - start < longest


def test_scores_are_found_by_prefix_and_bounded():
    dropped = []
    scores = Scores(10, dropped.append)
    scores.put("abcd", "first")
    assert scores.get("abcd", 0) == ("first", 4)
    assert scores.get("ab", 0) == ("first", 2)
    assert scores.get("abcx", 0) is None and scores.get("abcx", 1) == ("first", 3)
    assert scores.get("xyz", 3) is None and scores.get("", 1) is None
    scores.put("ABCDE", "second")
    scores.get("abcd", 0)
    assert not dropped
    scores.put("vw", "third")
    assert len(scores) == 6 and scores.get("ABCDE", 4) is None and scores.get("abcd", 0) is not None
    assert dropped == ["second"], "the one whose last use is the oldest"
    scores.put("abcd", "again")
    assert len(scores) == 6 and scores.get("abcd", 0) == ("again", 4)
    scores.put(range(11), "too long")
    assert len(scores) == 0 and not scores._having and not scores._prompts
    assert sorted(dropped) == ["again", "first", "second", "third", "too long"]
    scores.put("abcd", "last")
    scores.clear()
    assert len(scores) == 0 and scores.get("abcd", 3) is None and dropped[-1] == "last" and not scores._having


class NaiveScores:
    """Keeps the promises of `Scores`, by looking through all prompts. A block's hash is all that leads up to it."""

    def __init__(self, most):
        self.most, self.prompts, self.used = most, [], []

    def get(self, hashes, slack):
        for count in range(len(hashes), max(len(hashes) - slack, 1) - 1, -1):
            for stored, scores in reversed(self.prompts):
                if hashes[count - 1] in stored:
                    self.used.remove(stored)
                    self.used.append(stored)
                    return scores, count
        return None

    def put(self, hashes, scores):
        self.drop(hashes)
        self.prompts.append((hashes, scores))
        self.used.append(hashes)
        while sum(map(len, self.used)) > self.most:
            self.drop(self.used[0])

    def drop(self, hashes):
        self.prompts = [each for each in self.prompts if each[0] != hashes]
        self.used = [each for each in self.used if each != hashes]


def hashed(prompt):
    return [tuple(prompt[: end + 1]) for end in range(len(prompt))]


def test_a_dropped_prompt_leaves_the_prefix_that_another_shares():
    scores = Scores(8)
    scores.put(hashed("abc"), "first")
    scores.put(hashed("abde"), "second")
    assert scores.get(hashed("ab"), 0) == ("second", 2), "the newest that has it"
    scores.get(hashed("abc"), 0)
    scores.put(hashed("xy"), "third")  # the second goes
    assert len(scores) == 5 and scores.get(hashed("abde"), 1) is None
    assert scores.get(hashed("ab"), 0) == scores.get(hashed("abx"), 1) == ("first", 2)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(hashed)
CALLS = st.one_of(
    st.tuples(st.just("put"), PROMPTS, st.integers()),
    st.tuples(st.just("get"), PROMPTS, st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, max_size=30), st.integers(4, 20))
def test_scores_are_those_of_a_naive_search(calls, most):
    scores, naive = Scores(most), NaiveScores(most)
    for name, *arguments in calls:
        assert getattr(scores, name)(*arguments) == getattr(naive, name)(*arguments)
        assert len(scores) == sum(map(len, naive.used)) and list(scores._prompts) == [each[-1] for each in naive.used]
        assert scores._having.keys() == {block for prompt in naive.used for block in prompt}


def test_what_was_generated_goes_first_and_the_oldest_of_it():
    config = KVPolicyConfig.parse({**SERVER, "buffer": 0})
    resident = RequestBlocks(config, config.limits(SIZE, 256), SIZE)
    mass = Report(np.arange(8), {"mass": np.array([9.0, 1, 8, 2, 7, 3, 6, 4])})
    # 14 blocks, 6 stay: the sink, two recent ones, three of the prompt. Then 18, 6 of which are from generation.
    assert resident.choose(14 * SIZE, mass).tolist() == [1, 3, 5, 7, 8, 9, 10, 11]
    assert resident.choose(9 * SIZE, mass).tolist() == [1, 3, 5]
    nothing = Report(np.arange(0), {"mass": np.empty(0)})
    assert resident.choose(14 * SIZE, nothing).tolist() == list(range(1, 9))


@pytest.mark.parametrize("seed", range(2))
def test_scores_are_the_papers(monkeypatch, seed):
    """Mass of the queries from a position within a chunk on, on plain tensors."""
    start = 100
    scoring = classmethod(lambda cls, *_: Scoring("sum", 0.0, 1, 1, NEVER, start=start))
    monkeypatch.setattr(reference.Scoring, "of", scoring)
    served = reference.Served(KVPolicyConfig.parse({"name": "h2o", **reference.BASE, "budget": 176, "buffer": 0}), seed)
    done = [served.step(count) for count in (70, 45, 30, 40)]
    assert done[:3] == [None] * 3
    _, blocks, importance, _ = done[3]
    tokens = [list(range(b * reference.SIZE, (b + 1) * reference.SIZE)) for b in blocks.index.tolist()]
    n = served.computed
    layers = [(q[:n], k[:n], v[:n]) for q, k, v in served.layers]
    want = papers.kvzip(layers, served.seen[:n, :n], tokens, range(start, n))
    np.testing.assert_allclose(importance, want, rtol=2e-4)

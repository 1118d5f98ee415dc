"""What scored rows say of an answer, how they are scored, and the intervals of shares."""

import numpy as np
import pytest
import torch

from vllm_evict.core.audit import CLEARLY, Verdict, kept_label, missed_mass, wilson
from vllm_evict.core.plan import Report
from vllm_evict.integration.worker.scored import AT_ONCE, Scorer, score


def rows(*gaps, entropy=1.0):
    """Rows of tokens that full attention likes less than its own by so many nats."""
    return np.array([[-1.0 - gap, -1.0, float(gap > 0), entropy] for gap in gaps], np.float32)


def test_a_verdict_is_what_the_rows_say():
    same = Verdict.of(rows(0, 0, 0))
    assert (same.tokens, same.agreed, same.first, same.identical, same.changed) == (3, 3, None, True, False)
    assert same.gap == 0 and same.surprise == 3 and same.expected == 3
    tie = Verdict.of(rows(0, CLEARLY / 2, 0, CLEARLY / 2))
    assert (tie.agreed, tie.first, tie.identical, tie.changed) == (2, 1, False, False)
    other = Verdict.of(rows(0, 0, 0, 2 * CLEARLY))
    assert (other.first, other.changed, other.gap) == (3, True, 2 * CLEARLY)


def test_requests_are_grouped_by_the_share_that_they_kept():
    assert kept_label(0, 10, 10) == "all"
    assert kept_label(3, 10, 10) == "50-100"  # what it lost came back, or it started over
    labels = [kept_label(100 - held, held, 100) for held in (99, 50, 49, 25, 24, 10, 9, 0)]
    assert labels == ["50-100", "50-100", "25-50", "25-50", "10-25", "10-25", "0-10", "0-10"]


def test_missed_mass_is_a_share_of_all_that_was_measured():
    mass, gone = Report(np.arange(4), {"mass": np.array([2.0, 1.0, 0.5, 0.5])}), np.array([1, 3])
    assert missed_mass(mass, gone) == 1.5 / 4
    assert missed_mass(None, gone[:0]) == missed_mass(mass, gone[:0]) == 0
    late = Report(np.arange(3), {"mass": np.ones(3)})
    broken = Report(np.arange(4), {"mass": np.array([1.0, np.nan, 1.0, 1.0])})
    nothing = Report(np.arange(4), {"mass": np.zeros(4)})
    assert [missed_mass(report, gone) for report in (None, late, broken, nothing)] == [None] * 4


@pytest.mark.parametrize("share, n", [(0.98, 100), (0.9, 100), (0.95, 400), (0.5, 60)])
def test_intervals_cover_as_often_as_they_say(share, n):
    """Bar 8. The number of right answers is whole, so the cover of one share and number is not exactly 95 %."""
    right = np.random.default_rng(0).binomial(n, share, 20_000)
    known = {k: wilson(k, n) for k in set(right.tolist())}
    covered = np.mean([known[k][0] <= share <= known[k][1] for k in right.tolist()])
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_those_of_float64(dtype, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(9, 300, generator=generator)).to(dtype)
    logits[2, 5:9] = -torch.inf  # padding of a vocabulary
    tokens = torch.randint(0, 5, (9,), generator=generator)
    tokens[0] = logits[0].argmax()
    scored = score(logits, tokens, temperature).double()
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    own = log_p.gather(1, tokens[:, None])[:, 0]
    p = log_p.exp()
    torch.testing.assert_close(scored[:, 0], own, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scored[:, 1], log_p.amax(-1), atol=1e-4, rtol=1e-5)
    assert scored[:, 2].tolist() == (log_p > own[:, None]).sum(-1).tolist() and scored[0, 2] == 0
    torch.testing.assert_close(scored[:, 3], -torch.xlogy(p, p).sum(-1), atol=1e-4, rtol=1e-4)


def test_logits_are_made_in_pieces_of_the_rows_asked_for():
    from vllm_evict.core.plan import ScoredRows

    hidden, pieces = torch.arange(400.0)[:, None].expand(400, 3), []

    def compute_logits(states):
        pieces.append(states[:, 0].tolist())
        return states

    scorer = Scorer.__new__(Scorer)
    scorer._rows, scorer._scored = {"r": ScoredRows(10, [0] * 150, 1.0)}, {}
    scorer._score(compute_logits, hidden, {"r": 100})
    assert [len(piece) for piece in pieces] == [AT_ONCE, AT_ONCE, 150 - 2 * AT_ONCE]
    assert sum(pieces, []) == list(range(110, 260)) and scorer._scored["r"].shape == (150, 4)
    scorer._score(lambda _: None, hidden, {"r": 100})  # a rank that gets no logits

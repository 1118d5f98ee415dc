"""Verdicts from scored rows of an answer, their scores, and the intervals of shares."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_evict.core.plan import Report
from vllm_evict.features.audit import said
from vllm_evict.features.audit.answers import Loss, Losses
from vllm_evict.features.audit.engine import _penalises
from vllm_evict.features.audit.evidence import Promise
from vllm_evict.features.audit.plan import Truncation
from vllm_evict.features.audit.verdicts import CLEARLY, Verdict, kept_label, missed_mass
from vllm_evict.features.audit.worker import AT_ONCE, Scorer, score
from vllm_evict.tools.eval.stats import wilson


def rows(*gaps, entropy=1.0):
    """Rows of tokens that full attention likes less than its own by so many nats."""
    return np.array([[-1.0 - gap, -1.0, float(gap > 0), entropy, 1.0] for gap in gaps], np.float32)


def test_a_verdict_is_what_the_rows_say():
    same = Verdict.of(rows(0, 0, 0))
    assert (same.tokens, same.agreed, same.first, same.identical, same.changed) == (3, 3, None, True, False)
    assert same.gap == 0 and same.surprise == 3 and same.expected == 3
    tie = Verdict.of(rows(0, CLEARLY / 2, 0, CLEARLY / 2))
    assert (tie.agreed, tie.first, tie.identical, tie.changed) == (2, 1, False, False)
    other = Verdict.of(rows(0, 0, 0, 2 * CLEARLY))
    assert (other.first, other.changed, other.gap) == (3, True, 2 * CLEARLY)
    assert not same.outside and not other.outside


def test_tokens_that_cannot_be_sampled_do_not_surprise():
    """Full attention would never sample them, so their surprise has no expectation."""
    scored = rows(0, 3, 0)
    scored[1, 4] = 0
    verdict = Verdict.of(scored)
    assert (verdict.outside, verdict.surprise, verdict.expected, verdict.tokens) == (1, 2, 2, 3)


def test_requests_are_grouped_by_the_share_that_they_kept():
    assert kept_label(0, 10, 10) == "all"
    assert kept_label(3, 10, 10) == "50-100"  # what it lost came back, or it started over
    labels = [kept_label(100 - held, held, 100) for held in (99, 50, 49, 25, 24, 10, 9, 0)]
    assert labels == ["50-100", "50-100", "25-50", "25-50", "10-25", "10-25", "0-10", "0-10"]
    assert kept_label(100, 0, 0) == "0-10"  # it holds nothing, which says nothing of what it kept


def test_an_answer_that_ends_while_preempted_is_grouped_by_what_it_held_before():
    losses, gone = Losses(), np.arange(3, 60)
    losses.start_over("r", Loss(20, 100, gone))
    assert losses.end("r", 80, Loss()) == ("10-25", gone)
    # Computed again it holds more, but its first tokens saw what it had then.
    losses.start_over("r", Loss(20, 100, gone))
    losses.start_over("r", Loss(60, 100, gone[:40]))
    label, absent = losses.end("r", 80, Loss(100, 100))
    assert label == "10-25" and not len(absent)
    assert losses.end("r", 0, Loss(100, 100))[0] == "all" and losses.end("r", 5, Loss())[0] == "0-10"


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
    assert (scored[:, 4] == 1).all()


TRUNCATIONS = [Truncation(top_k=7), Truncation(top_p=0.6), Truncation(min_p=0.2), Truncation(12, 0.8, 0.05)]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncated_scores_are_those_of_vllms_sampler(truncation):
    """Of what vLLM leaves of the logits: log p of the token, and the entropy."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = 3 * torch.randn(30, 200, generator=torch.Generator().manual_seed(0))
    tokens = logits.topk(12).indices[torch.arange(30), torch.arange(30) % 12]
    left = logits / 0.7
    p = left.softmax(-1)
    left = left.masked_fill(p < truncation.min_p * p.amax(-1, keepdim=True), -torch.inf)
    k = torch.full((30,), truncation.top_k or 200)
    left = apply_top_k_top_p(left, k, torch.full((30,), truncation.top_p))
    log_p = left.log_softmax(-1)
    own, entropy = log_p.gather(1, tokens[:, None])[:, 0], torch.special.entr(log_p.exp()).sum(-1)
    scored, plain = score(logits, tokens, 0.7, truncation), score(logits, tokens, 0.7)
    assert (scored[:, 4] == torch.isfinite(own)).all() and 0 < scored[:, 4].sum() < 30
    torch.testing.assert_close(scored[:, 0], torch.where(torch.isfinite(own), own, plain[:, 0]))
    torch.testing.assert_close(scored[:, 3], entropy, atol=1e-5, rtol=1e-5)
    assert (scored[:, 1:3] == plain[:, 1:3]).all()


def test_logits_are_made_in_pieces_of_the_rows_asked_for():
    from vllm_evict.features.audit.plan import ScoredRows

    hidden, pieces = torch.arange(400.0)[:, None].expand(400, 3), []

    def compute_logits(states):
        pieces.append(states[:, 0].tolist())
        return states

    scorer = Scorer.__new__(Scorer)
    scorer.rows, scorer._scored = {"r": ScoredRows(10, [0] * 150, 1.0)}, {}
    scorer.score(compute_logits, hidden, {"r": 100})
    assert [len(piece) for piece in pieces] == [AT_ONCE, AT_ONCE, 150 - 2 * AT_ONCE]
    assert sum(pieces, []) == list(range(110, 260)) and scorer._scored["r"].shape == (150, 5)
    scorer.score(lambda _: None, hidden, {"r": 100})  # a rank that gets no logits


def test_lines_of_the_log_name_what_was_found():
    lost = Counter(audited=90, identical=80, changed=5, sampled_requests=10, sampled_tokens=98, outside_tokens=2)
    line = said.figures({True: lost + Counter(surprise=10.8, expected=1.0), False: Counter()}, [3, 5], {"late": 2})
    assert "of 90 that lost blocks, full attention gives 80 as they are (7" in line and "not audited: late 2" in line
    assert "surprise by 0.100 nats" in line and "could not have sampled 2 of 100 tokens of these" in line
    assert "of 12 answers that were drawn for an audit 9 have none (bias 1, penalties 8)" in said.coverage(
        {"penalties": 8, "bias": 1}, 3
    )
    promise = Promise(0.9, (100, 200))
    for _ in range(40):
        promise.draw(10)
        promise.audit(False)
    assert "0 of the last" in said.lengths(promise, False) and "the target 0.900 may be missed" in said.lengths(
        promise, False
    )
    assert "expected the target 0.900 or more" in said.target(promise, False, Counter(audited=4, identical=4))
    assert "Of 4 answers that lost nothing 4 are identical." in said.target(
        promise, False, Counter(audited=4, identical=4)
    )
    assert "meet the target 0.900 again" in said.target(promise, True, Counter())


@pytest.mark.parametrize(
    "given, penalises", [({"repetition_penalty": 1.05}, True), ({"top_p": 0.9}, False), ({}, False)]
)
def test_a_penalty_of_the_models_own_is_known(given, penalises):
    def gone():
        raise OSError("no such folder")

    assert _penalises(SimpleNamespace(get_diff_sampling_param=lambda: given)) is penalises
    assert not _penalises(SimpleNamespace(get_diff_sampling_param=gone))

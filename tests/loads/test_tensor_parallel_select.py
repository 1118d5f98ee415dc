"""Decodes that attend to their best blocks under tensor parallelism: each rank chooses for its own heads."""

import numpy as np
import pytest
from engine import logprobs_of, random_prompt, random_requests
from oracle.tiny import make_tiny_llama
from test_lserve import FEW, PATTERN, RETRIEVAL, SELECT, assert_like_dense, policy_of
from test_select import CASES, OWN, assert_selects_like_dense, check_choices

pytestmark = pytest.mark.minutes


@pytest.mark.parametrize(
    "name, kv_heads", [*((name, 2) for name in ("full", "every", "filters", "quest")), ("full", 1)]
)
def test_answers_are_those_of_a_dense_model_whose_ranks_choose(ranked_engine, tmp_path, name, kv_heads):
    """Freed blocks are NaN. With one KV head both ranks have it, and choose for queries of their own."""
    policy, model = dict(CASES[name]), make_tiny_llama(tmp_path, layers=5, kv_heads=kv_heads)
    if "filter_layers" in policy:
        del policy["dense_layers"]
    server = ranked_engine(policy, model=model, max_num_batched_tokens=192)
    requests = random_requests((700, 50), (230, 80), (500, 40))
    given, chosen = {field: value for field, value in policy.items() if field in OWN}, 0
    for prompt, output, trace in server.answered(requests):
        chosen += assert_selects_like_dense(model, prompt, output, trace, ranks=2, **given)
    assert chosen > 200 / policy.get("select_every", 1)
    server.assert_nothing_left()
    assert not any(server.ask(lambda worker: list(worker.kv_evict.groups[0].source.requests)))


@pytest.mark.parametrize("name, pattern", [("full", PATTERN), ("lserve", FEW), ("keydiff", PATTERN)])
def test_ranks_choose_for_their_retrieval_heads(ranked_engine, tmp_path, name, pattern):
    """Some layers have retrieval heads on one rank alone."""
    model = make_tiny_llama(tmp_path, layers=5, heads=8, kv_heads=4)
    server = ranked_engine(
        policy_of(name, pattern), model=model, blocks=256, max_num_batched_tokens=192, enable_prefix_caching=False
    )
    given = {
        field: each for field, each in RETRIEVAL[name].items() if field in (*SELECT, "select_every", "dense_layers")
    }
    for answered in server.answered(random_requests((600, 40), (150, 70), (400, 30))):
        assert assert_like_dense(model, pattern, *answered, ranks=2, **given) > 4
    server.assert_nothing_left()


def test_bounds_are_those_of_blocks_that_came_back(ranked_engine, tmp_path, monkeypatch):
    """Blocks go to the host and come back, prefixes are hit; on each rank."""
    check_choices(monkeypatch)
    tier = {"evict": "host", "host": "16MiB", "recall": "quest", "recall_every": 2, "again": 64}
    policy = {"name": "quest", "budget": 224, "buffer": 32, "sink": 32, "recent": 32, **tier}
    select = {"select": 160, "select_sink": 32, "select_recent": 32, "dense_layers": 1}
    server = ranked_engine({**policy, **select}, model=make_tiny_llama(tmp_path, layers=3), max_num_batched_tokens=128)
    prefix = random_prompt(200, 9)
    outputs = server.generate([prefix + random_prompt(200, seed) for seed in range(4)], max_tokens=40, logprobs=1)
    outputs += server.generate([prefix + random_prompt(300, 5)], max_tokens=40, logprobs=1)
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs)
    assert sum(output.kv_usage.recalled_blocks for output in outputs) > 10 and outputs[-1].num_cached_tokens
    one, two = server.ask(lambda worker: worker.kv_evict.groups[0].source.checked)
    assert one == two and len(one) > 200 and set(one) == {1, 2}
    server.assert_nothing_left()

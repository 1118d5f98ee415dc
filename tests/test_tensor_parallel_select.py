"""Decodes that attend to their best blocks under tensor parallelism: each rank chooses for its own heads."""

import pytest
from engine import random_requests
from oracle.tiny import make_tiny_llama
from test_select import CASES, OWN, assert_selects_like_dense


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
    assert not any(server.ask(lambda worker: list(worker.kv_evict.groups[0].selection.requests)))

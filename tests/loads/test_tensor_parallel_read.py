"""Decodes that read their best blocks under tensor parallelism: each rank chooses for its own heads."""

import pytest
from engine import random_requests
from oracle.tiny import make_tiny_llama
from test_lserve import FEW, READ, RETRIEVAL, assert_like_dense, policy_of
from test_read import CASES, assert_reads_like_dense
from test_read import READ as BLOCKS

pytestmark = pytest.mark.minutes


@pytest.mark.parametrize(
    "name, kv_heads", [("leaders", 2), ("listed", 2), ("keybound", 2), ("full", 1), ("prompts-box", 2)]
)
def test_answers_are_those_of_a_dense_model_whose_ranks_choose(ranked_engine, tmp_path, name, kv_heads):
    """Freed blocks are NaN. With one KV head both ranks have it, and choose for queries of their own."""
    fields, model = CASES[name], make_tiny_llama(tmp_path, layers=5, kv_heads=kv_heads)
    policy = {"read": 256, **fields} if "name" in fields else {"name": "full", **BLOCKS, **fields}
    server = ranked_engine(policy, model=model, max_num_batched_tokens=192)
    given = {
        field: policy[field] for field in policy.keys() & {"hold", "leaders", "dense_layers", "index", "read_prompts"}
    }
    chosen = 0
    for answered in server.answered(random_requests((700, 50), (230, 80), (500, 40))):
        chosen += assert_reads_like_dense(model, *answered, ranks=2, **BLOCKS, **given)
    assert chosen > 200 / policy.get("hold", 8)
    server.assert_nothing_left()
    assert not any(server.ask(lambda worker: list(worker.kv_evict.groups[0].source.requests)))


def test_ranks_choose_for_their_retrieval_heads(ranked_engine, tmp_path):
    """Some layers have retrieval heads on one rank alone."""
    model = make_tiny_llama(tmp_path, layers=5, heads=8, kv_heads=4)
    options = {"blocks": 256, "max_num_batched_tokens": 192, "enable_prefix_caching": False}
    server = ranked_engine(policy_of("lserve", FEW), model=model, **options)
    given = {field: value for field, value in RETRIEVAL["lserve"].items() if field in (*READ, "hold", "dense_layers")}
    for answered in server.answered(random_requests((600, 40), (150, 70), (400, 30))):
        assert assert_like_dense(model, FEW, *answered, ranks=2, **given) > 4
    server.assert_nothing_left()

"""Keys and values of unlike dimensions (MiMo-V2), behind vLLM's backends for them: a token's key and value in one row.

Like test_sliding_devices.py: layers with windows, learned sinks and more KV heads beside full attention.
"""

import pytest
import test_device_backends
from drafting import VOCAB, LayeredDrafter, add_mtp_to_mimo_v2, serve, speculative
from engine import random_prompt, random_requests
from oracle.logits import DenseLogits, make_tiny
from parity import assert_like_oracle
from test_device_backends import BLOCK, on
from test_reach import REACH, assert_counted, assert_nothing_left, assert_reaches_like_dense
from test_read import READ, assert_reads_like_dense

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
FIXTURES = "backend", "server", "view_launches"
backend, server, view_launches = (getattr(test_device_backends, name) for name in FIXTURES)
#: Tokens of a block of full attention: pages of layers with windows are twice as large.
SIZE = 2 * BLOCK
BASE = {"budget": 3 * SIZE, "buffer": 0, "sink": SIZE, "recent": SIZE}
POLICIES = {name: {"name": name, **BASE} for name in ("sink-window", "h2o", "pagedeviction")}
WIDE = {"blocks": 64, "max_model_len": 512, "max_num_batched_tokens": 160}
POLICIES["snapkv"] = {"name": "snapkv", **BASE, "window": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("unlike") / "model", "mimo_v2_flash")


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_full_is_stock(server, model):
    test_device_backends.check_full_is_stock(server, model=model)


CASES = [
    on("triton", "h2o"),
    on("triton", "snapkv"),
    on("fa3", "h2o"),
    on("fa3", "sink-window"),
    on("fa3", "pagedeviction"),
]


@pytest.mark.oracle("keys and values of unlike dimensions")
@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_evictions_and_logprobs_match_the_dense_oracle(server, backend, model, poisoned, name):
    """One prompt longer than the budget and a chunk, one that outgrows its budget while it decodes."""
    subject, dense = server(POLICIES[name], model=model), DenseLogits(model)
    requests = [(random_prompt(n), {"max_tokens": m, "logprobs": 0}) for n, m in [(150, 17), (93, 14)]]
    assert subject.manager.block_size == SIZE and not subject.runtime.decodes
    for prompt, output, trace in subject.answered(requests):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=SIZE, atol=1e-4) > 0
    subject.assert_nothing_left()


@pytest.mark.oracle("keys and values of unlike dimensions")
@pytest.mark.parametrize(
    "backend, fields", [on("triton", {"hold": 3}), on("fa3", {"index": "box", "hold": 3})], indirect=["backend"]
)
def test_layers_choose_what_they_read_on_the_host(server, backend, model, poisoned, fields):
    policy = {"read": 160, **fields}
    subject = server({**REACH, **policy}, model=model, **WIDE)
    uses, chosen, dense = [], 0, DenseLogits(model)
    for prompt, output, trace in subject.answered(random_requests((420, 12), (250, 14))):
        uses.append(output.kv_usage)
        chosen += assert_reaches_like_dense(None, prompt, output, trace, dense=dense, tables=False, **policy)
    assert chosen > 4
    assert_counted(uses)
    assert_nothing_left(subject)


@pytest.mark.oracle("keys and values of unlike dimensions")
@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_layers_choose_what_they_read_without_a_host(server, backend, model, poisoned):
    policy = {**READ, "read": 160, "hold": 3}
    subject, chosen = server({"name": "full", **policy}, model=model, **WIDE), 0
    for answered in subject.answered(random_requests((420, 12), (100, 14))):
        chosen += assert_reads_like_dense(None, *answered, dense=DenseLogits(model), tables=False, **policy)
    assert chosen > 4
    subject.assert_nothing_left()


@pytest.mark.oracle("keys and values of unlike dimensions")
@pytest.mark.parametrize("name", ["h2o", "host"])
@pytest.mark.parametrize("backend", [on("fa3")], indirect=True)
def test_drafts_match_the_dense_oracle(server, backend, tmp_path, monkeypatch, name):
    """Layers for multi-token prediction have windows, which recycle their blocks themselves."""
    model = add_mtp_to_mimo_v2(make_tiny(tmp_path / "model", "mimo_v2_flash", vocab_size=VOCAB))
    dense, chooses = DenseLogits(model), {"read": 160, "hold": 3}

    def check(prompt, output, trace):
        if name == "host":
            assert assert_reaches_like_dense(None, prompt, output, trace, dense=dense, tables=False, **chooses)
        else:
            assert assert_like_oracle(dense, prompt, output, trace, POLICIES["h2o"], atol=1e-4) >= 2

    policy = {**REACH, **chooses} if name == "host" else POLICIES["h2o"]
    double, options = (speculative("mtp"), LayeredDrafter), dict(tokens=60, blocks=128, max_model_len=512)
    if name == "host":
        options |= {"lengths": (300, 230), "evicted": 1}
    assert serve(server, model, policy, check, monkeypatch, *double, **options).runs > 50

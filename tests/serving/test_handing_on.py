"""Both sides of P/D on one server: prompts whose blocks go on are whole, and those that arrive are decoded with holes."""

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from connector import Shelf, ShelfConnector
from drafting import accepted, speculative
from engine import exactly, random_prompt
from latent import make_eagle3, make_latent, reference_mla
from oracle.hybrids import make_tiny_hybrid
from oracle.logits import make_tiny
from oracle.tiny import make_tiny_llama
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

pytestmark = pytest.mark.minutes

BOTH = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
POLICY = {"name": "sink-window", "budget": 192, "buffer": 32, "sink": 32, "allow": ["full", "h2o"]}
HANDS_ON = {"kv_transfer_params": {"do_remote_decode": True}}
#: Class of models -> a tiny one, and the last tokens of a prompt that the engine computes that decodes it.
MODELS = {
    "full attention": (make_tiny_llama, 0),
    "sliding windows": (lambda folder: make_tiny_llama(folder, layers=4, windows=[48, 0, 48, 0]), 0),
    "chunks": (lambda folder: make_tiny(folder, "llama4_text"), 0),
    "latents": (lambda folder: make_latent(folder, "DeepseekV3ForCausalLM"), 0),
    "states": (lambda folder: make_tiny_hybrid(folder, "falcon_h1"), 1),
}
#: Drafter -> the model's class, and what makes a `speculative_config` of the model's directory. A draft model like the
#: model is right as long as it has the blocks that the model has; the head is wrong.
DRAFTERS = {
    "a draft model": ("full attention", lambda model: speculative("draft_model", model)),
    "EAGLE-3": ("latents", lambda model: speculative("eagle3", make_eagle3(model.parent / "head", model))),
}
PROMPTS = [random_prompt(length, length) for length in (449, 641, 545)]


@pytest.fixture(params=MODELS)
def kind(request):
    """A class of models, or a drafter beside one."""
    with reference_mla():
        yield request.param


@pytest.fixture
def engines(engine, kind, tmp_path, monkeypatch, poisoned):
    """Factory of engines to and from which prompts go; with None, of stock vLLM. Freed blocks are full of NaN."""
    monkeypatch.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)
    Shelf.clear()
    folder, options = tmp_path / "model", {}
    layers, drafter = DRAFTERS.get(kind, (kind, None))
    MODELS[layers][0](folder)
    if drafter is not None:
        options["speculative_config"] = drafter(folder)
    options |= dict(model=folder, max_num_batched_tokens=2048)
    options["enable_prefix_caching"] = layers not in ("states", "latents")

    def made(policy, **kwargs):
        ensure_kv_transfer_shutdown()  # the process has one connector for all engines
        return engine(policy, **{**options, **kwargs})

    yield made
    ensure_kv_transfer_shutdown()
    Shelf.clear()


def handed_on(server, prompts, others=()):
    """Return the blocks of prompts that other engines get; requests `others` run meanwhile, and lose blocks."""
    Shelf.prompts = {}
    for prompt in others:
        server.add(prompt, max_tokens=40)
    while others and not all(len(each.output_token_ids) > 2 for each in server.scheduler.requests.values()):
        server.llm.llm_engine.step()
    for prompt in prompts:
        server.add(prompt, max_tokens=1, extra_args=HANDS_ON)
    outputs = server.run()
    while server.scheduler.has_requests():  # requests that ended, and are still read
        server.drain()
    assert {*map(tuple, prompts)} == Shelf.prompts.keys()
    return outputs


def test_a_server_that_only_prefills_is_stock_vllm(engines, kind):
    """To the byte: its answers, and the prompts that go on. What requests ask of a policy is checked, and kept."""
    left, asked = MODELS[kind][1], {"max_tokens": 1, "logprobs": 1}
    sent = [prompt[: len(prompt) - left] for prompt in PROMPTS]
    found = []
    for policy in (None, POLICY):
        server = engines(policy, kv_transfer_config={**BOTH, "kv_role": "kv_producer"})
        assert not hasattr(server.scheduler, "kv_policy") and not hasattr(server.worker, "kv_evict")
        fields = {"kv_policy": "h2o", "kv_budget": 128} if policy else {}
        outputs = server.generate(sent, **asked, extra_args={**HANDS_ON, **fields})
        while server.scheduler.has_requests():
            server.drain()
        assert server.free_blocks == server.all_blocks
        found.append((exactly(outputs), Shelf.prompts))
        Shelf.prompts = {}
    with pytest.raises(VLLMValidationError, match="kv_policy 'tova' is not enabled here"):
        server.generate(sent, **asked, extra_args={"kv_policy": "tova"})
    (stock, there), (own, here) = found
    assert own == stock and there.keys() == here.keys() == {*map(tuple, sent)}
    for prompt, contents in here.items():
        assert all(map(torch.equal, contents, there[prompt]))


@pytest.mark.parametrize("kind", ["states"], indirect=True)
def test_no_policy_takes_blocks_that_go_on(engines, kind, monkeypatch):
    """In the smallest pool that starts the longest prompt goes on whole. Where it would not fit, none of it goes on."""
    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)  # see test_hybrids.whole_chunks
    options = dict(kv_transfer_config=BOTH, enable_prefix_caching=True, max_num_batched_tokens=256, max_model_len=1024)
    server, prompt = engines(POLICY, blocks=1024 // 32 + 2 + 1, **options), random_prompt(1023)
    states = [each for each in server.all_managers if each not in server.managers]
    sizes = [each.kv_cache_spec.max_memory_usage_bytes(server.scheduler.vllm_config) for each in states]
    assert [each.beside.blocks(1024) for each in states] == [
        size // each.kv_cache_spec.page_size_bytes for each, size in zip(states, sizes)
    ]
    (output,) = handed_on(server, [prompt]).values()
    assert output.kv_usage.evicted_blocks == 0 and output.kv_usage.policy == "full"
    monkeypatch.setattr(server.scheduler, "room", replace(server.scheduler.room, pool=33))
    Shelf.prompts = {}
    server.add(prompt, max_tokens=1, extra_args=HANDS_ON)
    (output,) = server.run().values()
    assert output.kv_usage.evicted_blocks > 20 and not Shelf.prompts
    server.assert_nothing_left()


@pytest.mark.both_runners("full attention", "EAGLE-3")
@pytest.mark.parametrize("kind", [*MODELS, *DRAFTERS], indirect=True)
def test_a_prompt_that_goes_on_is_whole_and_one_that_came_is_decoded_with_holes(engines, kind):
    """A drafter's blocks come and go with the model's: step by step as many drafts are right as on one server."""
    left = MODELS[DRAFTERS.get(kind, (kind,))[0]][1]
    sent = [prompt[: len(prompt) - left] for prompt in PROMPTS]
    stock = engines(None, kv_transfer_config=BOTH)
    handed_on(stock, sent)
    expected = Shelf.prompts
    alone = engines(POLICY)
    answers, traces = alone.traced([(prompt, {"max_tokens": 48, "logprobs": 1}) for prompt in PROMPTS])
    assert all(sum(map(len, trace.evicted)) > 4 for trace in traces)

    both = engines(POLICY, kv_transfer_config=BOTH)
    assert both.worker.kv_evict
    handed_on(both, sent)
    for prompt, contents in Shelf.prompts.items():
        for content, want in zip(contents, expected[prompt], strict=True):
            assert torch.equal(content, want), "the prompt that goes on differs from stock vLLM's"
    both.assert_nothing_left()
    if both.scheduler.kv_cache_manager.enable_caching:
        assert both.llm.reset_prefix_cache()
    others = [random_prompt(400, 7), random_prompt(300, 8)]
    outputs = handed_on(both, sent, others)
    assert sum(output.kv_usage.evicted_blocks for output in outputs.values()) > 8
    for prompt, contents in Shelf.prompts.items():
        # Since vLLM 0.33 a drafter computes nothing where no request needs drafts: a prompt's last block lacks its part.
        late = kind in DRAFTERS and Version(version("vllm")) >= Version("0.33")
        whole = len(prompt) // both.manager.block_size if late else None
        for content, want in zip(contents, expected[prompt], strict=True):
            numbers = (each[:whole].contiguous().view(torch.float32) for each in (content, want))  # states: bytes
            torch.testing.assert_close(*numbers, atol=1e-4, rtol=1e-4)
    both.assert_nothing_left()
    if both.scheduler.kv_cache_manager.enable_caching:
        assert both.llm.reset_prefix_cache()

    came, starts = both.traced([(prompt, {"max_tokens": 48, "logprobs": 1}) for prompt in PROMPTS])
    for output, answer, start, trace, prompt in zip(came, answers, starts, traces, PROMPTS, strict=True):
        assert start.start == len(prompt) - 1, "part of the prompt was computed here"
        assert list(output.outputs[0].token_ids) == list(answer.outputs[0].token_ids)
        assert start.evicted == trace.evicted and start.steps[1:] == trace.steps[1:]
    if kind == "a draft model":
        assert accepted(both)[0] > 100
    asked = {"max_tokens": 48, "extra_args": {"kv_policy": "h2o"}}
    for output in both.generate(PROMPTS, **asked):
        assert output.kv_usage.evicted_blocks > 4
    both.assert_nothing_left()

"""Blocks that arrive from another engine (P/D, the side of decodes)."""

from collections import Counter

import disaggregated
import pytest
import torch
from connector import Shelf, ShelfConnector, prompt_blocks
from engine import Engine, random_prompt
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.exceptions import VLLMValidationError

BLOCK = 32
CONSUMER = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
#: One server for policies by block, one by token, and one that keeps prompts whole; requests ask for the others.
POLICIES = {
    "block": ("h2o", "sink-window", "keydiff", "snapkv"),
    "token": ("h2o", "keydiff"),
    "whole": ("h2o", "snapkv"),
}
KINDS = {"block": {}, "token": {"granularity": "token"}, "whole": {"prompt": "whole"}}
SERVERS = {
    kind: {"name": "h2o", "budget": 256, "recent": 64, "sink": 32, **KINDS[kind], "allow": ["full", *policies]}
    for kind, policies in POLICIES.items()
}
#: Most tokens of a step. Prompts that stay whole are computed in several.
CHUNKS = {"block": 1024, "token": 1024, "whole": 128}
#: With all tokens but the last in whole blocks, a prefix hit computes what a decode after a transfer does: one token.
LENGTHS = (449, 641, 545)
ARRIVES = dict(kv_transfer_config=CONSUMER, disable_hybrid_kv_cache_manager=True)


def caches(engine):
    return engine.worker.model_runner.kv_caches


@pytest.fixture(scope="module")
def prompts():
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def shelf():
    """The shelf as it is found: prompts stay."""
    yield
    Shelf.waits, Shelf.delay, Shelf.spoiled, Shelf.loaded = True, 2, {}, []


@pytest.fixture(scope="module", params=SERVERS)
def pair(request, tiny, prompts):
    """(answers of one engine by policy, each after a hit of all but the prompt's last token; an engine to which prompts
    come from the shelf, where freed blocks are full of NaN)."""
    chunk = {"max_num_batched_tokens": CHUNKS[request.param]}
    alone = Engine(tiny, SERVERS[request.param], **chunk)
    for prompt in prompts:
        Shelf.prompts[tuple(prompt)] = prompt_blocks(alone, prompt)
    answers = {policy: answers_of(alone, prompts, policy) for policy in POLICIES[request.param]}
    alone.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)
        patch.setenv("VLLM_EVICT_POISON", "1")
        consumer = Engine(tiny, SERVERS[request.param], **ARRIVES, **chunk)
        yield answers, consumer
        consumer.close()
    ensure_kv_transfer_shutdown()
    Shelf.prompts.clear()


@pytest.fixture
def consumer(pair):
    """Nothing is left of what a test did, and its prefixes are not."""
    _, consumer = pair
    yield consumer
    consumer.assert_nothing_left()
    assert not sum((manager.held for manager in consumer.managers), Counter())
    assert consumer.llm.reset_prefix_cache()


def answers_of(engine, prompts, policy):
    return disaggregated.answers_of(engine, prompts, max_tokens=60, extra_args={"kv_policy": policy})


def test_a_decode_engine_answers_as_one_engine_does(pair, consumer, prompts):
    """Blocks arrive before a request runs; the first decode is measured, and the first decision follows it."""
    expected, _ = pair
    for policy, alone in expected.items():
        answers = answers_of(consumer, prompts, policy)
        for (*answer, evicted, start), (*single, evicted_alone, _), prompt in zip(answers, alone, prompts, strict=True):
            assert answer == single and evicted == evicted_alone, policy
            assert evicted[0], "nothing was evicted after the first decode"
            assert start == len(prompt) - 1, "part of the prompt was computed here"
        assert [len(blocks) for blocks in Shelf.loaded] == [-(-len(prompt) // BLOCK) for prompt in prompts]
        Shelf.loaded.clear()
        assert consumer.llm.reset_prefix_cache()


def test_what_is_here_already_is_not_loaded(pair, consumer, prompts):
    """Loaded blocks are published, also those that the request loses; the next one with the prompt hits them."""
    (expected,) = list(pair[0].values())[:1]
    first, second = (answers_of(consumer, prompts[:1], "h2o") for _ in range(2))
    assert first[0][:3] == second[0][:3] == expected[0][:3]
    assert [len(blocks) for blocks in Shelf.loaded] == [-(-LENGTHS[0] // BLOCK), 1]


@pytest.mark.v1(
    *(f"{kind}-{bad}-within" for kind in SERVERS for bad in (0, 5)),
    why="vLLM 0.32's V2 does not set back what a request has computed",
)
@pytest.mark.parametrize("waits", [True, False], ids=["before", "within"])
@pytest.mark.parametrize("bad", [0, 5])
def test_a_block_that_does_not_come_is_computed(consumer, prompts, monkeypatch, complaints, waits, bad):
    """A block that failed to load is computed again, as in stock vLLM, with all that follow it. What a step computed
    over its garbage (NaN) counts for nothing.
    """
    prompt = tuple(prompts[0])
    shelved = Shelf.prompts.pop(prompt)
    if bad:
        consumer.generate([prompt[: bad * BLOCK + 1]], max_tokens=1, extra_args={"kv_policy": "full"})
    policy = "snapkv" if consumer.scheduler.kv_policy.prompt == "whole" else "h2o"
    (expected,) = answers_of(consumer, [prompt], policy)
    assert consumer.llm.reset_prefix_cache()
    Shelf.prompts[prompt], Shelf.spoiled, Shelf.waits = shelved, {prompt: [bad, bad + 2]}, waits
    (answer,) = answers_of(consumer, [prompt], policy)
    assert answer[:2] == expected[:2] and not Shelf.spoiled
    assert [holes for holes in answer[2] if holes] == [holes for holes in expected[2] if holes]
    assert not complaints


@pytest.mark.parametrize("waits", [True, False], ids=["before", "within"])
def test_requests_whose_connector_dies_end_and_the_others_go_on(pair, consumer, prompts, monkeypatch, waits):
    """Under `kv_load_failure_policy: fail`, as in stock vLLM: with an error. The next requests with the prompts load
    them again: nothing was published."""
    monkeypatch.setattr(consumer.scheduler, "recompute_kv_load_failures", False)
    stays = consumer.add(prompts[2], max_tokens=60, extra_args={"kv_policy": "h2o"})
    for _ in range(20):
        consumer.llm.llm_engine.step()
    (resident,) = consumer.manager.residents.values()
    assert resident.holes
    Shelf.waits, Shelf.spoiled = waits, {tuple(prompt): [0, 3] for prompt in prompts[:2]}
    fail = [consumer.add(prompt, max_tokens=60, extra_args={"kv_policy": "h2o"}) for prompt in prompts[:2]]
    outputs = consumer.run()
    assert [outputs[each].outputs[0].finish_reason for each in fail] == ["error", "error"] and not Shelf.spoiled
    assert list(outputs[stays].outputs[0].token_ids) == pair[0]["h2o"][2][0]
    consumer.assert_nothing_left()
    Shelf.waits = True
    for answer, single in zip(answers_of(consumer, prompts[:2], "h2o"), pair[0]["h2o"]):
        assert answer[0] == single[0] and answer[2] == single[2]


def test_a_request_that_ends_while_its_blocks_come(consumer, prompts):
    """They come none the less, and go back then."""
    Shelf.delay = 4
    consumer.add(prompts[0], "gone", max_tokens=8)
    stays = consumer.add(prompts[1], max_tokens=8)
    consumer.llm.llm_engine.step()
    consumer.llm.llm_engine.abort_request(["gone"])
    held = consumer.held_blocks()
    assert len(held) == sum(-(-len(prompt) // BLOCK) for prompt in prompts[:2])
    assert stays in consumer.run() and len(Shelf.loaded) == 2


def test_who_asks_for_a_prefill_is_refused(consumer, prompts):
    """The role kv_consumer hands nothing on. vLLM's MooncakeConnector ends the engine if it is asked to."""
    transfer = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(VLLMValidationError, match="do_remote_decode got .* NixlConnector hands no blocks on; expected"):
        consumer.generate(prompts[:1], max_tokens=1, extra_args=transfer)
    transfer = {"kv_transfer_params": {"do_remote_prefill": True}}
    (output,) = consumer.generate(prompts[:1], max_tokens=1, extra_args=transfer)
    assert len(output.outputs[0].token_ids) == 1


def test_what_a_step_in_flight_reads_is_no_place_to_load_into(async_engine, prompts, monkeypatch):
    """A load is not ordered after the steps in flight: what they read is free once they are done."""
    monkeypatch.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)
    server = async_engine(SERVERS["block"], **ARRIVES, max_num_batched_tokens=1024, blocks=80, max_model_len=1024)
    scheduler, in_flight, deferred = server.scheduler, [], []
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def scheduled(*args, **kwargs):
        loads = len(Shelf.loaded)
        output = schedule(*args, **kwargs)
        reads = set().union(*in_flight) if in_flight else set()
        assert reads.isdisjoint(block for load in Shelf.loaded[loads:] for block in load)
        in_flight.append(set().union(*map(server.held_by, output.num_scheduled_tokens)))
        deferred.append(len(scheduler.deferred_frees))
        return output

    def updated(*args):
        in_flight.pop(0)
        return update(*args)

    monkeypatch.setattr(scheduler, "schedule", scheduled)
    monkeypatch.setattr(scheduler, "update_from_output", updated)
    for seed in range(12):
        prompt = random_prompt(600 + 10 * seed, seed)
        Shelf.prompts[tuple(prompt)] = [
            torch.rand(-(-len(prompt) // BLOCK), *cache.shape[1:]) for cache in caches(server)
        ]
        server.add(prompt, max_tokens=20 + 7 * seed)
    outputs = server.run()
    assert len(outputs) == 12 and all(output.kv_usage.evicted_blocks for output in outputs.values())
    assert len(Shelf.loaded) >= 12 and max(deferred) > 0
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()

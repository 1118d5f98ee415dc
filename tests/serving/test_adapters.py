"""LoRA adapters on one server: an adapter's requests share prefixes and scores with each other, and with no other's."""

import itertools

import numpy as np
import pytest
from engine import Engine, logprobs_of, random_prompt
from lora import RANK, write_adapter
from oracle.model import DenseLlama
from parity import assert_like_oracle, assert_tokens_like_oracle
from streaming import Sessions
from test_kvzip import reconstructed
from test_serving_cache import pure_tokens
from vllm.lora.request import LoRARequest

from vllm_evict.config import KVPolicyConfig
from vllm_evict.features.kvzip.engine import Reconstructions

pytestmark = pytest.mark.minutes

BLOCK = 32
BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "h2o": {"name": "h2o", **BASE},
    "h2o-tokens": {"name": "h2o", **BASE, "granularity": "token"},
}
#: One adapter more than there are: vLLM's CPU kernels let requests without an adapter read the last one's memory.
SERVES = dict(enable_lora=True, max_loras=3, max_lora_rank=RANK, max_num_batched_tokens=1024)
#: Names of adapters; None: none.
ADAPTERS = (None, "a", "b")


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    """Adapter -> (its `LoRARequest`, the oracle of the model with the adapter's product added to its weights)."""
    root, made = tmp_path_factory.mktemp("adapters"), {None: (None, DenseLlama(tiny))}
    for number, name in enumerate(ADAPTERS[1:], 1):
        merged = DenseLlama(tiny)
        for key, added in write_adapter(tiny, root / name, number).items():
            merged.w[key] = merged.w[key] + added
        made[name] = (LoRARequest(name, number, str(root / name)), merged)
    return made


def serve(server, adapters, names, prompts, tokens=60):
    """(output, trace) of each prompt by adapter: one batch of all adapters for each prompt."""
    batches = []
    for prompt in prompts:
        requests = [(prompt, dict(max_tokens=tokens, logprobs=1, lora_request=adapters[name][0])) for name in names]
        batches.append(dict(zip(names, zip(*server.traced(requests)))))
    return batches


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("kind", POLICIES)
def test_adapters_answer_as_servers_of_their_own_do(engine, tiny, adapters, poisoned, kind):
    """All have one prompt, and then another with its prefix: each hits the blocks that its own adapter has computed."""
    policy, prefix = POLICIES[kind], random_prompt(300, 1)
    compare = assert_tokens_like_oracle if "granularity" in policy else assert_like_oracle
    prompts = [[*prefix, *random_prompt(30, seed)] for seed in (2, 3)]
    server = engine(policy, **SERVES)
    together = serve(server, adapters, ADAPTERS, prompts)
    server.assert_nothing_left()
    for name in ADAPTERS:
        alone = Engine(tiny, policy, **SERVES)
        answers = serve(alone, adapters, [name], prompts)
        alone.assert_nothing_left()
        alone.close()
        (_, first), (_, second) = (batch[name] for batch in together)
        assert first.start == 0 and second.start == min(pure_tokens(first), len(prefix)) // BLOCK * BLOCK > 0
        for prompt, batch, answer in zip(prompts, together, answers, strict=True):
            (output, trace), (single, single_trace) = batch[name], answer[name]
            assert output.outputs[0].token_ids == single.outputs[0].token_ids
            assert trace.evicted == single_trace.evicted and sum(map(len, trace.evicted)) > 5
            assert logprobs_of(output) == pytest.approx(logprobs_of(single), abs=1e-3)
            compare(adapters[name][1], prompt, output, trace, policy)
    answered = {tuple(output.outputs[0].token_ids) for output, _ in together[0].values()}
    assert len(answered) == len(ADAPTERS), "the adapters change nothing"


#: Policies for which workers keep something of each request that has started, and that of stock vLLM.
KEPT = {
    **POLICIES,
    "h2o-pressure": {"name": "h2o", **BASE, "when": "pressure"},
    "host": {"name": "full", **BASE, "evict": "host", "host": "32MiB"},
    "stock": {"name": "full"},
}


@pytest.mark.both_runners("h2o", "h2o-tokens", "stock")
@pytest.mark.parametrize("kind", KEPT)
def test_a_session_whose_adapter_has_to_wait_keeps_its_slot(engine, adapters, kind):
    """Its next turn has come: it neither runs nor waits for one, and no other request may take its slot on workers."""
    server = engine(KEPT[kind], **{**SERVES, "max_loras": 1}, max_num_seqs=2)
    sessions, taken = Sessions(server), []

    def send(name, adapter, tokens, answer, resumable=False):
        prompt = random_prompt(tokens, len(sessions.sent))
        sessions.send(name, prompt, answer, resumable, lora_request=adapters[adapter][0])
        sessions.sent[name] += not resumable

    def look():
        seated = [name for name, blocks in server.scheduler.residents.items() if blocks.started]
        assert len(seated) <= 2
        taken.append((len(server.scheduler.running), sorted(seated)))

    send("session", "a", 300, 20, resumable=True)
    sessions.run()
    send("other", "b", 300, 120)
    for _ in range(5):
        sessions.step()
    send("session", "a", 50, 20, resumable=True)
    send("late", "b", 300, 20)
    sessions.run(look)
    assert (1, ["other", "session"]) in taken, "the session's next turn was never kept waiting"
    assert [len(sessions.answers[name]) for name in ("session", "other", "late")] == [2, 1, 1]
    sessions.end("session")


def load_in_place(core, adapter):
    core.add_lora(LoRARequest(*adapter, load_inplace=True))


def remove_and_add(core, adapter):
    core.remove_lora(adapter[1])
    core.add_lora(LoRARequest(*adapter))


def change_weights(core, adapter):
    core.collective_rpc(lambda worker: [each.data.mul_(1.05) for each in worker.get_model().parameters()] and None)


def ask_in_place(core, adapter):
    """The next request says that its adapter is loaded anew."""


@pytest.mark.both_runners
def test_what_outlives_the_pool_is_of_the_weights_that_answer(engine, tiny, tmp_path, adapters):
    """Blocks that were on the host, or in the pool, or of a running request, when weights changed."""
    policy = {"name": "full", **BASE, "evict": "host", "host": "32MiB"}
    server = engine(policy, **SERVES, blocks=44, max_model_len=1024)
    adapter, path, salts = ("changing", 7, str(tmp_path / "changing")), tmp_path / "changing", itertools.count()
    seeds = itertools.count(10)

    def ask(prompt, tokens=4, **about):
        request = server.add(prompt, max_tokens=tokens, logprobs=0, lora_request=LoRARequest(*adapter, **about))
        return server.run()[request]

    def push_out():
        server.generate([random_prompt(640, next(seeds)) for _ in range(4)], max_tokens=1)

    def assert_right(prompt, hits=False):
        got = ask([*prompt, 1])
        alone = {"prompt_token_ids": [*prompt, 1], "cache_salt": str(next(salts))}
        assert logprobs_of(got) == pytest.approx(logprobs_of(ask(alone)), abs=1e-3)
        assert not hits or got.kv_usage.host_hit_blocks > 0

    write_adapter(tiny, path, 1)
    for number, change in enumerate((load_in_place, remove_and_add, change_weights, ask_in_place), 2):
        on_host, in_pool, running = (random_prompt(320, 100 * number + each) for each in range(3))
        ask(on_host)
        push_out()
        assert_right(on_host, hits=True)
        push_out()
        ask(in_pool)
        server.add(running, max_tokens=60, lora_request=LoRARequest(*adapter))
        for _ in range(4):
            server.llm.llm_engine.step()
        if change is not change_weights:
            write_adapter(tiny, path, number)
        change(server.core, adapter)
        about = {"load_inplace": True} if change is ask_in_place else {}
        ask(random_prompt(40, number), **about)
        push_out()
        for prompt in (on_host, in_pool, running):
            assert_right(prompt)
        push_out()
        assert_right(on_host, hits=change is not ask_in_place)
    server.assert_nothing_left()


def test_scores_of_other_weights_are_forgotten(engine, tiny, tmp_path, adapters):
    policy = {"name": "kvzip", "budget": 192, "buffer": 64, "sink": 32, "recent": 64, "instruction": [7, 8, 9]}
    server, adapter = engine(policy, **SERVES), ("changing", 7, str(tmp_path / "changing"))
    scores, prompt = server.scheduler.part(Reconstructions).scores, random_prompt(330, 1)
    write_adapter(tiny, tmp_path / "changing", 1)

    def add(prompt, tokens):
        server.add(prompt, max_tokens=tokens, lora_request=LoRARequest(*adapter))

    add(prompt, 100)
    server.run()
    server.core.add_lora(LoRARequest(*adapter))
    assert len(scores) == 330 // BLOCK, "the files are as they were"
    for change in (load_in_place, change_weights):
        server.llm.reset_prefix_cache()
        add(prompt, 100)
        server.run()
        assert len(scores) == 330 // BLOCK
        add(random_prompt(330, 2), 100)
        for _ in range(3):
            server.llm.llm_engine.step()
        write_adapter(tiny, tmp_path / "changing", 2)
        change(server.core, adapter)
        assert not len(scores)
        server.run()
        assert not len(scores), "its keys were computed before"
    server.assert_nothing_left()


def test_kvzip_repeats_a_prompt_under_the_adapter_of_its_request(engine, adapters):
    """The scores of one prompt are other ones under each adapter, and are kept apart."""
    policy = {"name": "kvzip", "budget": 192, "buffer": 64, "sink": 32, "recent": 64, "instruction": [7, 8, 9]}
    server, prompt = engine(policy, **SERVES), random_prompt(330, 1)
    (batch,) = serve(server, adapters, ADAPTERS, [prompt], tokens=100)
    scores = [stored for _, stored in server.scheduler.part(Reconstructions).scores._prompts.values()]
    assert len(scores) == len(ADAPTERS)
    for name in ADAPTERS:
        mass = reconstructed(adapters[name][1], prompt, KVPolicyConfig.parse(policy))
        assert sum(np.allclose(stored, mass, rtol=1e-3) for stored in scores) == 1
        assert sum(map(len, batch[name][1].evicted)) > 3
    server.assert_nothing_left()

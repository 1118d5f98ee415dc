"""Bugs that others already paid for, one test each, where no other file has it."""

import pickle
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engine import V2, logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.replay import replay
from parity import assert_like_oracle, oracle_config
from parts import sums_of

from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.integration.engine.managers import AdmittingManager
from vllm_evict.integration.engine.spec import EvictableSpec

BLOCK = 32
H2O = {"name": "h2o", "budget": 128, "buffer": 64, "sink": 32, "recent": 64}
WINDOW = {"name": "sink-window", "budget": 128, "sink": 32}


def watch_views(server):
    """Every (metadata before, metadata after, request ids) that the attention of `server` gets from now on."""
    seen, view = [], server.runtime.view

    def watched(metadata):
        result = view(metadata)
        if server.runtime.in_step:
            copies = [
                {
                    "table": some.block_table_tensor.clone(),
                    "seq_lens": some.seq_lens.clone(),
                    "starts": some.query_start_loc.clone(),
                }
                for some in (metadata, result[0])
            ]
            if result[1] is not None:  # the stock kernel need not read rows that the plugin decodes
                copies[1]["seq_lens"] = result[1].seq_lens.clone()
            seen.append((*copies, list(server.runtime.batch.req_ids)))
        return result

    server.runtime.view = watched
    return seen


# --- silent no-op under Model Runner V2 ------------------------------------------------------------------------------


@pytest.mark.both_runners
def test_silent_no_op_under_either_model_runner(engine):
    """The runner that the run is about is the one at work, attention reads fewer tokens, and outputs show it."""
    server = engine(WINDOW, enable_prefix_caching=False)
    assert server.worker.use_v2_model_runner == V2
    modules = {base.__module__ for base in type(server.worker.model_runner).__mro__}
    assert ("vllm.v1.worker.gpu.model_runner" in modules) == V2
    views = watch_views(server)
    prompt = random_prompt(300)
    evicted = server.generate([prompt], max_tokens=10, logprobs=1)[0]
    before, after, _ = views[-1]
    assert before["seq_lens"][0] == 309 and after["seq_lens"][0] < 309 - 4 * BLOCK
    whole = engine().generate([prompt], max_tokens=10, logprobs=1)[0]
    # The first token comes out of the first two chunks; what follows saw less.
    assert np.abs(logprobs_of(evicted) - logprobs_of(whole)).max() > 1e-2


# --- prefix cache corrupted ------------------------------------------------------------------------------------------


def test_prefix_cache_corrupted_by_compaction(engine):
    """The content of a published block never changes, however much of its request goes."""
    server = engine(H2O, max_num_batched_tokens=128)
    caches = server.worker.model_runner.kv_caches
    contents, compared = {}, []

    def check(server):
        for block in server.pool.blocks:
            if block.block_hash is None:
                contents.pop(block.block_id, None)
                continue
            now = [cache[block.block_id].clone() for cache in caches]
            known = contents.get(block.block_id)
            if known and known[0] == block.block_hash:
                compared.append(all(torch.equal(a, b) for a, b in zip(known[1], now)))
            else:
                contents[block.block_id] = (block.block_hash, now)

    prompt = random_prompt(400)
    server.add(prompt, max_tokens=60)
    outputs = list(server.run(check).values())
    server.add([*prompt[:128], *random_prompt(300, 1)], max_tokens=60)
    outputs += server.run(check).values()
    assert [output.kv_usage.evicted_blocks > 0 for output in outputs] == [True, True]
    assert outputs[1].num_cached_tokens == 128
    assert len(compared) > 100 and all(compared)


# --- negative positions after preemption -----------------------------------------------------------------------------


def test_negative_positions_after_preemption(engine):
    """Nobody's resident length is shorter than the queries of the step, or longer than the sequence."""
    server = engine(H2O, blocks=19, max_model_len=512, max_num_batched_tokens=64)
    views = watch_views(server)
    requests = [(random_prompt(100 + seed, seed), {"max_tokens": 120}) for seed in range(4)]
    _, traces = server.traced(requests)
    assert sum(trace.restarts for trace in traces) > 0
    assert any(trace.restarts and any(trace.evicted) for trace in traces)
    short = 0
    for before, after, req_ids in views:
        rows = len(req_ids)
        queries = before["starts"][: rows + 1].diff()
        missing = before["seq_lens"][:rows] - after["seq_lens"][:rows]
        assert (before["seq_lens"][:rows] >= queries).all() and (after["seq_lens"][:rows] >= queries).all()
        assert (missing >= 0).all() and (missing % BLOCK == 0).all()
        short += int((missing > 0).sum())
    assert short > 0


# --- per-request Python loops on the decode path ---------------------------------------------------------------------


class CountedDict(dict):
    lookups = 0

    def get(self, *args):
        self.lookups += 1
        return super().get(*args)

    def __getitem__(self, key):
        self.lookups += 1
        return super().__getitem__(key)

    def __iter__(self):
        self.lookups += len(self)
        return super().__iter__()


def test_per_request_python_loops_on_the_decode_path(engine, monkeypatch):
    """While all requests decode and none grows, nobody is asked anything; who grows is asked once."""
    server = engine({**H2O, "budget": 1024, "buffer": 0})
    calls = {"grown": 0, "parsed": 0}
    over_trigger, parse = RequestBlocks.over_trigger, KVPolicyConfig.parse.__func__

    def counted_over_trigger(resident, blocks):
        calls["grown"] += 1
        return over_trigger(resident, blocks)

    def counted_parse(cls, value):
        calls["parsed"] += 1
        return parse(cls, value)

    # 8 tokens into a block after the prompt: 24 decode steps without a new one.
    for seed in range(6):
        server.add(random_prompt(40, seed), max_tokens=120, extra_args={"kv_budget": 128})
    while any(request.num_computed_tokens < 41 for request in server.scheduler.requests.values()):
        server.llm.llm_engine.step()
    sums = sums_of(server.runtime)
    slots = sums._slots = CountedDict(sums._slots)
    assert len(slots) == 0 or len(slots) == 6
    server.llm.llm_engine.step()
    slots.lookups = 0
    monkeypatch.setattr(RequestBlocks, "over_trigger", counted_over_trigger)
    monkeypatch.setattr(KVPolicyConfig, "parse", classmethod(counted_parse))
    for _ in range(20):
        server.llm.llm_engine.step()
    assert {request.num_computed_tokens for request in server.scheduler.running} == {62}
    assert (calls["grown"], slots.lookups, calls["parsed"]) == (0, 0, 0)
    for _ in range(6):
        server.llm.llm_engine.step()
    assert calls["grown"] == 6 and slots.lookups == 0
    assert calls["parsed"] == 0
    server.run()


def test_vllms_own_methods_answer_in_steps_that_admit_nothing(engine):
    """The bound of admissions costs a call for each request. Only steps in which a request waits ask it, and none does
    while all requests so far were under `full`."""
    server = engine({**H2O, "budget": 128, "allow": ["full"]}, max_num_seqs=2)
    bounded, calls = AdmittingManager.get_num_blocks_to_allocate, []

    def counted(manager, *args, **kwargs):
        calls.append(kwargs.get("apply_admission_cap", False))
        return bounded(manager, *args, **kwargs)

    def steps(count):
        calls.clear()
        for _ in range(count):
            server.llm.llm_engine.step()
        return len(calls)

    with patch.object(AdmittingManager, "get_num_blocks_to_allocate", counted):
        server.add(random_prompt(40, 1), max_tokens=60, extra_args={"kv_policy": "full"})
        assert steps(4) == 0
        server.add(random_prompt(40, 2), max_tokens=60)
        assert steps(1) and True in calls
        assert steps(4) == 0
        server.add(random_prompt(40, 3), max_tokens=60)  # two run: it waits
        assert steps(4) == 8
    server.run()


# --- survivors renumbered while keys keep their old rotation ---------------------------------------------------------


def test_survivors_renumbered_while_keys_keep_their_rotation(engine, dense):
    """Queries keep the positions that their tokens have in the sequence; a model that closes the gap differs."""
    server = engine(H2O, max_num_batched_tokens=128)
    positions = []
    model = server.worker.model_runner.model.model
    assert model.layers[0].self_attn.rotary_emb is model.layers[1].self_attn.rotary_emb  # called twice a step
    model.layers[0].self_attn.rotary_emb.register_forward_pre_hook(lambda _, args: positions.append(args[0].clone()))
    prompt = random_prompt(300)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 40, "logprobs": 1})])
    computed = np.cumsum([0, *trace.steps])
    assert [p[:n].tolist() for p, n in zip(positions[::2], trace.steps)] == [
        list(range(a, b)) for a, b in zip(computed, computed[1:])
    ]
    assert_like_oracle(dense, prompt, output, trace, H2O)

    class Renumbered(DenseLlama):
        def _rope(self, at):
            return super()._rope(at - BLOCK * (at >= 200))

    tokens = [*prompt, *output.outputs[0].token_ids]
    wrong = replay(
        Renumbered(server.llm.llm_engine.model_config.model), tokens, trace.steps, oracle_config(H2O, prompt)
    )
    logprobs = torch.log_softmax(wrong.logits.double(), -1)[len(prompt) - 1 :]
    said = logprobs[range(40), output.outputs[0].token_ids].numpy()
    assert np.abs(said - logprobs_of(output)).max() > 1e-2, "the comparison would not have noticed"


# --- GQA heads repeated in the cache ---------------------------------------------------------------------------------


def test_gqa_heads_repeated_in_the_cache(engine):
    """4 query heads share 2 KV heads: the cache has 2, and a token costs what it costs in stock vLLM."""
    server, stock = engine(H2O), engine()
    spec, plain = server.manager.kv_cache_spec, stock.manager.kv_cache_spec
    assert spec.num_kv_heads == 2 and spec.page_size_bytes == plain.page_size_bytes == 2 * 2 * BLOCK * 32 * 4
    assert [cache.shape for cache in server.worker.model_runner.kv_caches] == [
        cache.shape for cache in stock.worker.model_runner.kv_caches
    ]


# --- worker-only registration: the engine plans the wrong pool size --------------------------------------------------


def test_worker_only_registration_plans_the_wrong_pool(engine):
    server = engine(WINDOW, blocks=64, max_num_batched_tokens=64)
    spec = server.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    assert type(spec) is EvictableSpec and spec.backend == "CPU_ATTN"
    assert EvictableSpec.merge([spec, spec]) == spec
    config = server.llm.llm_engine.vllm_config
    # 4 blocks, and a chunk of 2 in flight that may reach into one more.
    assert spec.max_memory_usage_bytes(config) == 7 * spec.page_size_bytes
    assert config.cache_config.kv_cache_max_concurrency == pytest.approx(64 / 7, rel=0.02)


def test_a_spec_that_reaches_another_process_brings_its_manager(engine, tmp_path):
    server = engine(WINDOW)
    path = tmp_path / "spec.pickle"
    path.write_bytes(pickle.dumps(server.manager.kv_cache_spec))
    script = (
        "import pickle, sys\n"
        "spec = pickle.load(open(sys.argv[1], 'rb'))\n"
        "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry\n"
        "print(spec.backend, KVCacheSpecRegistry.get_manager_class(spec).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["CPU_ATTN", "EvictableManager"], done.stderr


# --- a baseline crippled to look good --------------------------------------------------------------------------------


def test_a_baseline_crippled_to_look_good(script, monkeypatch):
    """benchmarks/pressure.py gives stock vLLM the engine options, the requests and the warm-up of every other case, and
    only leaves the plugin out."""
    pressure = script("pressure")
    options = pressure.parse_arguments()
    assert (options.requests, options.prompt, options.output, options.pool) == (16, 2000, 500, 8192)

    calls = {}

    class Done(Exception):
        pass

    def make_llm(model, kv_policy=None, **engine_options):
        calls[name] = [engine_options]
        return name

    def run_batch(llm, prompts, output_tokens, on_step=None):
        calls[llm].append((prompts, output_tokens))
        return pressure.Run(1.0, 1.0, 1, 0, 0, 0, 0)

    started = []
    monkeypatch.setattr(pressure, "make_llm", make_llm)
    monkeypatch.setattr(pressure, "run_batch", run_batch)

    def in_child(what, child, environment=None):
        started.append((child, environment))
        return vars(pressure.Run(1.0, 1.0, 1, 0, 0, 0, 0))

    monkeypatch.setattr(pressure, "in_child", in_child)
    options.rounds = 1
    pressure.pressure(options, Path("model"), pressure.Shape())
    assert len(started) == len(pressure.cases(options)) == 8
    for child, environment in started:
        assert environment == ({"VLLM_PLUGINS": ""} if child["policy"] is None else {})
        name = str(child["policy"])
        pressure.pressure_child(child)
    stock = calls.pop("None")
    assert stock[1] != stock[2] and len(stock[2][0]) == 16 and len(stock[2][0][0]) == 2000 and stock[2][1] == 500
    # Blocks of half the heads take half the bytes: as many as fit into the same.
    (duo,) = (calls.pop(case) for case in list(calls) if "duo" in case)
    assert duo[0].pop("num_gpu_blocks_override") is None
    assert duo == [{k: v for k, v in stock[0].items() if k != "num_gpu_blocks_override"}, *stock[1:]]
    assert len(calls) == 6 and all(case == stock for case in calls.values())


# --- only the first request of a process is compressed ---------------------------------------------------------------


def test_only_the_first_request_of_a_process_is_compressed(engine):
    server = engine(H2O, enable_prefix_caching=False)
    prompt = random_prompt(400)
    usages = [server.generate([prompt], max_tokens=30)[0].kv_usage for _ in range(3)]
    assert usages[0].evicted_blocks > 0 and usages == [usages[0]] * 3
    again = engine(H2O, enable_prefix_caching=False)  # and of a second engine
    assert again.generate([prompt], max_tokens=30)[0].kv_usage == usages[0]

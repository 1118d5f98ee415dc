"""Data-parallel ranks evict each for itself: those of a dense model, and those of experts that run in step."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from engine import V2, random_prompt
from preparation import FOLDERS
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

pytestmark = pytest.mark.minutes

POLICY = {"name": "h2o", "budget": 160, "buffer": 32, "sink": 32, "recent": 64}
PROMPTS = [random_prompt(250, seed) for seed in range(4)]
TOKENS = 12 if V2 else 40

#: Two ranks behind one front end. vLLM spawns engines and workers on a CPU; forks have imported everything already.
#: vLLM's CPU engine has no kernel for experts under data parallelism; here they hand on what they get.
SCRIPT = textwrap.dedent(
    """
    import asyncio, gc, json, os, sys

    if int(sys.argv[1]):
        import interpreter

        interpreter.use_model_runner_v2()

    from prometheus_client import REGISTRY
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker


    def counted(worker, run=Worker.execute_dummy_batch):
        open(worker.model_config.model + "/dummies.txt", "a").write(f"{worker.parallel_config.data_parallel_index}\\n")
        run(worker)


    def evicted(rank):
        labels = {"model_name": "tiny", "engine": str(rank), "policy": "h2o"}
        return REGISTRY.get_sample_value("vllm:kv_evict_blocks_evicted_total", labels) or 0


    async def serve(model, spec):
        arguments = AsyncEngineArgs(
            model, served_model_name="tiny", kv_policy=spec["policy"], data_parallel_size=2, dtype="float32",
            enforce_eager=True, seed=0, max_model_len=2048, block_size=32, num_gpu_blocks_override=64,
            kv_cache_memory_bytes=64 << 20, max_num_seqs=8, max_num_batched_tokens=128,
        )
        config = arguments.create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()  # engines collect all that they inherited otherwise, many times
        llm = AsyncLLM.from_vllm_config(config)

        async def ask(number, rank):
            before = evicted(rank)
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=spec["tokens"])
            prompt = {"prompt_token_ids": spec["prompts"][number]}
            async for output in llm.generate(prompt, params, f"{number}-{rank}", data_parallel_rank=rank):
                pass
            await asyncio.sleep(0.1)  # what the step counted comes with its outputs, and is shown after them
            usage = output.kv_usage.as_dict()
            return dict(tokens=list(output.outputs[0].token_ids), usage=usage, counted=evicted(rank) - before)

        whole = SamplingParams(max_tokens=40, extra_args={"kv_policy": "full"})
        try:
            llm.generate({"prompt_token_ids": [1] * 1977}, whole, "whole")
        except VLLMValidationError as error:
            assert "may grow to 2017 tokens; expected at most 2016" in str(error), error
        else:
            raise AssertionError("taken in, where no rank has room for it")

        # One rank at a time, while the other has nothing; after a pause, both.
        results = [await ask(0, 0), await ask(1, 1)]
        await asyncio.sleep(0.5)
        results += await asyncio.gather(ask(2, 0), ask(3, 1))
        json.dump(results, open(model + "/answer.json", "w"))
        llm.shutdown()


    if __name__ == "__main__":
        MoERunner.forward = lambda self, hidden_states, *args, **kwargs: hidden_states
        Worker.execute_dummy_batch = counted
        for model in sys.argv[3:]:
            asyncio.run(serve(model, json.loads(sys.argv[2])))
    """
)


def experts(folder, tiny):
    """The tiny model's attention in a mixture of experts."""
    config = json.loads((tiny / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    config |= {"num_local_experts": 1, "num_experts_per_tok": 1}
    shutil.copytree(tiny, folder)
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {"mlp.gate_proj": "w1", "mlp.down_proj": "w2", "mlp.up_proj": "w3"}
    weights = load_file(tiny / "model.safetensors")
    for name in list(weights):
        for old, new in renamed.items():
            if old in name:
                weights[name.replace(old, f"block_sparse_moe.experts.0.{new}")] = weights.pop(name)
    for layer in range(config["num_hidden_layers"]):
        weights[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = torch.zeros(1, config["hidden_size"])
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """The tiny model, dense and with experts; both served, one after the other, by a process of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    made = {} if V2 else {"dense": shutil.copytree(tiny, folder / "dense")}
    made["experts"] = experts(folder / "experts", tiny)
    (folder / "serve.py").write_text(SCRIPT)
    spec = {"policy": POLICY, "prompts": PROMPTS, "tokens": TOKENS}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    command = [sys.executable, folder / "serve.py", str(int(V2)), json.dumps(spec), *map(str, made.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return made


def results_of(model):
    """Record the output of a model's ranks, and the ranks of dummy batches."""
    dummies = model / "dummies.txt"
    return json.loads((model / "answer.json").read_text()), dummies.read_text().split() if dummies.exists() else []


def check(results, alone):
    """Each answer is the one that an engine without other ranks gives, and its rank counted what it evicted."""
    for prompt, result in zip(PROMPTS, results, strict=True):
        (output,) = alone.generate([prompt], max_tokens=TOKENS)
        assert result["tokens"] == list(output.outputs[0].token_ids)
        assert result["usage"]["evicted_blocks"] == result["counted"] == output.kv_usage.evicted_blocks > 0


def test_ranks_of_a_dense_model_are_engines_of_their_own(models, engine):
    results, dummies = results_of(models["dense"])
    check(results, engine(POLICY, models["dense"], max_num_batched_tokens=128))
    assert not dummies


@pytest.mark.both_runners
def test_ranks_of_experts_keep_step_until_the_wave_ends(models, engine, monkeypatch):
    """Batches of one that has nothing are made up, and spoil nothing of what it is asked for afterwards."""
    results, dummies = results_of(models["experts"])
    monkeypatch.setattr(MoERunner, "forward", lambda self, hidden_states, *args, **kwargs: hidden_states)
    check(results, engine(POLICY, models["experts"], max_num_batched_tokens=128))
    assert all(dummies.count(rank) >= TOKENS for rank in "01")

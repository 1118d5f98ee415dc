"""vLLM under Ray (the extra `ray`): Ray Data, Ray Serve, actors, vLLM's own executor and data parallelism on Ray.

vLLM's executor on Ray asks for accelerators. Here Ray is told of two GPUs, the CPU's platform that they are what it runs
on, and nobody touches them: workers, messages and collectives are those of the CPU engine.
"""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from engine import random_prompt

pytest.importorskip("ray.llm", reason="Ray is not installed: the extra `ray`")
pytestmark = [pytest.mark.timeout(1200), pytest.mark.minutes]

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "needle/model"
POLICY = {"name": "h2o", "budget": 160, "buffer": 32, "sink": 32, "recent": 64, "allow": ["sink-window"]}
PROMPTS = [random_prompt(length, length) for length in (420, 190, 260)]
ASKED = [None, None, {"kv_policy": "sink-window", "kv_budget": None}]
TOKENS = 60

#: Run by each process of the cluster before anything else.
HOOK = textwrap.dedent(
    """
    def hook():
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.ray_device_key = "GPU"
    """
)
#: Answers PROMPTS in an actor, by two ranks on vLLM's Ray executor, and by two data-parallel ranks that are actors.
SCRIPT = textwrap.dedent(
    """
    import asyncio, gc, json, os, sys
    from dataclasses import asdict

    import as_gpu
    import ray

    spec = json.loads(sys.argv[1])
    ARGUMENTS = dict(
        model=spec["model"], kv_policy=spec["policy"], dtype="float32", enforce_eager=True, seed=0, max_model_len=2048,
        block_size=32, num_gpu_blocks_override=128, kv_cache_memory_bytes=64 << 20, max_num_seqs=8,
        max_num_batched_tokens=192,
    )


    def params(asked):
        from vllm import SamplingParams

        return SamplingParams(temperature=0, ignore_eos=True, max_tokens=spec["tokens"], extra_args=asked)


    def generate(llm):
        # One after the other: what is in a step together depends on when it comes.
        asked = [({"prompt_token_ids": prompt}, params(asked)) for prompt, asked in zip(spec["prompts"], spec["asked"])]
        return [output for each in asked for output in llm.generate(*each, use_tqdm=False)]


    def answer(output):
        return {"tokens": list(output.outputs[0].token_ids), "usage": asdict(output.kv_usage)}


    @ray.remote(num_cpus=1)
    class Actor:
        # What the driver has in its environment for its own engines is not for this one.
        def __init__(self):
            from vllm import LLM

            os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
            self.llm = LLM(**ARGUMENTS)

        def generate(self):
            return generate(self.llm)


    def in_an_actor():
        actor = Actor.remote()
        outputs = ray.get(actor.generate.remote())
        ray.kill(actor)
        return outputs


    def on_the_executor():
        from vllm import LLM

        llm = LLM(**ARGUMENTS, tensor_parallel_size=2, distributed_executor_backend="ray")
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        assert type(executor).__name__ == "RayExecutorV2"
        outputs = generate(llm)
        executor.shutdown()
        ray.util.remove_placement_group(executor.parallel_config.placement_group)
        return outputs


    async def in_parallel():
        from prometheus_client import REGISTRY
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**ARGUMENTS, served_model_name="tiny", data_parallel_size=2, data_parallel_backend="ray")
        )

        async def ask(number, prompt, asked):
            prompt = {"prompt_token_ids": prompt}
            async for output in llm.generate(prompt, params(asked), str(number), data_parallel_rank=number % 2):
                pass
            return output

        outputs = [await ask(*each) for each in zip(range(len(spec["prompts"])), spec["prompts"], spec["asked"])]
        await asyncio.sleep(0.5)  # what the last step counted comes with its outputs, and is shown after them
        evicted = [
            sum(
                REGISTRY.get_sample_value(
                    "vllm:kv_evict_blocks_evicted_total",
                    {"model_name": "tiny", "engine": str(rank), "policy": policy},
                )
                for policy in ("h2o", "sink-window")
            )
            for rank in range(2)
        ]
        llm.shutdown()
        return outputs, evicted


    if __name__ == "__main__":
        ray.init(
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": "as_gpu.hook"},
        )
        as_gpu.hook()
        results = {"actor": in_an_actor(), "executor": on_the_executor()}
        results["parallel"], evicted = asyncio.run(in_parallel())
        results = {name: [answer(output) for output in outputs] for name, outputs in results.items()}
        os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"
        try:
            on_the_executor()
        except Exception as error:
            results["older executor"] = f"{type(error).__name__}: {error}"
        json.dump({**results, "evicted": evicted}, open(sys.argv[2], "w"))
        ray.shutdown()
    """
)


def run(*command, **environment):
    """Return the output of a script that starts its own cluster."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(200 << 20),
        **environment,
    }
    # Neither the tests' interpreter of Triton, nor a cluster that somebody else has started.
    for name in ("TRITON_INTERPRET", "RAY_ADDRESS"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def free_ports():
    """The first of two neighbours."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("localhost", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    """Results of SCRIPT."""
    folder = tmp_path_factory.mktemp("ray")
    script, results = folder / "serve.py", folder / "results.json"
    script.write_text(SCRIPT)
    (folder / "as_gpu.py").write_text(HOOK)
    spec = {"model": str(tiny), "policy": POLICY, "prompts": PROMPTS, "asked": ASKED, "tokens": TOKENS}
    run(
        script,
        json.dumps(spec),
        results,
        PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="|".join(str(rank % (os.cpu_count() or 1)) for rank in range(2)),
    )
    return json.loads(results.read_text())


@pytest.mark.parametrize("where", ["actor", "executor", "parallel"])
def test_answers_and_usage_are_those_without_ray(served, engine, where):
    alone = engine(POLICY, max_num_batched_tokens=192)
    for prompt, asked, got in zip(PROMPTS, ASKED, served[where], strict=True):
        (output,) = alone.generate([prompt], max_tokens=TOKENS, extra_args=asked)
        assert got["tokens"] == list(output.outputs[0].token_ids)
        usage = output.kv_usage
        assert got["usage"]["policy"] == usage.policy and got["usage"]["budget_tokens"] == usage.budget_tokens == 160
        assert got["usage"]["evicted_blocks"] == usage.evicted_blocks
    assert all(got["usage"]["evicted_blocks"] for got in served[where])


def test_each_data_parallel_actor_counts_what_it_evicts(served):
    blocks = [got["usage"]["evicted_blocks"] for got in served["parallel"]]
    assert served["evicted"] == [blocks[0] + blocks[2], blocks[1]]


def test_the_executor_that_goes_past_workers_is_refused(served):
    said = served["older executor"]
    assert said.startswith("KVPolicyError: KV policy 'h2o' can't be used with vLLM's older Ray executor"), said
    assert "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in said


def lines(said, *starts):
    """Those lines, one each, that begin like this."""
    found = [[line for line in said.splitlines() if line.startswith(start)] for start in starts]
    assert all(len(each) == 1 for each in found), said
    return [line for (line,) in found]


def blocks_of(line):
    """Blocks that a request lost, from its usage in the line."""
    return int(re.search(r"'evicted_blocks': (\d+)", line)[1])


def test_ray_data():
    """Of three rows one goes by the engine's policy, one by its own, and one is refused alone."""
    plain, own, refused = lines(run(EXAMPLES / "ray_batch.py"), "961 + 64 tokens", "719 + 64 tokens", "VLLMValidation")
    assert "'policy': 'h2o', 'budget_tokens': 512" in plain and blocks_of(plain) > 0
    assert "'policy': 'sink-window', 'budget_tokens': 256" in own and blocks_of(own) > 0
    assert "kv_budget 9999 comes to" in refused and "above the server's 512" in refused


def test_ray_serve():
    said = run(EXAMPLES / "ray_serve.py", MODEL, str(free_ports()))
    plain, own, refused, *metrics = lines(
        said, "the server: ", "{'kv_policy': 'sink", "{'kv_policy': 'nothing", "h2o: ", "sink"
    )
    assert "'policy': 'h2o', 'budget_tokens': 512" in plain and blocks_of(plain) > 0
    assert "'policy': 'sink-window', 'budget_tokens': 256" in own and blocks_of(own) > 0
    assert "400" in refused and "unknown KV policy 'nothing-of-the-kind': expected one of: " in refused
    assert metrics == [
        f"{name}: {blocks_of(line)}.0 blocks evicted" for name, line in (("h2o", plain), ("sink-window", own))
    ]

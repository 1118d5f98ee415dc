"""Two ranks keep what one keeps: every rank sees half of the heads, and all must agree on what goes."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from oracle.tiny import make_tiny_llama

pytestmark = pytest.mark.minutes

BASE = {"name": "h2o", "budget": 160, "buffer": 32, "sink": 32, "recent": 64}
WINDOW = {"kv_policy": "sink-window"}
#: What is served by one engine: the server's policy, and what each of three requests asks for. "windows" is of a model with
#: sliding windows, whose KV groups ranks have alike.
SERVERS = {
    "h2o": ({**BASE, "allow": ["sink-window", "rkv"]}, [{"kv_policy": "rkv"}, None, WINDOW]),
    # Scores of each rank's own heads, of keys and of queries.
    "max": (
        {**BASE, "heads": "max", "layers": "max", "allow": ["keydiff"]},
        [None, {"kv_budget": 128}, {"kv_policy": "keydiff"}],
    ),
    # Heads are dealt out anew: each rank has the retrieval head of one layer and the streaming head of the other.
    "duo": (
        {"name": "duo", "pattern": ["01", "01"], "sink": 32, "recent": 64, "retrieval": BASE},
        [None, None, {"kv_budget": 128}],
    ),
    # Each rank chooses for its own heads, by the mass of decodes or what its heads drew from the repetition.
    "tokens": (
        {**BASE, "name": "kvzip", "granularity": "token", "allow": ["h2o"]},
        [None, {"kv_budget": 128}, {"kv_policy": "h2o"}],
    ),
    # One set for the heads of a layer is agreed on.
    "tokens-layer": (
        {**BASE, "name": "kvzip", "granularity": "token", "sets": "layer", "unit": 16, "allow": ["h2o"]},
        [None, {"kv_budget": 128}, {"kv_policy": "h2o"}],
    ),
    "pyramidkv": ({**BASE, "name": "pyramidkv", "bands": 2}, [None, None, None]),
    "windows": (BASE, [None, {"kv_budget": 128}, None]),
    # Each rank rotates the keys of its own heads.
    "context": ({**BASE, "context": 448}, [None, None, {"kv_budget": 128}]),
}

#: Serves each of SERVERS with an engine of its own; writes tokens, log-probabilities and usage. vLLM spawns engines and
#: workers on a CPU; forks have imported everything already.
SCRIPT = textwrap.dedent(
    """
    import gc, json, os, sys
    from dataclasses import asdict

    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__


    def forking(cls, vllm_config):
        update(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


    def main(plain, windows, ranks, servers, path):
        results = {}
        for name, (policy, wishes) in json.loads(servers).items():
            model = windows if name == "windows" else plain
            llm = LLM(
                model, kv_policy=policy, tensor_parallel_size=int(ranks), dtype="float32", enforce_eager=True, seed=0,
                max_model_len=1024, block_size=32, num_gpu_blocks_override=128, kv_cache_memory_bytes=64 << 20,
                max_num_seqs=8, max_num_batched_tokens=192,
            )
            prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (420, 90, 260)]
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [
                    SamplingParams(temperature=0, ignore_eos=True, max_tokens=130, logprobs=0, extra_args=extra)
                    for extra in wishes
                ],
                use_tqdm=False,
            )
            results[name] = [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "logprobs": [next(iter(row.values())).logprob for row in output.outputs[0].logprobs],
                    "usage": asdict(output.kv_usage),
                }
                for output in outputs
            ]
            del llm
        json.dump(results, open(path, "w"))


    if __name__ == "__main__":
        CpuPlatform.check_and_update_config = classmethod(forking)
        gc.freeze()  # engines collect all that they inherited otherwise, many times
        main(*sys.argv[1:])
    """
)


def serve(folder, models, ranks, servers):
    script, answer = folder / "serve.py", folder / f"ranks-{ranks}.json"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if ranks > 1 else "0",
        # A mask for each rank; the masks may name the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
        if ranks > 1
        else "nobind",
    }
    done = subprocess.run(
        [sys.executable, script, *models, str(ranks), json.dumps(servers), answer],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    """Results by server, of one rank and of two."""
    folder = tmp_path_factory.mktemp("ranks")
    models = tiny, make_tiny_llama(folder / "model", layers=3, windows=[48, 0, 48])
    return serve(folder, models, 1, SERVERS), serve(folder, models, 2, SERVERS)


@pytest.mark.parametrize("name", SERVERS)
def test_two_ranks_evict_and_say_what_one_does(served, name):
    assert_alike(*(results[name] for results in served))


def assert_alike(one, two):
    for alone, together in zip(one, two, strict=True):
        assert together["usage"] == alone["usage"]
        assert together["usage"]["evicted_blocks"] > 0
        assert together["tokens"] == alone["tokens"]
        assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-3)

"""Runs vLLM, and this project on it: stock vLLM, its own levers against a small pool, and policies.

Each load is a process of its own, because stock vLLM runs without the plugin. Answers come from `vllm-evict eval`, in
the settings of the other peers: `agnostic` as kvpress, the whole context in one chunk and the question after the first
decision, and `aware` as OpenVINO, which decides after the question.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Clock, Load, main

sys.path.append(str(Path(__file__).parents[1]))

#: Sizes of `h2o` and `sink-window` as in benchmarks/pressure.py; `budget` and `recent` follow from the cases.
H2O = {"name": "h2o", "sink": 32, "recent": 64, "buffer": 0}
WINDOW = {"name": "sink-window", "sink": 32}
#: Options of `LLM`, and the policy; None is stock vLLM, without the plugin.
LOADS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "stock": ({}, None),
    "--max-num-seqs 3": ({"max_num_seqs": 3}, None),
    "prefix caching": ({"enable_prefix_caching": True}, None),
    "--kv-cache-dtype fp8": ({"kv_cache_dtype": "fp8"}, None),
    "--kv-offloading-size 1": ({"enable_prefix_caching": True, "kv_offloading_size": 1}, None),
    "sink-window": ({}, WINDOW),
    "h2o": ({}, H2O),
}
BFLOAT16 = ("stock", "--kv-cache-dtype fp8", "sink-window", "h2o")
#: As `LOADS`, of more requests.
FP8 = {name: LOADS[name] for name in ("stock", "--kv-cache-dtype fp8", "h2o")} | {
    "sink-window, fp8": ({"kv_cache_dtype": "fp8"}, WINDOW),
    "h2o, fp8": ({"kv_cache_dtype": "fp8"}, H2O),
}
SNAPKV = {**H2O, "name": "snapkv"}
#: As `LOADS`, of a load that asks for needles.
SERVED = {name: LOADS[name] for name in ("stock", "--kv-cache-dtype fp8", "sink-window", "h2o")} | {
    "h2o, pressure": ({}, {**H2O, "accumulate": "ema", "when": "pressure", "admit": True}),
    "snapkv": ({}, SNAPKV),
    "snapkv, whole prompts": ({}, {**SNAPKV, "prompt": "whole"}),
    "tova, whole prompts": ({}, {**H2O, "name": "tova", "prompt": "whole"}),
    "full, host": ({}, {**H2O, "name": "full", "evict": "host", "host": "1GiB"}),
}
#: Cases of all parts that are timed.
TIMED = LOADS | FP8 | SERVED
TOKEN = {"granularity": "token", "buffer": 64}
#: Sinks and recent tokens may go, as in kvpress.
BARE = {**TOKEN, "protect": False}
BLOCKS = {"sink": 32, "recent": 32, "buffer": 32}
#: Setting, and the policy without its budget.
NEEDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("agnostic", {"name": "full"}),
    "sink-window": ("agnostic", {"name": "sink-window", "sink": 32, "buffer": 64}),
    "snapkv": ("agnostic", {"name": "snapkv", **TOKEN, "sink": 0, "recent": 32, "kernel": 1}),
    "snapkv, one set": ("agnostic", {"name": "snapkv", **TOKEN, "sink": 32, "recent": 32, "kernel": 7, "sets": "all"}),
    "tova": ("agnostic", {"name": "tova", **TOKEN, "sink": 0, "recent": 1}),
    "keydiff": ("agnostic", {"name": "keydiff", **BARE}),
    "knorm": ("agnostic", {"name": "knorm", **BARE}),
    "h2o, mean": ("agnostic", {"name": "h2o", **BARE, "accumulate": "mean"}),
    "kvzip": ("agnostic", {"name": "kvzip", **TOKEN, "sink": 32, "recent": 0}),
    "rkv": ("agnostic", {"name": "rkv", **TOKEN, "sink": 32, "recent": 32}),
    "duo": ("agnostic", {"name": "duo", "gates": "configs/heads/needle", "sparsity": 0.5, "sink": 32, "recent": 64}),
    "full, aware": ("aware", {"name": "full"}),
    "h2o, aware": ("aware", {"name": "h2o", **BLOCKS}),
    "h2o mean, aware": ("aware", {"name": "h2o", **BLOCKS, "accumulate": "mean"}),
    "snapkv, aware": ("aware", {"name": "snapkv", **BLOCKS, "window": 8, "kernel": 1}),
    "rkv, aware": ("aware", {"name": "rkv", **BLOCKS}),
}


def load(name: str, spec: dict) -> Iterator[Load]:
    from engines import make_llm, run_batch, scheduler_of

    options, policy = TIMED[name]
    if policy is WINDOW:
        policy = {**WINDOW, "recent": spec["budget"] - WINDOW["sink"] - spec["block"]}
    elif policy is not None:
        policy = {**policy, "budget": spec["budget"]}
    prompts, bytes_per_token = spec["prompts"], spec["kv_bytes_per_token"]
    llm = make_llm(
        spec["model"],
        policy,
        **{
            "dtype": spec["dtype"],
            "max_model_len": len(prompts[0]) + spec["output"],
            "block_size": spec["block"],
            # The same bytes for all: a cache of fp8 has several times as many blocks.
            "kv_cache_memory_bytes": spec["pool"] * bytes_per_token,
            "max_num_seqs": len(prompts),
            "max_num_batched_tokens": spec["chunk"],
            "enable_prefix_caching": False,
            "enforce_eager": spec["eager"],
            **options,
        },
    )
    config = scheduler_of(llm).kv_cache_config
    page = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    run_batch(llm, spec["warm"], spec["output"] // 8)
    for requests in spec["batches"]:
        row, ended = Load(name, requests), {}
        if options.get("enable_prefix_caching"):
            llm.reset_prefix_cache()
        clock = Clock()
        on_step = lambda outputs: ended.update((output.request_id, output) for output in outputs)  # noqa: E731
        run = run_batch(llm, prompts[:requests], spec["output"], on_step)
        clock.stop(row)
        row.preemptions, row.at_once, row.peak_kv_bytes = run.preemptions, run.peak_requests, run.peak_blocks * page
        outputs = [ended[f"request-{index}"] for index in range(requests)]
        row.first = [output.metrics.first_token_latency for output in outputs]
        row.keep([list(output.outputs[0].token_ids) for output in outputs], spec)
        yield row


def needles(names: list[str], spec: dict) -> Iterator[dict[str, Any]]:
    from cases import Sizes

    from vllm_evict.tools.eval.policies import contenders
    from vllm_evict.tools.eval.run import run

    sizes = Sizes(**{**spec["sizes"], "depths": tuple(spec["sizes"]["depths"])})
    for setting in sorted({NEEDLES[name][0] for name in names}):
        here = {name: json.dumps(NEEDLES[name][1]) for name in names if NEEDLES[name][0] == setting}
        labels = {name: contenders(policy, ())[0].label for name, policy in here.items()}
        with tempfile.TemporaryDirectory() as folder:
            plan = replace(
                sizes.plan,
                out=Path(folder),
                policies=",".join(here.values()),
                budgets=tuple(spec["budgets"].values()),
                settings=(setting,),
                batch=10,
                engine_args={"dtype": "float32", "enforce_eager": True, "max_model_len": 2 * sizes.length + 256},
            )
            rows = run(plan, print)
        for name, label in labels.items():
            for budget, tokens in [*spec["budgets"].items(), (None, None)]:
                found = [row for row in rows if row["policy"] == label and row["budget"] == tokens]
                found.sort(key=lambda row: (plan.tasks.index(row["task"]), row["depth"], row["index"]))
                if found:
                    answers = [row["answer"] for row in found]
                    yield {"case": name, "setting": setting, "budget": budget, "answers": answers}


if __name__ == "__main__":
    main(load, needles, ("transformers",))

"""Measures the cost of a decision: choosing the evicted blocks, and reporting their statistics.

    python benchmarks/decide.py [--rounds 3] [--threads 1]
    python benchmarks/decide.py --model examples/needle/model --batch 16     keys of a model that reads documents

Scheduler: `RequestBlocks.choose` on a report of as many resident blocks as a request holds at its decision, and
`RequestBlocks.evict`. Worker: the report, from running sums or from a KV cache of all requests in float32, with blocks
in random places, so that keys come from memory. Keys are random: few are alike, unless they --lean to one direction, or
are those of a Llama that reads documents of the harness (--model).
Decisions are timed one by one; the result is the median of `--repeats`, in CPU time. Running sums are not part of it
(`pressure.py --step` times them).

Share: the time of a decision and its report, over the request's share of the decode steps between two of its decisions:
`steps between decisions` x a step / requests. The step is vLLM's own (policy `full`), measured in an engine with a
random Llama of the same shape and batch; use a smaller --batch if memory is short.

Writes a Markdown table and a JSON with hardware, versions, command and all raw timings to --out.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import make_llm, random_prompts
from models import Shape, make_model
from pressure import CHUNK, decode_steps
from reports import in_child, progress, publish, run_script, spread

#: Repeats of calls that take longer than SLOW seconds.
FEW, SLOW = 7, 0.05


def cpu_seconds(call: Callable[[int], Any], repeats: int) -> float:
    """Median CPU time of call(0), call(1), ...; the first is not counted."""
    times = []
    for number in range(repeats + 1):
        start = time.process_time()
        call(number)
        times.append(time.process_time() - start)
        if times[0] > SLOW and number == FEW:
            break
    return statistics.median(times[1:])


def decide_child(spec: dict) -> dict:
    """All policies, once: name -> steps between decisions and CPU seconds of each part."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    options, shape = argparse.Namespace(**spec["options"]), Shape(**spec["shape"])
    import torch

    from vllm_evict.compute.attention.cpu import KEY_LAYOUTS
    from vllm_evict.compute.kernels.mass import pack_keys

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    layout = _get_attn_isa(torch.float32, options.block_size, shape.head_dim)
    held = options.resident // options.block_size
    size = (options.batch * held, shape.kv_heads, options.block_size, 2 * shape.head_dim)
    layers = [SimpleNamespace(isa=layout, kv_cache=torch.randn(size)) for _ in range(shape.layers)]
    tables = torch.randperm(options.batch * held).view(options.batch, held)
    if options.model is not None:
        for layer, keys in zip(layers, keys_of(options.model, options.batch, options.resident), strict=True):
            blocks = keys.unflatten(1, (held, options.block_size)).transpose(2, 3).flatten(0, 1)
            halves = layer.kv_cache.view(len(blocks), shape.kv_heads, 2, options.block_size, shape.head_dim)
            halves[tables.flatten(), :, 0] = pack_keys(blocks, KEY_LAYOUTS[layout])
    for layer in layers if options.lean else ():
        lean = options.lean * torch.randn(1, shape.kv_heads, 1, shape.head_dim).expand(-1, -1, options.block_size, -1)
        both = pack_keys(lean, KEY_LAYOUTS[layout]), torch.zeros_like(lean)
        layer.kv_cache += torch.cat(both, 2).view(1, *size[1:])
    return {name: one_policy(name, options, shape, layers, tables) for name in options.policies}


def keys_of(model: str, requests: int, tokens: int) -> list[Any]:
    """Keys of a model that reads documents of the task `multikey`: of each layer float32 [requests, tokens, Hkv, D]."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_evict.tools.eval.prompts import Prompts
    from vllm_evict.tools.eval.tasks import make
    from vllm_evict.tools.eval.words import Filler

    prompts, llama = Prompts(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    read, filler = [], Filler()
    for index in range(requests):
        sample = make("multikey", tokens, 0.5, index, 0, prompts.count, filler)
        with torch.inference_mode():
            cache = llama(torch.tensor([prompts.ids(sample)[:tokens]])).past_key_values
        read.append([layer.keys.transpose(1, 2) for layer in cache.layers])
    return [torch.cat(layer) for layer in zip(*read)]


def shape_of(model: str) -> Shape:
    """Sizes of a Llama, from its config.json."""
    config = json.loads(Path(model, "config.json").read_text())
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "intermediate": "intermediate_size", "vocab": "vocab_size"}
    sizes = {size: config[name] for size, name in names.items()}
    return Shape(**sizes, head_dim=config["head_dim"], max_len=config["max_position_embeddings"])


def one_policy(name: str, options: argparse.Namespace, shape: Shape, layers: list[Any], tables: Any) -> dict:
    from vllm_evict.compute.attention.cpu import CPUOps
    from vllm_evict.compute.cached import CachedStatistics, Row
    from vllm_evict.compute.sums import RunningSums
    from vllm_evict.config import KVPolicyConfig
    from vllm_evict.core.blocks import RequestBlocks
    from vllm_evict.core.plan import Report, Scoring
    from vllm_evict.policies import CACHED, POLICIES, RUNNING

    policy, block_size = POLICIES[name], options.block_size
    held = tables.shape[1]
    # The decision comes when the request begins a block above its trigger.
    buffer = math.ceil(policy.defaults["buffer"] / block_size)
    config = KVPolicyConfig(name=name, budget=(held - 1 - buffer) * block_size)
    limits = config.limits(block_size, options.resident)
    assert held == limits.trigger + 1, "not where a decision falls"
    # Half of the blocks that the request ever had are evicted; the newest are resident.
    rng = np.random.default_rng(0)
    newest = math.ceil(config.recent / block_size) + 1
    blocks = 2 * held
    older = rng.permutation(np.arange(limits.sink, blocks - newest))[: held - limits.sink - newest]
    resident = np.sort(np.concatenate((np.arange(limits.sink), older, np.arange(blocks - newest, blocks))))
    computed = (blocks - 1) * block_size + 1
    report = (
        Report(resident, {statistic: rng.random(held) for statistic in sorted(policy.measures)})
        if (policy.measures)
        else None
    )
    residents = [RequestBlocks(config, limits, block_size) for _ in range(options.repeats + 1)]
    for each in residents:
        each.residence.adopt(resident, blocks)

    def choose(number: int) -> None:
        victims = residents[number].choose(computed, report)
        residents[number].evict(victims, computed)

    choosing = cpu_seconds(choose, options.repeats)
    assert residents[0].evicted_blocks == buffer + 1, "not what a decision takes"

    reporting = {"running": 0.0, "cached": 0.0}
    same = lambda values, maximise: values  # noqa: E731  (no tensor parallelism)
    if policy.measures & RUNNING:
        sums = RunningSums(
            options.batch, shape.kv_heads, shape.layers, blocks + 1, block_size, config.heads, config.layers
        )
        ids = [str(number) for number in range(options.batch)]
        for req_id in ids:
            sums.start(req_id, Scoring.of(config, limits.trigger))
        reporting["running"] = cpu_seconds(
            lambda number: sums.report([ids[number % len(ids)]], [resident], same), options.repeats
        )
    if policy.measures & CACHED:
        read = lambda physical, values: (CPUOps().read(layer, layer.kv_cache, physical, values) for layer in layers)  # noqa: E731
        cached = CachedStatistics(read, [shape.kv_heads] * shape.layers, config.heads, config.layers)
        length = (held - 1) * block_size + 1
        rows = [Row(resident, table, length) for table in tables]
        reporting["cached"] = cpu_seconds(
            lambda number: cached.report({"r": policy.measures}, {"r": rows[number % len(rows)]}, same),
            options.repeats,
        )
    return {"steps": (buffer + 1) * block_size, "choose": choosing, **reporting}


def step_child(spec: dict) -> dict:
    """Decode steps of the batch, all blocks resident: seconds and CPU seconds of each."""
    options, shape = argparse.Namespace(**spec["options"]), Shape(**spec["shape"])
    # The first requests decode while the prompts of the last ones are computed.
    early = options.batch * math.ceil(options.resident / CHUNK)
    tokens = options.steps + 2 * early
    prompt = options.resident - (early + options.steps) // 2
    longest = prompt + tokens
    blocks = options.batch * (math.ceil(longest / options.block_size) + 1) + 2 * CHUNK // options.block_size
    llm = make_llm(
        spec["model"],
        {"name": "full"},
        max_model_len=longest,
        block_size=options.block_size,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=blocks * options.block_size * shape.kv_bytes_per_token(),
        max_num_seqs=options.batch,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    return decode_steps(llm, random_prompts(options.batch, prompt, shape.vocab), "full", tokens, options.steps)


def decide(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    spec = {"model": str(model), "shape": asdict(shape), "options": vars(options)}
    with progress() as bar:
        task = bar.add_task(f"decode steps of {options.batch} x {options.resident} tokens", total=options.rounds + 1)
        step = in_child("step", spec)
        bar.advance(task)
        rounds = []
        for number in range(options.rounds):
            bar.update(task, description=f"decisions, round {number + 1}")
            rounds.append(in_child("decide", spec))
            bar.advance(task)
    return {"step": step, "rounds": rounds}


def table(report: dict) -> str:
    options = argparse.Namespace(**report["options"])
    held = options.resident // options.block_size
    step = statistics.median(report["step"]["cpu_seconds"])
    lines = [
        f"A decode step of {options.batch} requests: {1e3 * step:.1f} ms of CPU.",
        "",
        "| policy | decide, µs (rounds) | report, µs (rounds) | both, µs a resident block | steps between decisions "
        "| share of these steps | if it decided at every block |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in report["rounds"][0]:
        runs = [run[name] for run in report["rounds"]]
        choose = [1e6 * run["choose"] for run in runs]
        reporting = [1e6 * (run["running"] + run["cached"]) for run in runs]
        both = statistics.median(map(sum, zip(choose, reporting)))
        steps = runs[0]["steps"]
        share = both * 1e-6 * options.batch / step
        lines.append(
            f"| {name} | {spread(choose, '.0f')} | {spread(reporting, ',.0f') if any(reporting) else 'none'} "
            f"| {both / held:,.2f} | {steps} | {share / steps:.2%} | {share / options.block_size:.2%} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    from vllm_evict.policies import CACHED, POLICIES, RUNNING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", default="out/decide")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="requests")
    parser.add_argument("--resident", type=int, default=4096, help="resident tokens of each")
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed")
    parser.add_argument("--model", metavar="DIR", help="a Llama whose keys and decode steps are measured")
    parser.add_argument("--lean", type=float, default=0.0, help="weight of a direction that all keys of a head share")
    # Policies that decide block by block with what their own requests hold: no bands, reconstructions or bounds.
    measured = frozenset().union(RUNNING, CACHED)
    others = [name for name, each in POLICIES.items() if "protect" in each.defaults and each.measures <= measured]
    others = [name for name in others if not (POLICIES[name].allocator.splits or POLICIES[name].reconstructs)]
    parser.add_argument("--policies", nargs="+", choices=others, default=others, metavar="POLICY")
    group = parser.add_argument_group("model (random weights)")
    for size in fields(Shape):
        group.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    options = parser.parse_args()
    return options


def main() -> None:
    options = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    shape = Shape(**{size.name: getattr(options, size.name) for size in fields(Shape)})
    with tempfile.TemporaryDirectory() as folder:
        if options.model is not None:
            shape = shape_of(options.model)
            vars(options).update(asdict(shape))
        report = decide(options, Path(options.model) if options.model else make_model(folder, shape), shape)
    title = (
        f"Decisions of {options.batch} requests of {options.resident:,} resident tokens, {shape.layers} layers of "
        f"{shape.kv_heads} x {shape.head_dim} in float32"
    )
    publish(options, "decide", title, table, report)


if __name__ == "__main__":
    run_script(main, decide=decide_child, step=step_child)

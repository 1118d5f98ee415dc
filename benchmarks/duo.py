"""Measures the savings of retrieval and streaming heads on the engine: blocks held, and time of a decode step.

    python benchmarks/duo.py                 decode latency at growing context, stock vLLM and duo in turn
    python benchmarks/duo.py --prompts       time to the first token of such prompts
    python benchmarks/duo.py --read 1024     decode latency of `full` with read in place of duo, and its attention alone
    python benchmarks/duo.py --memory        blocks held, on models of the published patterns' shapes

Latency: one request decodes at each context. Each prompt extends the one before, so the prefix cache has most of its
tokens; with --prompts it has none. Each case is a process of its own, cases run in turn, and a ratio compares two runs
of the same round. "stock" runs with VLLM_PLUGINS empty. The models have random weights: MHA with a quarter of the KV
heads as retrieval heads, GQA with half. With --read layers read so many tokens, and times of attention are those of the
backend's `forward` in all layers, with the choice of blocks and without the write of keys and values.

Memory: layers, query and KV heads are those of the model for which the pattern was published; the width is tiny. Blocks
are counted in the scheduler while the last token is computed, and compared with the numbers that the pattern predicts.

Writes a Markdown table and a JSON with hardware, versions, command and all raw figures to --out.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines import greedy, make_llm, random_prompts, run_batch, scheduler_of
from models import Shape, make_model
from reports import in_child, progress, publish, run_script

SINK, RECENT = 128, 256
#: Name -> shape, one layer's pattern.
LATENCY = {
    "MHA, 25 % retrieval": (Shape(heads=32, kv_heads=32, max_len=1 << 16), "1" * 8 + "0" * 24),
    "GQA, 50 % retrieval": (Shape(heads=32, kv_heads=8, max_len=1 << 16), "1010" * 2),
}
#: Name -> shape with the layers and heads of the model, its published pattern, share of heads that stream.
_TINY = {"hidden": 64, "head_dim": 32, "intermediate": 64, "max_len": 1 << 16}
MEMORY = {
    "Llama-2-7B (MHA)": (Shape(layers=32, heads=32, kv_heads=32, **_TINY), "Llama-2-7B-32K-Instruct", 0.75),
    "Llama-3-8B (GQA)": (Shape(layers=32, heads=32, kv_heads=8, **_TINY), "Llama-3-8B-Instruct-Gradient-1048k", 0.5),
}
PATTERNS = Path(__file__).parents[1] / "configs" / "heads"


def attention_timer(llm: Any) -> list[float]:
    """Time `forward` of all attention layers from now on; returns a list whose only entry is the sum of seconds."""
    spent = [0.0]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():

        def timed(*args: Any, forward: Any = layer.impl.forward, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = forward(*args, **kwargs)
            spent[0] += time.perf_counter() - start
            return result

        layer.impl.forward = timed
    return spent


def latency_child(spec: dict) -> dict:
    """Seconds of each decode step at each context, with --read those of its attention; with --prompts of the prompt."""
    contexts, steps, block_size = spec["contexts"], spec["options"]["steps"], spec["options"]["block_size"]
    longest = max(contexts) + steps + 8
    tokens = 2 * longest + 4096
    llm = make_llm(
        spec["model"],
        spec["policy"],
        max_model_len=longest,
        block_size=block_size,
        kv_cache_memory_bytes=tokens * Shape(**spec["shape"]).kv_bytes_per_token(),
        max_num_seqs=2,
        max_num_batched_tokens=2048,
    )
    (prompt,) = random_prompts(1, max(contexts), spec["shape"]["vocab"])
    timings: dict[str, dict[int, list[float]]] = {"steps": {}, "attention": {}}
    spent = attention_timer(llm) if spec["options"]["read"] else [0.0]
    if spec["options"]["prompts"]:
        run_batch(llm, [prompt[:2048]], 1)  # what a first prompt allocates is not timed
    for context in contexts:
        engine = llm.llm_engine
        if spec["options"]["prompts"]:
            llm.reset_prefix_cache()
            timings["steps"][context] = [run_batch(llm, [prompt[:context]], 1).seconds]
            continue
        engine.add_request(f"at-{context}", {"prompt_token_ids": prompt[:context]}, greedy(steps + 4))
        scheduler = scheduler_of(llm)
        while not scheduler.running or scheduler.running[0].num_output_tokens < 3:
            engine.step()
        timings["steps"][context], timings["attention"][context] = [], []
        for _ in range(steps):
            start, before = time.perf_counter(), spent[0]
            engine.step()
            timings["steps"][context].append(time.perf_counter() - start)
            timings["attention"][context].append(spent[0] - before)
        while engine.has_unfinished_requests():
            engine.step()
    return timings


def latency(options: argparse.Namespace) -> dict:
    """Decode steps of every model, case and round."""
    runs: dict[str, list[dict]] = {name: [] for name in LATENCY}
    with progress() as bar:
        task = bar.add_task("", total=2 * len(LATENCY) * options.rounds)
        for name, (shape, row) in LATENCY.items():
            shape = replace(shape, layers=options.layers)
            with tempfile.TemporaryDirectory() as model:
                make_model(model, shape)
                other, policy = "duo", {"name": "duo", "pattern": [row] * shape.layers, "sink": SINK, "recent": RECENT}
                if options.read:
                    other, policy = "read", {"name": "full", "read": options.read}
                for number in range(options.rounds):
                    pair, order = {}, [("stock", None), (other, policy)]
                    for case, its_policy in order if number % 2 == 0 else reversed(order):
                        bar.update(task, description=f"{name}: {case}")
                        spec = {"model": model, "policy": its_policy, "shape": asdict(shape), "options": vars(options)}
                        spec["contexts"] = options.contexts
                        plugins = {"VLLM_PLUGINS": ""} if its_policy is None else {}
                        times = in_child("latency", spec, plugins)
                        pair[case] = times["steps"]
                        if options.read:
                            pair[f"{case}, attention"] = times["attention"]
                        bar.advance(task)
                    runs[name].append(pair)
    return {"runs": runs}


def latency_table(report: dict) -> str:
    contexts, other = report["options"]["contexts"], "read" if report["options"].get("read") else "duo"
    lines = ["| model | " + " | ".join(f"{context:,}" for context in contexts) + " |"]
    lines.append("|---|" + "---:|" * len(contexts))
    for name, part in ((name, part) for name in LATENCY for part in ("", ", attention")):
        if part and other == "duo":
            continue
        cells = []
        for context in map(str, contexts):
            pairs, cases = report["runs"][name], (f"stock{part}", f"{other}{part}")
            ms = [[1e3 * statistics.median(pair[case][context]) for pair in pairs] for case in cases]
            ratios = [stock / own for stock, own in zip(*ms)]
            stock, own = map(statistics.median, ms)
            cells.append(f"{statistics.median(ratios):.2f}x ({stock:.1f} / {own:.1f} ms)")
        lines.append(f"| {name}{part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_child(spec: dict) -> dict:
    """Blocks held by group at each context, and the bytes of a block."""
    shape, block_size = Shape(**spec["shape"]), spec["options"]["block_size"]
    longest = max(spec["contexts"]) + 8
    llm = make_llm(
        spec["model"],
        spec["policy"],
        dtype="bfloat16",
        max_model_len=longest,
        block_size=block_size,
        # In 16 bits, with room for the blocks of retrieval heads, or for all blocks.
        kv_cache_memory_bytes=(longest + 8192) * shape.kv_bytes_per_token(2),
        max_num_seqs=2,
        max_num_batched_tokens=2048,
    )
    scheduler = scheduler_of(llm)
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    held = {}
    for context in spec["contexts"]:
        (prompt,) = random_prompts(1, context - 2, shape.vocab)
        llm.llm_engine.add_request(f"of-{context}", {"prompt_token_ids": prompt}, greedy(3))
        while llm.llm_engine.has_unfinished_requests():
            for request in scheduler.running:
                if request.num_computed_tokens >= context - 1:
                    tables = [manager.req_to_blocks[request.request_id] for manager in managers]
                    held[context] = [sum(not block.is_null for block in table) for table in tables]
            llm.llm_engine.step()
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    pages = [s.page_size_bytes * len(g.layer_names) for s, g in zip(specs, scheduler.kv_cache_config.kv_cache_groups)]
    return {"held": held, "pages": pages, "classes": [getattr(s, "head_class", "") for s in specs]}


def memory(options: argparse.Namespace) -> dict:
    """Blocks of every shape under duo; of stock vLLM at the shortest context."""
    from vllm_evict.config import HeadPattern

    runs: dict[str, dict[str, Any]] = {}
    with progress() as bar:
        task = bar.add_task("", total=2 * len(MEMORY))
        for name, (shape, published, sparsity) in MEMORY.items():
            pattern = HeadPattern.read(PATTERNS / published, sparsity=sparsity)
            duo = {"name": "duo", "gates": str(PATTERNS / published), "sparsity": sparsity}
            runs[name] = {"predicted": {n: pattern.blocks(n, options.block_size) for n in options.contexts}}
            with tempfile.TemporaryDirectory() as model:
                make_model(model, shape)
                for case, policy in (("stock", None), ("duo", duo)):
                    bar.update(task, description=f"{name}: {case}")
                    spec = {"model": model, "policy": policy, "shape": asdict(shape), "options": vars(options)}
                    # Stock holds a block for every `block_size` tokens, so one context is enough.
                    spec["contexts"] = options.contexts if policy else [min(options.contexts)]
                    plugins = {"VLLM_PLUGINS": ""} if policy is None else {}
                    runs[name][case] = in_child("memory", spec, plugins)
                    bar.advance(task)
    return {"runs": runs}


def memory_table(report: dict) -> str:
    options = report["options"]
    lines = [
        "| model | tokens | retrieval heads: blocks held (predicted) | streaming heads | KV cache | stock | saves |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, run in report["runs"].items():
        for context in options["contexts"]:
            held, predicted = run["duo"]["held"][str(context)], run["predicted"][context]
            by_class = {
                head_class: ", ".join(str(n) for n, c in zip(held, run["duo"]["classes"]) if c == head_class)
                for head_class in ("retrieval", "streaming")
            }
            (page,) = set(run["duo"]["pages"])
            own = sum(held) * page
            stock = -(-context // options["block_size"]) * run["stock"]["pages"][0]
            lines.append(
                f"| {name} | {context:,} | {by_class['retrieval']} ({predicted[0]}) | {by_class['streaming']} "
                f"({predicted[1]}) | {own / 2**20:,.1f} MiB | {stock / 2**20:,.1f} MiB | {stock / own:.2f}x |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="count blocks instead")
    parser.add_argument("--prompts", action="store_true", help="time prompts instead")
    parser.add_argument("--read", type=int, default=0, help="measure `full` whose layers read so many tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens")
    parser.add_argument("--layers", type=int, default=2, help="of the models whose decodes or prompts are timed")
    parser.add_argument("--steps", type=int, default=24, help="decode steps timed at each context")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--out", default="out/duo")
    options = parser.parse_args()
    if options.prompts and options.read:
        parser.error("--prompts times duo; --read times decodes: give one of them")
    options.contexts = options.contexts or ([4096, 32768] if options.memory else [2048, 4096, 8192, 16384, 32768])
    report = (memory if options.memory else latency)(options)
    if options.memory:
        title = "KV blocks of one request under duo: published patterns and their shapes, 32 channels a head, 16 bits"
        publish(options, "duo-memory", title, memory_table, report)
    else:
        case, timed = f"read {options.read}" if options.read else "duo", "A decode step at growing context"
        name = case.split()[0] + ("-prompts" if options.prompts else "")
        timed = "Prompts to their first token" if options.prompts else timed
        title = f"{timed}, stock vLLM over {case} (medians), {options.layers}-layer Llamas in float32"
        publish(options, name, title, latency_table, report)


if __name__ == "__main__":
    run_script(main, latency=latency_child, memory=memory_child)

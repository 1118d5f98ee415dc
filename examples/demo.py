"""Shows eviction: policies on one batch of questions in a small pool, then a server and its clients.

    make demo                  (or: python examples/demo.py [--model smollm2] [--out out/demo])
    make demo MODEL=smollm2    on a trained model, or MODEL=gemma

Every prompt hides a number in a long text and asks for it, so the tables show lost answers beside saved blocks.

The demo needs no GPU, and on the embedded model, examples/needle/model of 5 MB, no download. A trained model and essays
for its prompts are made first, as by `make models`.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import openai
import psutil
from engines import Run, make_llm, run_batch
from prometheus_client.parser import text_string_to_metric_families
from reports import ENVIRONMENT
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from shows import BLOCK, CHECKOUT, EMBEDDED, DemoError, Needle, Needles, Show, Talk, named, require

console = Console(highlight=False)
START_UP_SECONDS = 300


# ---- offline: one batch, each policy, one small pool


def offline(needles: Needles, out: Path) -> None:
    show = needles.show
    console.rule("Offline: one batch, each policy")
    console.print(
        f"{show.requests} requests of up to {show.length:,} + {show.output} tokens in a pool of {show.pool_blocks} "
        f"blocks of {BLOCK}.\nEach text hides one number, at a depth of its own, and asks for it; after the answer the "
        f"model writes on.\n{show.kept}"
    )
    batch = needles.batch(show.requests)
    require(all(len(needle.ids) <= show.length for needle in batch), "prompts are longer than they should be")
    runs, found = {}, {}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name, policy in show.policies.items():
            task = progress.add_task(name, total=show.requests)
            runs[name], answers = run_policy(show, policy, batch, lambda done, task=task: progress.advance(task, done))
            found[name] = [needle.found_in(needles.answer(ids)) for needle, ids in zip(batch, answers)]
    console.print(runs_table(runs, found))
    console.print(depths_table(found, show.requests))
    picture = out / "resident_blocks.png"
    draw(show, runs, picture)
    console.print(f"Resident blocks over time: {picture}")
    check(show, runs, {name: sum(row) for name, row in found.items()})


def check(show: Show, runs: dict[str, Run], found: dict[str, int]) -> None:
    """Check results that hold on any machine."""
    whole, *others = show.policies
    require(not runs[whole].evicted_blocks, f"{whole} evicted something")
    require(runs[whole].preemptions > 0 or not show.outgrown, f"the pool was large enough for {whole}")
    for name in others:
        require(runs[name].evicted_blocks > 0, f"{name} evicted nothing")
        require(runs[name].preemptions == 0, f"{name} did not fit into the pool")
    enough = found[whole] >= show.sound * show.requests
    require(enough, f"with all of its cache the model found only {found[whole]} needles")
    show.order(found)


def run_policy(show: Show, policy: Any, batch: list[Needle], on_done: Any) -> tuple[Run, list[list[int]]]:
    """Run the batch under one policy, in an engine of its own; returns counts, and the tokens of each answer."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = make_llm(
        show.model,
        policy,
        dtype="bfloat16",
        max_model_len=show.length + show.output,
        block_size=BLOCK,
        num_gpu_blocks_override=show.pool_blocks,
        kv_cache_memory_bytes=show.pool_blocks * show.block_bytes,
        max_num_seqs=show.requests,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
    )
    answers: dict[str, list[int]] = {}

    def on_step(outputs: list[Any]) -> None:
        answers.update((output.request_id, list(output.outputs[0].token_ids)) for output in outputs)
        on_done(len(outputs))

    try:
        run_batch(llm, [batch[0].ids], 8)
        run = run_batch(llm, [needle.ids for needle in batch], show.output, on_step)
        return run, [answers[f"request-{index}"] for index in range(len(batch))]
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def runs_table(runs: dict[str, Run], found: dict[str, list[bool]]) -> Table:
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for heading in ("requests", "at once", "tokens/s", "peak blocks", "evicted blocks", "preemptions", "needles found"):
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    for name, run in runs.items():
        table.add_row(
            name,
            str(len(found[name])),
            str(run.peak_requests),
            f"{run.tokens_per_second:,.0f}",
            str(run.peak_blocks),
            str(run.evicted_blocks),
            str(run.preemptions),
            f"{sum(found[name])}/{len(found[name])}",
        )
    return table


def depths_table(found: dict[str, list[bool]], needles: int) -> Table:
    depths = "first" + "last".rjust(2 * needles - 6)
    table = Table("needle found, by depth", depths, box=SIMPLE, show_edge=False, pad_edge=False)
    for name, row in found.items():
        table.add_row(name, " ".join(".#"[hit] for hit in row))
    return table


def draw(show: Show, runs: dict[str, Run], path: Path) -> None:
    """Blocks in use after each step, by policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, run in runs.items():
        seconds, blocks = zip(*run.samples, strict=True)
        axes.plot(seconds, blocks, label=f"{name}: {run.seconds:.1f} s, {run.preemptions} preemptions")
    axes.axhline(show.pool_blocks, color="grey", linestyle="--", linewidth=1, label=f"pool: {show.pool_blocks} blocks")
    axes.set(
        xlabel="seconds",
        ylabel=f"resident blocks of {BLOCK} tokens",
        title=f"{show.requests} requests of up to {show.length:,} + {show.output} tokens",
        ylim=(0, None),
    )
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- online: a server and its clients


def online(needles: Needles, out: Path) -> None:
    console.rule("Online: vllm serve --kv-policy")
    show, port = needles.show, free_port()
    with serving(show, port, out / "server.log"):
        start_up = [line for line in (out / "server.log").read_text().splitlines() if "KV policy" in line]
        require(start_up, "the server did not say what it evicts")
        console.print(start_up[0][start_up[0].index("KV policy") :], style="green")
        before = scrape(port)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            name = client.models.list().data[0].id
            batch = needles.batch(show.asked, show.requests)
            found = complete(client, name, batch)
            stream(client, name, needles.talk(batch[-1]), needles.prompts.chat)
            refuse(client, name, batch[0])
            found_by_window, policy = choose(client, name, batch), show.server_policy["name"]
            require(found > found_by_window, f"{policy} found {found} needles, sink-window {found_by_window}")
        console.print(moved_table(before, wait_for_evictions(port, policy)))
    console.print("The server is gone, and every process it started.")


def complete(client: openai.OpenAI, model: str, batch: list[Needle], what: str = "completions", **body: Any) -> int:
    """Ask for all needles in one call; returns how many were found."""
    prompts = [needle.ids for needle in batch]
    done = client.completions.create(model=model, prompt=prompts, max_tokens=16, temperature=0, extra_body=body)
    texts = [choice.text.strip() for choice in sorted(done.choices, key=lambda choice: choice.index)]
    require(all(texts) and done.usage, f"{what}: no text came back")
    found = sum(needle.found_in(text) for needle, text in zip(batch, texts, strict=True))
    console.print(f"[bold]{what}[/]: {found}/{len(batch)} needles found: {', '.join(texts)}")
    return found


def stream(client: openai.OpenAI, model: str, talk: Talk, chat: bool) -> None:
    """A streamed chat; of a model without a chat template, a streamed completion."""
    options: dict[str, Any] = {"model": model, "max_tokens": talk.tokens, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True}
    if chat:
        chunks = client.chat.completions.create(messages=[{"role": "user", "content": talk.text}], **options)
    else:
        chunks = client.completions.create(prompt=talk.text, **options)
    text, usage = "", None
    with console.status("streaming") as status:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += (choice.delta.content if chat else choice.text) or ""
                status.update(f"streaming: {escape(text)}")
    what = f"streamed {'chat' if chat else 'completion'}"
    require(text and usage, f"{what}: no text came back")
    said = f'{usage.prompt_tokens} + {usage.completion_tokens} tokens: "... {talk.end}" {text.strip()}'
    if talk.needle:
        (number,) = talk.needle.sample.answers
        said += f" ({'right' if talk.needle.found_in(text) else f'it is {number}'})"
    console.print(f"[bold]{what}[/]: {escape(said)}")


def refuse(client: openai.OpenAI, model: str, needle: Needle) -> None:
    """Show that a request can't have more than the server's budget."""
    try:
        client.completions.create(
            model=model, prompt=needle.ids, max_tokens=8, extra_body={"vllm_xargs": {"kv_budget": 4096}}
        )
    except openai.BadRequestError as error:
        message = error.body["message"] if isinstance(error.body, dict) else str(error)
        console.print(f"[bold]asking for kv_budget 4096[/]: HTTP {error.status_code}: {escape(message)}")
    else:
        raise DemoError("the server granted a budget above its own")


def choose(client: openai.OpenAI, model: str, batch: list[Needle]) -> int:
    """Requests pick their own policy and a smaller budget; the server still runs after the wrong request."""
    xargs = {"kv_policy": "sink-window", "kv_budget": 160}
    # Salted, because the same prompts have left pure blocks in the prefix cache.
    return complete(client, model, batch, "with kv_policy sink-window, kv_budget 160", vllm_xargs=xargs, cache_salt="2")


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(metric, policy) -> value of the plugin's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, sample.labels["policy"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:kv_evict_") and not sample.name.endswith("_created")
    }


def wait_for_evictions(port: int, policy: str) -> dict[tuple[str, str], float]:
    """The metrics when they have both policies' evictions, which come with the engine's next statistics."""
    for _ in range(50):
        metrics = scrape(port)
        if all(metrics.get(("vllm:kv_evict_blocks_evicted_total", name)) for name in (policy, "sink-window")):
            return metrics
        time.sleep(0.2)
    raise DemoError(f"/metrics shows no evictions by {policy} and sink-window: {metrics}")


def moved_table(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> Table:
    table = Table("moved on /metrics", "policy", box=SIMPLE, show_edge=False, pad_edge=False)
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for key, value in after.items():
        if value != before.get(key, 0):
            table.add_row(*key, f"{before.get(key, 0):.0f}", f"{value:.0f}")
    return table


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(show: Show, port: int, log: Path) -> Iterator[None]:
    """`vllm serve` in a process group of its own, which always ends with the block."""
    policy = json.dumps(show.server_policy)
    console.print(f"$ vllm serve {show.model.relative_to(CHECKOUT)} --kv-policy '{policy}'", style="bold")
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(show.model), "--kv-policy", policy]
    command += f"--served-model-name {show.made or EMBEDDED} --host 127.0.0.1 --port {port}".split()
    command += ["--dtype", "bfloat16", "--enforce-eager"]
    command += f"--block-size {BLOCK} --max-model-len {2 * show.length} --max-num-seqs 8".split()
    command += f"--max-num-batched-tokens 512 --num-gpu-blocks-override {show.pool_blocks}".split()
    command += ["--kv-cache-memory-bytes", str(show.pool_blocks * show.block_bytes)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            wait_until_up(server, port, log)
            yield
        finally:
            end(server)


def wait_until_up(server: subprocess.Popen, port: int, log: Path) -> None:
    start = time.monotonic()
    with console.status("") as status:
        while (waited := time.monotonic() - start) < START_UP_SECONDS:
            status.update(f"starting, {waited:.0f} s (log: {log})")
            if server.poll() is not None:
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                console.print(f"up after {waited:.0f} s")
                return
            time.sleep(0.5)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    raise DemoError(f"the server did not come up. The end of {log}:\n{tail}")


def end(server: subprocess.Popen) -> None:
    """Ask the server to end, then end its whole process group: the engine has a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it is short and must not be interrupted
    for send, number, patience in ((os.kill, signal.SIGTERM, 20), (os.killpg, signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            send(server.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            server.poll()
            if not running(server.pid):
                return
            time.sleep(0.1)
    raise DemoError(f"processes of the server are still there: {running(server.pid)}")


def running(group: int) -> list[int]:
    """Ids of a process group's processes that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


# ---- command line


def stop(number: int, frame: FrameType | None) -> None:
    """Let a signal end the demo like Ctrl-C, through every `finally`."""
    raise KeyboardInterrupt


def fetch(show: Show) -> None:
    """Make a trained model, and essays for its prompts, unless they are there."""
    if show.made:
        command = [sys.executable, str(CHECKOUT / "scripts" / "models.py"), show.made, "essays"]
        require(not subprocess.run(command).returncode, f"there is no {show.model.name} to show")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, metavar="NAME", help="the embedded one, smollm2 or gemma")
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # On some machines vLLM warns of missing kernels that this model does not use. Errors are raised.
    os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="CRITICAL")
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        show = named(args.model)
        fetch(show)
        args.out.mkdir(parents=True, exist_ok=True)
        if show.threads:
            os.environ.setdefault("OMP_NUM_THREADS", str(show.threads))
        needles = show.prompts(show)
        offline(needles, args.out)
        online(needles, args.out)
    except DemoError as error:
        console.print(f"The demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

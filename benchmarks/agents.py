"""Agents over HTTP whose histories outgrow the pool: what each turn hits, and how long all turns take.

    python benchmarks/agents.py [--agents 4] [--turns 20] [--cases stock reach]

Each turn is a new request with the whole history: prompts and answers of all turns before it. Agents take their turns
one after the other. The pool holds a third of all histories; blocks have 32 tokens. The model is examples/needle/model
with random tokens, so the table tells hits and time and nothing about answers.

endless     stock vLLM with a pool for all histories
stock       stock vLLM
offloading  stock vLLM with its OffloadingConnector, and a host for all histories; vLLM's own copies need a GPU, so
            those of the tests (tests/harness/connector.py) stand in for them
reach       `full` with `evict: host`, a budget of 1,024 tokens, and a host for all histories
pressure    the same with `when: pressure`

Seconds are of the client's clock, without the server's start. CPU seconds are those of the server's processes.

Writes a Markdown table and a JSON with hardware, versions, command and all raw figures to --out.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
from reports import RESULTS, progress, publish
from traffic import KV_BYTES, ROOT, serving

FIRST, ASKED, ANSWERED = 256, 128, 16  # tokens of a history's begin, of a turn's prompt, and of its answer
VOCABULARY = 200
BLOCK = 32
REACH = {"name": "full", "evict": "host", "budget": 1024, "buffer": 0, "sink": 32, "recent": 64}
CASES = ("endless", "stock", "offloading", "reach", "pressure")


def arguments(case: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments of a case's server."""
    longest = FIRST + options.turns * (ASKED + ANSWERED)
    total = options.agents * longest
    blocks = (total if case == "endless" else total // 3) // BLOCK + 2
    host = 2 * total * KV_BYTES
    found = ["--num-gpu-blocks-override", str(blocks), "--max-model-len", str(longest + BLOCK)]
    found += ["--kv-cache-memory-bytes", str(256 << 20)]
    if case == "offloading":
        spec = {"spec_name": "HostSpec", "spec_module_path": "connector", "cpu_bytes_to_use": host, "delay": 1}
        spec["offload_prompt_only"] = False
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec}
        found += ["--kv-transfer-config", json.dumps(connector)]
    if case in ("reach", "pressure"):
        when = {"when": "pressure", "admit": True} if case == "pressure" else {}
        found += ["--kv-policy", json.dumps({**REACH, "host": host, **when})]
    return found


def cpu_seconds() -> float:
    """CPU seconds of all processes that this one has started."""
    return sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))


def run(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Have all agents take all turns on one server."""
    rng = np.random.default_rng(0)
    histories = [rng.integers(VOCABULARY, size=FIRST).tolist() for _ in range(options.agents)]
    counts = {"prompt_tokens": 0, "hit_tokens": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(arguments(case, options), options.threads, Path(folder, "log")) as url,
    ):
        client = openai.OpenAI(base_url=url, api_key="-", timeout=1800)
        start, cpu = time.monotonic(), cpu_seconds()
        for _ in range(options.turns):
            for history in histories:
                history += rng.integers(VOCABULARY, size=ASKED).tolist()
                answer = client.completions.create(
                    model="needle", prompt=history, temperature=0, max_tokens=ANSWERED,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )  # fmt: skip
                history += answer.choices[0].token_ids
                counts["prompt_tokens"] += answer.usage.prompt_tokens
                counts["hit_tokens"] += answer.usage.prompt_tokens_details.cached_tokens or 0
        return {"case": case, **counts, "seconds": time.monotonic() - start, "cpu_seconds": cpu_seconds() - cpu}


def table(report: dict[str, Any]) -> str:
    """Return a row for each case."""
    endless = next((each["hit_tokens"] for each in report["runs"] if each["case"] == "endless"), None)
    lines = ["| case | hit tokens | of an endless pool's | seconds | CPU seconds |", "|---|---:|---:|---:|---:|"]
    for each in report["runs"]:
        share = f"{100 * each['hit_tokens'] / endless:.1f} %" if endless else ""
        hits = f"{each['hit_tokens']:,} of {each['prompt_tokens']:,}"
        lines.append(f"| {each['case']} | {hits} | {share} | {each['seconds']:.0f} | {each['cpu_seconds']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default=str(RESULTS / "performance"))
    options = parser.parse_args()
    # The server imports the connector's stand-in.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "tests" / "harness"), os.environ.get("PYTHONPATH")))
    )
    runs = []
    with progress() as shown:
        task = shown.add_task("agents", total=len(options.cases))
        for case in options.cases:
            shown.update(task, description=case)
            runs.append(run(case, options))
            shown.advance(task)
    title = f"# {options.agents} agents of {options.turns} turns in a pool for a third of their histories"
    publish(options, "agents", title, table, {"runs": runs})


if __name__ == "__main__":
    main()

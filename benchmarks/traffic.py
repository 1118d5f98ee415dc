"""Answers that kinds of traffic get from `vllm serve` under a policy, over HTTP.

    python benchmarks/traffic.py --policy h2o-pressure [--traffic documents agents shared long]

The model is examples/needle/model. It answers every question with full attention, so wrong answers come from eviction.
The server computes prompts in chunks of at most 1,024 tokens, with prefix caching on, and its pool has room for all
requests, or for --pool tokens.

documents  a question at the end of 4,096 tokens, each prompt once: of niah, multikey, twostage and vt.
agents     conversations about 2,048 tokens each, four questions one after the other. Each question is a new request
           that carries the conversation so far, so it hits the prefix cache where that has the beginning.
shared     the same questions, each a request of its own behind the same 2,048 tokens.
long       answers of 2,000 tokens after 512: what requests hold; nothing tells whether they are right.

There are five depths of the first fact, and --samples documents for each.

Writes a JSON with answers, cached tokens and usage of all requests, hardware, versions and command to --out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
from reports import ENVIRONMENT, conditions, to_json

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))  # how a server is started and ended

from demo import end, free_port, wait_until_up  # noqa: E402

from vllm_evict.tools.eval.prompts import Prompts  # noqa: E402
from vllm_evict.tools.eval.score import score  # noqa: E402
from vllm_evict.tools.eval.tasks import Sample, make  # noqa: E402
from vllm_evict.tools.eval.words import Filler  # noqa: E402

MODEL = ROOT / "examples" / "needle" / "model"
KV_BYTES = 2 * 4 * 2 * 64 * 2  # a token: keys and values, layers, KV heads, head size, bfloat16
DEPTHS = (0.17, 0.33, 0.47, 0.61, 0.79)
AT_ONCE = 4


@contextmanager
def serving(arguments: list[str], threads: int, log: Path) -> Iterator[str]:
    """`vllm serve` in a process group of its own, which ends with the block. Yields its address."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(MODEL), *arguments]
    command += f"--served-model-name needle --host 127.0.0.1 --port {port} --dtype bfloat16 --enforce-eager".split()
    command += f"--block-size 32 --max-num-batched-tokens 1024 --max-num-seqs {AT_ONCE}".split()
    command += ["--enable-prompt-tokens-details"]
    environment = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            wait_until_up(server, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(server)


class Client:
    """Asks a server, and notes what each answer was and cost."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=url, api_key="-", timeout=1800)

    def ask(self, messages: list[dict[str, str]], sample: Sample, **more: Any) -> dict[str, Any]:
        answer = self.client.chat.completions.create(
            model="needle",
            messages=messages,
            temperature=0,
            max_tokens=sample.max_tokens,
            extra_body={"vllm_xargs": {"kv_usage": 1}, **more},
        )
        details, usage = answer.usage.prompt_tokens_details, answer.usage.kv_usage
        text = answer.choices[0].message.content
        return {
            "task": sample.task,
            "text": text if len(text) < 100 else "",
            "right": score(text, sample) if sample.answers else None,
            "prompt_tokens": answer.usage.prompt_tokens,
            "cached_tokens": details.cached_tokens if details else 0,
            "peak": usage["peak_resident_tokens"],
            "evicted": usage["evicted_tokens"],
        }


def samples(task: str, length: int, number: int, later: tuple[float, ...] | None = None) -> list[Sample]:
    """Documents with a question, or with several; `number` of each depth."""
    count, filler = Prompts(str(MODEL)).count, Filler()
    return [make(task, length, depth, index, 0, count, filler, later) for depth in DEPTHS for index in range(number)]


def by_user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def documents(client: Client, number: int) -> list[dict[str, Any]]:
    asked = [sample for task in ("niah", "multikey", "twostage", "vt") for sample in samples(task, 4096, number)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda sample: client.ask([by_user(sample.text)], sample), asked))


def agents(client: Client, number: int) -> list[dict[str, Any]]:
    def converse(sample: Sample) -> list[dict[str, Any]]:
        messages, found = [by_user(sample.text)], []
        for turn in sample.turns:
            if found:
                messages += [{"role": "assistant", "content": found[-1]["text"]}, by_user(turn.question)]
            found.append(client.ask(messages, turn))
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(converse, samples("multikey", 2048, number, DEPTHS[1:4])), [])


def shared(client: Client, number: int) -> list[dict[str, Any]]:
    found = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for sample in samples("multikey", 2048, number, DEPTHS[1:4]):
            # The document alone first, as a server that has answered about it before.
            client.ask([by_user(sample.context)], replace(sample, answers=(), max_tokens=1))
            found += pool.map(lambda turn: client.ask([by_user(turn.text)], turn), sample.turns)
    return found


def long(client: Client, number: int) -> list[dict[str, Any]]:
    asked = [replace(sample, answers=(), max_tokens=2000) for sample in samples("niah", 512, number)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda sample: client.ask([by_user(sample.text)], sample, ignore_eos=True), asked))


TRAFFIC = {"documents": documents, "agents": agents, "shared": shared, "long": long}


def told(found: list[dict[str, Any]]) -> str:
    """One line of what a kind of traffic got."""
    judged = [each["right"] for each in found if each["right"] is not None]
    tokens = {name: sum(each[name] for each in found) for name in ("prompt_tokens", "cached_tokens", "evicted")}
    peak = round(float(np.mean([each["peak"] for each in found])))
    right = f"{sum(judged):.0f} of {len(judged)} right, " if judged else ""
    cached = f"{tokens['cached_tokens']:,} of {tokens['prompt_tokens']:,} prompt tokens from the prefix cache"
    return f"{right}{cached}, {tokens['evicted']:,} tokens evicted, {peak:,} held at the peak on average"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="what --kv-policy takes")
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--samples", type=int, default=4, help="documents for each depth")
    parser.add_argument("--pool", type=int, default=65_536, help="tokens of the server's pool")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "policy": options.policy,
        "pool": options.pool,
        "samples": options.samples,
        "conditions": conditions(),
    }
    arguments = ["--kv-policy", options.policy, "--max-model-len", "4352"]
    arguments += ["--kv-cache-memory-bytes", str(options.pool * KV_BYTES)]
    with tempfile.TemporaryDirectory() as folder, serving(arguments, options.threads, Path(folder, "log")) as url:
        for name in options.traffic:
            report[name] = TRAFFIC[name](Client(url), options.samples)
            print(f"{name}: {told(report[name])}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(to_json(report) + "\n")
        print(f"written: {options.out}")


if __name__ == "__main__":
    main()

"""Needles in essays, and essays, under `evict: host` and `read` on trained models: on the engine, a setting a process.

    python benchmarks/essays.py MODEL ESSAYS --cells needle:2048:24 needle:4096:12 text:2048:8
    python benchmarks/essays.py MODEL ESSAYS --cells text:2048:8 --settings stock '{"name":"full","read":512}'
    python benchmarks/essays.py                     prints the tables of docs/reach.md

A cell is a task, tokens, and a number of prompts. Tasks have the prompts of benchmarks/choice.py:

- `needle`: a number in essays, asked for at the end of the prompt. An answer is right if it has the number.
- `text`: 256 tokens that follow in an essay. Each decode gets the text's next token, whatever the model says, and its
  log-probability is kept. So decodes compute these tokens, as they compute those of an answer.

A setting is a name of `settings`, with nothing but a budget or `read` given, or a policy as JSON. Each prompt's result
is a line of --raw, after the line of its run. A run goes on where another one ended.
"""

import argparse
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import make_llm
from reports import RESULTS, conditions, in_child, run_script

from vllm_evict.tools.eval.stats import bootstrap, interval

RAW = RESULTS / "quality/essays.jsonl"
HOST = {"name": "full", "evict": "host", "host": "1GiB"}
#: Most tokens of an answer: a number has seven digits.
ANSWER = 12
#: Numbers of prompts that have needles at different depths.
DEPTHS = 24
#: Tokens of a needle's prompt and answer below those of its cell.
MARGIN = 100
#: Tokens of a block, unless a setting's name has others.
BLOCK = 32
#: Requests that are computed together.
BATCH = 8
Row = dict[str, Any]


def settings(tokens: int) -> dict[str, dict | None]:
    """Name -> policy."""
    return {
        "stock": None,
        "host, a tenth": {**HOST, "budget": 0.1},
        "host, a twentieth": {**HOST, "budget": 0.05},
        "read, an eighth": {"name": "full", "read": tokens // 8},
        "read, a quarter": {"name": "full", "read": tokens // 4},
        "read, a half": {"name": "full", "read": tokens // 2},
    }


def numbers(count: int) -> list[int]:
    """Return numbers of prompts; the first few have needles at all depths."""
    return [i // DEPTHS * DEPTHS + 5 * i % DEPTHS for i in range(count)]


def forcing() -> type:
    """Return the class of a logits processor that lets a request say its `forced` tokens alone."""
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forcing(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            forced = (params.extra_args or {}).get("forced", ())

            def only(output: list[int], logits: Any) -> Any:
                alone = torch.full_like(logits, -math.inf)
                alone[forced[len(output)]] = 0.0
                return alone

            return only if forced else None

    return Forcing


def essays_child(spec: dict) -> dict:
    """Run cells of (task, tokens, numbers of prompts) under a policy, and append their rows."""
    from choice import CONTINUED, needle, sentences, text

    options = argparse.Namespace(**spec["options"])
    engine = {
        "dtype": "bfloat16",
        "block_size": options.block_size,
        "max_num_batched_tokens": options.chunk,
        "max_num_seqs": BATCH,
        "max_model_len": max(tokens + CONTINUED * (task == "text") for task, tokens, _ in spec["cells"]),
        "kv_cache_memory_bytes": options.cache << 30,
    }
    llm = make_llm(Path(options.model), spec["policy"], **engine, logits_processors=[forcing()])
    tokenizer = llm.get_tokenizer()
    whole, body = sentences(options.essays)
    append(
        options.raw, [{"run": spec["run"], "engine": engine, "conditions": conditions() | {"command": spec["command"]}}]
    )
    for task, tokens, number, *more in batches(spec["cells"]):
        some = [number, *more]
        if task == "text":
            made = [text(tokenizer, whole, tokens, number) for number in some]
        else:
            made = [needle(tokenizer, body, tokens - MARGIN, number, DEPTHS) for number in some]
        prompts = [{"prompt_token_ids": ids} for ids, _ in made]
        params = [sampling(after if task == "text" else None) for _, after in made]
        lines = []
        for number, (ids, after), output in zip(some, made, llm.generate(prompts, params, use_tqdm=False), strict=True):
            row = {"run": spec["run"], "model": Path(options.model).name, "task": task, "tokens": tokens}
            row |= {"setting": spec["setting"], "policy": spec["policy"], "number": number, "prompt_tokens": len(ids)}
            usage = getattr(output, "kv_usage", None)
            row |= {"peak_tokens": usage.peak_resident_tokens} if usage else {}
            found = said(output, after) if task == "text" else scored(output, tokenizer.decode(after).strip())
            lines.append(row | found)
        append(options.raw, lines)
    return {}


def batches(cells: list) -> Iterator[list]:
    """Yield a cell's task, its tokens, and numbers of a few of its prompts."""
    for task, tokens, missing in cells:
        for first in range(0, len(missing), BATCH):
            yield [task, tokens, *missing[first : first + BATCH]]


def append(raw: str, lines: list[Row]) -> None:
    with Path(raw).open("a") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def sampling(forced: list[int] | None) -> Any:
    from vllm import SamplingParams

    if forced is None:
        return SamplingParams(temperature=0.0, max_tokens=ANSWER)
    extra = {"forced": forced}
    return SamplingParams(temperature=0.0, max_tokens=len(forced), ignore_eos=True, logprobs=0, extra_args=extra)


def said(output: Any, forced: list[int]) -> Row:
    """Return the nats of each token that a decode computed; the prompt computes the first."""
    completion = output.outputs[0]
    assert list(completion.token_ids) == forced, "decodes did not say the text"
    nats = [-each[token].logprob for each, token in zip(completion.logprobs, forced, strict=True)][1:]
    return {"nats": round(sum(nats) / len(nats), 5), "decodes": len(nats)}


def scored(output: Any, value: str) -> Row:
    answer = output.outputs[0].text
    return {"expected": value, "answer": answer, "right": int(value in answer)}


def read(raw: Path) -> list[Row]:
    """Return the rows of a file, without the lines of runs."""
    lines = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    return [line for line in lines if "task" in line]


def by_setting(rows: list[Row]) -> dict[tuple, dict[str, dict[int, Row]]]:
    """Return (model, task, tokens) -> setting -> number -> row."""
    found: dict[tuple, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[row["model"], row["task"], row["tokens"]][row["setting"]][row["number"]] = row
    return found


def held(rows: list[Row]) -> str:
    """Return the most tokens that a request held on the device, as a share of its prompt, in the mean."""
    shares = [row["peak_tokens"] / row["prompt_tokens"] for row in rows if "peak_tokens" in row]
    return f"{sum(shares) / len(shares):.0%}".replace("%", " %") if shares else "all"


def shown(setting: str) -> str:
    """Return a setting's name; of a policy in JSON its fields."""
    policy, brace, rest = setting.rpartition("}")
    return f"`{policy}{brace}`{rest}" if brace else setting


def needles(found: dict) -> str:
    """Return the table of right answers, of all prompts and of those that stock vLLM answers."""
    lines = [
        "| model | tokens | setting | right | of those that stock answers (95 %) | held at most |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (model, task, tokens), its in sorted(found.items()):
        if task != "needle" or "stock" not in its:
            continue
        for setting, rows in its.items():
            both = [
                rows[number]["right"] for number, stock in its["stock"].items() if stock["right"] and number in rows
            ]
            low, high = interval(both)
            right = f"{sum(row['right'] for row in rows.values())} of {len(rows)}"
            share = f"{sum(both)} of {len(both)} ({low:.0%} to {high:.0%})".replace("%", " %")
            share = "" if setting == "stock" else share
            lines.append(f"| {model} | {tokens:,} | {shown(setting)} | {right} | {share} | {held([*rows.values()])} |")
    return "\n".join(lines)


def texts(found: dict) -> str:
    """Return the table of perplexities, and of their ratios to stock vLLM's on the same texts."""
    lines = [
        "| model | tokens | setting | perplexity, stock's | ratio (95 %) | texts |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (model, task, tokens), its in sorted(found.items()):
        if task != "text" or "stock" not in its:
            continue
        for setting, rows in its.items():
            both = [(rows[number]["nats"], stock["nats"]) for number, stock in its["stock"].items() if number in rows]
            if setting == "stock" or not both:
                continue
            ours, theirs = (math.exp(sum(each) / len(both)) for each in zip(*both, strict=True))
            low, high = (math.exp(each) for each in bootstrap([one - other for one, other in both]))
            perplexity, ratio = f"{ours:.2f}, {theirs:.2f}", f"{ours / theirs:.3f} ({low:.3f} to {high:.3f})"
            lines.append(f"| {model} | {tokens:,} | {shown(setting)} | {perplexity} | {ratio} | {len(both)} |")
    return "\n".join(lines)


TABLES = needles, texts


def cell(words: str) -> tuple[str, int, int]:
    task, tokens, prompts = words.split(":")
    if task not in ("needle", "text"):
        raise ValueError
    return task, int(tokens), int(prompts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of the model")
    parser.add_argument("essays", nargs="?", help="folder of texts")
    parser.add_argument("--cells", nargs="+", type=cell, default=[("needle", 2048, 24)], metavar="TASK:TOKENS:PROMPTS")
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="only these: names, or policies as JSON")
    parser.add_argument("--block-size", type=int, default=BLOCK)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--cache", type=int, default=1, help="GiB of the KV cache")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the engine")
    parser.add_argument("--raw", default=str(RAW), help="file of the results")
    return parser.parse_args()


def missing(options: argparse.Namespace) -> Iterator[tuple[str, dict | None, list]]:
    """Yield settings with their policies, and what each has to run: a policy at a time."""
    done = by_setting(read(Path(options.raw)))
    for setting in options.settings or settings(0):
        by_policy: dict[str, list] = defaultdict(list)
        name = setting if options.block_size == BLOCK else f"{setting}, blocks of {options.block_size}"
        for task, tokens, prompts in options.cells:
            its = done[Path(options.model).name, task, tokens][name]
            if left := [number for number in numbers(prompts) if number not in its]:
                named = settings(tokens)
                policy = json.dumps(named[setting]) if setting in named else setting
                by_policy[policy].append((task, tokens, left))
        for policy, cells in by_policy.items():
            yield name, json.loads(policy), cells


def main() -> None:
    options = parse_arguments()
    raw = Path(options.raw)
    if options.model is None:
        found = by_setting(read(raw))
        return print("\n\n".join(f"<!-- {table.__name__} -->\n{table(found)}" for table in TABLES))
    for setting, policy, cells in missing(options):
        run = sum("task" not in json.loads(line) for line in raw.read_text().splitlines()) if raw.exists() else 0
        asked = " ".join(":".join(map(str, each)) for each in options.cells)
        command = f"python benchmarks/essays.py MODEL ESSAYS --cells {asked} --settings {shlex.quote(setting)}"
        spec = {"policy": policy, "setting": setting, "cells": cells, "run": run, "command": command}
        spec["options"] = vars(options)
        in_child("essays", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
        print(f"{setting}: {[(task, tokens, len(numbers)) for task, tokens, numbers in cells]}", flush=True)
    return None


if __name__ == "__main__":
    run_script(main, essays=essays_child)

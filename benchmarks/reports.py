"""Parts of benchmarks beside the engine: a case in a process of its own, the conditions of a run, tables and JSON."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console()
#: Raw results that pages show, a folder for each kind.
RESULTS = Path(__file__).parent / "results"
#: One process runs the whole engine; its log is shown only if it fails.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def in_child(what: str, spec: dict, environment: dict[str, str] | None = None) -> dict:
    """Result of function `what` of the running script in a fresh process; ends this process if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "spec.json"), Path(folder, "result.json")
        request.write_text(json.dumps(spec))
        command = [sys.executable, sys.argv[0], "--child", what, str(request), str(answer)]
        threads = {"OMP_NUM_THREADS": str(spec["options"]["threads"])}
        environment = {**ENVIRONMENT, **os.environ, **threads, **(environment or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not answer.exists():
            console.print((done.stdout + done.stderr)[-4000:], markup=False, highlight=False, soft_wrap=True)
            sys.exit(f"a run failed (exit code {done.returncode}): {what} {json.dumps(spec)}")
        return json.loads(answer.read_text())


def run_script(main: Callable[[], None], **children: Callable[[dict], Any]) -> None:
    """Run `main`; in the process of a case (`in_child`), the child that the command line names."""
    if sys.argv[1:2] == ["--child"]:
        child_main(children, *sys.argv[2:])
    else:
        main()


def child_main(children: dict[str, Any], what: str, request: str, answer: str) -> None:
    Path(answer).write_text(json.dumps(children[what](json.loads(Path(request).read_text()))))


def hardware() -> dict[str, str]:
    """The CPU, as lscpu tells."""
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    facts = dict(line.split(":", 1) for line in lscpu.splitlines() if ":" in line)
    wanted = ("Model name", "CPU(s)", "L2 cache", "L3 cache")
    return {key: facts[key].strip() for key in wanted if key in facts}


def listed(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


#: Options that name folders of one machine, and are no condition of a run.
FOLDERS = ("--environments", "--out")


def command() -> str:
    """The command line of this process, without FOLDERS."""
    words = iter(sys.argv)
    kept = []
    for word in words:
        if word in FOLDERS:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in FOLDERS)):
            kept.append(word)
    return " ".join(["python", *kept])


def conditions() -> dict:
    """The conditions of a run: hardware, versions, command."""
    import torch
    from vllm.version import __version__ as vllm_version

    from vllm_evict import __version__
    from vllm_evict.compute.kernels.mass import kernel_path

    return {
        "hardware": hardware(),
        "versions": {"vllm": vllm_version, "torch": torch.__version__, "vllm_evict": __version__},
        "kernel": kernel_path(),
        "command": command(),
    }


def to_json(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each short value, and for each entry of a list: a round a line."""
    flat, inner = json.dumps(value), indent + " "
    if len(indent + flat) <= 120:
        return flat
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(key))}: {to_json(item, inner)}" for key, item in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        lines = [json.dumps(item) for item in value]
        opening, closing = "[]"
    else:
        return flat
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def publish(options: argparse.Namespace, name: str, title: str, table: Callable[[dict], str], report: dict) -> None:
    """Write a report and its table, with the conditions of the run and the options of the command line."""
    report |= {"conditions": conditions(), "options": vars(options)}
    write(Path(options.out), name, title, table(report), report)


def write(folder: Path, name: str, title: str, table: str, report: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(report) + "\n")
    facts = report["conditions"]
    text = "\n".join(
        [
            f"{title}\n",
            table,
            "",
            f"hardware: {listed(facts['hardware'])}  ",
            f"versions: {listed(facts['versions'])}; OpenMP threads {report['options']['threads']}, "
            f"attention mass by {facts['kernel']}  ",
            f"command: `{facts['command']}`",
        ]
    )
    (folder / f"{name}.md").write_text(text + "\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nwritten: {folder}/{name}.md and .json")


def spread(values: list[float], form: str) -> str:
    """Median (each round)."""
    return f"{statistics.median(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})"


def progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def choose_cases(parser: argparse.ArgumentParser, wanted: list[str] | None, known: Iterable[str]) -> list[str]:
    """The cases that --cases names, and stock, to compare with; all without it. Unknown ones end the program."""
    known = list(known)
    if unknown := set(wanted or ()) - set(known):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; choose from: {', '.join(known)}")
    return known if wanted is None else ["stock", *(name for name in wanted if name != "stock")]

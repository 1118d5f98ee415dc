"""Measures peers beside this project: the same model files, prompts, budgets and machine (`make peers`).

    python benchmarks/peers/run.py [--rounds 2] [--only kvpress vllm] [--parts load bfloat16] [--out out/peers]

Every peer runs in an environment of its own (scripts/peers-env.sh). Loads run in turn for some rounds, each case of
vLLM and each other peer in a process of its own: random prompts (`load`; the same in `bfloat16`; three times as many
for caches of 8 bits, `fp8`), then prompts that ask for needles (`served`). Then all answer the same questions
(`needles`). A peer without an environment, and a case that a peer refuses, is a row with the reason. Writes peers.json
with hardware, versions, command and all raw timings; table.py makes tables and a picture of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import cases  # noqa: E402
import peer_kvpress  # noqa: E402
import peer_openvino  # noqa: E402
import peer_vllm  # noqa: E402
from reports import ENVIRONMENT, conditions, console, to_json  # noqa: E402

from vllm_evict.tools.eval.prompts import Prompts  # noqa: E402


@dataclass(frozen=True)
class Peer:
    """A peer's runner.

    Attributes:
        module: the runner, which names its cases of each part (`PARTS`).
        alone: each load has a process of its own.
        few: cases of a dry run.
    """

    module: Any
    alone: bool = False
    few: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.module.__name__.removeprefix("peer_")

    def python(self, environments: Path) -> Path:
        """Its interpreter; vLLM's is that of this process."""
        return (
            Path(sys.executable)
            if self.module is peer_vllm
            else environments / f".venv-peers-{self.name}" / "bin" / "python"
        )

    def missing(self, environments: Path) -> str | None:
        """Why the peer cannot run here, if it cannot."""
        folder = self.python(environments).parents[1]
        if self.module is peer_vllm:
            return None
        if (folder / "unavailable").exists():
            return f"cannot be installed here: {(folder / 'unavailable').read_text().strip()}"
        return None if (folder / ".made").exists() else f"no environment: run make {folder.name}/.made"

    def names(self, what: str, options: argparse.Namespace) -> list[str]:
        every = list(getattr(self.module, PARTS[what]))
        wanted = self.few if options.dry_run else options.cases or every
        return [name for name in every if name in wanted]


#: Parts of a run, and where a runner names the cases of each.
PARTS = {"load": "LOADS", "bfloat16": "BFLOAT16", "fp8": "FP8", "served": "SERVED", "needles": "NEEDLES"}
PEERS = [
    Peer(peer_vllm, alone=True, few=("stock", "h2o", "--kv-offloading-size 1", "keydiff")),
    Peer(peer_openvino, few=("full", "NORM_SUM")),
    Peer(peer_kvpress, few=("none", "KeyDiff")),
]


def run_peer(peer: Peer, what: str, path: Path, names: list[str], options: argparse.Namespace) -> dict:
    """Return the output of a runner; if it failed as a whole, an error for each of its cases."""
    stock = peer.alone and what != "needles" and peer_vllm.TIMED[names[0]][1] is None
    environment = {
        **{**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"},
        **{**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        **({"VLLM_PLUGINS": ""} if stock else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "result.json")
        command = [
            str(peer.python(options.environments)),
            str(HERE / f"peer_{peer.name}.py"),
            what,
            str(path),
            str(answer),
            *names,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cases.ROOT)
        if answer.exists():
            return json.loads(answer.read_text())
    said = (done.stdout + done.stderr).strip()
    console.print(said[-3000:], markup=False, highlight=False, soft_wrap=True)
    last = said.splitlines()[-1] if said else "no output"
    reason = f"its process ended with {done.returncode}: {last[:200]}"
    return {"versions": {}, "rows": [{"case": name, "error": reason} for name in names]}


def measure(options: argparse.Namespace, sizes: cases.Sizes, save: Callable[[dict], None]) -> None:
    """Run all cases, and save the report after each process: each part has a list of rows for each peer."""
    chosen = [peer for peer in PEERS if peer.name in options.only]
    report: dict[str, Any] = {
        "versions": {},
        "missing": {peer.name: why for peer in chosen if (why := peer.missing(options.environments))},
        **{part: {peer.name: [] for peer in chosen} for part in options.parts},
        "sizes": asdict(sizes) | {"budgets": sizes.budgets},
    }
    here = [peer for peer in chosen if peer.name not in report["missing"]]
    folder = Path(options.out, "work")
    folder.mkdir(parents=True, exist_ok=True)
    path = cases.write(folder.resolve(), sizes)
    prompts = Prompts(str(cases.NEEDLE))
    plans = {"needles": sizes.plan, "served": sizes.plan_of(cases.SERVED, sizes.asked)}
    samples = {part: cases.samples_of(plan, prompts) for part, plan in plans.items()}

    def step(peer: Peer, what: str, names: list[str], words: str) -> None:
        start = time.perf_counter()
        result = run_peer(peer, what, path, names, options)
        for row in result["rows"]:
            if answers := row.pop("answers", None):
                if what == "served":
                    answers = prompts.tokenizer.batch_decode(answers, skip_special_tokens=True)
                row["right"] = "".join(str(int(each)) for each in cases.right(answers, samples[what]))
        report["versions"][peer.name] = result["versions"] or report["versions"].get(peer.name, {})
        report[what][peer.name] += result["rows"]
        wrong = sum("error" in row for row in result["rows"])
        console.print(
            f"{words:<10}{peer.name:<10}{', '.join(names)[:70]:<72}{time.perf_counter() - start:6.1f} s"
            + (f"  {wrong} refused" if wrong else ""),
            soft_wrap=True,
            highlight=False,
        )
        save(report)

    for what in options.parts:
        for number in range(1 if what == "needles" else options.rounds):
            for peer in here:
                names = peer.names(what, options)
                alone = peer.alone and what != "needles"
                for some in [[name] for name in names] if alone else [names] if names else []:
                    step(peer, what, some, f"{what} {number + 1}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--rounds", type=int, default=2, help="times that each load runs")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only these peers")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these cases, of all peers")
    parser.add_argument("--samples", type=int, default=cases.Sizes.samples, help="prompts of each task and depth")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads of a peer")
    parser.add_argument("--out", type=Path, default=Path("out/peers"))
    parser.add_argument("--environments", type=Path, default=cases.ROOT, help="folder of .venv-peers-NAME")
    parser.add_argument("--dry-run", action="store_true", help="few cases of small sizes: whether it all runs")
    options = parser.parse_args(arguments)
    known = {name for peer in PEERS for part in PARTS.values() for name in getattr(peer.module, part)}
    if unknown := set(options.cases or ()) - known:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; choose from: {', '.join(sorted(known))}")
    sizes = cases.DRY if options.dry_run else cases.Sizes(samples=options.samples)
    start, facts = time.perf_counter(), conditions()
    versions = facts.pop("versions")
    about = {"conditions": facts, "rounds": options.rounds, "threads": options.threads}

    def save(report: dict) -> None:
        report["versions"].setdefault("vllm", {}).update(versions)
        minutes = round((time.perf_counter() - start) / 60, 1)
        text = to_json(report | about | {"minutes": minutes, "load average": round(os.getloadavg()[0], 1)})
        Path(options.out, "peers.json").write_text(text + "\n")

    measure(options, sizes, save)
    console.print(f"\nwritten: {options.out}/peers.json")


if __name__ == "__main__":
    main()

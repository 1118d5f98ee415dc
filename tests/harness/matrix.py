"""Tests that have run, by class of model, attention backend and model runner: the matrix of docs/limits.md.

    python tests/harness/matrix.py FILE...      run the tests marked `oracle`; VLLM_EVICT_TEST_RUNNER is the model runner
    python tests/harness/matrix.py              print the matrix

`@pytest.mark.oracle("latents")` says that a test compares evictions or answers of engines with a reference that shares no
code with the plugin, and names the class of its models. While such a test runs, each request that loses blocks is noted
by its policy, with the engine's backend and runner; if the test passes, the note becomes a cell of the matrix. Then the
plugin's configuration is asked what it refuses for the same model on Model Runner V1. Results are kept in
benchmarks/results/matrix.json; a file of tests that runs again replaces its own.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks/results/matrix.json"
#: Runners by the value of VLLM_EVICT_TEST_RUNNER.
RUNNERS = {"v1": "V1", "v1-triton": "V1", "v2": "V2"}
BUDGET = {"budget": 384, "sink": 128, "recent": 128}
SNAPKV = {"name": "snapkv", **BUDGET}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 256}
#: Column -> policy and engine arguments of a server that has it.
COLUMNS: dict[str, tuple[dict, dict]] = {
    "places": ({"name": "sink-window", **BUDGET}, {}),
    "attention": (SNAPKV, {}),
    "keys": ({"name": "keydiff", **BUDGET}, {}),
    "tokens": ({**SNAPKV, "granularity": "token"}, {}),
    "split heads": ({"name": "adakv", "bands": 2, **BUDGET}, {}),
    "kvzip": ({"name": "kvzip", **BUDGET}, {}),
    "pressure": ({"name": "h2o", **BUDGET, "when": "pressure", "admit": True}, {}),
    "context": ({"name": "h2o", **BUDGET, "context": "model"}, {}),
    "host": ({"name": "full", **BUDGET, "evict": "host", "host": "64MiB"}, {}),
    "drafts": ({"name": "h2o", **BUDGET}, {"speculative_config": NGRAM}),
}


def columns(config: Any, policy: str, speculates: bool) -> set[str]:
    """The columns of a request that loses blocks under a policy, on a server with this configuration."""
    from vllm_evict.policies import POLICIES

    found = {
        "tokens": config.granularity == "token",
        "split heads": bool(config.allocator.splits),
        "kvzip": policy == "kvzip",
        "pressure": config.when == "pressure",
        "context": bool(config.context),
        "host": config.reaches,
        "drafts": speculates,
    }
    measured = POLICIES[policy].measures
    kind = "places" if not measured else "attention" if measured & {"mass", "pivots"} else "keys"
    return {name for name, holds in found.items() if holds} or {kind}


class Recorder:
    """A plugin of pytest that notes what engines of marked tests did, and what their models are refused."""

    def __init__(self, path: Path, runner: str) -> None:
        self.path, self.runner = path, runner
        #: File of tests -> class of model -> backend -> columns.
        self.ran: dict[str, dict] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
        #: Class -> a model of it.
        self.models: dict[str, str] = {}
        self._noted: set[tuple[str, str]] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.get_closest_marker("oracle")]
        for item in items:
            self.ran[item.path.name].clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        from vllm_evict.integration.engine.scheduler import EvictionMixin

        (kind,), self._noted, apply = item.get_closest_marker("oracle").args, set(), EvictionMixin.apply

        def noting(scheduler: Any, action: Any) -> None:
            vllm_config = scheduler.vllm_config
            self.models.setdefault(kind, vllm_config.model_config.model)
            policy = scheduler.groups[action.group].residents[action.req_id].policy
            for column in columns(scheduler.kv_policy, policy, bool(vllm_config.speculative_config)):
                self._noted |= {(backend, column) for backend in backends(vllm_config)}
            apply(scheduler, action)

        with patch.object(EvictionMixin, "apply", noting):
            result = yield
        for backend, column in self._noted:
            self.ran[item.path.name][kind][backend].add(column)
        return result

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {"ran": {}, "refused": {}}
        for file, kinds in self.ran.items():
            cells = {kind: {name: sorted(found) for name, found in by.items()} for kind, by in kinds.items()}
            known["ran"].setdefault(file, {})[self.runner] = cells
        self._write(known)
        if self.runner == "v1":  # V2 refuses more, for other reasons than the model
            for kind, model in self.models.items():
                known["refused"][kind] = [column for column in COLUMNS if is_refused(model, column)]
            self._write(known)

    def _write(self, known: dict) -> None:
        self.path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def backends(vllm_config: Any) -> set[str]:
    """Attention backends of an engine's layers whose blocks may go."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return {
        layer.get_attn_backend().get_name()
        for layer in layers
        if getattr(layer, "impl", None) is not None and not getattr(layer, "sliding_window", None)
    }


def is_refused(model: str, column: str) -> bool:
    """Whether the plugin refuses a model with a column's policy, before anything is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_evict import KVPolicyError

    policy, arguments = COLUMNS[column]
    # vLLM's CPU platform refuses prefix caching of some models, the plugin that of others.
    refused = False
    for caching in (None, False):
        try:
            args = EngineArgs(model=model, kv_policy=policy, enable_prefix_caching=caching, **ENGINE, **arguments)
            args.create_engine_config()
        except KVPolicyError:
            refused = True
        except ValueError:
            continue
        else:
            return False
    if not refused:
        raise ValueError(f"vLLM refuses {model} with {policy}, whether prefixes are cached or not")
    return True


def table() -> str:
    """One row for each class and backend; a cell names the model runners (V1, V2) on which tests passed."""
    known = json.loads(RESULTS.read_text())
    cells: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for runs in known["ran"].values():
        for runner, kinds in runs.items():
            for kind, by_backend in kinds.items():
                for backend, found in by_backend.items():
                    for column in found:
                        cells[kind, backend, column].add(RUNNERS[runner])
    lines = [f"| models | backend | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for kind, backend in sorted(
        {key[:2] for key in cells}, key=lambda row: (row[0], not row[1].startswith("CPU"), row)
    ):
        shown = []
        for column in COLUMNS:
            ran, refused = cells[kind, backend, column], column in known["refused"].get(kind, ())
            assert not (ran and refused), f"{kind} with {column} has run, and is refused"
            shown.append(", ".join(sorted(ran)) or ("refused" if refused else ""))
        lines.append(f"| {kind} | {backend} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(files: list[str]) -> int:
    if not files:
        print(table(), end="")
        return 0
    recorder = Recorder(RESULTS, os.environ.setdefault("VLLM_EVICT_TEST_RUNNER", "v1"))
    options = ["-q", "--show-capture=no", "--tb=short", "-p", "no:cacheprovider"]
    return pytest.main([*options, *files], plugins=[recorder])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

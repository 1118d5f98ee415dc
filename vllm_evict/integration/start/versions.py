"""Releases of vLLM that the plugin serves on, and what differs between them for several modules.

What differs for one function alone stands in it, with the release ("since 0.32").

A release that `CHECKED` lists is served, in vLLM's own builds. The sources of all others (a post-release, a build of a
fork, a version that is none) are compared at start: one is served if each function that the plugin replaces, calls or
relies on is that of a checked release, else refused. `touched.json` has the digests of these functions in each checked
release; `tests/harness/guard` writes it.
"""

import functools
import gc
import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ...config import KVPolicyError
from .sources import FUNCTIONS, Found, Sources

#: Releases whose sources were checked: they hold all that the guard asks for (tests/compat/test_guard.py).
CHECKED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
#: Of them, releases on whose own builds tests have been run (benchmarks/results/versions has the results).
RUN = ("0.30.0", "0.31.0", "0.32.0")
#: Labels of vLLM's own builds of a release: the device that they are for.
BUILDS = re.compile(r"cpu|cu\d+|rocm\d*|xpu|tpu")
#: Modules whose content some releases have in another module: where it was -> where it went.
MOVED = {  # vLLM 0.33
    "vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args",
    "vllm.v1.core.kv_cache_utils": "vllm.v1.core.kv_cache_planning",
}
#: Of each checked release: digests of files, and of functions with the modules in which they are looked up.
#: {"releases": [...], "files": {module: [digest, ...]}, "functions": {"module:name": {"in": [module, ...], "code":
#: [digest, ...]}}}; a digest is None where a release has no such file or function.
TOUCHED = Path(__file__).with_name("touched.json")
#: A refusal names so many functions that changed.
NAMED = 5

# Below vLLM's own, which says where lines go.
logger = logging.getLogger("vllm.evict")


def check(release: str, sources: Sources | None = None) -> None:
    """Refuse a release of vLLM that is not checked, unless all that the plugin touches is as in a checked release.

    Args:
        release: of vLLM, as `release` returns it.
        sources: of vLLM; None for those that are installed.

    Raises:
        KVPolicyError: naming the functions that differ, and releases to install.
    """
    if (base := release.partition("+")[0]) not in CHECKED or not _is_own_build(release):
        _check_sources(release, sources)
    elif base not in RUN:
        _warn_not_run(release)


def _is_own_build(release: str) -> bool:
    """Return whether vLLM's own project built a release, as far as its version tells."""
    labels = release.partition("+")[2]
    return all(BUILDS.fullmatch(label) for label in labels.split(".")) if labels else True


def release() -> str:
    """Return the version of the vLLM that is imported. Its distribution may have another name, or another version."""
    return str(importlib.import_module("vllm").__version__)


def since(first: str) -> bool:
    """Return whether the vLLM that is imported is of this release or a later one, or has a version that is none."""
    try:
        return Version(release()) >= Version(first)
    except InvalidVersion:  # "dev", of a checkout that was not built
        return True


def splits_in_builders() -> bool:
    """Return whether vLLM splits blocks for one backend's builder (0.32 and later); before, the block tables were
    split.
    """
    return hasattr(importlib.import_module("vllm.v1.worker.utils").AttentionGroup, "map_to_kernel_block_table")


def layers_size_blocks(device: str) -> bool:
    """Return whether layers tell vLLM the size of blocks on a device: on GPUs, and on CPUs since vLLM 0.33."""
    return device != "cpu" or since("0.33")


def serves_on_v2() -> bool:
    """Return whether speculation and stages are served on Model Runner V2 of this vLLM: 0.32 and later."""
    return since("0.32")


def import_moved(module: str, name: str) -> Any:
    """Import a name from a module, or from where other releases have the module's content."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError):
        return getattr(importlib.import_module(MOVED[module]), name)


def waiting_with_blocks(scheduler: Any) -> list[Any]:
    """Return the requests that wait and hold blocks, like sessions between two turns.

    vLLM 0.30 has no queue of their own for them: they are among those that wait or that a step skips.
    """
    queue = getattr(scheduler, "kv_holding_waiting", None)
    if queue is None:
        queues = (*scheduler.waiting, *scheduler.skipped_waiting)
        return [request for request in queues if request.num_computed_tokens > 0]
    return list(queue)


def queues_sessions_first(scheduler: Any) -> bool:
    """Return whether a step tries requests that wait and hold blocks before all others: since vLLM 0.31."""
    return hasattr(scheduler, "kv_holding_waiting")


def any_waits(scheduler: Any) -> bool:
    """Return whether any request is in a queue that a step admits from, idle sessions included. If not, it admits none.

    vLLM 0.30 has `skipped_waiting`, later releases `kv_holding_waiting`.
    """
    return any(getattr(scheduler, queue, ()) for queue in ("waiting", "kv_holding_waiting", "skipped_waiting"))


def most_in_window(manager: Any) -> int:
    """Return the most blocks that vLLM sets aside for a request by a sliding window's manager.

    vLLM 0.30 keeps the number under a private name.
    """
    name = "max_admission_blocks_per_request"
    return getattr(manager, name) if hasattr(manager, name) else getattr(manager, f"_{name}")


def find(sources: Sources, where: str) -> Found | None:
    """Find "module:name", also where the module's content moved."""
    module, _, name = where.partition(":")
    moved = [new for old, new in MOVED.items() if old == module] + [old for old, new in MOVED.items() if new == module]
    return next(filter(None, (sources.find(place, name) for place in (module, *moved))), None)


def digest(sources: Sources, where: str) -> str | None:
    """Return the fingerprint of the function "module:name", None where there is none."""
    found = find(sources, where)
    return sources.body_digest(found) if found and isinstance(found.node, FUNCTIONS) else None


def _check_sources(release: str, sources: Sources | None) -> None:
    if sources is None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None and spec.origin is not None, "vLLM is installed"
        sources = Sources(Path(spec.origin).parents[1])
    known = json.loads(TOUCHED.read_text())
    with _no_collection():
        nearest, changed = _compare(sources, known)
    if changed:
        raise KVPolicyError(
            f"vllm_evict works inside vLLM and has not been tested with vLLM {release}, which differs from "
            f"vLLM {nearest} in {_functions(sources, changed)}: "
            f"install one of {', '.join(f'vllm=={checked}' for checked in CHECKED)}, or leave --kv-policy out"
        )
    _say_identical(release, len(known["functions"]), nearest)


def _compare(sources: Sources, known: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the checked release with the most files in common, and the functions that differ from it."""
    files = {module: sources.digest(module) for module in known["files"]}
    differing = [
        {module for module, each in known["files"].items() if each[column] != files[module]}
        for column in range(len(known["releases"]))
    ]
    nearest = min(reversed(range(len(differing))), key=lambda column: len(differing[column]))
    # Only functions that are looked up in a file that differs can differ: other files are not parsed.
    changed = [
        where
        for where, function in known["functions"].items()
        if not differing[nearest].isdisjoint(function["in"]) and digest(sources, where) != function["code"][nearest]
    ]
    return known["releases"][nearest], changed


def _functions(sources: Sources, places: list[str]) -> str:
    named = []
    for where in places[:NAMED]:
        found = find(sources, where)
        module, _, name = where.partition(":")
        named.append(f"{name} ({sources.file(found.module if found else module)}{'' if found else ', gone'})")
    more = len(places) - len(named)
    return ", ".join(named) + (f" and {more} more functions" if more else "")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Syntax trees have a million objects and no garbage: collections would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _say_identical(release: str, functions: int, nearest: str) -> None:
    logger.warning(
        "vllm_evict has not been tested with vLLM %s; all %d functions of vLLM that it replaces, calls or relies on "
        "are those of vLLM %s, so it serves",
        release,
        functions,
        nearest,
    )


@functools.cache
def _warn_not_run(release: str) -> None:
    logger.warning(
        "vllm_evict has been checked against the sources of vLLM %s, not run on it; it has been run on vLLM %s",
        release,
        ", ".join(RUN),
    )

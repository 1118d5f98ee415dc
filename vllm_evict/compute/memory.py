"""Device memory that the plugin needs beside vLLM's KV cache. vLLM learns of it before it sizes its pool.

Memory that the plugin keeps is allocated before vLLM's profile run (`EvictionRuntime.reserve`). Memory of a step, of a
decision or of a report is allocated during the profile run (`integration.worker.runners`). Memory that grows with the
pool is taken from what vLLM finds for the pool.
"""

from collections.abc import Iterable
from math import ceil

from .group import GroupRuntime
from .needs import MIB, Needs
from .runtime import EvictionRuntime


def needs(groups: Iterable[GroupRuntime]) -> Needs:
    """Return the needs of all KV groups of a worker."""
    return Needs.of_groups(
        Needs.of_parts((part.needs(group.shape) for part in group.parts), group.shape.blocks) for group in groups
    )


def kept_bytes(runtime: EvictionRuntime) -> int:
    """Return the bytes on the device that a worker keeps between steps."""
    kept = runtime.ops.scratch.nbytes
    for group in runtime.groups:
        kept += sum(each.nbytes for each in group.views.memory(group) if each is not None)
        kept += group.identity.nbytes + group.graph_rows.rows.nbytes
        kept += sum(part.kept_bytes for part in group.parts)
    return kept


def described(name: str, runtime: EvictionRuntime, beside: Needs, pool: int) -> str:
    """Return the log line about device memory, for a pool of `pool` blocks."""
    blocks = min(pool, beside.blocks)
    taken = sum(part.pool_bytes for group in runtime.groups for part in group.parts)
    kept = kept_bytes(runtime) + beside.block * blocks - taken
    line = f"KV policy {name}: {_size(kept)} of device memory are set aside beside the KV cache"
    if beside.block:
        line += f", {_size(beside.block * blocks)} of them for scores by token of {blocks} blocks"
    return f"{line}; a step takes up to {_size(beside.step)} more, a decision or report {_size(beside.between)}"


def put_aside(name: str, runtime: EvictionRuntime) -> str | None:
    """Return the log line about host memory that requests take; None if they take none."""
    parts = [part for group in runtime.groups for part in group.parts if part.host_bytes]
    if not parts:
        return None
    return f"KV policy {name}: {parts[0].host_use.format(_size(sum(part.host_bytes for part in parts)))}"


def _size(count: int) -> str:
    return f"{ceil(count / MIB)} MiB"

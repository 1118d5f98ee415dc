"""Device memory that the plugin needs beside vLLM's KV cache. vLLM learns of it before it sizes its pool.

Memory that the plugin keeps is allocated before vLLM's profile run (`EvictionRuntime.reserve`). Memory of a step, of a
decision or of a report is allocated during the profile run (`integration.runners`). Memory that grows with the pool is
taken from what vLLM finds for the pool.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ..policies import CACHED, QUERIED
from . import measure
from .group import GroupRuntime
from .prompts import SCRATCH
from .runtime import EvictionRuntime
from .tokens import TURNED

MIB = 1 << 20
#: Bytes kept for each token, layer and KV head: its sum, its position, and a copy of the sum for a decision that is
#: due. For a reconstructed prompt: the prompt's score, the request's score, and the position.
OF_TOKEN = 12
#: Bytes that a decision by token takes for each candidate: float64 numbers and their inputs.
OF_CANDIDATE = 72
#: Bytes that statistics of keys and values, and merging, take for each element of a key: four float32 numbers.
OF_DIMENSION = 16
#: Bytes that a rotation takes for each element of a key with that of its value: read, float32, rotated and written.
OF_TURNED = 32
#: Bytes that work in pieces takes at most: pairs of keys (`kernels.alike`), tokens (`triton_kernels.compact`).
AT_A_TIME = 128 * MIB


class Needs(NamedTuple):
    """Upper bounds of device memory, in bytes.

    Attributes:
        step: bytes while layers run, beside their activations.
        between: bytes before the first layer or after the last one, for a short time.
        block: bytes for each block that requests hold.
        blocks: number of blocks that requests hold if they share none.
    """

    step: int = 0
    between: int = 0
    block: int = 0
    blocks: int = 0

    def left(self, available: int, block_bytes: int) -> int:
        """Return the bytes of `available` that are left for a pool with blocks of `block_bytes`."""
        blocks = available // (block_bytes + self.block) + 1
        return available - self.block * min(blocks, self.blocks)


def needs(groups: Iterable[GroupRuntime], head_size: int, itemsize: int, queries: int) -> Needs:
    """Return the needs of all KV groups of a worker.

    Args:
        groups: KV groups of the worker.
        head_size, itemsize: elements of a key, and bytes of an element.
        queries: bytes of one layer's queries in the largest step.
    """
    each = [_needs(group, head_size, itemsize, queries) for group in groups]
    step, between, block, blocks = zip(*each)
    return Needs(sum(step), max(between), sum(block), max(blocks))


def _needs(group: GroupRuntime, head_size: int, itemsize: int, queries: int) -> Needs:
    kv_heads, layers = group.shape
    blocks, numbers = group.held_blocks * group.max_requests, group.held_blocks * group.block_size * kv_heads
    rows = numbers * head_size  # elements of the longest request's keys in one layer
    step = between = block = 0
    if group.sums is not None:
        tests = "pivots" in group.statistics
        by_layer = group.sums.kv_heads if tests or group.sums.maximise_layers else 0
        # A copy of the queries in another dtype, or their LSE. Tested queries need copies and outputs beside it.
        step += 4 * blocks * (group.sums.heads + by_layer) + queries * (3 if tests else 1)
        step += measure.PIVOT_SCRATCH if tests else 0
        # Reports: two indices of each block, sums in float32 and float64, and their reduction.
        between = blocks * (32 + 16 * group.sums.heads)
    if group.statistics & CACHED:
        between = max(between, rows * (2 * itemsize + OF_DIMENSION) + AT_A_TIME)
    if group.statistics & QUERIED:
        step += 2 * rows * itemsize // group.block_size + rows * itemsize
    if group.originals is not None:
        tokens = max(min(TURNED, group.held_blocks * group.block_size), group.block_size)
        # The rotation of one layer, and computed keys of all layers.
        between = max(between, tokens * kv_heads * head_size * (OF_TURNED + layers * itemsize))
    if group.by_token:
        decision = layers * numbers * OF_CANDIDATE + AT_A_TIME
        if group.merges:
            decision += layers * rows * 8  # kept keys and values of all layers
        between = max(between, decision + rows * (2 * itemsize + OF_DIMENSION))
    if group.tokens is not None:
        step += 4 * numbers * group.max_requests
    if group.prompts is not None:
        step += rows * (itemsize + OF_DIMENSION) + 4 * SCRATCH
    if group.tokens is not None or group.prompts is not None:
        block = OF_TOKEN * layers * kv_heads * group.block_size
    return Needs(step, between, block, blocks)


def kept_bytes(runtime: EvictionRuntime) -> int:
    """Return the bytes on the device that a worker keeps between steps."""
    return runtime.ops.scratch_bytes + sum(group.kept_bytes for group in runtime.groups)


def described(name: str, runtime: EvictionRuntime, beside: Needs, pool: int) -> str:
    """Return the log line about device memory, for a pool of `pool` blocks."""
    blocks = min(pool, beside.blocks)
    taken = sum(group.tokens.nbytes for group in runtime.groups if group.tokens is not None)
    kept = kept_bytes(runtime) + beside.block * blocks - taken
    line = f"KV policy {name}: {_size(kept)} of device memory are set aside beside the KV cache"
    if beside.block:
        line += f", {_size(beside.block * blocks)} of them for scores by token of {blocks} blocks"
    return f"{line}; a step takes up to {_size(beside.step)} more, a decision or report {_size(beside.between)}"


def put_aside(name: str, runtime: EvictionRuntime) -> str | None:
    """Return the log line about host memory for rotated keys; None if the policy has no context."""
    groups = [group for group in runtime.groups if group.originals is not None]
    if not groups:
        return None
    most = sum(group.held_blocks * group.originals.block_bytes for group in groups)
    return (
        f"KV policy {name}: a request that outgrows its context takes up to {_size(most)} of host memory on each rank, "
        "for its keys as they were computed"
    )


def _size(count: int) -> str:
    return f"{ceil(count / MIB)} MiB"

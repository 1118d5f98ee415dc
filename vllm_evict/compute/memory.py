"""Memory of a device that a worker's policies take beside vLLM's KV cache, told to vLLM before it sizes its pool.

What is there from start to end is allocated before vLLM profiles (`EvictionRuntime.reserve`), so vLLM finds it taken.
What a step takes, and what a decision or a report takes for a moment, is taken while it profiles
(`compat.runners.profiling`). What grows with the pool comes out of the memory that vLLM finds for the pool.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ..policies import CACHED
from . import sums
from .group import GroupRuntime
from .prompts import SCRATCH
from .runtime import EvictionRuntime
from .tokens import TURNED

MIB = 1 << 20
#: Bytes of numbers that are kept about a token, layer and KV head: a sum, its position once a decision has left it, and
#: a copy of the sum for a decision that is due. Of a reconstructed prompt: scores, the request's own, and positions.
OF_TOKEN = 12
#: Of numbers that a decision by token makes of them, in float64 with what it is made from: for each candidate.
OF_CANDIDATE = 72
#: Of what statistics of keys and values, and merging, make of each number of a token's key: four in float32 at once.
OF_DIMENSION = 16
#: Of a block that moves up: a number of its key, with the one of its value; read, in float32, turned, and written.
OF_TURNED = 32
#: What is done some at a time, so that it takes no more than about so much: pairs of keys that are compared
#: (`kernels.alike`), tokens that are moved (`triton_kernels.compact`).
AT_A_TIME = 128 * MIB


class Needs(NamedTuple):
    """Bytes on a device, at most.

    Attributes:
        step: while layers run, beside their activations.
        between: for a moment, before the first layer runs or after the last.
        block: for each block that requests hold.
        blocks: that they hold, if they share none.
    """

    step: int = 0
    between: int = 0
    block: int = 0
    blocks: int = 0

    def left(self, available: int, block_bytes: int) -> int:
        """What of the memory for a pool is left for its blocks, of so many bytes each, beside what is kept of them."""
        blocks = available // (block_bytes + self.block) + 1
        return available - self.block * min(blocks, self.blocks)


def needs(groups: Iterable[GroupRuntime], head_size: int, itemsize: int, queries: int) -> Needs:
    """Of all KV groups of a worker.

    Args:
        groups: its.
        head_size, itemsize: dimensions of a key, and bytes of each.
        queries: bytes of a layer's, in the largest step.
    """
    each = [_needs(group, head_size, itemsize, queries) for group in groups]
    step, between, block, blocks = zip(*each)
    return Needs(sum(step), max(between), sum(block), max(blocks))


def _needs(group: GroupRuntime, head_size: int, itemsize: int, queries: int) -> Needs:
    layers, kv_heads = group.shape
    blocks, numbers = group.held_blocks * group.max_requests, group.held_blocks * group.block_size * kv_heads
    rows = numbers * head_size  # of the longest request, in one layer
    step = between = block = 0
    if group.sums is not None:
        tests = "pivots" in group.statistics
        by_layer = group.sums.kv_heads if tests or group.sums.maximise_layers else 0
        # Queries in another dtype, or their LSE; of those that are looked at one by one copies, and outputs.
        step += 4 * blocks * (group.sums.heads + by_layer) + queries * (3 if tests else 1)
        step += sums.PIVOT_SCRATCH if tests else 0
        # Reports: both indices of each block, sums in float32 and float64, and what they are reduced to.
        between = blocks * (32 + 16 * group.sums.heads)
    if group.statistics & CACHED:
        between = max(between, rows * (2 * itemsize + OF_DIMENSION) + AT_A_TIME)
    if group.originals is not None:
        tokens = max(min(TURNED, group.held_blocks * group.block_size), group.block_size)
        # Besides keys of all layers, as they were computed.
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
    """Of all that a worker's policies keep on the device from start to end."""
    return runtime.ops.scratch_bytes + sum(group.kept_bytes for group in runtime.groups)


def described(name: str, runtime: EvictionRuntime, beside: Needs, pool: int) -> str:
    """What is set aside, for the log, once there is a pool of so many blocks."""
    blocks = min(pool, beside.blocks)
    taken = sum(group.tokens.nbytes for group in runtime.groups if group.tokens is not None)
    kept = kept_bytes(runtime) + beside.block * blocks - taken
    line = f"KV policy {name}: {_size(kept)} of device memory are set aside beside the KV cache"
    if beside.block:
        line += f", {_size(beside.block * blocks)} of them for scores by token of {blocks} blocks"
    return f"{line}; a step takes up to {_size(beside.step)} more, a decision or report {_size(beside.between)}"


def put_aside(name: str, runtime: EvictionRuntime) -> str | None:
    """Host memory that a request takes which outgrows its context, for the log; None if requests have no context."""
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

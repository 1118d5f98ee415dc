"""vLLM's messages and metrics with fields of the plugin: what the engine core tells the front end, and what users get.

An engine core sends `EngineCoreOutputs` as msgpack. The encoder sends all fields of a struct's own class, and a decoder
skips fields that its type does not have. So a subclass with one more field at the end travels, and code that decodes
vLLM's class (the coordinator of data parallelism) is not affected.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestStateStats, SchedulerStats

from ...core.usage import KVUsage


class EvictionOutput(EngineCoreOutput, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]  # of msgspec
    """One step's output of a request, with its usage so far where that is news to the front end."""

    kv_usage: KVUsage | None = None

    @classmethod
    def of(cls, output: EngineCoreOutput, usage: KVUsage) -> "EvictionOutput":
        return cls(*msgspec.structs.astuple(output), kv_usage=usage)


@dataclass
class EvictionStats(SchedulerStats):
    """Statistics of a step, with the scheduler's counts by policy (`tally.Tally`)."""

    kv_evict: dict[str, dict[str, Any]] | None = None

    @classmethod
    def of(cls, stats: SchedulerStats, counts: dict[str, dict[str, Any]]) -> "EvictionStats":
        """Turn vLLM's object into one of this class: a new one would copy each field, in each step."""
        stats.__class__, stats.kv_evict = cls, counts
        return stats


class EvictionOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]  # of msgspec
    """A step's message, as the front end reads it."""

    outputs: list[EvictionOutput] = []
    scheduler_stats: EvictionStats | None = None


@dataclass
class RequestStats(RequestStateStats):
    """`RequestOutput.metrics` of a finished request. Ray Data keeps these fields, and little else of an output.

    Attributes:
        kv_usage: a `KVUsage` as a dict; with n > 1 a list in the order of the completions.
    """

    kv_usage: Any = None

"""A request's metrics in vLLM, with the usage of its cache."""

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.stats import RequestStateStats


@dataclass
class RequestStats(RequestStateStats):
    """`RequestOutput.metrics` of a request that asked for its usage.

    Ray Data keeps the fields of these metrics, and few other fields of an output.

    Attributes:
        kv_usage: a `KVUsage` as a dict; with n > 1 a list in the order of the completions.
    """

    kv_usage: Any = None

"""Eviction on vLLM's own /metrics: counted by the scheduler, shown by the front end."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from ...config import KVPolicyConfig
from ...core.mechanisms import Mechanism
from ..engine.tally import METRICS
from ..seams import replaces

#: What names of metrics begin with, so that vLLM unregisters them with its own.
PREFIX = "vllm:kv_evict_"


class PrometheusMetrics:
    """Front-end side: one time series a policy and engine, labelled like vLLM's own and there from the start.

    Args:
        model_name: as served.
        engines: indices of the engines.
        policy: the server's.
        kinds: classes of mechanisms.
        counter, gauge: classes that vLLM's own metrics have: prometheus_client's, or wrappers of Ray's.
    """

    def __init__(
        self,
        model_name: str,
        engines: Iterable[int],
        policy: KVPolicyConfig,
        kinds: Sequence[type[Mechanism]],
        counter: Any,
        gauge: Any,
    ) -> None:
        known = [METRICS, *(kind.metrics for kind in kinds if kind.serves(policy))]
        self._metrics = {
            key: metric
            for each in known
            for key, metric in each.items()
            if metric.kind != "field" or getattr(policy, key) is not None
        }
        self._model_name, self._made, self._series = model_name, dict[str, Any](), dict[tuple[Any, ...], Any]()
        for key, (name, help, kind, label, _) in self._metrics.items():
            labels = ["model_name", "engine", "policy", *filter(None, [label])]
            more = {} if kind == "counter" else {"multiprocess_mode": "mostrecent"}
            self._made[key] = (counter if kind == "counter" else gauge)(PREFIX + name, help, labels, **more)
        for engine, name, (key, metric) in product(engines, sorted(policy.allowed), self._metrics.items()):
            for value in metric.values:
                series = self._of(key, engine, name, value)
                if metric.kind == "field":
                    series.set(getattr(policy, key))

    def record(self, counts: dict[str, dict[str, dict[str, Any]]], engine: int) -> None:
        """Add what an engine counted (`Tally.take`)."""
        for policy, labels in counts.items():
            for label, values in labels.items():
                for key, value in values.items():
                    series = self._of(key, engine, policy, label)
                    series.inc(value) if self._metrics[key].kind == "counter" else series.set(value)

    def _of(self, key: str, engine: int, policy: str, label: str) -> Any:
        """Return a series of a metric."""
        if (of := (key, engine, policy, label)) not in self._series:
            labels = self._model_name, str(engine), policy, *filter(None, [label])
            self._series[of] = self._made[key].labels(*labels)
        return self._series[of]


def server_policy(vllm_config: Any) -> KVPolicyConfig | None:
    """Return the policy in vLLM's configuration; None: there is none."""
    additional = vllm_config.additional_config
    value = additional.get("kv_policy") if isinstance(additional, dict) else None
    return None if value is None else KVPolicyConfig.parse(value)


@replaces(
    "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    at_import=True,
    why="the scheduler's counts have metrics on /metrics, beside vLLM's own",
    remove_when="vLLM lets plugins add metrics",
)
def add_metrics(init: Callable[..., None]) -> Callable[..., None]:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def with_metrics(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        self.kv_evict_metrics = None
        if (policy := server_policy(vllm_config)) is not None:
            from ..engine.mechanisms import KINDS

            # After vLLM's Prometheus logger, which unregisters every metric called vllm:*.
            name = vllm_config.model_config.served_model_name
            # There is one: vLLM's, or the one that was given in its place (Ray's).
            beside = next(each for each in self.stat_loggers if isinstance(each, PrometheusStatLogger))
            classes = beside._counter_cls, beside._gauge_cls
            self.kv_evict_metrics = PrometheusMetrics(name, self.engine_indexes, policy, KINDS, *classes)

    return with_metrics


@replaces(
    "vllm.v1.metrics.loggers:StatLoggerManager.record",
    at_import=True,
    why="counts what a step's statistics say",
    remove_when="vLLM lets plugins add metrics",
)
def record_counts(record: Callable[..., None]) -> Callable[..., None]:
    def recorded(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        counts = getattr(scheduler_stats, "kv_evict", None)
        if counts is not None and self.kv_evict_metrics is not None:
            self.kv_evict_metrics.record(counts, kwargs.get("engine_idx") or 0)
        record(self, scheduler_stats, *args, **kwargs)

    return recorded

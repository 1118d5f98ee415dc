"""Eviction on vLLM's own /metrics: counted by the scheduler, shown by the front end."""

from collections.abc import Iterable
from itertools import product
from typing import Any

from ...config import KVPolicyConfig
from ...core.audit import CONTROL, KEPT
from ..engine.tally import (
    AUDIT_COUNTERS,
    AUDIT_SHARE,
    AUDIT_SKIPPED,
    AUDIT_TARGET,
    COUNTERS,
    HOST_COUNTERS,
    HOST_GAUGES,
    RESIDENT,
)


class PrometheusMetrics:
    """Front-end side: one time series a policy and engine, labelled like vLLM's own and there from the start.

    Args:
        model_name: as served.
        engines: indices of the engines.
        policy: the server's.
        counter, gauge: classes that vLLM's own metrics have: prometheus_client's, or wrappers of Ray's.
    """

    def __init__(
        self, model_name: str, engines: Iterable[int], policy: KVPolicyConfig, counter: Any, gauge: Any
    ) -> None:
        labels, self._model_name = ["model_name", "engine", "policy"], model_name
        counters, self._gauges = dict(COUNTERS), {"resident": RESIDENT}
        if policy.reaches:
            counters |= HOST_COUNTERS
            self._gauges |= HOST_GAUGES
        self._metrics: dict[str, Any] = {key: counter(*named, labels) for key, named in counters.items()}
        for key, named in self._gauges.items():
            self._metrics[key] = gauge(*named, labels, multiprocess_mode="mostrecent")
        self._series: dict[tuple[int, str], dict[str, Any]] = {}
        self._audits: dict[str, Any] = {}
        settings = []
        if policy.audit:
            settings.append((AUDIT_SHARE, policy.audit))
            by_share = [*labels, "kept"]
            self._audits = {key: counter(*named, by_share) for key, named in AUDIT_COUNTERS.items()}
            self._skipped = counter(*AUDIT_SKIPPED, [*labels, "reason"])
        if policy.target is not None:
            settings.append((AUDIT_TARGET, policy.target))
        shown = [(gauge(*named, labels, multiprocess_mode="mostrecent"), value) for named, value in settings]
        for engine, name in product(engines, sorted(policy.allowed)):
            self._of(engine, name)
            for metric, kept in product(self._audits.values(), (CONTROL, *KEPT)):
                metric.labels(model_name, str(engine), name, kept)
            for metric, value in shown:
                metric.labels(model_name, str(engine), name).set(value)

    def record(self, counts: dict[str, dict[str, Any]], engine: int) -> None:
        """Add what an engine counted (`Tally.take`)."""
        for policy, values in counts.items():
            for key, metric in self._of(engine, policy).items():
                if key in values:
                    metric.set(values[key]) if key in self._gauges else metric.inc(values[key])
            labels = self._model_name, str(engine), policy
            for kept, audited in values.get("audits", {}).items():
                for key, value in audited.items():
                    self._audits[key].labels(*labels, kept).inc(value)
            for reason, value in values.get("skipped", {}).items():
                self._skipped.labels(*labels, reason).inc(value)

    def _of(self, engine: int, policy: str) -> dict[str, Any]:
        """Return its series, by key of the counts."""
        if (engine, policy) not in self._series:
            labels = self._model_name, str(engine), policy
            self._series[engine, policy] = {key: metric.labels(*labels) for key, metric in self._metrics.items()}
        return self._series[engine, policy]

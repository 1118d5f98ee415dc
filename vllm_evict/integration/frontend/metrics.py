"""Eviction on vLLM's own /metrics: counted by the scheduler, shown by the front end."""

from collections.abc import Iterable
from itertools import product
from typing import Any

from ..engine.tally import COUNTERS, PLACES, RESIDENT


class PrometheusMetrics:
    """Front-end side: one time series a policy and engine, labelled like vLLM's own and there from the start.

    Args:
        model_name: as served.
        engines: indices of the engines.
        policies: that requests may run under.
        counter, gauge: classes that vLLM's own metrics have: prometheus_client's, or wrappers of Ray's.
        place: where evicted blocks go (`KVPolicyConfig.evict`).
    """

    def __init__(
        self,
        model_name: str,
        engines: Iterable[int],
        policies: Iterable[str],
        counter: Any,
        gauge: Any,
        place: str,
    ) -> None:
        labels, self._model_name = ["model_name", "engine", "policy"], model_name
        counters, self._gauges = dict(COUNTERS), {"resident": RESIDENT}
        if place in PLACES:
            counters |= PLACES[place].counters
            self._gauges |= PLACES[place].gauges
        self._metrics: dict[str, Any] = {key: counter(*named, labels) for key, named in counters.items()}
        for key, named in self._gauges.items():
            self._metrics[key] = gauge(*named, labels, multiprocess_mode="mostrecent")
        self._series: dict[tuple[int, str], dict[str, Any]] = {}
        for engine, policy in product(engines, policies):
            self._of(engine, policy)

    def record(self, counts: dict[str, dict[str, int]], engine: int) -> None:
        for policy, values in counts.items():
            series = self._of(engine, policy)
            for key, value in values.items():
                if key in self._gauges:
                    series[key].set(value)
                elif value:
                    series[key].inc(value)

    def _of(self, engine: int, policy: str) -> dict[str, Any]:
        """Return its series, by key of the counts."""
        if (engine, policy) not in self._series:
            labels = self._model_name, str(engine), policy
            self._series[engine, policy] = {key: metric.labels(*labels) for key, metric in self._metrics.items()}
        return self._series[engine, policy]

"""Counts of one scheduler by policy, for /metrics."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from ...core.mechanisms.base import Metric

#: What each server shows; mechanisms add their own (`Mechanism.metrics`).
METRICS = {
    "evicted": Metric("blocks_evicted", "KV blocks taken from running requests by their policy."),
    "freed": Metric("blocks_freed", "Evicted KV blocks that went back to the pool."),
    "shared": Metric("blocks_shared", "Evicted KV blocks that other requests still hold."),
    "copied": Metric("blocks_copied", "KV blocks taken for kept tokens in place of shared or published ones."),
    "moved": Metric("moves", "Times that what a request keeps moved up, so that it stays in its context."),
    "requests": Metric("requests", "Requests that lost at least one KV block."),
    "missing": Metric("reports_missing", "Scores that workers were asked for and did not report."),
    "resident": Metric("blocks_resident", "KV blocks held by running requests.", "gauge"),
}


class Tally:
    """Counts of one scheduler since it was last asked, and gauges of what it holds, by keys and labels of metrics."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))

    def add(self, policy: str, label: str = "", /, **counts: Any) -> None:
        """Add to counters of a policy."""
        self._known[policy][label].update(counts)

    def hold(self, policy: str, /, **gauges: int) -> None:
        """Set gauges of a policy."""
        for key, value in gauges.items():
            self._known[policy][""][key] = value

    def take(self, resident: Mapping[str, int]) -> dict[str, dict[str, dict[str, Any]]]:
        """Return policy -> label -> key -> the count since last time, or what is held now; only what there is.

        Args:
            resident: policy -> blocks that running requests hold, of each policy that ever had a request.
        """
        for policy, blocks in resident.items():
            self.hold(policy, resident=blocks)
        taken = {policy: {label: dict(of) for label, of in labels.items()} for policy, labels in self._known.items()}
        self._known.clear()
        return taken

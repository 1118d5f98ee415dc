"""Counts of one scheduler by policy, for /metrics."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

#: Counter name -> help. The prefix lets vLLM unregister them with its own.
COUNTERS = {
    "evicted": ("vllm:kv_evict_blocks_evicted", "KV blocks taken from running requests by their policy."),
    "freed": ("vllm:kv_evict_blocks_freed", "Evicted KV blocks that went back to the pool."),
    "shared": ("vllm:kv_evict_blocks_shared", "Evicted KV blocks that other requests still hold."),
    "copied": ("vllm:kv_evict_blocks_copied", "KV blocks taken for kept tokens in place of shared or published ones."),
    "moved": ("vllm:kv_evict_moves", "Times that what a request keeps moved up, so that it stays in its context."),
    "requests": ("vllm:kv_evict_requests", "Requests that lost at least one KV block."),
    "missing": ("vllm:kv_evict_reports_missing", "Scores that workers were asked for and did not report."),
}
#: The same of blocks on the host, if the server's policy has such.
HOST_COUNTERS = {
    "spilled": ("vllm:kv_evict_blocks_spilled", "Evicted KV blocks that were copied to the host."),
    "hit": ("vllm:kv_evict_host_blocks_hit", "Blocks of requests' prefixes that the host had for them."),
    "fetched": ("vllm:kv_evict_host_blocks_fetched", "Host blocks that layers of decodes copied into rooms."),
    "in_room": ("vllm:kv_evict_host_blocks_in_room", "Host blocks that layers of decodes chose, and rooms had."),
    "cut": ("vllm:kv_evict_host_blocks_cut", "Host blocks in whose place layers read others, as fetch bounds them."),
}
HOST_GAUGES = {
    "used": ("vllm:kv_evict_host_blocks", "Host blocks that hold KV blocks, under the server's policy."),
    "unused": ("vllm:kv_evict_host_blocks_cached", "Of these, blocks that are kept as prefixes alone."),
    "bytes": ("vllm:kv_evict_host_bytes", "Bytes of the host blocks that hold KV blocks, under the server's policy."),
}
#: The same of audits, by the share of its blocks that a request kept: there if the server audits.
AUDIT_COUNTERS = {
    "requests": ("vllm:kv_evict_audit_requests", "Greedy answers that full attention has scored."),
    "identical": ("vllm:kv_evict_audit_identical", "Of these, answers that full attention gives too."),
    "changed": ("vllm:kv_evict_audit_changed", "Of these, answers with a token that it clearly would not give."),
    "tokens": ("vllm:kv_evict_audit_tokens", "Tokens of these answers."),
    "agreed": ("vllm:kv_evict_audit_tokens_agreed", "Tokens that full attention prefers to all others."),
    "gap": ("vllm:kv_evict_audit_gap_nats", "Nats by which it prefers its own tokens, summed over tokens."),
    "sampled_requests": ("vllm:kv_evict_audit_sampled_requests", "Sampled answers that full attention has scored."),
    "sampled_tokens": ("vllm:kv_evict_audit_sampled_tokens", "Tokens of sampled answers."),
    "surprise": ("vllm:kv_evict_audit_surprise_nats", "Nats by which sampled tokens surprise full attention, summed."),
    "expected": ("vllm:kv_evict_audit_expected_nats", "The same had full attention sampled them: entropy, summed."),
    "measured": ("vllm:kv_evict_audit_measured", "Answers whose attention to lost blocks was measured."),
    "missed_mass": ("vllm:kv_evict_audit_missed_mass", "Shares of attention that answers pay to lost blocks, summed."),
    "computed_tokens": ("vllm:kv_evict_audit_computed_tokens", "Tokens computed to score answers."),
}
AUDIT_SKIPPED = ("vllm:kv_evict_audit_skipped", "Answers that were drawn for an audit and have none, by reason.")
AUDIT_SHARE = ("vllm:kv_evict_audit_share", "Share of answers that are drawn for an audit.")
AUDIT_TARGET = ("vllm:kv_evict_audit_target", "Share of audited answers that should be identical.")
RESIDENT = ("vllm:kv_evict_blocks_resident", "KV blocks held by running requests.")


class Tally:
    """Counts of one scheduler, by policy, since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTERS, 0))
        self._gauges: dict[str, dict[str, int]] = defaultdict(dict)
        #: Policy -> share kept -> counts; policy -> reason -> answers.
        self._audits: dict[str, dict[str, Counter[str]]] = {}
        self._skipped: dict[str, Counter[str]] = {}

    def count(self, policy: str, evicted: int, freed: int, first: bool, copied: int = 0) -> None:
        counts = self._counts[policy]
        counts["evicted"] += evicted
        counts["freed"] += freed
        counts["shared"] += evicted - freed
        counts["requests"] += first
        counts["copied"] += copied

    def add(self, policy: str, **counts: int) -> None:
        """Add to counters of a policy: `COUNTERS`, and `HOST_COUNTERS` where blocks go to the host."""
        known = self._counts[policy]
        for key, count in counts.items():
            known[key] = known.get(key, 0) + count

    def audit(self, policy: str, kept: str, **counts: float) -> None:
        """Add to `AUDIT_COUNTERS` of a policy, for requests that kept this share."""
        of_policy = self._audits.setdefault(policy, {})
        of_policy.setdefault(kept, Counter()).update(counts)

    def skip(self, policy: str, why: str) -> None:
        """Count an answer without an audit."""
        self._skipped.setdefault(policy, Counter())[why] += 1

    def hold(self, policy: str, used: int, block_bytes: int, unused: int = 0) -> None:
        """Set `HOST_GAUGES` of a policy.

        Args:
            policy: its name.
            used: host blocks that hold something now.
            block_bytes: bytes of each.
            unused: of these, blocks that no request uses.
        """
        self._gauges[policy] |= {"used": used, "bytes": used * block_bytes, "unused": unused}

    def take(self, resident: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return the counts since last time, and what is held now, of policies that had requests.

        Args:
            resident: policy -> blocks that running requests hold, of each policy that ever had a request.
        """
        known = (resident, self._counts, self._gauges, self._audits, self._skipped)
        taken: dict[str, dict[str, Any]] = {
            policy: {**self._counts[policy], "resident": resident.get(policy, 0), **self._gauges[policy]}
            for policy in set[str]().union(*known)
        }
        for policy, audits in self._audits.items():
            taken[policy]["audits"] = {kept: dict(counts) for kept, counts in audits.items()}
        for policy, skipped in self._skipped.items():
            taken[policy]["skipped"] = dict(skipped)
        for counts in known[1:]:
            counts.clear()
        return taken

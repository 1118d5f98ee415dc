"""The KV cache use of one request, for users of `LLM` and of the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .blocks import RequestBlocks

#: Fields that are None unless an event happened to the request: (events, any of which will do; field -> event). Events
#: are those of `RequestState.counts`.
SHOWN: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (
        ("spilled",),
        {
            "spilled_blocks": "spilled",
            "recalled_blocks": "recalled",
            "still_there_blocks": "still_there",
            "dropped_blocks": "dropped",
            "asked_again": "again",
        },
    ),
    (("restored", "recomputed"), {"restored": "restored", "recomputed": "recomputed"}),
)


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV cache use of one finished request, `RequestOutput.kv_usage`; for a session, up to the current output.

    If heads are split into KV groups, blocks are summed over groups and tokens are averaged over groups.

    Attributes:
        policy: name of the request's policy.
        budget_tokens: the request's budget in whole blocks; None if the request, or some of its heads, keep everything.
        peak_resident_blocks: most blocks held at once, the step in flight included.
        peak_resident_tokens: the same in tokens (whole blocks).
        evicted_blocks: evicted blocks, summed over restarts.
        evicted_tokens: the same in tokens.
        spilled_blocks: evicted blocks that went to the host; this and the next are None where none did.
        recalled_blocks: blocks that came back.
        still_there_blocks: of these, blocks that no request had taken in the meantime; no copy was needed.
        dropped_blocks: blocks that were dropped there, as the host's memory was full.
        asked_again: times that the end of its prompt was computed again, so that its answer sees what came back.
        restored: times that it was preempted and went on with its blocks from the host; this and the next are None
            unless the server saves blocks of preempted requests and it was preempted.
        recomputed: times that it was preempted and computed again.
    """

    policy: str
    budget_tokens: int | None
    peak_resident_blocks: int
    peak_resident_tokens: int
    evicted_blocks: int
    evicted_tokens: int
    spilled_blocks: int | None = None
    recalled_blocks: int | None = None
    still_there_blocks: int | None = None
    dropped_blocks: int | None = None
    asked_again: int | None = None
    restored: int | None = None
    recomputed: int | None = None

    @classmethod
    def of(cls, groups: Sequence[RequestBlocks]) -> "KVUsage":
        """Make it from the request's blocks in each KV group."""

        def tokens(blocks: int) -> int:
            # KV groups are equally wide, so the mean over groups divides by their number.
            return blocks * groups[0].block_size // len(groups)

        peak, evicted = groups[0].state.peak_blocks, sum(group.evicted_blocks for group in groups)
        limits = [group.limits for group in groups if group.limits is not None]
        counts = groups[0].state.counts
        shown: dict[str, int] = {}
        for events, fields in SHOWN:
            if any(counts[event] for event in events):
                shown |= {field: counts[event] for field, event in fields.items()}
        return cls(
            policy=groups[0].policy,
            budget_tokens=tokens(sum(each.budget for each in limits)) if len(limits) == len(groups) else None,
            peak_resident_blocks=peak,
            peak_resident_tokens=tokens(peak),
            evicted_blocks=evicted,
            evicted_tokens=tokens(evicted),
            **shown,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, as JSON carries them; those in `SHOWN` only where they are not None."""
        return {field: value for field, value in asdict(self).items() if value is not None or field == "budget_tokens"}

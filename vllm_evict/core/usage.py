"""The KV cache use of one request, for users of `LLM` and of the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .blocks import RequestBlocks

#: Fields that are None unless an event happened to the request: (events, any of which will do; field -> event). Events
#: are those of `RequestState.counts`.
SHOWN: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("spilled",), {"spilled_blocks": "spilled"}),
    (("hit",), {"host_hit_blocks": "hit"}),
    (("fetched", "in_room"), {"fetched_blocks": "fetched", "in_room_blocks": "in_room", "cut_blocks": "cut"}),
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
        spilled_blocks: blocks that were copied to the host; None: none.
        host_hit_blocks: blocks of its prefix, in all KV groups, that the host had for it; None: none.
        fetched_blocks: blocks of the host that its decodes copied into its room, summed over layers; this and the next
            are None where no decode chose such a block. With several ranks, those of one rank.
        in_room_blocks: blocks of the host that they chose, and that were in the room, summed over layers.
        cut_blocks: blocks of the host in whose place they read others, as `fetch` bounds them, summed over layers.
    """

    policy: str
    budget_tokens: int | None
    peak_resident_blocks: int
    peak_resident_tokens: int
    evicted_blocks: int
    evicted_tokens: int
    spilled_blocks: int | None = None
    host_hit_blocks: int | None = None
    fetched_blocks: int | None = None
    in_room_blocks: int | None = None
    cut_blocks: int | None = None

    @classmethod
    def of(cls, groups: Sequence[RequestBlocks]) -> "KVUsage":
        """Make it from the request's blocks in each KV group."""

        def tokens(blocks: int) -> int:
            # KV groups are equally wide, so the mean over groups divides by their number.
            return blocks * groups[0].block_size // len(groups)

        peak, evicted = groups[0].state.peak_blocks, sum(group.evicted_blocks for group in groups)
        limits = [group.limits for group in groups if group.limits is not None]
        counts = groups[0].state.counts
        shown = {
            field: counts[event]
            for events, fields in SHOWN
            if any(counts[each] for each in events)
            for field, event in fields.items()
        }
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

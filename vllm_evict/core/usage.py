"""What one request's cache came to, for users of `LLM` and of the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import RequestBlocks

#: Key that carries a `KVUsage` through vLLM's per-request transfer parameters.
USAGE_KEY = "vllm_evict"
#: Key beside it where the request asked for its usage (`kv_usage`), and of the usage in what clients get then.
SHOWN_KEY = "kv_usage"


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV cache use of one finished request; `RequestOutput.kv_usage`. Of a session, up to the output that has it.

    Where heads are split in KV groups, blocks are those of all groups, and tokens the mean over groups.

    Attributes:
        policy: name of the policy it ran under.
        budget_tokens: tokens it was brought back to; None if it, or any of its heads, kept everything.
        peak_resident_blocks: most blocks held at once, the step in flight included.
        peak_resident_tokens: the same in tokens (whole blocks).
        evicted_blocks: blocks it lost, over all its restarts.
        evicted_tokens: the same in tokens.
    """

    policy: str
    budget_tokens: int | None
    peak_resident_blocks: int
    peak_resident_tokens: int
    evicted_blocks: int
    evicted_tokens: int

    @classmethod
    def of(cls, groups: Sequence["RequestBlocks"]) -> "KVUsage":
        """Of a request, by its residency in each KV group."""
        # KV groups are equally wide, each with its share of the heads.
        tokens = lambda blocks: blocks * groups[0].block_size // len(groups)  # noqa: E731
        peak, evicted = groups[0].state.peak_blocks, sum(group.evicted_blocks for group in groups)
        bounded = all(group.limits for group in groups)
        return cls(
            policy=groups[0].policy,
            budget_tokens=tokens(sum(group.limits.budget for group in groups)) if bounded else None,
            peak_resident_blocks=peak,
            peak_resident_tokens=tokens(peak),
            evicted_blocks=evicted,
            evicted_tokens=tokens(evicted),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

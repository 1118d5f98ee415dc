"""What one request's cache came to, for users of `LLM` and of the engine."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.residency import Residency

#: Key that carries a `KVUsage` through vLLM's per-request transfer parameters.
USAGE_KEY = "vllm_evict"


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV cache use of one finished request; `RequestOutput.kv_usage`.

    Attributes:
        policy: name of the policy it ran under.
        budget_tokens: tokens it was brought back to; None if it kept everything.
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
    def of(cls, resident: "Residency") -> "KVUsage":
        block_size = resident.block_size
        return cls(
            policy=resident.config.name,
            budget_tokens=resident.limits.budget * block_size if resident.limits else None,
            peak_resident_blocks=resident.peak_blocks,
            peak_resident_tokens=resident.peak_blocks * block_size,
            evicted_blocks=resident.evicted_blocks,
            evicted_tokens=resident.evicted_blocks * block_size,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

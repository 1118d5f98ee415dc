"""Payload of answers that workers score, and the name under which scored rows come back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.plan import Payload

#: Attribute of a `ModelRunnerOutput` that holds scored rows, request -> float32 [rows, 5]; absent without any.
SCORED = "kv_evict_scored"


class Truncation(NamedTuple):
    """The tokens that a request may sample, as vLLM's sampling parameters have them.

    Attributes:
        top_k: the likeliest ones; 0: all.
        top_p: the likeliest ones that have so much probability together.
        min_p: those that have so much of the probability of the likeliest one.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ScoredRows(NamedTuple):
    """Rows of a step that workers score: how likely the token after each row is, as the model sees it.

    Attributes:
        first: index of the first row among those that the request computes in the step.
        tokens: for each row the token after it.
        temperature: divides the logits.
        truncation: the tokens that could be sampled; None: all.
    """

    first: int
    tokens: list[int]
    temperature: float
    truncation: Truncation | None = None


@dataclass(slots=True)
class AuditedRows(Payload):
    """Rows that workers score in the step, by request."""

    feature = "audit"

    of_requests: dict[str, ScoredRows] = field(default_factory=dict)

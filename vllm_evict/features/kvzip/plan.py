"""Payload of repeated prompts, for scores by token."""

from dataclasses import dataclass, field

from ...core.plan import Payload


@dataclass(frozen=True, slots=True)
class Repetition:
    """The part of a prompt that one shadow repeats, for scores by token.

    Attributes:
        prompt: number under which workers keep the prompt's scores.
        length: tokens of the prompt. Queries at later positions count.
        start, end: range of repeated tokens.
        sink: leading tokens of the prompt that queries see beside the repeated tokens.
    """

    prompt: int
    length: int
    start: int
    end: int
    sink: int


@dataclass(slots=True)
class Repetitions(Payload):
    """Prompts that shadows repeat, and the requests that take their scores.

    Attributes:
        repeats: shadow that starts in this step -> the tokens that it repeats.
        scored: request -> (number of a prompt, tokens). The scores of these tokens become the request's.
        forgotten: numbers of prompts whose scores workers drop.
    """

    feature = "kvzip"

    repeats: dict[str, Repetition] = field(default_factory=dict)
    scored: dict[str, tuple[int, int]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

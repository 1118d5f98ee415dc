"""Requests of a load on engines, as clients see them."""

from dataclasses import dataclass, field


@dataclass
class Live:
    """A request as its client sees it.

    Attributes:
        prompt: token ids; of images, numbers that name them (images.py).
        item: of the program.
        since: step of its arrival.
        answers: token ids of each completion so far; of a session, of all turns.
        turns: of a session, the turns not sent yet; None for other requests.
        ended: whether the session's last sent turn has ended.
        mixed: whether its adapter may have had several weights by the time it has its answer.
    """

    prompt: list[int]
    item: dict
    since: int
    answers: list[list[int]] = field(default_factory=list)
    turns: list | None = None
    ended: bool = False
    mixed: bool = False

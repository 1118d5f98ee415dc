"""Contents of blocks in a load without a model, and the knowledge and counts of its worker (double.py)."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_evict.core.host_pool import RoomOf
from vllm_evict.features.audit.plan import ScoredRows

from .program import STOP, VOCABULARY

#: Tokens of all prompts, and numbers of all scores, are slices of these.
_random = np.random.default_rng(0)
STREAM = _random.integers(STOP + 1, VOCABULARY, 1 << 16)
SCORES = _random.random(1 << 14)
#: What a token adds to the content at its position and at all later ones.
WEIGHTS = _random.integers(1, 1 << 63, 1 << 13, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
#: What a KV group adds to its contents: blocks of one pool serve all groups.
SALTS = _random.integers(1, 1 << 63, 64, dtype=np.uint64)
#: What rotating a key by one position adds.
TURN = np.uint64(0x9E3779B97F4A7C15)
#: Content of a block that was poisoned, and of one that was never written.
POISON = np.uint64(0xDEAD)
MASK = (1 << 64) - 1


def contents(tokens: list[int], start: int = 0, before: int = 0) -> np.ndarray:
    """Contents of tokens from position `start` on, where the one before has the content `before`. uint64 [n]"""
    values = (np.array(tokens, np.uint64) + np.uint64(1)) * WEIGHTS[start : start + len(tokens)]
    values[:1] += np.uint64(before)
    return np.cumsum(values, dtype=np.uint64)


def prompt_tokens(name: str, length: int, family: int, shared: int) -> list[int]:
    """A prompt: the first `shared` tokens of its family's, then some of its own."""
    own, common = zlib.crc32(name.encode()) % 50_000, 997 * family
    return STREAM[common : common + shared].tolist() + STREAM[own : own + length - shared].tolist()


class Fault(AssertionError):
    """An invariant that does not hold.

    Args:
        kind: one word, by which faults of different programs are told apart.
        message: what was found, with the names of requests and blocks.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Row:
    """The worker's knowledge of a request.

    Attributes:
        tokens: ids, of the prompt and sampled.
        prompt: tokens of the prompt; of a session, all before its turn's answer.
        known: contents of the tokens if nothing is missing, uint64 [max_model_len + 1].
        tables: physical blocks of each KV group; 0 is a hole.
        expected: what each group's logical blocks have to hold, uint64 [blocks, block].
        turned: positions by which keys of each group's logical blocks were rotated, int64 [blocks].
        reduced: whether anything is missing or was not read, or was when anything that is read was computed.
        nonce: what content that saw a reduced context differs by.
        tracked: of each group that may have holes, what is measured: "mass", "pivots" or nothing.
        active: whether its blocks are its own; False once it was preempted.
        counted: tokens in `known`.
        turns: of a session, that have begun since it started.
        computed: tokens that stay of the steps so far: drafts that were rejected do not.
        judged: numbers of the decisions by token for which its scores were copied.
        on_host: logical block -> host block, of those that its layers read there.
        room: where on the device they come to be read; None: nothing is on the host.
        following: of a session whose next turn begins, the tables that come with it.
    """

    key: int
    tokens: list[int]
    prompt: int
    known: np.ndarray
    tables: list[list[int]]
    expected: list[np.ndarray]
    turned: list[np.ndarray]
    tracked: list[str]
    hot: bool = False
    reduced: bool = False
    nonce: int = 0
    active: bool = True
    counted: int = 0
    turns: int = 0
    computed: int = 0
    judged: set[int] = field(default_factory=set)
    on_host: dict[int, int] = field(default_factory=dict)
    room: RoomOf | None = None
    following: list[list[int]] | None = None

    def decodes(self, start: int) -> bool:
        """Whether a step from token `start` on is a decode: of the newest token, a sampled one."""
        return start >= max(self.prompt, len(self.tokens) - 1)

    def learn(self) -> None:
        """Take the content of new tokens in."""
        count, total = self.counted, len(self.tokens)
        if count < total:
            before = int(self.known[count - 1]) if count else 0
            self.known[count:total] = contents(self.tokens[count:], count, before)
            self.counted = total


@dataclass
class Counts:
    """Counts of what the load has made happen."""

    steps: int = 0
    tokens: int = 0
    holes: int = 0
    compactions: int = 0
    moves: int = 0
    reports: int = 0
    lost: int = 0
    hits: int = 0
    restarts: int = 0
    turns: int = 0
    shadows: int = 0
    drafts: int = 0
    accepted: int = 0
    spilled: int = 0
    fetched: int = 0
    staged: int = 0
    reached: int = 0
    read_less: int = 0
    rows: int = 0

    def add(self, other: Any) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def scored(
    rows: dict[str, Row], starts: dict[str, int], asked: dict[str, ScoredRows], counts: Counts
) -> dict[str, Any]:
    """Scores of rows of a step, which have to be rows of requests with nothing missing, before their own tokens.

    Args:
        rows: of all requests.
        starts: request -> where its tokens of this step begin.
        asked: request -> what the plan has scored.
        counts: to which the scored rows are added.
    """
    for req_id, told in asked.items():
        row, first = rows[req_id], starts[req_id] + told.first
        last, counts.rows = first + len(told.tokens), counts.rows + len(told.tokens)
        if row.reduced or told.first < 0 or last > row.computed:
            raise Fault("rows", f"rows {first} to {last} are to be scored, {row.computed} are there, {row.reduced}")
        # What the last row predicts is no token of the request.
        if told.tokens[:-1] != row.tokens[first + 1 : last]:
            raise Fault("rows", f"{told.tokens} are to be scored, the tokens are {row.tokens[first + 1 : last]}")
    return {req_id: np.zeros((len(told.tokens), 5), np.float32) for req_id, told in asked.items()}

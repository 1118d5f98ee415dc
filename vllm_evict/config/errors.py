"""Errors of users' input, and helpers that word them."""

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

#: Most characters of a given value in a message.
LONGEST_SHOWN = 120
#: Least `difflib` ratio of a wrong word and the word that a message suggests.
LIKE = 0.65
#: Most mistakes that one message lists.
MOST_MISTAKES = 5


class KVPolicyError(ValueError):
    """A mistake in a user's input. The message says what is allowed."""


class _Bounded(reprlib.Repr):
    """`repr` of bounded cost: it reads only the first entries and characters of a value."""

    # The standard library's methods sort all entries first.
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return reprlib.Repr.repr_dict(self, dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_set(self, x: set[Any], level: int) -> str:
        return reprlib.Repr.repr_set(self, set(islice(x, self.maxset + 1)), level)


_BOUNDED = _Bounded()
_BOUNDED.maxlevel, _BOUNDED.maxother = 3, 1 << 16
_BOUNDED.maxstring = _BOUNDED.maxlong = 3 * LONGEST_SHOWN
for _kind in ("list", "tuple", "set", "frozenset", "dict", "deque"):
    setattr(_BOUNDED, f"max{_kind}", 12)


def shown(value: object) -> str:
    """Return `repr` of a given value for a message: one line, at most `LONGEST_SHOWN` characters and an ellipsis."""
    try:
        text = _BOUNDED.repr(value)
    except ValueError:  # Python does not write whole numbers of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def place(path: object) -> str:
    """Return a path for a message: as it is, or by `shown` if it is long or not printable."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 4 * LONGEST_SHOWN else shown(text)


def instead(word: object, options: Iterable[str], rest: Iterable[str] = ()) -> str:
    """Return the end of a message about a wrong word: the most similar word, and all options in order.

    Args:
        word: the wrong word, of any type.
        options: allowed words, which the message lists.
        rest: further words that the message may suggest.
    """
    options = sorted(options)
    text = word[:LONGEST_SHOWN].lower() if isinstance(word, str) else ""
    listed = f"xpected one of: {', '.join(options)}"
    likeness = {each: difflib.SequenceMatcher(None, text, each).ratio() for each in sorted({*options, *rest}, key=len)}
    meant = max(likeness, key=likeness.__getitem__, default="")  # of equal ratios the shortest word
    return f"did you mean {meant!r}? E{listed}" if likeness.get(meant, 0) >= LIKE else f"e{listed}"


def words(error: Mapping[str, Any]) -> str:
    """Word one of pydantic's errors, to follow the name of a field."""
    # Users of JSON and YAML write lists, not tuples.
    message: str = (
        error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list").replace("tuple", "list", 1)
    )
    if error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, not {shown(error['input'])}"
    return message


def together(mistakes: Sequence[str]) -> str:
    """Join mistakes in one line: the first `MOST_MISTAKES` of them, and the number of others."""
    more = f"; and {len(mistakes) - MOST_MISTAKES} more" if len(mistakes) > MOST_MISTAKES else ""
    return "; ".join(mistakes[:MOST_MISTAKES]) + more

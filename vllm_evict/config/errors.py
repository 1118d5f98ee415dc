"""What users can get wrong, in words that say what is allowed."""

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

#: Characters of a given value that a message repeats.
LONGEST_SHOWN = 120
#: Least likeness (`difflib`'s ratio) of a wrong word and the one that may have been meant.
LIKE = 0.65
#: Mistakes in one policy that a message lists.
MOST_MISTAKES = 5


class KVPolicyError(ValueError):
    """Something a user can get wrong; the message says what is allowed."""


class _Bounded(reprlib.Repr):
    """`repr` whose cost does not grow with the value: it looks at the first entries and characters only."""

    # The standard library sorts all of these first.
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
    """`repr` of a given value for a message, in one line of at most `LONGEST_SHOWN` characters and an ellipsis."""
    try:
        text = _BOUNDED.repr(value)
    except ValueError:  # Python refuses to write whole numbers of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def place(path: object) -> str:
    """A path for a message: as it is, unless it is long or has characters that can't be printed."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 4 * LONGEST_SHOWN else shown(text)


def instead(word: object, options: Iterable[str], rest: Iterable[str] = ()) -> str:
    """What a message says in place of a wrong word: the one that may have been meant, and all options in order.

    Args:
        options: those that are listed.
        rest: others that may have been meant.
    """
    options = sorted(options)
    text = word[:LONGEST_SHOWN].lower() if isinstance(word, str) else ""
    listed = f"xpected one of: {', '.join(options)}"
    likeness = {each: difflib.SequenceMatcher(None, text, each).ratio() for each in sorted({*options, *rest}, key=len)}
    meant = max(likeness, key=likeness.__getitem__, default="")  # the shortest of those that are equally like
    return f"did you mean {meant!r}? E{listed}" if likeness.get(meant, 0) >= LIKE else f"e{listed}"


def words(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors, as words that follow the name of a field."""
    # JSON and YAML have lists.
    message: str = (
        error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list").replace("tuple", "list", 1)
    )
    if error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, not {shown(error['input'])}"
    return message


def together(mistakes: Sequence[str]) -> str:
    """Mistakes in one line: the first `MOST_MISTAKES` of them."""
    more = f"; and {len(mistakes) - MOST_MISTAKES} more" if len(mistakes) > MOST_MISTAKES else ""
    return "; ".join(mistakes[:MOST_MISTAKES]) + more

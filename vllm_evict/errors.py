"""What users can get wrong, in words that say what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Characters of what a client sent that an answer repeats.
LONGEST_SHOWN = 120


class KVPolicyError(ValueError):
    """Something a user can get wrong; the message says what is allowed."""


def nearest(word: object, options: Iterable[str]) -> str:
    """The options as a list for a message, the one most like `word` first."""
    text = str(word)[:LONGEST_SHOWN].lower()
    likeness = lambda option: difflib.SequenceMatcher(None, text, option).ratio()  # noqa: E731
    return ", ".join(sorted(sorted(options), key=likeness, reverse=True))


def shown(value: object) -> str:
    """`repr` of what somebody gave, for a message: no longer than a line."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def sentence(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors."""
    where = error["loc"][0] if error["loc"] else ""
    # JSON and YAML have lists.
    message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, not {shown(error['input'])}"
    return f"{where}: {message}" if where else message

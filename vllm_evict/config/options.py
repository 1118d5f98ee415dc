"""How a policy declares what users may set: the name of a field, its type, its default, and a line that explains it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from .errors import shown, words

#: No size in tokens is as large.
TOO_MANY = 1 << 31
#: Entries of a list: more than any model has layers or KV heads, and more than is worth repeating of token ids.
MOST_ENTRIES = 1 << 14


@dataclass(frozen=True)
class Option:
    """One field of a policy.

    Attributes:
        name: the field.
        type: an annotation as pydantic takes it; see `whole`, `real`, `flag` and `entries`.
        default: the value where the user gives none.
        doc: what it means, in one line, for tables and help.
        check: further validation: returns the value to keep. Raises ValueError with words that follow the field's name.
    """

    name: str
    type: Any
    default: Any
    doc: str
    check: Callable[[Any], Any] | None = None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type, config=ConfigDict(allow_inf_nan=False))

    def validate(self, value: Any) -> Any:
        """The value as it is kept.

        Raises:
            ValueError: the value is none of this field; the words follow the field's name.
        """
        try:
            value = self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(words(error.errors(include_url=False, include_context=False)[0])) from None
        return value if self.check is None else self.check(value)

    def having(self, default: Any) -> "Option":
        """The same field with another default."""
        return replace(self, default=default)


def having(options: Iterable[Option], **defaults: Any) -> tuple[Option, ...]:
    """Options, some of them with other defaults, by name."""
    return tuple(option.having(defaults.get(option.name, option.default)) for option in options)


def without(options: Iterable[Option], *names: str) -> tuple[Option, ...]:
    """Options but those of these names."""
    return tuple(option for option in options if option.name not in names)


def names_of(options: Iterable[Option]) -> frozenset[str]:
    """Names of options."""
    return frozenset(option.name for option in options)


def _number(value: Any) -> Any:
    # pydantic would take True for 1 and "64" for 64; in a policy both are mistakes.
    if value is None or (isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)):
        return value
    raise ValueError(f"must be a number, not {shown(value)}")


def _true_or_false(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


#: true or false, and nothing that pydantic would take for it.
flag = Annotated[bool, BeforeValidator(_true_or_false)]

#: Text, and nothing that pydantic would decode to it.
text = Annotated[str, Field(strict=True)]


def whole(least: int = 0, below: int = TOO_MANY) -> Any:
    """Type of whole numbers from `least` on."""
    return Annotated[int, Field(ge=least, lt=below), BeforeValidator(_number)]


def real(**bounds: float) -> Any:
    """Type of numbers within pydantic's `ge`, `gt`, `le` and `lt`."""
    field: Any = Field
    return Annotated[float, field(**bounds), BeforeValidator(_number)]


def entries(type: Any) -> Any:
    """Type of lists of at most `MOST_ENTRIES` values of a type, kept as tuples."""
    return Annotated[tuple[type, ...], Field(max_length=MOST_ENTRIES, fail_fast=True)]

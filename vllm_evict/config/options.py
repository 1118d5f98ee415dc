"""Declaration of a policy's fields: name, type, default and a line of documentation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from .errors import shown, words

#: Upper bound of sizes in tokens, exclusive.
TOO_MANY = 1 << 31
#: Most entries of a list: above the layers and KV heads of any model.
MOST_ENTRIES = 1 << 14


class Fields(Protocol):
    """A `KVPolicyConfig` as policies and allocators read it: each field is an attribute."""

    def __getattr__(self, field: str) -> Any: ...


@dataclass(frozen=True)
class Option:
    """One field of a policy.

    Attributes:
        name: name of the field.
        type: annotation that pydantic validates by; see `whole`, `real`, `flag` and `entries`.
        default: value if the user gives none.
        doc: meaning in one line, for tables and help.
        check: further validation, which returns the value to keep. It raises ValueError with words that follow the
            field's name.
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
        """Validate a value, and return the value to keep.

        Raises:
            ValueError: the value does not fit; the words follow the field's name.
        """
        try:
            value = self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(words(error.errors(include_url=False, include_context=False)[0])) from None
        return value if self.check is None else self.check(value)

    def having(self, default: Any) -> "Option":
        """Return the field with another default."""
        return replace(self, default=default)


def having(options: Iterable[Option], **defaults: Any) -> tuple[Option, ...]:
    """Return the options with other defaults for some names."""
    return tuple(option.having(defaults.get(option.name, option.default)) for option in options)


def without(options: Iterable[Option], *names: str) -> tuple[Option, ...]:
    """Return the options without the given names."""
    return tuple(option for option in options if option.name not in names)


def names_of(options: Iterable[Option]) -> frozenset[str]:
    """Return the names of the options."""
    return frozenset(option.name for option in options)


def _number(value: Any) -> Any:
    # pydantic converts True to 1 and "64" to 64; a policy refuses both.
    if value is None or (isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)):
        return value
    raise ValueError(f"must be a number, not {shown(value)}")


def _true_or_false(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


#: Type of true and false, without pydantic's conversions.
flag = Annotated[bool, BeforeValidator(_true_or_false)]

#: Type of text, without pydantic's conversions.
text = Annotated[str, Field(strict=True)]


def whole(least: int = 0, below: int = TOO_MANY) -> Any:
    """Type of whole numbers in [least, below)."""
    return Annotated[int, Field(ge=least, lt=below), BeforeValidator(_number)]


def real(**bounds: float) -> Any:
    """Type of numbers with pydantic's bounds `ge`, `gt`, `le` and `lt`."""
    field: Any = Field
    return Annotated[float, field(**bounds), BeforeValidator(_number)]


def entries(type: Any) -> Any:
    """Type of lists of at most `MOST_ENTRIES` values of a type, kept as tuples."""
    return Annotated[tuple[type, ...], Field(max_length=MOST_ENTRIES, fail_fast=True)]

"""Immutable fields as attributes, with defaults for fields of other policies."""

from typing import Any, TypeVar

from .registry import REGISTRY

#: Cached properties, which are not compared, copied or pickled.
MADE = frozenset({"split_classes"})
C = TypeVar("C", bound="Frozen")


class Frozen:
    """Base class of the parts of `KVPolicyConfig`. A field that only other policies have reads as its default."""

    name: str
    #: Names of fields that the user gave.
    given: frozenset[str]

    def __init__(self, /, **fields: Any) -> None:
        vars(self).update(fields)

    def replace(self: C, **changes: Any) -> C:
        """Return a copy with changed values, which are not validated."""
        copied = object.__new__(type(self))
        vars(copied).update(self.__getstate__(), **changes)
        vars(copied)["given"] = self.given | {field for field in changes if not field.startswith("_")}
        return copied

    def __getattr__(self, field: str) -> Any:
        try:
            if not field.startswith("_"):
                return REGISTRY.default(field)
        except KeyError:
            pass
        raise AttributeError(f"{type(self).__name__} has no field {field!r}")

    def __setattr__(self, field: str, value: Any) -> None:
        raise AttributeError(f"{field}: a {type(self).__name__} is frozen; use replace()")

    def __getstate__(self) -> dict[str, Any]:
        return {field: value for field, value in vars(self).items() if field not in MADE}

    def _compared(self) -> dict[str, Any]:
        return {field: value for field, value in self.__getstate__().items() if field != "given"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(tuple(sorted((field, repr(value)) for field, value in self._compared().items())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{field}={value!r}' for field, value in self._compared().items())})"

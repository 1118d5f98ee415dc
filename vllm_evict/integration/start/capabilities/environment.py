"""The fields of a row of the table of refusals (`environments`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....config.features import Feature
from .server import Server

#: Why a pair is refused of which nothing is known to be wrong, and what a user sets to run it all the same.
UNTRIED = "which no test runs"
RUN_UNTRIED = "set untried: true"


@dataclass(frozen=True, eq=False)
class Environment:
    """A part of a server. Texts have facts of the `Server` in braces.

    Attributes:
        name: as messages name it.
        of: whether a server is one.
        cannot_stand: feature, or other environment -> why the two do not go together; "": there is no more to say.
        instead: what a user sets to have another environment; "": it is the model's.
    """

    name: str
    of: Callable[[Server], object]
    cannot_stand: "Mapping[Feature | Environment, str]"
    instead: str = ""

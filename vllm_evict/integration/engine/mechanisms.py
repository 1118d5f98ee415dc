"""The mechanisms of one scheduler."""

from collections.abc import Iterator
from typing import Any

from ...core.mechanisms import Budget, Context, Mechanism, Profiles, SharedBudget, WholePrompts
from ...core.mechanisms.base import M
from .allocation import Reads
from .audits import Audits
from .poison import Poison
from .pressure import RoomMaker
from .reaching import Reaching
from .reconstruction import Reconstructions
from .shadows import ShadowRequests
from .view import EngineView

#: In the order in which their hooks are called. `ShadowRequests` comes after what begins shadows.
KINDS: tuple[type[Mechanism], ...] = (
    Poison, Reads, WholePrompts, RoomMaker, Profiles, Budget, SharedBudget, Reaching, Context, Reconstructions, Audits,
    ShadowRequests,
)  # fmt: skip


class Mechanisms:
    """The mechanisms that a server's requests may need.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        self._all: list[Mechanism] = []
        self._having: dict[str, list[Mechanism]] = {}
        scheduler.mechanisms = self
        for kind in KINDS:
            if kind.serves(scheduler.kv_policy):
                self.add(kind(scheduler))

    def __iter__(self) -> Iterator[Mechanism]:
        return iter(self._all)

    def add(self, mechanism: Mechanism, last: bool = True) -> None:
        """Add a mechanism, whose hooks are called after those of all others, or before them.

        One that limits tokens has to be there when the scheduler is made (see `EvictionMixin.__init__`).
        """
        self._all.insert(len(self._all) if last else 0, mechanism)
        self._having = {}

    def of(self, kind: type[M]) -> list[M]:
        """Return the mechanisms of a class."""
        return [mechanism for mechanism in self._all if isinstance(mechanism, kind)]

    def having(self, hook: str) -> list[Mechanism]:
        """Return the mechanisms that have a hook of their own."""
        if hook not in self._having:
            default = getattr(Mechanism, hook)
            self._having[hook] = [each for each in self._all if getattr(type(each), hook) is not default]
        return self._having[hook]

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook that returns nothing."""
        for mechanism in self.having(hook):
            getattr(mechanism, hook)(*args)

    def passed(self, hook: str, value: Any, *before: Any) -> Any:
        """Return a value that each hook has changed in turn, until one returns None.

        Args:
            hook: its name.
            value: the hook's last argument.
            before: the hook's other arguments.
        """
        for mechanism in self.having(hook):
            if value is None:
                break
            value = getattr(mechanism, hook)(*before, value)
        return value

"""The registry of policies. `vllm_evict.policies` fills it, so that this package imports no policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from .allocators import ALLOCATORS, Allocator
from .errors import KVPolicyError, instead, shown
from .fields import KEEPING, NEUTRAL, SERVER
from .options import Fields, Option, names_of


class Declaration:
    """The part of a policy that configuration reads, beside what the policy measures (`policies.base.Policy`)."""

    #: Name in configurations and requests.
    name: ClassVar[str]
    #: Source: authors, title, venue, arXiv id.
    paper: ClassVar[str] = ""
    #: Fields that users may set.
    declares: ClassVar[tuple[Option, ...]] = KEEPING
    #: Fields with a fixed value: name -> value.
    fixed: ClassVar[Mapping[str, Any]] = {}
    #: Old names of fields, which work for one release: old -> new.
    renamed: ClassVar[Mapping[str, str]] = {}
    #: Names of declared fields. Follows from `declares`.
    options: ClassVar[frozenset[str]] = names_of(KEEPING)
    #: Values of declared and fixed fields that the user does not give. Follows from `declares` and `fixed`.
    defaults: ClassVar[Mapping[str, Any]] = {option.name: option.default for option in KEEPING}
    #: Whether the recent window is what the budget leaves beside the sinks.
    window_is_the_budget: ClassVar[bool] = False
    #: Whether statistics come from a reconstruction of the prompt (`features.kvzip.engine`). A request
    #: keeps everything until they are there.
    reconstructs: ClassVar[bool] = False
    #: Whether the policy is a control of experiments: requests may pick it only where the server's `allow` names it.
    control: ClassVar[bool] = False
    #: Who shares the budget unless a configuration says otherwise. Follows from `defaults`.
    allocator: ClassVar[Allocator] = ALLOCATORS["uniform"]
    #: Policies of which one is chosen for each KV group once the prompt is computed (`policies.fastgen`): name -> the
    #: fields that it takes over from this one.
    profiles: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls) -> None:
        cls.options = names_of(cls.declares)
        cls.defaults = {option.name: option.default for option in cls.declares} | dict(cls.fixed)
        cls.allocator = ALLOCATORS[cls.defaults.get("allocate", "uniform")]

    def complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add fields that follow from the given ones. Raises ValueError with words for the user."""
        return fields

    def check(self, config: Fields) -> None:
        """Raise ValueError, with words for the user, if fields do not fit together."""


class Registry(Mapping[str, Any]):
    """Policies by name, in the order in which they were added.

    Attributes:
        broken: name of a policy that could not be loaded -> reason.
        reserved: names that no field may have, since configurations use them.
    """

    def __init__(self) -> None:
        self._policies: dict[str, Declaration] = {}
        self._fields: dict[str, Option] = {}
        self.broken: dict[str, str] = {}
        self.reserved: frozenset[str] = frozenset({"name"}) | names_of(SERVER)

    def __getitem__(self, name: str) -> Any:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def add(self, policy: Declaration) -> None:
        """Add a policy.

        Raises:
            ValueError: the policy's name is taken, or it declares a field in conflict with another policy.
        """
        if policy.name in self._policies:
            raise ValueError(f"the name {policy.name!r} is taken by another policy")
        known = self.fields()
        own = [option.name for option in policy.declares]
        if twice := {name for name in own if own.count(name) > 1}:
            raise ValueError(f"{policy.name!r} declares {', '.join(sorted(twice))} twice")
        for option in policy.declares:
            if option.name.startswith("_") or not option.name.isidentifier() or option.name in self.reserved:
                raise ValueError(f"{option.name!r} can't be the name of a field")
            other = known.get(option.name)
            if other is not None and other != option.having(other.default):
                raise ValueError(
                    f"the field {option.name!r} differs from the field of that name in another policy: import that "
                    "declaration, or rename the field"
                )
            option.validate(option.default)
        self._policies[policy.name] = policy
        found: dict[str, Option] = {}
        for each in sorted(self.values(), key=lambda each: "protect" not in each.options):
            found |= {option.name: option for option in each.declares if option.name not in found}
        self._fields = found

    def fields(self) -> dict[str, Option]:
        """Return the fields of all policies by name, in the order of declarations, policies that evict first."""
        return self._fields

    def default(self, field: str) -> Any:
        """Return the value of a field for policies without it. Raises KeyError if no policy has it."""
        return NEUTRAL[field] if field in NEUTRAL else self.fields()[field].default

    def named(self, name: object, presets: Callable[[], Iterable[str]] = tuple) -> Any:
        """Return the policy of this name.

        Args:
            name: what the user gave, of any type.
            presets: returns names of presets; a preset's name gets a message of its own.

        Raises:
            KVPolicyError: no policy has this name; the message lists all names.
        """
        if isinstance(name, str) and name in self._policies:
            return self._policies[name]
        if isinstance(name, str) and name in self.broken:
            raise KVPolicyError(f"KV policy {name!r} {self.broken[name]}")
        if isinstance(name, str) and name in presets():
            raise KVPolicyError(
                f"{name!r} is a preset, which stands for a whole policy (--kv-policy {name}); "
                f"a policy's name is one of: {', '.join(sorted(self))}"
            )
        raise KVPolicyError(f"unknown KV policy {shown(name)}: {instead(name, self)}")

    def with_option(self, option: str) -> str:
        """Return the names of policies with a field, as a list for a message."""
        return ", ".join(sorted(name for name in self if option in self[name].options))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return all fields, each with its policies, its default and its meaning, in Markdown."""
        rows = [("`name`", "all", "", "the policy")]
        every = [name for name, policy in self.items() if "protect" in policy.options]
        for field, option in self.fields().items():
            defaults: dict[str, list[str]] = {}
            for name, policy in self.items():
                if field in policy.options:
                    defaults.setdefault(_written(policy.defaults[field]), []).append(name)
            whose = [name for names in defaults.values() for name in names]
            first = max(defaults, key=lambda value: len(defaults[value]))
            others = "".join(f"; {value} for {_names(names)}" for value, names in defaults.items() if value != first)
            of = _names(whose)
            if len(missing := set(every) - set(whose)) <= 6 < len(whose):
                of = "all that evict" + (f" but {_names(sorted(missing))}" if missing else "")
                others_of = _names(name for name in whose if name not in every)
                of += f"{'; also ' if missing else ', '}{others_of}" if others_of else ""
            rows.append((f"`{field}`", of, first + others, option.doc))
        return rows + [(f"`{option.name}`", "all", _written(option.default), option.doc) for option in SERVER]

    def table(self) -> str:
        """Return all fields as a Markdown table."""
        rows = [" | ".join(row).replace("|  |", "| |") for row in self.rows()]
        return "\n".join(["| field | of | default | meaning |", "|---|---|---|---|", *(f"| {row} |" for row in rows)])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _written(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower()}`" if isinstance(value, (bool, str)) else f"{value:g}"


#: All policies; `vllm_evict.policies` fills it.
REGISTRY = Registry()

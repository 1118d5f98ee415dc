"""Which policies there are. Rooms above fill the registry, so that configuration imports none of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import KVPolicyError, instead, shown
from .fields import ALLOW, KEEPING, NEUTRAL
from .options import Option, names_of

if TYPE_CHECKING:
    from .schema import KVPolicyConfig


class Declaration:
    """What configuration has to know of a policy."""

    #: Name in configurations and requests.
    name: ClassVar[str]
    #: Where it comes from: authors, venue, arXiv id.
    paper: ClassVar[str] = ""
    #: Fields that users may set.
    declares: ClassVar[tuple[Option, ...]] = KEEPING
    #: Fields that the policy sets itself: name -> value.
    fixed: ClassVar[Mapping[str, Any]] = {}
    #: Old names of fields, which work for a release: old -> new.
    renamed: ClassVar[Mapping[str, str]] = {}
    #: Names of declared fields; and values where the user gives none, of fixed fields too. Both follow from the above.
    options: ClassVar[frozenset[str]] = names_of(KEEPING)
    defaults: ClassVar[Mapping[str, Any]] = {option.name: option.default for option in KEEPING}
    #: Statistics that workers have to measure for it.
    measures: ClassVar[frozenset[str]] = frozenset()
    #: Whether its recent window is simply what the budget leaves beside the sinks.
    window_is_the_budget: ClassVar[bool] = False
    #: Whether its statistics are those of a reconstruction of the prompt (see `core.reconstruction`). Until they are
    #: there a request keeps everything.
    reconstructs: ClassVar[bool] = False
    #: What gets KV groups, and so block tables, of its own: "classes" of heads, "bands" of layers, "heads" (each
    #: layer's are dealt to several groups), or nothing.
    splits: ClassVar[str] = ""
    #: Whether it chooses another policy for each KV group when the prompt is computed (`policies.fastgen`).
    profiles: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.options = names_of(cls.declares)
        cls.defaults = {option.name: option.default for option in cls.declares} | dict(cls.fixed)

    @property
    def triggers(self) -> tuple[str, ...]:
        """Values of `when` that it supports."""
        return ("budget", "pressure")

    def complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that a user gave, with others that follow from them. Raises ValueError in a user's words."""
        return fields

    def check(self, config: "KVPolicyConfig") -> None:
        """Refuse fields that do not go together by a ValueError in a user's words."""

    def shares(self, config: "KVPolicyConfig", bands: int) -> list[float]:
        """Of each KV group that it makes: the group's budget over the mean, both beside sinks and recent window."""
        return [1.0] * bands


class Registry(Mapping[str, Any]):
    """Policies by name, in the order in which they were added.

    Attributes:
        broken: name -> why a policy from outside of the package is not there.
        reserved: names that no field may have, as configurations use them.
    """

    def __init__(self) -> None:
        self._policies: dict[str, Declaration] = {}
        self._fields: dict[str, Option] = {}
        self.broken: dict[str, str] = {}
        self.reserved: frozenset[str] = frozenset({"name", "allow"})

    def __getitem__(self, name: str) -> Any:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def add(self, policy: Declaration) -> None:
        """Add a policy.

        Raises:
            ValueError: its name is taken, or a field of it means something else in another policy.
        """
        if policy.name in self._policies:
            raise ValueError(f"the name {policy.name!r} is another policy's")
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
                    f"the field {option.name!r} means something else: import its declaration, or rename it"
                )
            option.validate(option.default)
        self._policies[policy.name] = policy
        found: dict[str, Option] = {}
        for each in sorted(self.values(), key=lambda each: "budget" not in each.options):
            found |= {option.name: option for option in each.declares if option.name not in found}
        self._fields = found

    def fields(self) -> dict[str, Option]:
        """Fields of all policies by name, as first declared: what most of them have first."""
        return self._fields

    def default(self, field: str) -> Any:
        """The value of a field in a policy that does not have it. Raises KeyError if no policy has it."""
        return NEUTRAL[field] if field in NEUTRAL else self.fields()[field].default

    def named(self, name: object, presets: Callable[[], Iterable[str]] = tuple) -> Any:
        """The policy called `name`.

        Args:
            presets: makes names of presets, which are no policies' names.

        Raises:
            KVPolicyError: there is none; the message lists those there are.
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
        """Names of policies that have a field, as a list for a message."""
        return ", ".join(sorted(name for name in self if option in self[name].options))

    def table(self) -> str:
        """All fields as a table in Markdown: field, whose it is, default, meaning."""
        rows = ["| field | of | default | meaning |", "|---|---|---|---|", "| `name` | all | | the policy |"]
        every = [name for name, policy in self.items() if "budget" in policy.options]
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
                of += "".join(f", `{name}`" for name in whose if name not in every)
            rows.append(f"| `{field}` | {of} | {first}{others} | {option.doc} |")
        rows.append(f"| `allow` | all | none | {ALLOW.doc} |")
        return "\n".join(rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _written(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower()}`" if isinstance(value, (bool, str)) else f"{value:g}"


#: All policies; `vllm_evict.policies` fills it.
REGISTRY = Registry()

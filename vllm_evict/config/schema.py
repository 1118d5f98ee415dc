"""`KVPolicyConfig`: a validated policy with its fields, from a flag, a dict, a YAML file or a request."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from .allocators import ALLOCATE, ALLOCATION, ALLOCATORS
from .errors import KVPolicyError, instead, shown, together
from .features import APART
from .fields import OF_EVICT, OF_PROMPTS, READ, READ_PROMPTS, SERVER
from .groups import Groups
from .options import Option, names_of
from .registry import REGISTRY
from .request import Requests
from .retired import as_full, policy_of, with_new_names, without_retired
from .sizes import FLOOR, SMALLEST_BLOCK, Sizes
from .sources import completed, policy_named, read

logger = logging.getLogger("vllm.evict")

#: Fields of `full` that have an effect with `evict: host` alone; the sizes of `READ_SIZES` with `read`, too.
OF_BUDGETS = frozenset({"when", "admit", "budget", "buffer", "sink", "recent", "exact"})
READ_SIZES = frozenset({"sink", "recent"})
#: Most fields of one policy, unknown fields included, so that messages stay readable.
MOST_FIELDS = 100


class KVPolicyConfig(Sizes, Groups, Requests):
    """A KV eviction policy and its fields. Sizes are tokens; the plugin rounds them up to whole blocks.

    Fields are attributes. A field that is left out has the policy's default. A field that the policy does not have is
    refused; the attribute then has the field's neutral value. Configurations are frozen.

    Attributes:
        name: name of the policy.
        allow: policies that requests may pick. None: all policies without reconstruction or split heads that support
            the server's `when`, `read` and `context`, but no control (`random`); `full` alone if the allocator splits
            heads or layers, and under `full` with `read` or `evict: host`.
        audit: share of requests whose answers full attention scores again.
        target: share of audited answers that should be identical; None: no share is expected.
        tuned: tokens of the shortest and of the longest prompt that the policy was tuned on; None: they are not known.
        untried: whether the server runs pairs of a feature and an environment that no test runs.
        given: names of fields that the user gave.
    """

    allow: tuple[str, ...] | None
    audit: float
    target: float | None
    tuned: tuple[int, int] | None
    untried: bool
    #: Layers of the model, which bands divide; None: as many as bands. Set by `for_model`.
    _depth: int | None
    #: A band's budget over the mean of all bands; None if this is not a band. Set by `classes`.
    _share: float | None
    #: Blocks above which no size of a request that is not given raises its budget; None: any. Set by `for_request`.
    _granted: int | None

    def __init__(self, /, **fields: Any) -> None:
        """Validate the fields. Raises KVPolicyError with one message for all mistakes."""
        if "name" not in fields:
            raise KVPolicyError(
                f"a KV policy needs a name: one of {', '.join(sorted(REGISTRY))} (--kv-policy.name beside other "
                "--kv-policy.FIELD)"
            )
        self._fill(fields)
        if self.evict == "host" and self.name != "full":
            self._fill(as_full(self))

    def _fill(self, fields: dict[str, Any]) -> None:
        vars(self).clear()
        policy = policy_named(fields.pop("name"))
        fields = with_new_names(policy.name, fields, policy.renamed)
        if "evict" in policy.options:
            fields = without_retired(fields)
        known: dict[str, Option] = {option.name: option for option in (*policy.declares, *SERVER)}
        for field in fields:
            if field not in known:
                raise KVPolicyError(_unknown(policy.name, field, known))
        try:
            fields = policy.complete(fields)
            values = _validated(known, fields)
            values["allow"] = values["allow"] and tuple(map(policy_of, values["allow"]))
            if policy.window_is_the_budget and values["budget"] is not None and "recent" not in fields:
                values["recent"] = 0
            if values.get("read") and values.get("read_prompts") and "index" not in fields:
                values["index"] = OF_PROMPTS
            if values.get("when") == "pressure" and "budget" not in fields and values["budget"] is not None:
                values["budget"] = FLOOR
            vars(self).update(policy.fixed, **values, name=policy.name, given=frozenset(fields))
            vars(self).update(_depth=None, _share=None, _granted=None)
            if isinstance(self.budget, int):
                _, sizes = self._resolved(SMALLEST_BLOCK, 0)
                vars(self).update({size: sizes[size] for size in sizes.keys() & self.unsaid})
            for rule in (*RULES, policy.check):
                rule(self)
        except ValueError as error:
            raise KVPolicyError(str(error)) from None

    @classmethod
    def parse(cls, value: "KVPolicyConfig | Mapping[str, Any] | str | Path") -> "KVPolicyConfig":
        """Make a configuration from what users write.

        Args:
            value: a configuration, a dict of fields, the name of a policy or preset, a JSON object, or the path of a
                YAML or JSON file. The field `name` may name a preset, whose fields the others change.

        Raises:
            KVPolicyError: the value is not a valid policy.
        """
        if isinstance(value, cls):
            return value
        source, fields = "", value
        if isinstance(value, (str, Path)):
            fields, source = read(str(value).strip())
        if not isinstance(fields, Mapping):
            raise KVPolicyError(f"{source}a KV policy is a name, a dict of its fields or a path, not {shown(fields)}")
        if len(fields) > MOST_FIELDS:
            raise KVPolicyError(f"{source}got a KV policy of {len(fields)} fields; expected at most {MOST_FIELDS}")
        try:
            return cls(**completed(fields))
        except KVPolicyError as error:
            raise KVPolicyError(f"{source}{error}") from None
        except TypeError:
            if all(isinstance(field, str) for field in fields):
                raise
            raise KVPolicyError(f"{source}field names must be strings: {shown(list(fields))}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the policy's fields as `parse` takes them, of JSON types; without `unsaid` sizes and `idle` fields."""
        unsaid = self.unsaid | self.idle
        fields = {field: value for field, value in self.effective().items() if field not in unsaid}
        return {
            field: self.retrieval.to_dict() if field == "retrieval" and value else value
            for field, value in fields.items()
        }

    @property
    def idle(self) -> frozenset[str]:
        """Names of fields without effect: of blocks on the host where evicted blocks are dropped, of decodes that read
        less where they read everything, of audits where there are none, of pressure under `when: budget`, and of
        allocators other than this configuration's."""
        idle = frozenset(field for value, fields in OF_EVICT.items() if self.evict != value for field in fields)
        idle |= {"evict"} if self.evict == "drop" else frozenset()
        idle |= frozenset() if self.sparse or self.reaches else names_of(READ)
        idle |= frozenset() if self.sparse else {READ_PROMPTS.name}
        idle |= OF_BUDGETS - (READ_SIZES if self.sparse else frozenset()) if self.keeps_all else frozenset()
        idle |= frozenset() if self.audit else {"audit", "target", "tuned"}
        idle |= frozenset() if self.untried else {"untried"}
        idle |= frozenset() if self.when == "pressure" else {"admit"}
        own = names_of(self.allocator.declares) | {"allocate"} if self.allocator.splits else frozenset()
        return idle | (names_of(ALLOCATION) - own)

    def effective(self) -> dict[str, Any]:
        """Return all fields of the policy, of JSON types, with sizes that follow the budget."""
        fields = ("name", *(option.name for option in (*self.policy.declares, *SERVER)))
        return {field: _plain(getattr(self, field)) for field in fields}

    @property
    def policy(self) -> Any:
        """The `policies.Policy`."""
        return REGISTRY[self.name]

    @property
    def allowed(self) -> frozenset[str]:
        """Names of the policies that requests may pick."""
        if self.allow is not None:
            return frozenset(self.allow) | {self.name}
        if self.name == "full" and (self.sparse or not self.keeps_all):
            return frozenset({self.name})
        # A reconstruction costs a second pass and room for the whole prompt, so only the server can enable it.
        whole = {
            name
            for name, policy in REGISTRY.items()
            if not (policy.reconstructs or policy.allocator.splits or policy.control)
        }
        names = {"full"} if self.allocator.splits else whole
        needed = {field for field in ("read", "context") if getattr(self, field)}
        return frozenset(
            name for name in names if needed <= REGISTRY[name].options and self.when in REGISTRY[name].triggers
        ) | {self.name}

    @property
    def reconstructs(self) -> bool:
        """Whether some request may need a reconstruction of its prompt."""
        return any(REGISTRY[name].reconstructs for name in self.allowed)

    @property
    def runs_shadows(self) -> bool:
        """Whether requests of the plugin's own may run inside the engine: repetitions of prompts, audits of answers."""
        return self.reconstructs or self.audit > 0

    def without_mass(self) -> "KVPolicyConfig":
        """Return the policy where no kernel measures attention: answers are scored, and their attention is not."""
        return self.replace(audit=0.0, target=None)

    @property
    def moves_content(self) -> bool:
        """Whether decisions have workers move tokens or rotate keys, which they do of requests in the batch only."""
        return self.granularity == "token" or self.context is not None

    @property
    def decides_at_once(self) -> bool:
        """Whether a decision waits for no report, because a request has no room to outgrow its trigger further."""
        return self.context is not None

    @property
    def statistics(self) -> frozenset[str]:
        """Statistics that workers must be able to measure for some request."""
        named = [REGISTRY[name].measures for name in self.allowed]
        parts = (part.statistics for part in self.classes.values() if part is not self)
        return frozenset[str]().union(*named, *parts)


def _plain(value: Any) -> Any:
    """Return a field's value in JSON types."""
    if isinstance(value, KVPolicyConfig):
        return value.effective()
    return list(value) if isinstance(value, tuple) else value


def _validated(known: Mapping[str, Option], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all known fields. Raises KVPolicyError with all mistakes."""
    values, mistakes = {}, []
    for field, option in known.items():
        try:
            values[field] = option.validate(fields[field]) if field in fields else option.default
        except ValueError as error:
            mistakes.append(f"{field}: {error}")
    if mistakes:
        raise KVPolicyError(together(mistakes))
    return values


def _unknown(name: str, field: object, known: Iterable[str]) -> str:
    if field == "granularity":
        others = REGISTRY.with_option("granularity")
        return f"granularity: {name!r} supports only 'block'. Policies that support 'token': {others}"
    if field == "read":
        others = REGISTRY.with_option("read")
        return f"read: {name!r} sees only what a decode attends to. Policies that support read: {others}"
    if field == "allocate":
        return f"allocate: {name!r} {_why_no_allocator(name)}. Policies that support it: {REGISTRY.with_option(field)}"
    if field == "evict":
        return f"evict: {name!r} supports only 'drop'. Policies that support 'host': {REGISTRY.with_option('evict')}"
    return f"policy {name!r} has no field {shown(field)}: {instead(field, [*known, 'name'])}"


def _why_no_allocator(name: str) -> str:
    policy = REGISTRY[name]
    if policy.allocator.splits:
        return f"has an allocator of its own, {policy.allocator.name!r}"
    if policy.reconstructs:
        return "repeats prompts in one KV group"
    return "has no scores that compare between layers or heads"


# --- rules about several fields: each raises ValueError -------------------------------------------------------------


def _room_to_choose(config: KVPolicyConfig) -> None:
    sizes = {size: getattr(config, size) for size in ("sink", "recent") if size in config.given}
    if config.protect and isinstance(config.budget, int) and config.budget <= sum(sizes.values()):
        raise ValueError(
            f"budget {config.budget} leaves nothing to choose: it must be at least {' + '.join(sizes)} + one block = "
            f"{' + '.join(map(str, sizes.values()))} + block size"
        )


def _goes_together(config: KVPolicyConfig) -> None:
    for field, one, other, why in APART:
        if one.of(config) and other.of(config):
            raise ValueError(f"{field}: {why}")


def _keeps_tokens(config: KVPolicyConfig) -> None:
    if config.merge and config.granularity != "token":
        raise ValueError(f"merge: {config.merge!r} merges tokens: it needs granularity: token")
    if config.unit > 1 and config.granularity != "token":
        raise ValueError(f"unit: {config.unit} tokens of a head stay or go together: it needs granularity: token")
    if config.retrieval is not None and config.retrieval.sets == "layer":
        raise ValueError("retrieval: sets: heads of a layer lie in several KV groups: use sets: head or all")


def _keeps_on_the_host(config: KVPolicyConfig) -> None:
    if config.retrieval is not None and config.retrieval.evict == "host":
        raise ValueError("retrieval: evict: host needs one KV group, and heads are split in several: use evict: drop")
    for value, fields in OF_EVICT.items():
        for field, why in fields.items() if config.evict != value else ():
            if getattr(config, field) != REGISTRY.default(field):
                raise ValueError(f"{field}: {why}: it needs evict: {value}")
    if config.keeps_all and (sizes := sorted(config.given & OF_BUDGETS - (READ_SIZES if config.read else set()))):
        raise ValueError(
            f"{sizes[0]}: 'full' keeps everything on the device: it needs evict: host"
            + " or read" * (sizes[0] in READ_SIZES)
        )
    if config.evict != "host":
        return
    if config.host is None:
        raise ValueError("evict: host: it needs a size of host memory, such as host: 8GiB")
    for name in config.allow or ():
        if config.reaches and policy_named(name).reconstructs:
            raise ValueError(f"allow: {name!r} repeats prompts, which no test runs with evict: host: leave {name} out")
        # Of a policy that is served as `full` (`retired.as_full`), which keeps no `allow`.
        if not config.reaches and name != "full" and "evict" not in policy_named(name).options:
            others = sorted(n for n in REGISTRY if "evict" in REGISTRY[n].options)
            raise ValueError(f"allow: {name!r} has no evict: host; requests may pick: {', '.join(others)}")


def _reads_less(config: KVPolicyConfig) -> None:
    if config.retrieval is not None and config.retrieval.leads_by_list:
        raise ValueError(
            "retrieval: leaders choose for the layers after them, and not every layer has retrieval heads: set leaders "
            "to a number"
        )
    if not (config.read or config.reaches):
        changed = [each.name for each in (*READ, READ_PROMPTS) if getattr(config, each.name) != each.default]
        if given := sorted({*changed, *(config.given & (names_of(READ) - {"read"}))}):
            raise ValueError(f"{given[0]}: decodes attend to all resident tokens: it needs read")
        return
    if not config.read:
        return
    if config.leads_by_list and config.dense_layers:
        raise ValueError(
            "dense_layers: layers up to the first of leaders attend to all resident tokens: leave dense_layers out"
        )
    sizes = [
        size
        for size in ("sink", "recent")
        if size in config.given or (config.reaches and isinstance(config.budget, int))
    ]
    tokens = [getattr(config, size) for size in sizes]
    if config.name == "full" and config.read <= sum(tokens):
        raise ValueError(
            f"read: got {config.read}; expected room for a choice beside {' and '.join(sizes)}, more than "
            f"{' + '.join(map(str, tokens))} tokens; set read to more, or {' and '.join(sizes)} to less"
        )
    for name in config.allow or ():
        if config.read_prompts and name != "full":
            raise ValueError(
                f"allow: {name!r} evicts, and prompts that read less have all their blocks; expected read_prompts of "
                f"'full' alone: leave {name} out"
            )
        if config.sparse and "read" not in policy_named(name).options:
            others = REGISTRY.with_option("read")
            raise ValueError(
                f"allow: {name!r} measures attention, and a server with read sees only what it reads; requests may "
                f"pick: {others}"
            )


def _goes_with_its_allocator(config: KVPolicyConfig) -> None:
    if "allocate" not in config.policy.options:
        return  # a policy with one allocator lacks what does not go with it
    own, others = names_of(config.allocator.declares), names_of(ALLOCATION) - {"allocate"}
    for field in sorted((config.given & others) - own):
        able = [name for name in get_args(ALLOCATE.type) if field in names_of(ALLOCATORS[name].declares)]
        raise ValueError(f"{field}: it needs allocate: {' or '.join(able)}")
    changed = {field for field in config.allocator.lacks if getattr(config, field) != REGISTRY.default(field)}
    for field, way_out in (
        ("granularity", "use granularity: block"),
        ("evict", "use evict: drop"),
        ("read", "leave read out"),
        ("context", "leave context out"),
    ):
        if field in changed:
            raise ValueError(
                f"{field}: {getattr(config, field)} does not go with allocate: {config.allocate}, which makes KV "
                f"groups: {way_out}"
            )


def _fits_its_context(config: KVPolicyConfig) -> None:
    if config.context is None:
        return
    if isinstance(config.budget, float):
        raise ValueError("context: a ratio of a long prompt may exceed it; a context needs a budget in tokens")
    if config.min_prompt > 1:
        raise ValueError("context: a request with a prompt below min_prompt may outgrow it; leave min_prompt out")
    for name in config.allow or ():
        if "context" not in policy_named(name).options:
            others = sorted(
                n for n in REGISTRY if "context" in REGISTRY[n].options and not REGISTRY[n].allocator.splits
            )
            raise ValueError(
                f"allow: requests under {name!r} would outgrow the context; they may pick: {', '.join(others)}"
            )


def _audits(config: KVPolicyConfig) -> None:
    if config.target is not None and not config.audit:
        raise ValueError("target: no answer is audited: it needs audit, such as audit: 0.01")
    if config.tuned is not None and config.target is None:
        raise ValueError("tuned: other prompts could miss no target: it needs target, such as target: 0.95")


def _allows_what_there_is(config: KVPolicyConfig) -> None:
    for name in config.allow or ():
        try:
            policy = policy_named(name)
        except KVPolicyError as error:
            raise ValueError(f"allow: {error}") from None
        if policy.allocator.splits and name != config.name:
            raise ValueError(f"allow: {name!r} needs KV groups from the start on: make it the server's policy")
        if config.allocator.splits and name not in (config.name, "full"):
            server = f"{config.name!r} server" + (
                "" if config.policy.allocator.splits else f" with allocate: {config.allocate}"
            )
            raise ValueError(f"allow: requests of a {server} may pick 'full' beside it, not {name!r}")


def _has_the_trigger(config: KVPolicyConfig) -> None:
    policy = config.policy
    if config.admit and config.when != "pressure":
        raise ValueError("admit: requests that keep a budget lose blocks for no other request: it needs when: pressure")
    if policy.options and config.when not in policy.triggers:
        others = sorted(name for name in REGISTRY if config.when in REGISTRY[name].triggers and name != "full")
        raise ValueError(
            f"when: {config.name!r} supports only {' and '.join(map(repr, policy.triggers))}. "
            f"Policies that support {config.when!r}: {', '.join(others)}"
        )
    for name in config.allow or ():
        if config.when not in REGISTRY[name].triggers:
            others = sorted(
                n for n in REGISTRY if config.when in REGISTRY[n].triggers and not REGISTRY[n].allocator.splits
            )
            raise ValueError(
                f"allow: {name!r} does not support the server's when: {config.when}; "
                f"requests may pick: {', '.join(others)}"
            )


RULES: tuple[Callable[[KVPolicyConfig], None], ...] = (
    _allows_what_there_is, _goes_together, _keeps_tokens, _keeps_on_the_host, _reads_less, _goes_with_its_allocator,
    _fits_its_context, _has_the_trigger, _room_to_choose, _audits,
)  # fmt: skip
REGISTRY.reserved |= frozenset(dir(KVPolicyConfig)) | frozenset(KVPolicyConfig.__annotations__)

"""One validated object for what to evict: from a flag, a dict, a YAML file or a request."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from .errors import LONGEST_SHOWN, KVPolicyError, nearest, sentence, shown
from .heads.pattern import HeadPattern
from .policies import BUDGET_OPTIONS, MASS_OPTIONS, POLICIES, TOKEN_OPTIONS, Policy
from .sources import presets, read, with_pattern

Reduction = Literal["sum", "mean", "max"]
REDUCTION_NAMES = get_args(Reduction)

#: KV groups of policies that have bands, if nobody says how many.
DEFAULT_BANDS = 4
#: Names of head classes, in the order of their KV groups.
RETRIEVAL, STREAMING = "retrieval", "streaming"


def policy_named(name: object) -> Policy:
    """The policy called `name`.

    Raises:
        KVPolicyError: there is none; the message lists those there are.
    """
    if isinstance(name, str) and name in presets():
        raise KVPolicyError(
            f"{name!r} is a preset, which stands for a whole policy (--kv-policy {name}); "
            f"a policy's name is one of: {nearest(name, POLICIES)}"
        )
    if not isinstance(name, str) or name not in POLICIES:
        raise KVPolicyError(f"unknown KV policy {shown(name)}; choose one of: {nearest(name, POLICIES)}")
    return POLICIES[name]


#: No size in tokens is as large.
TOO_MANY = 1 << 31
#: Trigger of requests that are evicted from only when the pool runs out.
NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may keep resident, in whole blocks of one KV group.

    Attributes:
        budget: blocks left after a decision.
        trigger: blocks above which a decision is taken; `NEVER` under `when: pressure`.
        sink: leading blocks that are never evicted.
        recent: trailing *tokens* whose blocks are never evicted.
    """

    budget: int
    trigger: int
    sink: int
    recent: int

    @property
    def bound(self) -> int:
        """Blocks that a request may insist on between steps: under pressure its floor."""
        return self.budget if self.trigger == NEVER else self.trigger


class KVPolicyConfig(BaseModel):
    """A KV eviction policy and its options. Sizes are tokens, rounded up to whole blocks where they are used.

    Fields that a policy does not have are refused; fields left out take the policy's own defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    #: budget: every request keeps its budget. pressure: all is kept while the pool has room; then the least important
    #: blocks of all requests go, down to each one's budget.
    when: Literal["budget", "pressure"] = "budget"
    #: Tokens a request keeps, or a ratio of its prompt below 1. None: sink + recent + one block.
    budget: int | float | None = None
    #: Hysteresis: eviction starts above budget + buffer and goes back to budget. Under pressure: tokens that are freed
    #: at a time beyond what is needed.
    buffer: int = Field(0, ge=0, lt=TOO_MANY)
    #: Leading tokens that always stay (attention sinks).
    sink: int = Field(0, ge=0, lt=TOO_MANY)
    #: Trailing tokens that always stay.
    recent: int = Field(0, ge=0, lt=TOO_MANY)
    #: False: sinks and recent tokens may go like all others, for ablations. What is written or in flight stays.
    protect: bool = True
    #: Requests with a shorter prompt are never evicted from.
    min_prompt: int = Field(0, ge=0, lt=TOO_MANY)
    #: How far back a token may look, in tokens, or "model": as far as the model was made for. What a request keeps when
    #: it grows past that is moved up, its keys rotated anew, and it goes on. None: positions stay as they are.
    context: int | Literal["model"] | None = None
    #: block: whole blocks stay or go, the same for all heads. token: each KV head keeps its own tokens, as many as all
    #: others, gathered into as few blocks as they need.
    granularity: Literal["block", "token"] = "block"
    #: token: "head", a set of kept tokens for each KV head of each layer; "all", one for all of them.
    sets: Literal["head", "all"] = "head"
    #: token: what goes is merged into what stays, by the rules and thresholds of "d2o" or "ems" (see `worker.merge`).
    merge: Literal["d2o", "ems"] | None = None
    #: d2o: weight of a decision's similarities in the threshold.
    merge_decay: float = Field(0.7, ge=0, le=1)
    #: ems: least similarity of keys.
    merge_threshold: float = Field(0.6, ge=-1, le=1)
    #: How mass adds up over queries: all of it, per query seen, exponentially forgotten, or the last queries only.
    accumulate: Literal["sum", "mean", "ema", "last"] = "sum"
    #: ema: share of the old average that stays, per query.
    decay: float = Field(0.99, gt=0, lt=1)
    #: last, and policies that look at the last queries only: queries before a decision that count.
    window: int = Field(32, ge=1, lt=TOO_MANY)
    #: Score every n-th query position only.
    every: int = Field(1, ge=1, lt=TOO_MANY)
    #: How KV heads and layers of a group are reduced to one score a block. duo: the file of its gates.
    heads: str = "sum"
    layers: Reduction = "sum"
    #: snapkv: blocks in the pooling kernel, odd.
    kernel: int = Field(3, ge=1, lt=TOO_MANY)
    #: rkv: weight of attention against redundancy.
    mix: float = Field(0.1, ge=0, le=1)
    #: kvzip: tokens of the prompt that are repeated at once.
    chunk: int = Field(2048, ge=1, lt=TOO_MANY)
    #: kvzip: token ids between the prompt and its repetition.
    instruction: tuple[Annotated[int, Field(ge=0, lt=TOO_MANY)], ...] = ()
    #: random: of its hash.
    seed: int = Field(0, ge=0, lt=1 << 63)
    #: duo: gates of at least `threshold` are retrieval heads, or the share `sparsity` with the smallest gates streams.
    threshold: float | None = Field(None, ge=0, le=1)
    sparsity: float | None = Field(None, ge=0, le=1)
    #: duo: the policy of retrieval heads; None: they keep everything.
    retrieval: "KVPolicyConfig | None" = None
    #: duo: a row a layer, of 1 for each retrieval and 0 for each streaming head; taken from `heads` if not given.
    pattern: tuple[Annotated[str, Field(pattern="^[01]+$")], ...] = ()
    #: pyramidkv: KV groups that layers are cut into; adakv: that each layer's heads are dealt to. None: 4, if there are
    #: as many.
    bands: int | None = Field(None, ge=1)
    #: pyramidkv: the last layer's budget is 1 / beta of the mean.
    beta: float = Field(20.0, ge=1)
    #: adakv: share of an even split that each KV group keeps.
    floor: float = Field(0.2, ge=0, le=1)
    #: fastgen: share of the attention mass that a KV group's policy has to keep.
    recovery: float = Field(0.95, gt=0, le=1)
    #: pyramidkv: layers of the model, which bands are cut from; None: as many as bands. Set by `for_model`.
    depth: int | None = None
    #: Of one band: its budget over the mean. Set by `classes`.
    share: float | None = None
    #: Policies that requests may pick; None: all that evict; `full` as well if this is `full`, or under pressure.
    #: Those that reconstruct prompts have to be named.
    allow: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _options_of_the_policy(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if "name" not in values:
            raise ValueError(
                f"a KV policy needs a name: one of {', '.join(sorted(POLICIES))} (--kv-policy.name beside other "
                "--kv-policy.FIELD)"
            )
        policy = policy_named(values["name"])
        allowed = policy.options | {"name", "allow"}
        if "granularity" in values and "granularity" not in allowed:
            tokens = sorted(name for name in POLICIES if "granularity" in POLICIES[name].options)
            raise ValueError(
                f"granularity: policy {policy.name!r} has: block; those that have token: {', '.join(tokens)}"
            )
        for field in values:
            if field not in allowed:
                raise ValueError(f"policy {policy.name!r} has no field {field!r}; it has: {nearest(field, allowed)}")
        if policy.splits == "classes":
            return with_pattern(values)
        defaults = dict(policy.defaults)
        if policy.window_is_the_budget and "budget" in values:
            defaults["recent"] = 0
        return {**defaults, **values}

    @field_validator("budget", mode="before")
    @classmethod
    def _tokens_or_ratio(cls, budget: Any) -> int | float | None:
        if budget is None:
            return None
        # numpy's numbers are such too.
        if isinstance(budget, Integral) and not isinstance(budget, bool) and 0 < budget < TOO_MANY:
            return int(budget)
        if isinstance(budget, Real) and not isinstance(budget, Integral) and 0 < budget < 1:
            return float(budget)
        raise ValueError(
            f"must be a whole number of tokens above 0 and below {TOO_MANY}, or a ratio of the prompt between 0 and 1, "
            f"not {shown(budget)}"
        )

    @field_validator("context", mode="before")
    @classmethod
    def _tokens_or_the_models(cls, context: Any) -> Any:
        tokens = isinstance(context, int) and not isinstance(context, bool) and 0 < context < TOO_MANY
        if context is None or tokens or context == "model":
            return context
        raise ValueError(f"must be a whole number of tokens above 0, or 'model', not {shown(context)}")

    @field_validator(
        "buffer",
        "sink",
        "recent",
        "min_prompt",
        "window",
        "every",
        "decay",
        "kernel",
        "mix",
        "chunk",
        "seed",
        "threshold",
        "sparsity",
        "bands",
        "beta",
        "floor",
        "merge_decay",
        "merge_threshold",
        "recovery",
        mode="before",
    )
    @classmethod
    def _numbers_only(cls, value: Any) -> Any:
        # pydantic would take True for 1 and "64" for 64; in a policy file both are mistakes.
        if isinstance(value, (bool, str)):
            raise ValueError(f"must be a number, not {value!r}")
        return value

    @field_validator("heads")
    @classmethod
    def _reduction_or_file(cls, heads: str, info: ValidationInfo) -> str:
        if heads not in REDUCTION_NAMES and not POLICIES[info.data["name"]].splits == "classes":
            raise ValueError(f"must be 'sum', 'mean' or 'max', not {heads!r}")
        return heads

    @field_validator("retrieval", mode="before")
    @classmethod
    def _policy_by_name(cls, retrieval: Any) -> Any:
        return {"name": retrieval} if isinstance(retrieval, str) else retrieval

    @field_validator("retrieval")
    @classmethod
    def _can_serve_a_class(cls, retrieval: "KVPolicyConfig | None") -> "KVPolicyConfig | None":
        if retrieval is None:
            return None
        if retrieval.policy.splits or retrieval.policy.reconstructs:
            names = (name for name, policy in POLICIES.items() if not policy.splits and not policy.reconstructs)
            raise ValueError(f"retrieval heads can't run {retrieval.name!r}, they can run: {', '.join(sorted(names))}")
        if retrieval.allow is not None:
            raise ValueError("allow belongs beside retrieval, not into it")
        if "max" in (retrieval.heads, retrieval.layers):
            # Layers have different numbers of retrieval heads: they can't be compared head by head.
            raise ValueError("heads and layers are reduced by sum or mean where heads are split, not by max")
        return retrieval

    @field_validator("protect", mode="before")
    @classmethod
    def _true_or_false(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value

    @model_validator(mode="after")
    def _sees_tokens(self) -> "KVPolicyConfig":
        if self.granularity == "token" and self.when == "pressure":
            raise ValueError("granularity: under pressure whole blocks of all requests are compared: it has: block")
        if self.merge and self.granularity != "token":
            raise ValueError(f"merge: {self.merge!r} merges tokens: it needs granularity: token")
        return self

    @model_validator(mode="after")
    def _fits_its_context(self) -> "KVPolicyConfig":
        if self.context is None:
            return self
        for refused, why in (
            (self.when == "pressure", "under pressure requests keep all while there is room: it needs when: budget"),
            (
                self.granularity == "token",
                "heads that keep tokens of their own can't move up: it needs granularity: block",
            ),
            (isinstance(self.budget, float), "a ratio of a long prompt may be more: it needs a budget in tokens"),
            (self.min_prompt > 1, "requests that are never evicted from would outgrow it: leave min_prompt out"),
        ):
            if refused:
                raise ValueError(f"context: {why}")
        for name in self.allow or ():
            if "context" not in POLICIES[name].options:
                others = sorted(n for n in POLICIES if "context" in POLICIES[n].options and not POLICIES[n].splits)
                raise ValueError(
                    f"allow: requests under {name!r} would outgrow the context; they may pick: {', '.join(others)}"
                )
        return self

    @field_validator("pattern")
    @classmethod
    def _as_many_heads_in_each_layer(cls, pattern: tuple[str, ...]) -> tuple[str, ...]:
        if len({len(row) for row in pattern}) > 1:
            raise ValueError("must have as many digits, one for each KV head, in every row")
        return pattern

    @field_validator("kernel")
    @classmethod
    def _centred(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError(f"must be odd, a block and as many on either side, not {kernel}")
        return kernel

    @field_validator("allow")
    @classmethod
    def _known_policies(cls, allow: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in allow or ():
            policy_named(name)
        return allow

    @model_validator(mode="after")
    def _groups_are_made_at_start(self) -> "KVPolicyConfig":
        for name in self.allow or ():
            if POLICIES[name].splits and name != self.name:
                raise ValueError(f"allow: {name!r} needs KV groups from the start on: make it the server's policy")
            if self.policy.splits and name not in (self.name, "full"):
                raise ValueError(f"allow: requests of a {self.name!r} server may pick 'full' beside it, not {name!r}")
        return self

    @model_validator(mode="after")
    def _has_the_trigger(self) -> "KVPolicyConfig":
        if self.policy.options and self.when not in self.policy.triggers:
            others = sorted(name for name in POLICIES if self.when in POLICIES[name].triggers and name != "full")
            raise ValueError(
                f"policy {self.name!r} has no when: {self.when}, it has: {', '.join(self.policy.triggers)}; "
                f"policies that have it: {', '.join(others)}"
            )
        return self

    @model_validator(mode="after")
    def _allowed_have_the_trigger(self) -> "KVPolicyConfig":
        for name in self.allow or ():
            if self.when not in POLICIES[name].triggers:
                others = {n for n in POLICIES if self.when in POLICIES[n].triggers and not POLICIES[n].splits}
                raise ValueError(
                    f"allow: {name!r} has no when: {self.when}, and a request has its server's; "
                    f"requests may pick: {', '.join(sorted(others))}"
                )
        return self

    @model_validator(mode="after")
    def _room_to_choose(self) -> "KVPolicyConfig":
        if self.protect and isinstance(self.budget, int) and self.budget <= self.sink + self.recent:
            raise ValueError(
                f"budget {self.budget} leaves nothing to choose: it must be at least sink + recent + one block "
                f"= {self.sink} + {self.recent} + block size"
            )
        return self

    @classmethod
    def parse(cls, value: "KVPolicyConfig | Mapping[str, Any] | str | Path") -> "KVPolicyConfig":
        """Make a config from what users write.

        Args:
            value: a config, a dict of its fields, the name of a policy or preset, a JSON object, or the path of a YAML
                or JSON file.

        Raises:
            KVPolicyError: with one message that says what is wrong and what is allowed.
        """
        if isinstance(value, cls):
            return value
        source = ""
        if isinstance(value, (str, Path)):
            value, source = read(str(value).strip())
        if not isinstance(value, Mapping):
            raise KVPolicyError(f"{source}a KV policy is a name, a dict of its fields or a path, not {value!r}")
        try:
            return cls(**value)
        except ValidationError as error:
            raise KVPolicyError(source + "; ".join(map(sentence, error.errors()))) from None
        except TypeError:
            raise KVPolicyError(f"{source}field names must be strings: {list(value)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields that this policy has, as `parse` takes them and JSON carries them."""
        fields = self.model_dump(mode="json", include=(self.policy.options | {"name", "allow"}) - {"retrieval"})
        if self.retrieval is not None:
            fields["retrieval"] = self.retrieval.to_dict()
        return fields

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "KVPolicyConfig":
        copied = BaseModel.model_copy(self, update=update, deep=deep)
        copied.__dict__.pop("split_classes", None)  # they follow from what may have changed
        return copied

    @property
    def policy(self) -> Policy:
        return POLICIES[self.name]

    @property
    def allowed(self) -> frozenset[str]:
        """Names of the policies that requests may pick."""
        if self.allow is not None:
            return frozenset(self.allow) | {self.name}
        if self.policy.splits:
            return frozenset({self.name})
        # A second pass over its prompt, and holding all of it, is not for a request to decide.
        names = {name for name, policy in POLICIES.items() if not policy.reconstructs and not policy.splits}
        names = frozenset(names) | {self.name}
        if self.name == "full":
            return names
        if self.when == "pressure":  # a request that keeps everything is no harm while there is room
            return frozenset(name for name in names if "pressure" in POLICIES[name].triggers)
        return names - {"full"}

    @property
    def classes(self) -> dict[str, "KVPolicyConfig"]:
        """Head class -> what its heads run under. One class of all heads, called "", unless heads are split.

        The classes of `duo` that have no heads are left out.
        """
        if self.share is not None or not self.policy.splits:
            return {"": self}
        return self.split_classes

    @cached_property
    def split_classes(self) -> dict[str, "KVPolicyConfig"]:
        """`classes` where heads are split. Made once: requests share them."""
        may_keep_all = ("full",) if "full" in self.allowed else ()
        if self.policy.splits != "classes":
            return {
                f"band-{band}": self.model_copy(update={"share": share, "allow": may_keep_all})
                for band, share in enumerate(self._shares())
            }
        rows = "".join(self.pattern)
        classes = {}
        if "1" in rows:
            retrieval = self.retrieval or KVPolicyConfig(name="full")
            classes[RETRIEVAL] = retrieval.model_copy(update={"allow": may_keep_all})
        if "0" in rows:
            classes[STREAMING] = KVPolicyConfig(
                name="sink-window", sink=self.sink, recent=self.recent, allow=may_keep_all
            )
        return classes

    def _shares(self) -> list[float]:
        """Of each band, its budget over the mean one, both beside sinks and recent window."""
        bands = self.bands or DEFAULT_BANDS
        if self.policy.splits == "heads":
            return [1.0] * bands
        # Linear from 2 - 1 / beta at the first layer to 1 / beta at the last; a band has its layers' mean. Bands take
        # as much memory each, however many layers they have, so it is their mean that is the budget.
        depth = self.depth or bands
        middles = [(depth * band // bands + depth * (band + 1) // bands - 1) / 2 for band in range(bands)]
        slope = (2 - 2 / self.beta) / max(depth - 1, 1)
        return [1 + slope * (sum(middles) / bands - middle) for middle in middles]

    def for_model(self, layers: int, kv_heads: int, ranks: int) -> "KVPolicyConfig":
        """This config with what it leaves to the model filled in.

        Raises:
            KVPolicyError: as `check`; more bands than there is to band.
        """
        if self.policy.splits in ("", "classes"):
            return self
        what = f"{layers} layers"
        most = layers
        if self.policy.splits == "heads":
            most = max(kv_heads // ranks, 1)
            what = f"{most} KV heads on each rank"
        if (self.bands or 0) > most:
            raise KVPolicyError(f"bands: {self.name!r} can't make {self.bands} of {what}, at most {most}")
        return self.model_copy(update={"bands": self.bands or min(DEFAULT_BANDS, most), "depth": layers})

    def profiled(self, name: str) -> "KVPolicyConfig":
        """What a KV group runs under once its policy is chosen: its own sizes, as far as that policy has them."""
        fields = {field: getattr(self, field) for field in ("sink", "recent", "protect", "buffer")} | {"name": name}
        if name == "h2o":
            fields |= {"budget": self.budget, "accumulate": "last", "window": self.window, "heads": self.heads}
        return KVPolicyConfig.parse({k: v for k, v in fields.items() if k == "name" or k in POLICIES[name].options})

    def of_class(self, head_class: str) -> "KVPolicyConfig":
        """What heads of a class run under; the same for all where this config does not split them."""
        return self.classes.get(head_class, self)

    @property
    def head_pattern(self) -> HeadPattern:
        """duo: its retrieval heads."""
        retrieval = np.array([[digit == "1" for digit in row] for row in self.pattern])
        return HeadPattern(retrieval, self.sink, self.recent)

    @property
    def reconstructs(self) -> bool:
        """Whether any request may need its prompt reconstructed."""
        return any(POLICIES[name].reconstructs for name in self.allowed)

    @property
    def statistics(self) -> frozenset[str]:
        """All that workers must be able to measure: what any request may need."""
        named = [POLICIES[name].measures for name in self.allowed]
        return frozenset().union(*named, *(part.statistics for part in self.classes.values() if part is not self))

    def minimum(self, block_size: int) -> int:
        """The smallest budget that leaves something to choose, in blocks."""
        return self._sinks_and_recent(block_size) + 1 if self.protect else 1

    def _sinks_and_recent(self, block_size: int) -> int:
        # A window that does not end on a block's edge reaches into one block more.
        return math.ceil(self.sink / block_size) + math.ceil(self.recent / block_size)

    def check(self, block_size: int, layers: int, kv_heads: int, max_model_len: int, ahead: int = 0) -> None:
        """Make sure that this config means something for a model and its blocks.

        Args:
            block_size: tokens.
            layers, kv_heads: of the model.
            max_model_len: tokens.
            ahead: most tokens of a request that are in flight.

        Raises:
            KVPolicyError: a budget leaves nothing to choose, or more than the context has room for; heads are split for
                a model of another shape.
        """
        if self.pattern and self.head_pattern.retrieval.shape != (layers, kv_heads):
            shape = self.head_pattern.retrieval.shape
            raise KVPolicyError(
                f"{self.heads} has {shape[0]} layers x {shape[1]} KV heads, the model has {layers} x {kv_heads}"
            )
        for part in self.classes.values():
            limits = part.limits(block_size, max_model_len)
            if isinstance(self.context, int) and (limits.trigger + 1) * block_size + ahead > self.context:
                raise KVPolicyError(
                    f"context: {self.context} tokens have no room for budget and buffer "
                    f"({limits.trigger * block_size}), one block of {block_size} and {ahead} in flight: "
                    "set a smaller budget or --max-num-batched-tokens"
                )

    def check_instruction(self, vocab_size: int) -> None:
        """Make sure that the model knows the tokens that kvzip puts between a prompt and its repetition.

        Raises:
            KVPolicyError: naming one that it does not know, which would end the engine with the first request.
        """
        for token in self.instruction:
            if token >= vocab_size:
                raise KVPolicyError(f"instruction: {token} is no token of the model, whose ids are below {vocab_size}")

    def limits(self, block_size: int, prompt_len: int) -> Limits | None:
        """Blocks that a request with this prompt may keep; None if all of them.

        Raises:
            KVPolicyError: the budget is smaller than `minimum`.
        """
        if self.name == "full":
            return None
        limits = self._limits(block_size, prompt_len)
        return None if prompt_len < self.min_prompt else limits

    def _limits(self, block_size: int, prompt_len: int) -> Limits:
        minimum = self.minimum(block_size)
        if self.budget is None:
            # The same without protection: an ablation compares equal budgets.
            budget = self._sinks_and_recent(block_size) + 1
        elif isinstance(self.budget, float):
            budget = max(math.ceil(math.ceil(self.budget * prompt_len) / block_size), minimum)
        else:
            budget = math.ceil(self.budget / block_size)
            if budget < minimum:
                raise KVPolicyError(
                    f"budget {self.budget} is too small for blocks of {block_size} tokens: sink {self.sink} + recent "
                    f"{self.recent} + one block need at least {minimum * block_size}"
                )
        tokens = self.budget if isinstance(self.budget, int) else budget * block_size
        if self.share not in (None, 1):
            budget = max(minimum, minimum - 1 + round(self.share * (budget - minimum + 1)))
            tokens = budget * block_size
        trigger = NEVER if self.when == "pressure" else math.ceil((tokens + self.buffer) / block_size)
        sink, recent = (math.ceil(self.sink / block_size), self.recent) if self.protect else (0, 0)
        return Limits(budget, trigger, sink, recent)

    def bound(self, block_size: int, max_model_len: int) -> int | None:
        """Most blocks that any request may hold between steps; None if requests may keep everything."""
        profiles = any(POLICIES[name].profiles for name in self.allowed | {self.name})
        if "full" in self.allowed or self.reconstructs or profiles or self.min_prompt > 1:
            return None
        return self.limits(block_size, max_model_len).bound

    def for_request(self, extra_args: Mapping[str, Any] | None, prompt_len: int, block_size: int) -> "KVPolicyConfig":
        """This config as one request changes it by `REQUEST_FIELDS`; `kv_usage` changes nothing.

        A request that picks another policy keeps what the server says of budget, buffer, sinks, recent window,
        protection and shortest prompt, and those options of scoring in which the server differs from its own policy's
        defaults, as far as the other policy has them. The rest are the other policy's defaults. A window that is the
        budget (sink-window) is no recent window to another policy, nor the other way round.

        Raises:
            KVPolicyError: the request asks for what it may not have.
        """
        if not extra_args:
            return self
        if not isinstance(extra_args, Mapping):
            raise KVPolicyError(f"extra_args must be a dict of a request's own arguments, not {shown(extra_args)}")
        extra_args = given(extra_args)
        for key in extra_args:
            text = str(key)[:LONGEST_SHOWN].lower()
            option = text.startswith("kv_") and text.removeprefix("kv_") in type(self).model_fields
            if key not in REQUEST_FIELDS and (option or difflib.get_close_matches(text, REQUEST_FIELDS, cutoff=0.8)):
                raise KVPolicyError(
                    f"unknown request field {shown(key)}; a request may set: {nearest(key, REQUEST_FIELDS)}"
                )
        usage = extra_args.get("kv_usage", False)
        # vLLM's models of requests make a number of a bool.
        if not isinstance(usage, (bool, int, float)) or usage not in (0, 1):
            raise KVPolicyError(f"kv_usage must be true or false (1 or 0), not {usage!r}")
        name = extra_args.get("kv_policy", self.name)
        if policy_named(name).name not in self.allowed:
            raise KVPolicyError(f"kv_policy {name!r} is not enabled here; enabled: {nearest(name, self.allowed)}")
        sizes = {field: _number(field, extra_args[field]) for field in REQUEST_SIZES if field in extra_args}
        if not sizes and name == self.name:
            return self
        if name == "full":
            if sizes:
                raise KVPolicyError(f"kv_policy 'full' keeps everything: it takes no {next(iter(sizes))}")
            return KVPolicyConfig(name="full")
        if self.policy.splits == "classes":
            return self._with_retrieval(sizes, prompt_len, block_size)
        granted = self.limits(block_size, prompt_len)
        options = self._resized(POLICIES[name], sizes, granted, prompt_len, block_size)
        config = KVPolicyConfig.parse({**options, "name": name}).model_copy(update={"depth": self.depth})
        asked = config.limits(block_size, prompt_len)
        if granted is not None and (asked.budget > granted.budget or asked.trigger > granted.trigger):
            what = ", ".join(f"{field} {size}" for field, size in sizes.items()) or f"kv_policy {name}"
            raise KVPolicyError(
                f"{what} comes to {asked.budget * block_size} tokens of this request's cache, above the server's "
                f"{granted.budget * block_size}"
            )
        return config

    def _with_retrieval(self, sizes: Mapping[str, int | float], prompt_len: int, block_size: int) -> "KVPolicyConfig":
        """duo, with another budget of its retrieval heads."""
        for field in sizes:
            if field != "kv_budget":
                raise KVPolicyError(
                    f"kv_policy {self.name!r} takes no {field}: what streaming heads keep is the server's"
                )
        if self.retrieval is None or self.retrieval.name == "full":
            raise KVPolicyError(f"kv_policy {self.name!r} takes no kv_budget here: its retrieval heads keep everything")
        return self.model_copy(update={"retrieval": self.retrieval.for_request(sizes, prompt_len, block_size)})

    def _resized(
        self,
        policy: Policy,
        sizes: Mapping[str, int | float],
        granted: Limits | None,
        prompt_len: int,
        block_size: int,
    ) -> dict[str, Any]:
        """Options of a policy, this one's or another's, for a request that sets `sizes`."""
        options = self.to_dict() if policy.name == self.name else self._handed_to(policy, block_size, prompt_len)
        asked = {field.removeprefix("kv_"): size for field, size in sizes.items()}
        for field in asked:
            if field not in policy.options:
                raise KVPolicyError(f"kv_policy {policy.name!r} takes no kv_{field}: it has no {field}")
            if field != "budget" and not options.get("protect", True):
                raise KVPolicyError(f"kv_{field} can't be set here: the server protects no tokens (protect: false)")
        if policy.window_is_the_budget and "recent" in asked:
            options.pop("budget", None)
        elif policy.window_is_the_budget:
            # More sinks leave less of a window.
            if granted is not None and "sink" in asked:
                options["budget"] = granted.budget * block_size
            if options.get("budget") is not None or "budget" in asked:
                options.pop("recent", None)
        options |= asked
        if self.context is not None and isinstance(asked.get("budget"), float):
            options["budget"] = math.ceil(asked["budget"] * prompt_len)  # this prompt's length is known
        if policy.name != self.name and self.policy.window_is_the_budget and "recent" not in asked:
            options["recent"] = _fitting_window(policy, options, block_size, prompt_len)
        return {field: value for field, value in options.items() if field in policy.options}

    def _handed_to(self, policy: Policy, block_size: int, prompt_len: int) -> dict[str, Any]:
        """Options of another policy that follow from this config; see `for_request`."""
        if self.name == "full":
            return {}
        default = KVPolicyConfig(name=self.name)
        scoring = (self.policy.options & policy.options) - BUDGET_OPTIONS
        options = {field: getattr(self, field) for field in scoring}
        options = {field: value for field, value in options.items() if value != getattr(default, field)}
        limits = self._limits(block_size, prompt_len)
        options |= {
            "budget": limits.budget * block_size,
            "buffer": self.buffer if self.when == "pressure" else (limits.trigger - limits.budget) * block_size,
            **{field: getattr(self, field) for field in ("when", "sink", "recent", "protect", "min_prompt", "context")},
            **{field: getattr(self, field) for field in TOKEN_OPTIONS},
        }
        if policy.window_is_the_budget:
            del options["recent"]
        return options


#: What a request may set, in `SamplingParams.extra_args` or over HTTP in `vllm_xargs`.
REQUEST_FIELDS = ("kv_policy", "kv_budget", "kv_sink", "kv_recent", "kv_usage")
#: Those of them that are sizes.
REQUEST_SIZES = ("kv_budget", "kv_sink", "kv_recent")
SIZE = "a whole number of tokens, 0 or more"


def given(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's own arguments without those that are null.

    A table of requests (Ray Data's, Arrow's) has a null in each row that leaves out what another row has.
    """
    return {field: value for field, value in (extra_args or {}).items() if value is not None}


def _fitting_window(policy: Policy, options: Mapping[str, Any], block_size: int, prompt_len: int) -> int:
    """The policy's own recent window, or half of what a smaller budget leaves beside sinks and one block."""
    budget = options["budget"]
    if isinstance(budget, float):
        budget *= prompt_len
    room = math.ceil(budget / block_size) - math.ceil(options["sink"] / block_size) - 1
    return min(policy.defaults["recent"], max(room, 0) * block_size // 2)


def _number(field: str, value: Any) -> int | float:
    """One of `REQUEST_SIZES`, which may have come as text: HTTP clients send both.

    Or as 256.0: a column of a table with nulls in it is one of floats. A budget of 1.0 stays one, and is refused, as it
    might be a ratio.
    """
    number = value
    if isinstance(value, str):
        try:
            number = json.loads(value[:LONGEST_SHOWN], parse_constant=float)
        except json.JSONDecodeError:
            number = None
    if isinstance(number, float) and number.is_integer() and (number > 1 or field != "kv_budget"):
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        allowed = "a number of tokens, or a ratio of the prompt below 1" if field == "kv_budget" else SIZE
        raise KVPolicyError(f"{field} must be {allowed}, not {shown(value)}")
    if field != "kv_budget" and not (isinstance(number, int) and 0 <= number < TOO_MANY):
        raise KVPolicyError(f"{field} must be {SIZE}, not {shown(value)}")
    return number


__all__ = [
    "MASS_OPTIONS",
    "REQUEST_FIELDS",
    "REQUEST_SIZES",
    "KVPolicyConfig",
    "KVPolicyError",
    "Limits",
    "given",
    "policy_named",
]

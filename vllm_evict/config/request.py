"""What one request may ask for, and what it is granted."""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import LONGEST_SHOWN, KVPolicyError, instead, shown
from .fields import KEEPING, PER_TOKEN, TOKENS_OR_RATIO, tokens_or_ratio
from .frozen import C, Frozen
from .options import TOO_MANY, names_of
from .registry import REGISTRY, Declaration
from .sizes import Limits
from .sources import policy_named

#: What a request may set, in `SamplingParams.extra_args` or over HTTP in `vllm_xargs`.
REQUEST_FIELDS = ("kv_policy", "kv_budget", "kv_sink", "kv_recent", "kv_usage")
#: Those of them that are sizes.
REQUEST_SIZES = ("kv_budget", "kv_sink", "kv_recent")
SIZE = "a whole number of tokens, 0 or more"
#: Names of one request's arguments that are compared with `REQUEST_FIELDS` letter by letter.
MOST_COMPARED = 32


class Requests(Frozen):
    """Of `KVPolicyConfig`: requests."""

    def for_request(self: C, extra_args: Mapping[str, Any] | None, prompt_len: int, block_size: int) -> C:
        """This config as one request changes it by `REQUEST_FIELDS`; `kv_usage` changes nothing.

        A request that picks another policy keeps the server's budget, buffer, protection and shortest prompt, sinks and
        recent window if the server's user gave them, and those options of scoring in which the server differs from its
        own policy's defaults, as far as the other policy has them. The rest are the other policy's defaults. A window
        that is the budget (sink-window) is no recent window to another policy, nor the other way round. Sinks and
        recent window that neither gives follow the budget that the request has in the end.

        Raises:
            KVPolicyError: the request asks for what it may not have.
        """
        if not extra_args:
            return self
        if not isinstance(extra_args, Mapping):
            raise KVPolicyError(f"extra_args must be a dict of a request's own arguments, not {shown(extra_args)}")
        if (key := _mistaken(extra_args)) is not None:
            raise KVPolicyError(f"unknown request field {shown(key)}: {instead(key, REQUEST_FIELDS)}")
        extra_args = given(extra_args)
        usage = extra_args.get("kv_usage", False)
        # vLLM's models of requests make a number of a bool.
        if not isinstance(usage, (bool, int, float)) or usage not in (0, 1):
            raise KVPolicyError(f"kv_usage must be true or false (1 or 0), not {shown(usage)}")
        name = extra_args.get("kv_policy", self.name)
        if policy_named(name).name not in self.allowed:
            raise KVPolicyError(f"kv_policy {name!r} is not enabled here: {instead(name, self.allowed)}")
        sizes = {field: _number(field, extra_args[field]) for field in REQUEST_SIZES if field in extra_args}
        if not sizes and name == self.name:
            return self
        if name == "full":
            if sizes:
                raise KVPolicyError(f"kv_policy 'full' keeps everything: it takes no {next(iter(sizes))}")
            return type(self)(name="full")
        if self.policy.splits == "classes":
            split: C = self._with_retrieval(sizes, prompt_len, block_size)
            return split
        granted = self.limits(block_size, prompt_len)
        options = self._resized(REGISTRY[name], sizes, granted, prompt_len, block_size)
        config: C = self.parse({**options, "name": name}).replace(_depth=self._depth)
        asked = config.limits(block_size, prompt_len)
        if (
            granted is not None
            and asked is not None
            and (asked.budget > granted.budget or asked.trigger > granted.trigger)
        ):
            what = ", ".join(f"{field} {size}" for field, size in sizes.items()) or f"kv_policy {name}"
            raise KVPolicyError(
                f"{what} comes to {asked.budget * block_size} tokens of this request's cache, above the server's "
                f"{granted.budget * block_size}"
            )
        return config

    def _with_retrieval(self: C, sizes: Mapping[str, int | float], prompt_len: int, block_size: int) -> C:
        """duo, with another budget of its retrieval heads."""
        for field in sizes:
            if field != "kv_budget":
                raise KVPolicyError(
                    f"kv_policy {self.name!r} takes no {field}: what streaming heads keep is the server's"
                )
        if self.retrieval is None or self.retrieval.name == "full":
            raise KVPolicyError(f"kv_policy {self.name!r} takes no kv_budget here: its retrieval heads keep everything")
        return self.replace(retrieval=self.retrieval.for_request(sizes, prompt_len, block_size))

    def _resized(
        self: C,
        policy: Declaration,
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
        options = {field: value for field, value in options.items() if field in policy.options}
        if granted is not None and not isinstance(options.get("budget"), int):
            options = _within(self, policy, options, granted.budget, block_size) | options
        return options

    def _handed_to(self: C, policy: Declaration, block_size: int, prompt_len: int) -> dict[str, Any]:
        """Options of another policy that follow from this config; see `for_request`."""
        if self.name == "full":
            return {}
        default = type(self)(name=self.name)
        scoring = (self.policy.options & policy.options) - names_of(KEEPING)
        options = {field: getattr(self, field) for field in scoring}
        options = {field: value for field, value in options.items() if value != getattr(default, field)}
        limits = self._limits(block_size, prompt_len)
        options |= {
            "budget": limits.budget * block_size,
            "buffer": self.buffer if self.when == "pressure" else (limits.trigger - limits.budget) * block_size,
            **{
                field: getattr(self, field)
                for field in ("when", "protect", "min_prompt", "context", *names_of(PER_TOKEN))
            },
            **{size: getattr(self, size) for size in {"sink", "recent"} - self.unsaid},
        }
        if policy.window_is_the_budget or self.policy.window_is_the_budget:
            options.pop("recent", None)
        return options


def _mistaken(extra_args: Mapping[str, Any]) -> str | None:
    """An argument whose name is a policy's option (`kv_window`), or a typo of one of `REQUEST_FIELDS`; None if none is.

    Other names belong to other extensions of vLLM. A client may send any number of them, so only the first
    `MOST_COMPARED` names that are about as long as a field are compared letter by letter.
    """
    options = {f"kv_{field}" for field in ("name", *REGISTRY.fields(), "allow")}
    for key in extra_args.keys() & options:
        if extra_args[key] is not None and key not in REQUEST_FIELDS:
            return key
    lengths, compared = range(5, max(map(len, options)) + 1), 0
    for key, value in extra_args.items():
        if isinstance(key, str) and len(key) in lengths and key not in REQUEST_FIELDS and value is not None:
            text = key.lower()
            if text in options or difflib.get_close_matches(text, REQUEST_FIELDS, cutoff=0.8):
                return key
            compared += 1
            if compared == MOST_COMPARED:
                break
    return None


def given(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of `REQUEST_FIELDS` that a request sets.

    A table of requests (Ray Data's, Arrow's) has a null in each row that leaves out what another row has.
    """
    values = {field: (extra_args or {}).get(field) for field in REQUEST_FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def _within(
    config: Frozen, policy: Declaration, options: Mapping[str, Any], granted: int, block_size: int
) -> dict[str, int]:
    """Sizes that nobody gave, where they are too large for what a request with a ratio, or no budget, may keep.

    Args:
        config: the server's.
        options: of the request's policy.
        granted: blocks that the server grants the request; the sizes follow them.
    """
    window = {"recent"} if policy.window_is_the_budget else set()  # it is what the budget leaves
    unsaid = (policy.options & {"sink", "recent"}) - options.keys() - window
    if not unsaid or not options.get("protect", True):
        return {}
    others = {field: value for field, value in options.items() if field != "recent" or not policy.window_is_the_budget}
    config = config.parse({**others, "name": policy.name, "budget": granted * block_size})
    sizes = config._fitted(block_size)
    return {size: sizes[size] for size in unsaid if sizes[size] < policy.defaults[size]}


def _number(field: str, value: Any) -> int | float:
    """One of `REQUEST_SIZES`, which may have come as text: HTTP clients send both.

    Or as 256.0: a column of a table with nulls in it is one of floats. A budget of 1.0 stays one, and is refused, as it
    might be a ratio.

    Raises:
        KVPolicyError: it is no number, or one that no size can be.
    """
    number = value
    if isinstance(value, str):
        try:
            number = json.loads(value, parse_constant=float) if len(value) <= LONGEST_SHOWN else None
        except json.JSONDecodeError:
            number = None
    if isinstance(number, (float, np.floating)) and number.is_integer() and (number > 1 or field != "kv_budget"):
        number = int(number)
    if field == "kv_budget":
        meant, allowed = tokens_or_ratio(number), TOKENS_OR_RATIO
    else:
        whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool) and 0 <= number < TOO_MANY
        meant, allowed = int(number) if whole else None, SIZE
    if meant is None:
        raise KVPolicyError(f"{field} must be {allowed}, not {shown(value)}")
    return meant

"""Arguments of one request, and the configuration that it runs under."""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import LONGEST_SHOWN, KVPolicyError, instead, shown
from .fields import KEEPING, PER_TOKEN, PROMPT_NAMES, SERVER, TOKENS_OR_RATIO, tokens_or_ratio
from .frozen import C, Frozen
from .options import TOO_MANY, names_of
from .registry import REGISTRY, Declaration
from .retired import OLD_NAMES, RETIRED
from .room import Room
from .sizes import Limits, share_of
from .sources import policy_named

#: Arguments of a request, in `SamplingParams.extra_args` or over HTTP in `vllm_xargs`.
REQUEST_FIELDS = ("kv_policy", "kv_budget", "kv_sink", "kv_recent", "kv_prompt", "kv_usage")
#: In `extra_args` of the requests that a beam search makes; the front end puts it there.
BEAM = "vllm_evict_beam"
#: Arguments that are sizes.
REQUEST_SIZES = ("kv_budget", "kv_sink", "kv_recent")
#: Arguments that later turns of a session may set anew.
TURN_FIELDS = (*REQUEST_SIZES, "kv_prompt")
SIZE = "a whole number of tokens, 0 or more"
#: Fields of the server that a request keeps under another policy, beside sizes and those of token granularity.
HANDED = ("when", "admit", "protect", "min_prompt", "prompt", "exact", "context")
#: Most argument names of one request that are compared with `REQUEST_FIELDS` letter by letter.
MOST_COMPARED = 32


class Requests(Frozen):
    """The part of `KVPolicyConfig` about requests."""

    def for_request(self: C, extra_args: Mapping[str, Any] | None, prompt_len: int, block_size: int) -> C:
        """Return the configuration of one request, whose `REQUEST_FIELDS` change this one.

        A request that picks another policy keeps these fields of the server, if the other policy has them:

        - budget, buffer, protect, min_prompt, prompt, exact, when, context and the fields of token granularity;
        - sink and recent, if the server's configuration gives them;
        - scoring fields that differ from the defaults of the server's policy.

        All other fields have the other policy's defaults. `recent` is not handed over from or to a policy whose window
        is its budget (sink-window). Sinks and recent window that neither side gives follow the request's budget.

        Args:
            extra_args: arguments of the request.
            prompt_len: tokens of its prompt.
            block_size: tokens.

        Raises:
            KVPolicyError: an argument is wrong, is not enabled, or exceeds what the server grants.
        """
        if not extra_args:
            return self
        if not isinstance(extra_args, Mapping):
            raise KVPolicyError(f"extra_args must be a dict of a request's own arguments, not {shown(extra_args)}")
        if (key := _mistaken(extra_args)) is not None:
            raise KVPolicyError(f"unknown request field {shown(key)}: {instead(key, REQUEST_FIELDS)}")
        extra_args = given(others := extra_args)
        if extra_args and (key := _bare(others)) is not None:
            own = f"kv_{key.lower()}"
            way_out = f"write {own}" if own in REQUEST_FIELDS else "set it in the server's --kv-policy"
            raise KVPolicyError(
                f"request field {shown(key)} is a policy's, beside {next(iter(extra_args))}; expected one of "
                f"{', '.join(REQUEST_FIELDS)}; {way_out}"
            )
        usage = extra_args.get("kv_usage", False)
        # vLLM's HTTP models convert a bool to a number.
        if not isinstance(usage, (bool, int, float)) or usage not in (0, 1):
            raise KVPolicyError(f"kv_usage must be true or false (1 or 0), not {shown(usage)}")
        name = extra_args.get("kv_policy", self.name)
        if (own := policy_named(name).name) not in self.allowed:
            raise KVPolicyError(
                f"kv_policy {name!r} is not enabled here: {instead(name, self.allowed)}; the server's "
                "field allow may name others"
            )
        name, prompt = own, self._prompt_of(own, extra_args.get("kv_prompt"))
        sizes = {field: _number(field, extra_args[field]) for field in REQUEST_SIZES if field in extra_args}
        if not sizes and not prompt and name == self.name:
            return self
        if name == "full":
            if sizes:
                why = "keeps everything" if self.keeps_all or self.name != name else "has the sizes of the server here"
                raise KVPolicyError(f"kv_policy 'full' {why}: it takes no {next(iter(sizes))}")
            return type(self)(name="full")
        if self.allocator.splits == "classes":  # `name` is this policy's
            split: C = self._with_retrieval(sizes, prompt_len, block_size)
            return split
        granted = self.limits(block_size, prompt_len)
        options = self._resized(REGISTRY[name], sizes, granted, prompt_len, block_size) | prompt
        config: C = self.parse({**options, "name": name}).replace(_depth=self._depth)
        asked = config.limits(block_size, prompt_len)
        wished = self.when == "pressure" and "kv_budget" in sizes
        if granted is not None and asked is not None and asked.budget > granted.budget and not wished:
            config = config.replace(_granted=granted.budget)
            asked = config.limits(block_size, prompt_len)
        # Under pressure a budget is what a request keeps at least: a larger one is the safer wish.
        more = self.when != "pressure" and granted is not None and asked is not None
        if more and (asked.budget > granted.budget or asked.trigger > granted.trigger):
            what = ", ".join(f"{field} {size}" for field, size in sizes.items()) or f"kv_policy {name}"
            raise KVPolicyError(
                f"{what} comes to {asked.budget * block_size} tokens of this request's cache, above the server's "
                f"{granted.budget * block_size}"
            )
        return config

    def lasting(self, extra_args: Mapping[str, Any], prompt_len: int, block_size: int) -> dict[str, Any]:
        """Return the `REQUEST_FIELDS` that a request sets, such that longer prompts get what this one gets.

        A budget that is a share of the prompt becomes tokens.
        """
        fields = given(extra_args)
        config = self.for_request(fields, prompt_len, block_size)
        config = config.retrieval or config if config.allocator.splits == "classes" else config
        if "kv_budget" in fields and isinstance(config.budget, float):
            limits = config.limits(block_size, max(prompt_len, config.min_prompt))
            fields["kv_budget"] = limits.budget * block_size
        return fields

    def check_room(
        self: C, granted: C, prompt_len: int, longest: int, max_model_len: int, room: Room, keeps: str = ""
    ) -> None:
        """Refuse a request that keeps more than the pool was planned for, if the pool may be too small for it.

        It would wait for ever, and all requests behind it. Such a request keeps everything, or under pressure more than
        the server's budget.

        Args:
            granted: the request's configuration.
            prompt_len: tokens.
            longest: tokens that the request may grow to.
            max_model_len: tokens.
            room: of the pool.
            keeps: field of the request by which it keeps everything, whatever its policy; "" if there is none.

        Raises:
            KVPolicyError: naming both sizes.
        """
        block_size, longest = room.block_size, room.slots(longest, max_model_len)
        if self.bound(block_size, max_model_len) is None:
            return
        left, what = room.left(longest), f"{keeps or f'kv_policy {granted.name!r}'} got a request that"
        blocks = left // room.groups
        holds = f"expected at most {blocks * block_size}, which the cache holds"
        if room.others:
            holds += f" beside its {room.pool - left} blocks of windows or states"
        for head_class, part in self.classes.items():
            limits = granted.of_class(head_class).limits(block_size, prompt_len)
            planned = part.bound(block_size, max_model_len)
            if part.when != "pressure" or limits is None or planned is None or limits.bound <= planned:
                continue
            if min(limits.bound + room.in_flight, math.ceil(longest / block_size)) > blocks:
                raise KVPolicyError(
                    f"{what} keeps {limits.bound * block_size} tokens, beside {room.in_flight * block_size} in flight; "
                    f"{holds}; ask for a smaller kv_budget"
                )
        if granted.limits(block_size, longest) is None and longest > blocks * block_size:
            raise KVPolicyError(
                f"{what} may grow to {longest} tokens; {holds}; ask for fewer max_tokens (a session may grow to "
                f"--max-model-len), or {f'leave {keeps} out' if keeps else 'for a policy that evicts'}"
            )

    def _with_retrieval(self: C, sizes: Mapping[str, int | float], prompt_len: int, block_size: int) -> C:
        """Return `duo` with another budget of its retrieval heads."""
        for field in sizes:
            if field != "kv_budget":
                raise KVPolicyError(
                    f"kv_policy {self.name!r} takes no {field}: the server sets what streaming heads keep"
                )
        if self.retrieval is None or self.retrieval.name == "full":
            raise KVPolicyError(f"kv_policy {self.name!r} takes no kv_budget here: its retrieval heads keep everything")
        return self.replace(retrieval=self.retrieval.for_request(sizes, prompt_len, block_size))

    def _prompt_of(self, name: str, asked: Any) -> dict[str, str]:
        """Return the field `prompt` of a request under a policy that sets `kv_prompt`; {} if it does not.

        A server with `prompt: whole`, or under `full`, plans its memory for requests that hold whole prompts, and these
        may lose blocks between chunks. Other servers plan for less.
        """
        if asked is None:
            return {}
        if not isinstance(asked, str) or asked not in PROMPT_NAMES:
            raise KVPolicyError(f"kv_prompt must be {' or '.join(PROMPT_NAMES)}, not {shown(asked)}")
        if "prompt" not in REGISTRY[name].options:
            raise KVPolicyError(f"kv_policy {name!r} takes no kv_prompt: it has no prompt")
        if asked == "whole" and not self.takes_whole:
            raise KVPolicyError(
                "kv_prompt got 'whole' on a server with prompt: chunks, which has room for budgets; expected 'chunks'; "
                "start the server with prompt: whole, where requests may ask for either"
            )
        return {"prompt": asked}

    def _resized(
        self: C,
        policy: Declaration,
        sizes: Mapping[str, int | float],
        granted: Limits | None,
        prompt_len: int,
        block_size: int,
    ) -> dict[str, Any]:
        """Return the fields of a policy, this one or another, for a request that sets `sizes`."""
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
            # More sinks leave a smaller window.
            if granted is not None and "sink" in asked:
                options["budget"] = granted.budget * block_size
            if options.get("budget") is not None or "budget" in asked:
                options.pop("recent", None)
        options |= asked
        if self.context is not None and isinstance(asked.get("budget"), float):
            options["budget"] = share_of(asked["budget"], prompt_len)
        return {field: value for field, value in options.items() if field in policy.options}

    def _handed_to(self: C, policy: Declaration, block_size: int, prompt_len: int) -> dict[str, Any]:
        """Return the fields that this configuration hands to another policy; see `for_request`."""
        if self.keeps_all:
            return {}
        default = type(self)(name=self.name)
        scoring = (self.policy.options & policy.options) - names_of(KEEPING)
        options = {field: getattr(self, field) for field in scoring}
        options = {field: value for field, value in options.items() if value != getattr(default, field)}
        limits = self._limits(block_size, prompt_len)
        options |= {
            "budget": limits.budget * block_size,
            "buffer": self.buffer if self.when == "pressure" else (limits.trigger - limits.budget) * block_size,
            **{field: getattr(self, field) for field in (*HANDED, *names_of(PER_TOKEN))},
            **{size: getattr(self, size) for size in {"sink", "recent"} & self.given},
        }
        if policy.window_is_the_budget or self.policy.window_is_the_budget:
            options.pop("recent", None)
        return options


def _mistaken(extra_args: Mapping[str, Any]) -> str | None:
    """Find an argument named like a policy's field (`kv_window`), or a typo of one of `REQUEST_FIELDS`.

    Other names belong to other extensions of vLLM. A client may send any number of them, so only the first
    `MOST_COMPARED` names of about the length of a field are compared letter by letter.

    Returns:
        The argument's name; None if there is no such argument.
    """
    options = {f"kv_{field}" for field in _fields()}
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


def _bare(extra_args: Mapping[str, Any]) -> str | None:
    """Find an argument named as a field of a policy (`prompt`, where `kv_prompt` is meant); None if there is none."""
    fields = _fields()
    named = (key for key in extra_args if isinstance(key, str) and key.lower() in fields)
    return next((key for key in named if extra_args[key] is not None), None)


def _fields() -> set[str]:
    """Return all fields that a server's policy may have, old ones included."""
    return {"name", *REGISTRY.fields(), *names_of(SERVER), *names_of(RETIRED), *OLD_NAMES}


def given(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `REQUEST_FIELDS` that a request sets. None counts as not set.

    Tables of requests (Ray Data, Arrow) have a null in each row without a field that another row has.
    """
    values = {field: (extra_args or {}).get(field) for field in REQUEST_FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def _number(field: str, value: Any) -> int | float:
    """Parse one of `REQUEST_SIZES`, a number or its text, since HTTP clients send both.

    A whole float such as 256.0 is accepted, since a table's column with nulls has floats. A budget of 1.0 is refused,
    since it might be a ratio.

    Raises:
        KVPolicyError: the value is not a size.
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

"""Old names, and fields of blocks on the host, of earlier releases: accepted for one more release."""

import json
import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from .allocators import ALLOCATION
from .errors import KVPolicyError, shown
from .fields import KEEPING
from .options import Option, names_of, text, whole
from .registry import REGISTRY

logger = logging.getLogger("vllm.evict")

NONE: Mapping[str, str] = MappingProxyType({})
#: Old names of presets, policies and fields -> new ones. The old name of a policy may be that of a preset now.
OLD_PRESETS = {"quest-select": "quest", "quest-read": "quest"}
OLD_POLICIES = {"quest": "keybound"}
OLD_NAMES = {
    "select": "read",
    "select_every": "hold",
    "select_bounds": "index",
    "select_sink": "sink",
    "select_recent": "recent",
    "filter_layers": "leaders",
}
#: Fields by which the old name of a policy is told from the preset of that name, which evicts nothing.
OF_EVICTION = names_of((*KEEPING, *ALLOCATION)) - {"sink", "recent"}
#: Fields without effect.
RETIRED = (
    Option("host_path", text | None, None, ""),
    Option("recall", Literal["none", "quest"], "none", ""),
    Option("recall_bounds", Literal["box", "sphere", "mean"], "box", ""),
    Option("recall_every", whole(1), 8, ""),
    Option("recall_blocks", whole(1), 8, ""),
    Option("again", whole(), 64, ""),
    Option("again_rounds", whole(1, 9), 1, ""),
    Option("preempt", Literal["recompute", "host"], "recompute", ""),
)
#: Fields that `full` takes over from a policy whose blocks go to the host.
TAKEN = (
    *("when", "admit", "budget", "buffer", "sink", "recent", "evict", "host", "audit", "target", "tuned", "untried"),
    *("read", "index", "hold", "leaders"),
)


def preset_of(name: str) -> str:
    """Return the name that a preset has now; log it, or that a policy had the name, once a process."""
    if (new := OLD_POLICIES.get(name)) is not None:
        _warn_of_preset(name, new)
    if (new := OLD_PRESETS.get(name)) is None:
        return name
    _warn_of_old_name("preset", name, new)
    return new


def policy_of(name: str) -> str:
    """Return the name that a policy has now; log it once a process. A policy that is there has its name."""
    if name in REGISTRY or (new := OLD_POLICIES.get(name)) is None:
        return name
    _warn_of_old_name("KV policy", name, new)
    return new


def with_new_names(policy: str, fields: Mapping[str, Any], renamed: Mapping[str, str] = NONE) -> dict[str, Any]:
    """Return the fields that a user gave under their new names; log each old one once a process.

    Args:
        policy: its name.
        fields: of the user, without those of a preset.
        renamed: old names -> new ones, of this policy alone.

    Raises:
        KVPolicyError: a field has both names, or its value has no new one.
    """
    kept = dict(fields)
    if kept.get("select") and kept.get("evict") != "host":  # defaults that were others
        if "select_every" not in kept:
            kept.setdefault("hold", 1)
        if "select_bounds" not in kept:
            kept.setdefault("index", "box")
        if kept.get("dense_layers") is None:
            kept.pop("dense_layers", None)
            kept |= {} if kept.get("filter_layers") else {"dense_layers": 2}
    for old, new in {**renamed, **OLD_NAMES}.items():
        if old not in kept:
            continue
        value = kept.pop(old)
        if new in ("sink", "recent") and policy != "full":  # what a policy protects is not what decodes read
            try:
                Option(old, whole(), 0, "").validate(value)
            except ValueError as error:
                raise KVPolicyError(f"{old}: {error}") from None
            new = f"nothing: sinks and recent blocks follow {OLD_NAMES['select']}"
        elif new in kept:
            raise KVPolicyError(f"{old} is the old name of {new}: give {new} alone")
        elif old == "select_bounds" and value != "box":
            raise KVPolicyError(f"select_bounds: got {shown(value)}; expected a kind of index; use index: box or signs")
        else:
            kept[new] = value
        _warn_of_old_name(f"KV policy {policy}", old, new)
    return kept


def without_retired(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's fields without those that have no effect any more; log these once a process.

    Raises:
        KVPolicyError: one of them is wrong, or names a file.
    """
    kept, dropped = dict(fields), []
    for option in RETIRED:
        if option.name not in kept:
            continue
        try:
            value = option.validate(kept.pop(option.name))
        except ValueError as error:
            raise KVPolicyError(f"{option.name}: {error}") from None
        if value == option.default:
            continue
        if fields.get("evict") != "host":
            raise KVPolicyError(f"{option.name}: blocks that are dropped have no copy on the host: leave it out")
        if option.name == "host_path":
            raise KVPolicyError("host_path: blocks on the host lie in memory: leave host_path out")
        dropped.append(option.name)
    if dropped:
        _warn_of_fields(", ".join(dropped))
    return kept


def as_full(config: Any) -> dict[str, Any]:
    """Return the fields of `full` with which a policy is served whose blocks go to the host; log it once a process.

    Args:
        config: a valid `KVPolicyConfig` of another policy, with `evict: host`.
    """
    taken = {field: getattr(config, field) for field in TAKEN if field in config.given}
    if config.policy.window_is_the_budget:
        # Recent tokens are what the policy keeps; `full` needs room beside them.
        taken.pop("recent", None)
        taken["budget"] = config.budget if config.budget is not None else config.sink + config.recent
    fields = {"name": "full", **taken}
    _warn_of_name(config.name, json.dumps(fields))
    return fields


@cache
def _warn_of_old_name(where: str, old: str, new: str) -> None:
    logger.warning("%s: in place of %s write %s; the old name goes with the next release", where, old, new)


@cache
def _warn_of_preset(name: str, policy: str) -> None:
    logger.warning(
        "%s is a preset, in which decodes read less and nothing is evicted; the policy that had this name is %s",
        name,
        policy,
    )


@cache
def _warn_of_fields(names: str) -> None:
    logger.warning(
        "KV policy: %s got a value; expected none: with evict: host layers read blocks of the host where they are, and "
        "the prefix of a preempted request waits there; leave it out, the next release refuses it",
        names,
    )


@cache
def _warn_of_name(name: str, fields: str) -> None:
    logger.warning(
        "evict: host got the KV policy %s; expected full: blocks on the host are not lost, so that scores have nothing "
        "to choose. It is served as %s, and so are all requests: write that, the next release refuses other names",
        name,
        fields,
    )

"""What a policy may do that some environment of a server cannot stand."""

from collections.abc import Callable
from dataclasses import dataclass

from ....config import KVPolicyConfig
from .server import Server


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that a policy does in a class of heads, or for requests that pick one of its allowed policies.

    Attributes:
        name: as messages name it.
        of: whether a server's policy does it.
        instead: what a user sets to do without.
        beside: names it in an environment `{}`; "": by its name and the environment's.
    """

    name: str
    of: Callable[[Server], object]
    instead: str
    beside: str = ""


#: A policy for caches that the plugin's kernels do not read.
UNREAD = 'a policy without scores, context, recall and select (sink-window), and leave others out of "allow"'


def reads_keys(config: KVPolicyConfig) -> bool:
    """Return whether the plugin's kernels read keys of the cache."""
    return bool(config.statistics or config.context or config.recall != "none" or config.selects or config.reaches)


def _measured(server: Server) -> list[KVPolicyConfig]:
    """Return the policy's classes of heads that are measured."""
    return [part for part in server.config.classes.values() if part.statistics]


ANY = Feature("any policy", lambda server: True, "leave --kv-policy out", "{}")
EVICTS = Feature(
    "any policy but `full`",
    lambda server: server.config.allowed != {"full"} or server.config.reaches,
    'use {"name": "full", "allow": []}, which evicts nothing, or leave --kv-policy out for this model',
    "{}",
)
READS = Feature("a policy that reads keys", lambda server: reads_keys(server.config), f"use {UNREAD}", "{}")
SPLIT = Feature(
    "a policy that splits heads",
    lambda server: len(server.config.classes) > 1,
    "use a policy for whole layers, such as h2o, snapkv or sink-window",
    "{}, because the policy puts heads into pages of its own",
)
SCORES = Feature(
    "a policy that scores or splits heads",
    lambda server: server.config.statistics or SPLIT.of(server),
    'use sink-window, and leave policies that score out of "allow"',
    "{}",
)
MAX = Feature(
    "heads or layers: max",
    lambda server: any("max" in (part.heads, part.layers) for part in _measured(server)),
    "set sum or mean",
)
MEAN = Feature(
    "accumulate: mean",
    lambda server: any(part.accumulate == "mean" for part in _measured(server)),
    "set accumulate: sum, ema or last",
)
TOKENS = Feature("granularity: token", lambda server: server.config.granularity == "token", "set granularity: block")
CONTEXT = Feature("a context", lambda server: server.config.context is not None, "leave context out")
KVZIP = Feature(
    "kvzip",
    lambda server: server.config.reconstructs,
    'leave kvzip out of name and "allow" (snapkv, h2o and keydiff need no second pass)',
)
OFF_THE_HOST = "set evict: drop (under full also leave budget, host and read out)"
HOST = Feature("evict: host", lambda server: server.config.evict == "host", OFF_THE_HOST)
REACH = Feature(
    "evict: host under full", lambda server: server.config.reaches, "use h2o with evict: host and recall: quest"
)
HOST_PATH = Feature("host_path", lambda server: server.config.host_path is not None, "leave host_path out")
SELECT = Feature("select", lambda server: server.config.selects, "leave select out")
PRESSURE = Feature("when: pressure", lambda server: server.config.when == "pressure", "set when: budget")

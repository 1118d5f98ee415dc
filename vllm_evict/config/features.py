"""Features: what a policy may do that something else cannot stand.

Each thing that does not go together is said in one place: two features of one policy in `APART`; a feature and a value
of a field, or a name in `allow`, in `config.schema.RULES`; a field and an allocator in `Allocator.lacks`; a feature and
a server in `integration.start.capabilities`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that a policy does in a class of heads, or for requests that pick one of its allowed policies.

    Attributes:
        name: as messages name it.
        of: whether a `KVPolicyConfig` does it.
        instead: what a user sets to do without.
        beside: names it in an environment `{}`; "": by its name and the environment's.
    """

    name: str
    of: Callable[[Any], object]
    instead: str
    beside: str = ""


#: A policy for caches that the plugin's kernels do not read.
UNREAD = 'a policy without scores, context and read (sink-window), and leave others out of "allow"'


def reads_keys(config: Any) -> bool:
    """Return whether the plugin's kernels read keys of the cache."""
    return bool(config.statistics or config.context or config.sparse_heads or config.reaches)


def _measured(config: Any) -> list[Any]:
    """Return the policy's classes of heads that are measured."""
    return [part for part in config.classes.values() if part.statistics]


ANY = Feature("any policy", lambda config: True, "leave --kv-policy out", "{}")
EVICTS = Feature(
    "any policy but `full`",
    lambda config: config.allowed != {"full"} or not config.keeps_all or config.sparse_heads,
    'use {"name": "full", "allow": []}, which evicts nothing, or leave --kv-policy out for this model',
    "{}",
)
READS = Feature("a policy that reads keys", reads_keys, f"use {UNREAD}", "{}")
SPLIT = Feature(
    "a policy that splits heads",
    lambda config: len(config.classes) > 1,
    "use a policy for whole layers, such as h2o, snapkv or sink-window",
    "{}, because the policy puts heads into pages of its own",
)
SCORES = Feature(
    "a policy that scores or splits heads",
    lambda config: config.statistics or SPLIT.of(config),
    'use sink-window, and leave policies that score out of "allow"',
    "{}",
)
MAX = Feature(
    "heads or layers: max",
    lambda config: any("max" in (part.heads, part.layers) for part in _measured(config)),
    "set sum or mean",
)
MEAN = Feature(
    "accumulate: mean",
    lambda config: any(part.accumulate == "mean" for part in _measured(config)),
    "set accumulate: sum, ema or last",
)
TOKENS = Feature("granularity: token", lambda config: config.granularity == "token", "set granularity: block")
CONTEXT = Feature("a context", lambda config: config.context is not None, "leave context out")
KVZIP = Feature(
    "kvzip",
    lambda config: config.reconstructs,
    'leave kvzip out of name and "allow" (snapkv, h2o and keydiff need no second pass)',
)
OFF_THE_HOST = "set evict: drop, and leave out budget, host, fetch, and read with leaders, hold and index"
HOST = Feature("evict: host", lambda config: config.evict == "host", OFF_THE_HOST)
READ = Feature(
    "read",
    lambda config: config.sparse_heads,
    "leave read out, with leaders, dense_layers, hold, index and read_prompts",
)
PROMPTS = Feature(
    "read_prompts", lambda config: any(part.read_prompts for part in config.classes.values()), "leave read_prompts out"
)
#: Where layers write what they read into the table of the backend's kernel: it has one length for all layers, and what
#: a policy measures needs it as it was.
READ_OF_LAYERS = Feature(
    "dense_layers or a list of leaders",
    lambda config: any(part.layers_differ for part in config.classes.values()),
    "set dense_layers: 0 and leaders: 1",
)
READ_OF_SOME = Feature(
    "read under a policy that scores or splits heads",
    lambda config: READ.of(config) and (config.statistics or SPLIT.of(config)),
    'set read under full or sink-window, and leave policies that score out of "allow"',
)
PRESSURE = Feature("when: pressure", lambda config: config.when == "pressure", "set when: budget")
WHOLE = Feature("prompt: whole", lambda config: config.prompt == "whole", "set prompt: chunks")


class Apart(NamedTuple):
    """Two features that do not go together in one policy.

    Attributes:
        field: what the message begins with.
        one, other: the features.
        why: the rest of the message.
    """

    field: str
    one: Feature
    other: Feature
    why: str


APART = (
    Apart(
        "granularity",
        TOKENS,
        PRESSURE,
        "'when: pressure' compares whole blocks of all requests and supports only 'block'",
    ),
    Apart(
        "evict: host",
        HOST,
        READ_OF_LAYERS,
        "all layers read as many blocks: leave dense_layers out, and set leaders to a number",
    ),
    Apart("evict: host", HOST, TOKENS, "each head has tokens of its own: it needs granularity: block"),
    Apart("evict: host", HOST, CONTEXT, "layers read blocks at the positions where they were: leave context out"),
    Apart("read_prompts", HOST, PROMPTS, "prompts read the blocks of the host, too: leave read_prompts out"),
    Apart(
        "read_prompts",
        PROMPTS,
        READ_OF_LAYERS,
        "all layers of a prompt read as many blocks: leave dense_layers out, and set leaders to a number",
    ),
    Apart("read_prompts", SPLIT, PROMPTS, "heads of one prompt read as many blocks: leave it out of retrieval"),
    Apart("read", TOKENS, READ, "each head has tokens of its own: it needs granularity: block"),
    Apart("read", CONTEXT, READ, "the index is of keys as they were computed: leave context out"),
    Apart("prompt: whole", WHOLE, PRESSURE, "the pool may run out while a prompt is computed: it needs when: budget"),
    Apart("prompt: whole", WHOLE, CONTEXT, "a long prompt would outgrow the context: leave context out"),
    Apart(
        "context",
        CONTEXT,
        PRESSURE,
        "under pressure a request grows while the pool has room; a context needs when: budget",
    ),
    Apart(
        "context",
        CONTEXT,
        TOKENS,
        "a block of granularity: token has other positions in each head; a context needs granularity: block",
    ),
)

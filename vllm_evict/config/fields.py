"""Fields that several policies share, and that other parts of the plugin read."""

from typing import Any, Literal, get_args

import numpy as np

from .errors import shown
from .options import TOO_MANY, Option, entries, flag, having, real, text, whole

Reduction = Literal["sum", "mean", "max"]
REDUCTION_NAMES = get_args(Reduction)

TOKENS_OR_RATIO = f"a whole number of tokens above 0 and below {TOO_MANY}, or a ratio of the prompt between 0 and 1"


def tokens_or_ratio(number: Any) -> int | float | None:
    """Convert a budget, of Python's or numpy's types, to a Python number; None if it is not a budget."""
    if isinstance(number, (int, np.integer)) and not isinstance(number, bool) and 0 < number < TOO_MANY:
        return int(number)
    return float(number) if isinstance(number, (float, np.floating)) and 0 < number < 1 else None


def _budget(budget: Any) -> int | float | None:
    if budget is not None and tokens_or_ratio(budget) is None:
        raise ValueError(f"must be {TOKENS_OR_RATIO}, not {shown(budget)}")
    return tokens_or_ratio(budget)


def _context(context: Any) -> Any:
    tokens = isinstance(context, int) and not isinstance(context, bool) and 0 < context < TOO_MANY
    if context is None or tokens or (isinstance(context, str) and context == "model"):
        return context
    raise ValueError(f"must be a whole number of tokens above 0, or 'model', not {shown(context)}")


WHEN = Option(
    "when",
    Literal["budget", "pressure"],
    "budget",
    "`budget`: every request keeps its budget. `pressure`: no request loses blocks while the pool has room; then the "
    "least important blocks of all requests go, down to each request's budget, where vLLM would preempt a running "
    "request",
)
ADMIT = Option(
    "admit",
    flag,
    False,
    "with `when: pressure`: `true`: requests lose blocks also where vLLM would keep a request waiting, so more of them "
    "run at once. `false`: a request starts once the pool has room for its whole prompt, as in stock vLLM",
)
BUDGET = Option(
    "budget",
    Any,
    None,
    "tokens that a request keeps, or a ratio of its prompt below 1, in whole blocks with room for `sink`, `recent` "
    "and a block to choose; if left out, at least 8 blocks, and with `when: pressure` half of the prompt, at least "
    "1024 tokens; null: `sink`, `recent` and one block",
    _budget,
)
BUFFER = Option(
    "buffer",
    whole(),
    0,
    "tokens of hysteresis: a request above `budget` + `buffer` goes back to `budget`; under pressure, tokens that are "
    "freed beyond the missing ones",
)
SINK = Option(
    "sink",
    whole(),
    0,
    "leading tokens that always stay; if left out, at most an eighth of the budget's blocks, and at least one block",
)
RECENT = Option(
    "recent",
    whole(),
    0,
    "trailing tokens that always stay; if left out, at most a quarter of the budget's blocks, and at least one block",
)
PROTECT = Option(
    "protect",
    flag,
    True,
    "`false`: sinks and recent tokens may be evicted too, for ablations; the block that is written and blocks in "
    "flight stay",
)
MIN_PROMPT = Option("min_prompt", whole(), 0, "requests with a shorter prompt keep everything")
Computed = Literal["chunks", "whole"]
PROMPT_NAMES = get_args(Computed)
PROMPT = Option(
    "prompt",
    Computed,
    "chunks",
    "`chunks`: a request loses blocks while its prompt is computed, chunk by chunk. `whole`: it keeps all blocks until "
    "its prompt is computed, as in SnapKV's paper, so the pool has to hold whole prompts",
)
EXACT = Option(
    "exact",
    flag | None,
    None,
    "`true`: vLLM's kernel attends for requests that lost no block, so their output and their cached prefixes are "
    "vLLM's, bit for bit; scores cost one more read of the keys. `false`: the plugin's kernel attends for requests "
    "that are scored, with output and scores from one read, and for those whose prompt will have blocks on the "
    "host. null: `true` on a CPU with prefix caching, a KV connector or `when: pressure`, else `false`",
)
CONTEXT = Option(
    "context",
    Any,
    None,
    "most tokens from the oldest kept token to the newest one, or `model`: the model's own context. Kept keys are "
    "rotated to later positions before a request exceeds it",
    _context,
)
#: Units of sizes in bytes.
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _bytes(size: Any) -> int | None:
    """Return the bytes, from a whole number or from a number with one of `UNITS`."""
    if size is None:
        return None
    found = size
    if isinstance(size, str):
        number, unit = size[:-3].strip(), size[-3:]
        plain = number.replace(".", "", 1)
        found = int(float(number) * UNITS[unit]) if unit in UNITS and plain.isascii() and plain.isdigit() else None
    if isinstance(found, (int, np.integer)) and not isinstance(found, bool) and 0 < found < 1 << 50:
        return int(found)
    raise ValueError(
        "must be a number of bytes above 0, or a size such as '8GiB' or '512MiB', in KiB, MiB, GiB or TiB and below "
        f"1024TiB, not {shown(size)}"
    )


def _leaders(layers: Any) -> Any:
    if isinstance(layers, tuple) and list(layers) != sorted({*layers}):
        raise ValueError(f"must be ascending layers, not {shown(layers)}")
    return layers or 1


#: What happens to blocks over the budget of requests under the server's policy; those under another one drop them.
TIER = (
    Option(
        "evict",
        Literal["drop", "host"],
        "drop",
        "`drop`: evicted blocks are gone. `host`: they wait in host memory, where layers read them: under `full`",
    ),
    Option(
        "host", Any, None, "with `evict: host`: bytes for these blocks in each engine, or with a unit (`8GiB`)", _bytes
    ),
)
#: The kind of index that prompts that read less choose by where none is given: kernels look up sums of signs.
OF_PROMPTS = "signs"
#: What each layer of a decode reads: settings of the server, the same for all its requests.
READ = (
    Option(
        "read",
        whole(),
        0,
        "tokens that each layer of a decode attends to, in whole blocks: sinks, recent blocks, and the best others; 0: "
        "all resident tokens. With `evict: host` of requests with blocks on the host; 0: as many as are on the device",
    ),
    Option(
        "index",
        Literal["bits", "signs", "box"],
        "bits",
        "with `read`: what layers choose blocks by; `bits`, two bits for each number of a key, with a middle and a "
        "step for each dimension of 32 tokens; `signs`, a bit for each number and a scale for each token (the default "
        "with `read_prompts`); `box`, the least and the largest value of each dimension",
    ),
    Option(
        "hold",
        whole(1) | real(gt=0, lt=1),
        1,
        "with `read`: decode steps that read one choice, at most; or, below 1, a cosine: a choice stands in a layer "
        "until its query has a smaller one with the query that chose",
    ),
    Option(
        "leaders",
        whole(1) | entries(whole()),
        1,
        "with `read`: layers that choose blocks by the scores of the first of them; 1: each scores for itself. Or, not "
        "with `evict: host`, a list of layers that attend to all resident tokens and choose for the layers after them",
        _leaders,
    ),
    Option("dense_layers", whole(), 0, "with `read`, not with `evict: host`: first layers that read everything"),
)
FETCH = Option(
    "fetch",
    whole(),
    0,
    "with `evict: host`: most blocks of the host that a layer brings to the device for a request when it chooses; "
    "beyond them it reads the best ones that are there; 0: any number",
)
READ_PROMPTS = Option(
    "read_prompts",
    whole(),
    0,
    "with `read`, not with `evict: host`: tokens that 32 tokens of a prompt attend to in each layer, in whole blocks: "
    "sinks, recent blocks, their own, and the best others; 0: all tokens before them",
)
#: Value of `evict` -> fields that have an effect with it alone: name -> why the field has none without it.
OF_EVICT = {"host": {"fetch": "blocks come from the host", "host": "blocks that are dropped have no copy on the host"}}
#: Fields of every policy that evicts, with their usual defaults.
KEEPING = having(
    (WHEN, ADMIT, BUDGET, BUFFER, SINK, RECENT, PROTECT, MIN_PROMPT, PROMPT, EXACT, CONTEXT, *TIER),
    budget=2048,
    buffer=128,
    sink=64,
    recent=256,
)

#: Fields of policies that support token granularity.
PER_TOKEN = (
    Option(
        "granularity",
        Literal["block", "token"],
        "block",
        "`block`: whole blocks stay or go, for all heads. `token`: each KV "
        "head keeps its own tokens, gathered into private blocks",
    ),
    Option(
        "sets",
        Literal["head", "layer", "all"],
        "head",
        "with `token`: `head`, a set of kept tokens for each KV head of each layer; `layer`, one for each layer; "
        "`all`, one for all of them",
    ),
    Option(
        "unit",
        whole(1),
        1,
        "with `token`: successive tokens that stay or go together, by the sum of their scores; a divisor of the block",
    ),
    Option(
        "merge",
        Literal["d2o", "ems"] | None,
        None,
        "with `token`: evicted tokens are merged into kept ones by the rules of `d2o` or `ems`",
    ),
    Option("merge_decay", real(ge=0, le=1), 0.7, "`d2o`: weight of a decision's similarities in the threshold"),
    Option("merge_threshold", real(ge=-1, le=1), 0.6, "`ems`: least cosine similarity of keys that are merged"),
)

#: Fields of every policy that measures.
REDUCTION = (
    Option("heads", Reduction, "sum", "how a group's KV heads become one score: `sum`, `mean` or `max`"),
    Option("layers", Reduction, "sum", "how a group's layers become one score: `sum`, `mean` or `max`"),
)

ACCUMULATE = Option(
    "accumulate",
    Literal["sum", "mean", "ema", "last"],
    "sum",
    "how attention mass adds up: `sum`, `mean` over the queries "
    "that saw a token, `ema` (with `decay`), `last` (with `window` queries)",
)
WINDOW = Option("window", whole(1), 32, "number of last queries before a decision that count")
#: Fields of policies whose users choose how attention mass adds up.
MASS = (
    *REDUCTION,
    ACCUMULATE,
    Option("decay", real(gt=0, lt=1), 0.99, "`ema`: share of the old average that stays, for each query"),
    WINDOW,
    Option("every", whole(1), 1, "score every n-th query position"),
)

AUDIT = Option(
    "audit",
    real(ge=0, le=1),
    0.0,
    "share of requests whose answers full attention scores again once they ended, on an idle engine, to measure what "
    "eviction changed; 0: none",
)
TARGET = Option(
    "target",
    real(gt=0, le=1) | None,
    None,
    "with `audit`: share of audited answers that should be identical; the log warns where fewer are",
)


def _lengths(lengths: Any) -> Any:
    if lengths is not None and (len(lengths) != 2 or lengths[0] > lengths[1]):
        raise ValueError(f"must be two numbers of tokens, the shortest prompt and the longest, not {shown(lengths)}")
    return lengths


TUNED = Option(
    "tuned",
    entries(whole()) | None,
    None,
    "with `target`: tokens of the prompts on which `vllm-evict tune` found the policy, the shortest and the longest; "
    "the log warns when other prompts come",
    _lengths,
)
#: Fields of every policy, beside the fields that it declares.
ALLOW = Option(
    "allow",
    entries(text) | None,
    None,
    "policies that requests may pick; null: `full`, and all except `kvzip`, `random` and those that make KV groups; "
    "none that lacks the server's `when`, `read` or `context`; beside a policy that makes KV groups, and for `full` "
    "with `read` or `evict: host`, `full` alone",
)
UNTRIED = Option(
    "untried",
    flag,
    False,
    'run what is refused with the words "which no test runs"; the log warns of each such pair at start',
)
#: All of them: settings of the server.
SERVER = (ALLOW, AUDIT, TARGET, TUNED, UNTRIED)

#: Values that `KVPolicyConfig` returns for fields that its policy does not have.
NEUTRAL = {
    option.name: option.default
    for options in (
        (WHEN, ADMIT, BUDGET, BUFFER, SINK, RECENT, PROTECT, MIN_PROMPT, PROMPT, EXACT, CONTEXT),
        TIER,
        (*READ, FETCH, READ_PROMPTS),
        PER_TOKEN,
        MASS,
    )
    for option in options
}

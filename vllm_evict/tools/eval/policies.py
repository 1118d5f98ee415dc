"""The contenders (policies with budgets), and the fewest engines that can serve all of them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config import RETRIEVAL, STREAMING, KVPolicyConfig, KVPolicyError
from ...core.arrange import Arrangement, arrange
from ...policies import POLICIES
from . import EvalError

Budget = int | float | None
#: Characters of an option's value in a label.
LONGEST = 40


@dataclass(frozen=True)
class Contender:
    """One policy at one budget.

    Attributes:
        label: name of the policy, or of its file, for tables.
        config: all of its options, the budget included.
    """

    label: str
    config: KVPolicyConfig

    @property
    def budget(self) -> Budget:
        """Tokens, a ratio of the prompt, or None: the whole cache, or where heads are split its `share`."""
        return None if self.config.keeps_all else self.config.budget

    @property
    def options(self) -> dict[str, Any]:
        """The policy's fields without its budget and `allow`."""
        return {k: v for k, v in brief(self.config).items() if k not in ("budget", "allow")}

    @property
    def xargs(self) -> dict[str, Any]:
        """The arguments of a request. A budget that is not given is the server's."""
        own = {} if self.budget is None or "budget" in self.config.unsaid else {"kv_budget": self.budget}
        if self.config.reaches:  # the sizes of its server
            own = {}
        return {"kv_policy": self.config.name} | own

    def share(self, tokens: int, block_size: int, ranks: int = 1) -> float | None:
        """Return the share of the cache that a policy which splits heads keeps after a decision; None for all others.

        Empty head slots count: they are taken from the pool.

        Args:
            tokens: of the sequence.
            block_size: tokens of a KV block.
            ranks: tensor-parallel size.
        """
        if self.config.allocator.splits != "classes":
            return None
        every = math.ceil(tokens / block_size)
        arranged = _arranged(self.config.pattern, ranks)
        held = 0
        for head_class, groups in zip((RETRIEVAL, STREAMING), arranged.groups, strict=True):
            limits = self.config.of_class(head_class).limits(block_size, tokens)
            held += groups * (min(limits.budget, every) if limits else every)
        layers, heads = arranged.order.shape
        return arranged.width * held / (layers * max(heads // ranks, 1) * every)

    def needs_eviction(self, tokens: int, block_size: int) -> bool:
        """Return whether a sequence of this length outgrows the budget."""
        limits = self.config.limits(block_size, tokens)
        return limits is not None and math.ceil(tokens / block_size) > limits.bound

    def __str__(self) -> str:
        return self.label if self.budget is None else f"{self.label} at {budget_words(self.budget)}"


@functools.cache
def _arranged(pattern: tuple[str, ...], ranks: int) -> Arrangement:
    return arrange(np.array([[digit == "1" for digit in row] for row in pattern]), ranks)


def brief(config: KVPolicyConfig) -> dict[str, Any]:
    """Return a config's fields for rows of results; a pattern of heads becomes one hexadecimal number a layer."""
    fields = config.to_dict()
    if config.pattern:
        fields["pattern"] = ".".join(f"{int(row, 2):0{math.ceil(len(row) / 4)}x}" for row in config.pattern)
    return fields


def budget_words(budget: Budget) -> str:
    """Return a budget for tables."""
    if budget is None:
        return "all"
    return f"{budget:.0%}" if isinstance(budget, float) else str(budget)


def split_list(text: str) -> list[str]:
    """Entries of a comma-separated list; commas inside {...} do not count."""
    entries, depth = [""], 0
    for c in text:
        depth += (c == "{") - (c == "}")
        if c == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += c
    return [entry.strip() for entry in entries if entry.strip()]


def parse_budgets(text: str) -> list[int | float]:
    """`128,256,0.25` -> numbers of tokens, and ratios of the prompt below 1."""
    budgets: list[int | float] = []
    for entry in split_list(text):
        try:
            budget = float(entry) if "." in entry else int(entry)
        except ValueError:
            raise EvalError(f"budget {entry!r} is no number of tokens and no ratio of the prompt below 1") from None
        budgets.append(budget)
    return budgets


def contenders(
    policies: str,
    budgets: Sequence[int | float],
    *,
    sink: int | None = None,
    recent: int | None = None,
    buffer: int | None = None,
    pattern: tuple[str, ...] = (),
) -> list[Contender]:
    """Return every policy at every budget; `full`, and policies that split heads, once.

    Args:
        policies: names, YAML or JSON files, or JSON objects, separated by commas.
        budgets: for each policy that evicts; if empty, the policies' own.
        sink, recent, buffer: options of policies given by name; None: their own, as those of files and objects.
        pattern: heads of policies given by name that split heads; if empty, these need a pattern of their own.

    Raises:
        EvalError: a policy or budget is wrong.
    """
    found: list[Contender] = []
    shared = {"sink": sink, "recent": recent, "buffer": buffer, "pattern": pattern or None}
    shared = {field: value for field, value in shared.items() if value is not None}
    for entry in split_list(policies):
        try:
            if entry in POLICIES:
                label = entry
                fields: dict[str, Any] = {"name": entry}
                if entry != "full":  # it has no sizes while it keeps everything
                    fields |= {k: v for k, v in shared.items() if k in POLICIES[entry].options}
            else:
                config = KVPolicyConfig.parse(entry)
                fields = {k: v for k, v in config.to_dict().items() if k != "allow"}
                label = Path(entry).stem if not entry.startswith("{") else label_of(config)
            policy = POLICIES[fields["name"]]
            sized = "budget" in policy.options and not KVPolicyConfig.parse(fields).keeps_all
            for budget in budgets if budgets and sized else [fields.get("budget")]:
                at = fields if budget is None else fields | {"budget": budget}
                if budget is not None and policy.window_is_the_budget:
                    at = {k: v for k, v in at.items() if k != "recent"}
                contender = Contender(label, KVPolicyConfig.parse(at))
                if contender not in found:
                    found.append(contender)
        except KVPolicyError as error:
            raise EvalError(f"--policies {entry}: {error}") from None
    if not found:
        raise EvalError("no policy to compare: give --policies, such as full,h2o,sink-window")
    return found


def label_of(config: KVPolicyConfig) -> str:
    """Return a policy's name, and its options of scoring and splitting that are not defaults."""
    unsaid = {"name", "budget", "buffer", "sink", "recent", "allow", "host"}
    fields, defaults = brief(config), {"threshold": None, "sparsity": None}
    if config.allocator.splits == "classes":
        # Without a file of gates only the pattern names the heads.
        unsaid |= {"gates"} | ({"pattern"} if config.gates else set())
    else:
        defaults = KVPolicyConfig(name=config.name).effective()
    options = {k: str(v) for k, v in fields.items() if k not in unsaid and v != defaults.get(k)}
    if config.retrieval:
        options["retrieval"] = label_of(config.retrieval)
    short = {k: v if len(v) <= LONGEST else v[:LONGEST] + "…" for k, v in options.items()}
    return " ".join([config.name, *(f"{k}={v}" for k, v in short.items())])


def servers(wanted: Sequence[Contender], max_len: int, block_size: int) -> list[tuple[KVPolicyConfig, list[Contender]]]:
    """Engines that together serve all contenders by per-request policies.

    A request may pick policy and budget, and inherits other options from its server or from the policy's defaults. So
    this tries each contender's options as those of a server, with the whole context as budget, and takes the server
    that serves most contenders exactly. It repeats that until all are served.
    """
    plan, left = [], list(wanted)
    while left:
        options = [_server_like(contender, max_len) for contender in left]
        best = max(options, key=lambda server: sum(_serves(server, c, max_len, block_size) for c in left))
        served = [c for c in left if _serves(best, c, max_len, block_size)]
        if not served:  # its sizes follow the server's, so no request can set them: it gets a server of its own
            best, served = left[0].config, left[:1]
        plan.append((best, served))
        left = [c for c in left if c not in served]
    return plan


def _server_like(contender: Contender, max_len: int) -> KVPolicyConfig:
    config = contender.config
    if config.name == "full" or config.allocator.splits == "classes":
        return config
    budget = {} if config.budget is None else {"budget": max_len}
    # Reconstruction needs an engine with a prefix cache; KV groups are made at start.
    allow = sorted(name for name, policy in POLICIES.items() if not policy.reconstructs and not policy.allocator.splits)
    if config.allocator.splits:
        allow = ["full"]
    if config.policy.reconstructs:
        allow = []
    if config.read:
        allow = [name for name in allow if "read" in POLICIES[name].options]
    return KVPolicyConfig.parse(config.to_dict() | budget | {"allow": allow})


def _serves(server: KVPolicyConfig, contender: Contender, max_len: int, block_size: int) -> bool:
    try:
        granted = server.for_request(contender.xargs, max_len, block_size)
    except KVPolicyError:
        return False
    without = {"allow": None}
    return granted.to_dict() | without == contender.config.to_dict() | without

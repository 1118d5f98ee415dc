"""What is compared: policies with budgets, and the fewest engines that can serve them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import KVPolicyConfig, KVPolicyError
from ..policies import POLICIES
from . import EvalError

Budget = int | float | None


@dataclass(frozen=True)
class Contender:
    """One policy at one budget.

    Attributes:
        label: how tables call the policy: its name, or the name of its file.
        config: all of its options; the budget is in it.
    """

    label: str
    config: KVPolicyConfig

    @property
    def budget(self) -> Budget:
        """Tokens, a ratio of the prompt, or None for all of it."""
        return None if self.config.name == "full" else self.config.budget

    @property
    def options(self) -> dict[str, Any]:
        """The policy without its budget and without what only servers need."""
        return {k: v for k, v in self.config.to_dict().items() if k not in ("budget", "allow")}

    @property
    def xargs(self) -> dict[str, Any]:
        """What a request asks its server for."""
        return {"kv_policy": self.config.name} | ({} if self.budget is None else {"kv_budget": self.budget})

    def __str__(self) -> str:
        return self.label if self.budget is None else f"{self.label} at {budget_words(self.budget)}"


def budget_words(budget: Budget) -> str:
    """A budget for tables."""
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
    policies: str, budgets: Sequence[int | float], *, sink: int, recent: int, buffer: int, block_size: int
) -> list[Contender]:
    """Every policy at every budget; `full` once.

    Args:
        policies: names, YAML or JSON files, or JSON objects, separated by commas.
        budgets: for each policy that evicts; empty: those that the policies bring themselves.
        sink, recent, buffer: options of policies given by name; files and objects say theirs themselves.
        block_size: tokens; a budget has to leave something to choose.

    Raises:
        EvalError: a policy or budget that cannot be.
    """
    found: list[Contender] = []
    shared = {"sink": sink, "recent": recent, "buffer": buffer}
    for entry in split_list(policies):
        try:
            if entry in POLICIES:
                label = entry
                fields = {"name": entry} | {k: v for k, v in shared.items() if k in POLICIES[entry].options}
            else:
                config = KVPolicyConfig.parse(entry)
                fields = {k: v for k, v in config.to_dict().items() if k != "allow"}
                label = Path(entry).stem if not entry.startswith("{") else _label(fields)
            policy = POLICIES[fields["name"]]
            for budget in budgets if budgets and "budget" in policy.options else [fields.get("budget")]:
                at = fields if budget is None else fields | {"budget": budget}
                if budget is not None and policy.window_is_the_budget:
                    at = {k: v for k, v in at.items() if k != "recent"}
                contender = Contender(label, KVPolicyConfig.parse(at))
                contender.config.limits(block_size, prompt_len=1)
                if contender not in found:
                    found.append(contender)
        except KVPolicyError as error:
            raise EvalError(f"--policies {entry}: {error}") from None
    if not found:
        raise EvalError("no policy to compare: give --policies, such as full,h2o,sink-window")
    return found


def _label(fields: dict[str, Any]) -> str:
    """A JSON object's name, and how it scores and protects if that is not the policy's default."""
    defaults = KVPolicyConfig(name=fields["name"]).to_dict()
    sizes = {"name", "budget", "buffer", "sink", "recent"}
    options = [f"{k}={v}" for k, v in fields.items() if k not in sizes and v != defaults[k]]
    return " ".join([fields["name"], *options])


def servers(wanted: Sequence[Contender], max_len: int, block_size: int) -> list[tuple[KVPolicyConfig, list[Contender]]]:
    """Engines that serve all contenders by per-request policies, fewest first come.

    A request may pick policy and budget, and inherits other options from its server or from the policy's defaults. So
    each contender's own options are tried as a server's, with the whole context as budget, and the one that serves most
    of the contenders exactly as wanted is taken, until all are served.
    """
    plan, left = [], list(wanted)
    while left:
        options = [_server_like(contender, max_len) for contender in left]
        best = max(options, key=lambda server: sum(_serves(server, c, max_len, block_size) for c in left))
        served = [c for c in left if _serves(best, c, max_len, block_size)]
        plan.append((best, served))
        left = [c for c in left if c not in served]
    return plan


def _server_like(contender: Contender, max_len: int) -> KVPolicyConfig:
    config = contender.config
    if config.name == "full":
        return config
    budget = None if config.budget is None else max_len
    # Without a prefix cache, which measuring leaves off, nothing can be reconstructed.
    allow = sorted(name for name, policy in POLICIES.items() if not policy.reconstructs)
    return KVPolicyConfig.parse(config.to_dict() | {"budget": budget, "allow": allow})


def _serves(server: KVPolicyConfig, contender: Contender, max_len: int, block_size: int) -> bool:
    try:
        granted = server.for_request(contender.xargs, max_len, block_size)
    except KVPolicyError:
        return False
    without = {"allow": None}
    return granted.to_dict() | without == contender.config.to_dict() | without

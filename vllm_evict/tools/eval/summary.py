"""Summarises rows: a line for each task, policy, budget and length, with interval and difference from `full`."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import EvalError
from .policies import Budget, budget_words
from .rows import Row
from .stats import ALPHA, FEWEST, MATTERS, interval, kendall, p_value
from .tasks import NLL


@dataclass(frozen=True)
class Line:
    """One task (in sessions one turn of it), policy, budget and length (None: all lengths) in one setting.

    Attributes:
        score, low, high: mean and 95 % interval: a share of 1, or a perplexity.
        difference: score minus that of `full` on the same prompts; None for `full`, or if `full` did not run.
        p: p-value of the difference, paired by prompt.
        share: mean share of the cache that a policy which splits heads keeps; None for all others.
        budget_tokens, peak_blocks, evicted_tokens, ttft_s, tokens_per_s: means; None where they are not known.
        prompt_tokens: their mean, for the share of a prompt that a budget is.
        raised: whether a ratio became more than whole blocks of it, for sinks, recent tokens and blocks to choose.
        pool_tokens_per_s, pool_full_tokens_per_s: throughput of policy and budget, and of `full`, at equal memory: in a
            pool that the budgets fill. Measured once for each length; None where it was not.
    """

    setting: str
    task: str
    policy: str
    budget: Budget
    length: int | None
    perplexity: bool
    n: int
    score: float
    low: float
    high: float
    difference: float | None = None
    p: float | None = None
    share: float | None = None
    budget_tokens: float | None = None
    peak_blocks: float | None = None
    evicted_tokens: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens: float | None = None
    raised: bool = False
    pool_tokens_per_s: float | None = None
    pool_full_tokens_per_s: float | None = None

    @property
    def speed(self) -> float | None:
        """Throughput as a multiple of that of `full` at equal memory."""
        if self.is_full:
            return 1.0
        own, full = self.pool_tokens_per_s, self.pool_full_tokens_per_s
        return None if own is None or full is None else own / full

    @property
    def is_full(self) -> bool:
        return self.budget is None and self.policy.split()[0] == "full"

    @property
    def memory(self) -> str:
        """The budget in words, or where heads are split the share of the cache."""
        return memory_words(self.policy, self.budget, self.share)

    @property
    def kept(self) -> str:
        """The budget in tokens, and for a ratio its share of the prompt, in words."""
        if self.budget_tokens is None:
            return "all" if self.is_full else ""
        words = f"{self.budget_tokens:,.0f}"
        if not isinstance(self.budget, float) or not self.prompt_tokens:
            return words
        return f"{words} ({self.budget_tokens / self.prompt_tokens:.0%}{', raised' if self.raised else ''})"

    @property
    def tested(self) -> bool:
        """Whether `full` ran on some of the prompts."""
        return self.p is not None

    @property
    def verdict(self) -> str:
        """The difference from `full` in words."""
        if self.p is None or self.difference is None:
            return "" if self.is_full else "no full to compare"
        if self.p >= ALPHA or not self.difference:
            share = abs(self.difference) / (abs(self.score - self.difference) if self.perplexity else 1)
            if self.n < FEWEST or share >= MATTERS:
                return f"too few prompts ({self.n}) to tell"
            return "within noise"
        return "worse" if (self.difference > 0) == self.perplexity else "better"

    @property
    def quality(self) -> str:
        """Score and interval in words."""
        if self.perplexity:
            return f"{self.score:.2f}{self._interval('.2f', 1)}"
        return f"{self.score:.0%}{self._interval('.0f', 100)}"

    def _interval(self, form: str, scale: float) -> str:
        if not math.isfinite(self.high):
            return ""
        return f" [{self.low * scale:{form}}, {self.high * scale:{form}}]"

    @property
    def delta(self) -> str:
        """Difference from `full` in words."""
        if self.difference is None:
            return ""
        return f"{self.difference:+.2f}" if self.perplexity else f"{100 * self.difference:+.0f}"


def memory_words(policy: str, budget: Budget, share: float | None) -> str:
    """Return a budget for tables, or the share in its place; empty if neither is known."""
    if share is not None:
        return budget_words(share)
    return "" if budget is None and policy.split()[0] != "full" else budget_words(budget)


def mean_share(rows: Iterable[Row]) -> float | None:
    """Return the mean share of rows of one policy (see `Line.share`)."""
    return _mean_of_any([row["share"] for row in rows if row.get("share") is not None])


def setting_of(row: Row) -> str:
    """Return the setting, with its chunk size and its haystack: rows that differ in it are never combined."""
    chunk, haystack = row.get("chunk"), row.get("haystack")
    parts = row["setting"], chunk and f"chunks of {chunk}", haystack and f"haystack {haystack}"
    return ", ".join(filter(None, parts))


def task_of(row: Row) -> str:
    """Return the task, with the turn of a session."""
    return f"{row['task']} turn {row['turn']}" if row.get("turn") else row["task"]


def settings_of(rows: Iterable[Row]) -> list[str]:
    return sorted({setting_of(row) for row in rows})


def one_setting(rows: Sequence[Row]) -> str:
    """Return the setting of rows for one picture or table.

    Raises:
        EvalError: the rows have several settings.
    """
    settings = settings_of(rows)
    if len(settings) != 1:
        raise EvalError(f"results of different settings are not put together: {'; '.join(settings) or 'no rows'}")
    return settings[0]


def labelled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with policy names that differ where the options or engines of one policy differ."""
    variants: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if _options(row) not in variants[row["policy"]]:
            variants[row["policy"]].append(_options(row))

    def label(row: Row) -> str:
        configs = variants[row["policy"]]
        if len(configs) == 1:
            return row["policy"]
        own = _options(row)
        differing = sorted({k for c in configs for k in c | own if any(c.get(k) != o.get(k) for o in configs)})
        # Sparsity or threshold say the same as a pattern of heads, in fewer words.
        differing = [k for k in differing if k != "pattern"] or differing
        return " ".join([row["policy"], *(f"{k}={own[k]}" for k in differing if k in own)])

    return [row | {"policy": label(row)} for row in rows]


def _options(row: Row) -> dict[str, Any]:
    options = dict(row.get("policy_config") or {})
    of_retrieval = options.pop("retrieval", None) or {}
    options |= {f"retrieval.{name}": value for name, value in of_retrieval.items()}
    return options | (row.get("engine_args") or {})


def summarise(rows: Sequence[Row], by_length: bool = True) -> list[Line]:
    """Return the lines of all settings, tasks, policies and budgets, `full` first and budgets ascending.

    Args:
        rows: as read from a results file.
        by_length: a line for each length; else one over all lengths.
    """
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in labelled(rows):
        length = row["length"] if by_length else None
        groups[setting_of(row), task_of(row), row["policy"], row["budget"], length].append(row)
    full = {_prompt(row): row["score"] for row in rows if row["policy"] == "full"}
    pools: dict[tuple, list[dict[str, float]]] = defaultdict(list)
    for (setting, _, policy, budget, length), group in groups.items():
        pools[setting, policy, budget, length] += [row["pool"] for row in group if row.get("pool")]
    lines = [_line(key, group, full, pools[key[:1] + key[2:]]) for key, group in groups.items()]
    order = {task: i for i, task in enumerate(dict.fromkeys(map(task_of, rows)))}
    return sorted(
        lines,
        key=lambda x: (x.setting, order[x.task], x.length or 0, not x.is_full, x.policy, _size(x.budget)),
    )


def _prompt(row: Row) -> tuple:
    engine = json.dumps(row.get("engine_args"), sort_keys=True)
    place = row["task"], row["length"], row["depth"], row["index"], row["seed"], row["prompt_sha256"]
    return setting_of(row), engine, *place


def _size(budget: Budget) -> float:
    """Ratios after tokens."""
    return math.inf if budget is None else budget if budget >= 1 else 1e9 + budget


def _line(key: tuple, rows: list[Row], full: dict[tuple, float], pools: list[dict[str, float]]) -> Line:
    setting, task, policy, budget, length = key
    scores = [row["score"] for row in rows]
    perplexity = rows[0]["metric"] == NLL
    scale = math.exp if perplexity else float
    low, high = (scale(min(bound, 700)) for bound in interval(scores))
    line = Line(
        setting=setting,
        task=task,
        policy=policy,
        budget=budget,
        length=length,
        perplexity=perplexity,
        n=len(rows),
        score=scale(_mean(scores)),
        low=low,
        high=high if len(rows) > 1 or not perplexity else math.inf,
        share=mean_share(rows),
        raised=any(map(_raised, rows)),
        pool_tokens_per_s=_mean_of_any([pool["tokens_per_s"] for pool in pools]),
        pool_full_tokens_per_s=_mean_of_any([pool["full_tokens_per_s"] for pool in pools]),
        **{
            name: _mean_of_any([row[name] for row in rows if row.get(name) is not None])
            for name in ("budget_tokens", "peak_blocks", "evicted_tokens", "ttft_s", "tokens_per_s", "prompt_tokens")
        },
    )
    pairs = [(row["score"], full[_prompt(row)]) for row in rows if _prompt(row) in full]
    if line.is_full or not pairs:
        return line
    own, reference = zip(*pairs, strict=True)
    difference = scale(_mean(own)) - scale(_mean(reference))
    return replace(line, difference=difference, p=p_value([a - b for a, b in pairs]))


def _raised(row: Row) -> bool:
    """Return whether a ratio became more than a block above its share of the prompt."""
    budget, kept, block = row["budget"], row.get("budget_tokens"), row.get("block_size")
    if not isinstance(budget, float) or kept is None or not block or not row.get("prompt_tokens"):
        return False
    return bool(kept >= budget * row["prompt_tokens"] + block)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_of_any(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None


def rankings(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return rows of mean scores of policies and budgets by haystack, over tasks and lengths that all haystacks have.

    The last rows of a setting have Kendall's tau at each budget, `full` left out: how alike the orders of policies in a
    haystack and in the first one are. No rows for settings with one haystack.
    """
    found: dict[str, dict[str, dict[tuple[str, str], dict[tuple, float]]]] = {}
    for line in lines:
        if not line.perplexity:
            setting, _, haystack = line.setting.partition(", haystack ")
            of_policy = found.setdefault(setting, {}).setdefault(haystack or "grammar", {})
            of_policy.setdefault((line.policy, line.memory), {})[line.task, line.length] = line.score
    table = []
    for setting, haystacks in found.items():
        cells = [scores.keys() for of_policy in haystacks.values() for scores in of_policy.values()]
        common = set.intersection(*map(set, cells))
        rivals = [
            rival for rival in next(iter(haystacks.values())) if all(rival in each for each in haystacks.values())
        ]
        if len(haystacks) < 2 or not common:
            continue
        means = {
            haystack: [sum(of_policy[rival][cell] for cell in common) / len(common) for rival in rivals]
            for haystack, of_policy in haystacks.items()
        }
        for i, (policy, memory) in enumerate(rivals):
            scores = {haystack: f"{mean[i]:.0%}" for haystack, mean in means.items()}
            table.append({"setting": setting, "policy": policy, "budget": memory} | scores)
        for memory in dict.fromkeys(memory for policy, memory in rivals if policy != "full"):
            at = [i for i, (policy, its) in enumerate(rivals) if policy != "full" and its == memory]
            own = {haystack: [mean[i] for i in at] for haystack, mean in means.items()}
            orders = {haystack: f"{kendall(next(iter(own.values())), mean):.2f}" for haystack, mean in own.items()}
            table.append({"setting": setting, "policy": "Kendall's tau", "budget": memory} | orders)
    return table


def columns(line: Line) -> dict[str, Any]:
    """Return a line as a row of a CSV: raw values."""
    return {
        "setting": line.setting,
        "task": line.task,
        "policy": line.policy,
        "budget": line.memory,
        "length": line.length,
        "n": line.n,
        "metric": "perplexity" if line.perplexity else "score",
        "score": line.score,
        "low": line.low,
        "high": line.high,
        "difference": line.difference,
        "p": line.p,
        "verdict": line.verdict,
        "budget_tokens": line.budget_tokens,
        "peak_blocks": line.peak_blocks,
        "evicted_tokens": line.evicted_tokens,
        "tokens_per_s": line.tokens_per_s,
        "pool_tokens_per_s": line.pool_tokens_per_s,
        "pool_full_tokens_per_s": line.pool_full_tokens_per_s,
        "ttft_s": line.ttft_s,
    }


def words(line: Line) -> dict[str, str]:
    """Return a line as a row of a table, in words."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "" if value is None else f"{value:{form}}"

    return {
        "task": line.task,
        "length": number(line.length, ","),
        "policy": line.policy,
        "budget": line.memory,
        "tokens kept": line.kept,
        "n": str(line.n),
        "quality [95 %]": line.quality,
        "vs full": line.delta,
        "": line.verdict,
        "peak blocks": number(line.peak_blocks, ".1f"),
        "evicted tokens": number(line.evicted_tokens),
        "tokens/s": number(line.tokens_per_s),
        "× full": number(line.speed, ".2f"),
        "first token s": number(line.ttft_s, ".3f"),
    }


def conditions(rows: Sequence[Row]) -> list[str]:
    """Conditions of the run, a sentence each, for the foot of every report."""

    def distinct(name: str) -> list[str]:
        values = [row.get(name) for row in rows if row.get(name)]
        return sorted({json.dumps(v, sort_keys=True) if isinstance(v, dict) else str(v) for v in values})

    names = ("model", "versions", "hardware", "engine", "server_policy")
    said = [f"{name}: {'; '.join(found)}" for name in names if (found := distinct(name))]
    timed = [row["seconds"] for row in rows if row.get("seconds")]
    return said + ([f"time: {len(timed):,} answers took {sum(timed):,.0f} s, engine starts excluded"] if timed else [])

"""Words of the log about audits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from .evidence import Promise, interval

OF_MODEL = (
    "KV policies: no answer is audited under the repetition penalty that the model's generation_config.json gives all "
    "requests without one of their own; expected no penalty: serve with --generation-config vllm, or have clients send "
    "repetition_penalty 1"
)


def audited(counts: Counter[str]) -> int:
    """Return the answers that full attention has scored."""
    return int(counts["audited"] + counts["sampled_requests"])


def listed(skips: Mapping[str, int]) -> str:
    """Return the reasons in `skips`, in alphabetical order, each with its count."""
    return ", ".join(f"{why} {count}" for why, count in sorted(skips.items()))


def figures(totals: Mapping[bool, Counter[str]], firsts: Sequence[int], skips: Mapping[str, int]) -> str:
    """Return what audits found so far.

    Args:
        totals: whether requests lost blocks -> counts, by keys of `Audits.metrics`.
        firsts: index of the first other token of answers that differ.
        skips: reason -> answers that were drawn and have no audit.
    """
    parts = []
    for lost, whose in ((True, "lost blocks"), (False, "lost none")):
        counts = totals[lost]
        if n := int(counts["audited"]):
            low, high = interval(counts["identical"], n)
            part = f"of {n} that {whose}, full attention gives {int(counts['identical'])} as they are "
            part += f"({low:.0%} to {high:.0%}) and clearly others for {int(counts['changed'])}"
            parts.append(part)
        if n := int(counts["sampled_tokens"]):
            more = (counts["surprise"] - counts["expected"]) / n
            parts.append(f"sampled answers that {whose} surprise by {more:.3f} nats a token more than expected")
        if out := int(counts["outside_tokens"]):
            parts.append(f"full attention could not have sampled {out} of {n + out} tokens of these")
    if n := int(totals[True]["measured"]):
        missed = totals[True]["missed_mass"] / n
        parts.append(f"answers that lost blocks would pay {missed:.1%} of their attention to these")
    if firsts:
        parts.append(f"the first other token is number {median(firsts):g} (median)")
    if skips:
        parts.append(f"not audited: {listed(skips)}")
    return "; ".join(parts)


def begun(drawn: int, waiting: int, skips: Mapping[str, int]) -> str:
    """Return what became of the first answers that were drawn for an audit."""
    skipped, reasons = sum(skips.values()), f" ({listed(skips)})" if skips else ""
    return (
        f"KV policies: of the first {drawn} answers drawn for an audit {drawn - waiting - skipped} are audited, "
        f"{waiting} wait and {skipped} have none{reasons}"
    )


def coverage(skips: Mapping[str, int], audited: int) -> str:
    """Return that most answers have no audit."""
    skipped = sum(skips.values())
    return (
        f"KV policies: of {skipped + audited} answers that were drawn for an audit {skipped} have none "
        f"({listed(skips)}), so what audits say is of the others alone; docs/safe.md says what each reason means. Said "
        "once."
    )


def target(promise: Promise, kept: bool, control: Counter[str]) -> str:
    """Return that fewer answers are identical than the target says, beyond chance, or that later ones meet it.

    Args:
        promise: has the answers since the last verdict.
        kept: whether it is kept now.
        control: counts of requests that lost nothing.
    """
    found, same = promise.target, ""
    low, high = interval(found.right, found.n)
    if kept:
        return (
            f"KV policies meet the target {found.bound:.3f} again: {found.right} of the last {found.n} audited answers "
            f"are identical to those of full attention ({low:.3f} to {high:.3f})."
        )
    if seen := int(control["audited"]):
        same = f" Of {seen} answers that lost nothing {int(control['identical'])} are identical."
    return (
        f"KV policies got {found.right} of the last {found.n} audited answers identical to those of full attention "
        f"({low:.3f} to {high:.3f}); expected the target {found.bound:.3f} or more: raise the budget, or pick another "
        f"policy.{same}"
    )


def lengths(promise: Promise, alike: bool) -> str:
    """Return that prompts no longer have the lengths of those that the policy was tuned on, or that they have again."""
    found, (shortest, longest) = promise.watched, promise.range
    seen = f"{found.right} of the last {found.n} prompts have the {shortest} to {longest} tokens of the field tuned"
    if alike:
        return f"KV policies: {seen} again: the target {promise.target.bound:.3f} is expected to be met."
    return (
        f"KV policies: {seen}; expected most of them: the target {promise.target.bound:.3f} may be missed until audits "
        "of these prompts confirm it; run vllm-evict tune on prompts of now, or have more answers audited."
    )

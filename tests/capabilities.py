"""Prints what a policy cannot be used with, for docs/limits.md: the table in vllm_evict/integration/start/capabilities.

python tests/capabilities.py
"""

import re

from vllm_evict.integration.start.capabilities import features
from vllm_evict.integration.start.capabilities.environments import ENVIRONMENTS, Environment
from vllm_evict.integration.start.capabilities.features import Feature

#: What stands for facts of a server that say little where there is no server; "…" for the others.
FACTS = {"{counts}": "ALiBi", "{whose}": "", "{of_yours}": "", "{beside}": "latents, states or sliding windows"}
FEATURES = [each for each in vars(features).values() if isinstance(each, Feature)]


def words(text: str) -> str:
    """Return a text of the table without a server."""
    for fact, word in FACTS.items():
        text = text.replace(fact, word)
    return re.sub(r"\{[^}]*\}", "…", text)


def refused(environment: Environment) -> str:
    """Return what an environment cannot stand, and why: parts with one reason together."""
    parts: dict[str, list[str]] = {}
    for other, why in environment.cannot_stand.items():
        parts.setdefault(words(why), []).append(words(other.name))
    return "; ".join(", ".join(names) + f" ({why})" * bool(why) for why, names in parts.items())


def table() -> str:
    """One row for each environment that cannot stand something, and one for each feature."""
    lines = ["| server | refused with it | do |", "|---|---|---|"]
    lines += [
        f"| {words(each.name)} | {refused(each)} | {words(each.instead)} |"
        for each in ENVIRONMENTS
        if each.cannot_stand
    ]
    lines += ["", "| in place of | do |", "|---|---|"]
    lines += [f"| {each.name} | {each.instead} |" for each in FEATURES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")

"""Policies with blocks on the host, and policies whose decodes read less, for programs (program.py)."""

from random import Random
from typing import Any

from vllm_evict.policies import POLICIES


def on_host(rand: Random, block: int, length: int, token_bytes: int) -> dict[str, Any]:
    """A policy of a server whose layers read blocks on the host, which holds the longest request and more.

    Args:
        block: tokens.
        length: of the longest request, in tokens.
        token_bytes: of a token, in all layers.
    """
    sink, recent = (block * rand.randint(0, 2) + rand.choice((0, 0, -1, 1)) for _ in range(2))
    sink, recent = max(sink, 0), max(recent, 0)
    blocks = -(-length // block) + rand.choice((0, 0, 0, 1, 3, 8, 16, 64, 1024))
    policy = {
        "name": "full",
        "evict": "host",
        "host": blocks * block * token_bytes + rand.randrange(block * token_bytes),
        "when": rand.choice(("budget", "pressure")),
        "budget": rand.choice((sink + recent + block * rand.randint(1, 6), rand.uniform(0.01, 0.99))),
        "buffer": max(block * rand.randint(0, 3) + rand.choice((0, 0, 0, -1, 1)), 0),
        "sink": sink,
        "recent": recent,
    }
    if policy["when"] == "pressure":
        policy["admit"] = rand.random() < 0.5
        if rand.random() < 0.2:
            del policy["budget"]
    given = ("sink", "recent") if rand.random() < 0.8 else ()
    return {field: value for field, value in policy.items() if field not in ("sink", "recent") or field in given}


def reading(rand: Random, policy: dict[str, Any], block: int, layers: int) -> dict[str, Any]:
    """A policy whose decodes read a part of their blocks: one and more beside sinks and recent ones.

    Args:
        policy: of a server; fields and policies of requests that do not go with it are left out.
        block: tokens.
        layers: of the model.
    """
    refused = {"granularity", "merge", "context"}
    kept = {field: value for field, value in policy.items() if field not in refused}
    sink, recent = (rand.choice((0, 1, block, 2 * block)) for _ in range(2))
    kept |= {"read": sink + recent + rand.randint(2, 5) * block, "hold": rand.choice((1, 1, 3))}
    if kept["name"] == "full":
        kept |= {"sink": sink, "recent": recent}
    if kept["name"] == "full" and rand.random() < 0.3:
        return kept | {"read_prompts": sink + recent + 64 + rand.randint(2, 5) * block, "allow": []}
    kept |= rand.choice(({"dense_layers": rand.randrange(layers)}, {"leaders": [0, layers - 2]}))
    if kept.get("allow"):
        kept["allow"] = [name for name in kept["allow"] if "read" in POLICIES[name].options]
    return kept

"""Policies that keep evicted blocks on the host, and policies whose decodes select blocks, for programs (program.py)."""

from random import Random
from typing import Any

from vllm_evict.policies import POLICIES

#: Policies whose evicted blocks can go to the host.
ON_HOST = sorted(name for name, policy in POLICIES.items() if "evict" in policy.options)


def on_host(rand: Random, policy: dict[str, Any], block: int, token_bytes: int) -> dict[str, Any]:
    """A policy with a host pool, of one block and more.

    Args:
        policy: of a server, one of `ON_HOST`; fields that do not go with a host are left out.
        block: tokens.
        token_bytes: of a token, in all layers.
    """
    refused = {"granularity": "token", "merge": None, "context": None}
    kept = {field: value for field, value in policy.items() if field not in refused}
    blocks, spare = rand.choice((1, 1, 2, 3, 5, 8, 16, 64, 1024)), rand.randrange(block * token_bytes)
    kept |= {
        "when": "budget",
        "evict": "host",
        "host": blocks * block * token_bytes + spare,
        "preempt": rand.choice(("host", "host", "recompute")),
    }
    if rand.random() < 0.9:
        kept |= {
            "recall": "quest",
            "recall_every": rand.choice((1, 1, 2, 3, 8)),
            "recall_blocks": rand.choice((1, 2, 4, 8)),
            "again": rand.choice((0, 1, block, 3 * block, 256)),
            "again_rounds": rand.choice((1, 1, 2, 3)),
        }
    if kept.get("allow"):
        kept["allow"] = rand.sample([*ON_HOST, "full"], 3)
    return kept


def selecting(rand: Random, policy: dict[str, Any], block: int, layers: int) -> dict[str, Any]:
    """A policy whose decodes select blocks: one and more beside sinks and recent ones.

    Args:
        policy: of a server; fields and policies of requests that do not go with a selection are left out.
        block: tokens.
        layers: of the model.
    """
    refused = {"granularity", "merge", "context"}
    kept = {field: value for field, value in policy.items() if field not in refused}
    sink, recent = (rand.choice((0, 1, block, 2 * block)) for _ in range(2))
    kept |= {
        "select": sink + recent + rand.randint(2, 5) * block,
        "select_sink": sink,
        "select_recent": recent,
        "select_every": rand.choice((1, 1, 3)),
    }
    kept |= rand.choice(({"dense_layers": rand.randrange(layers)}, {"filter_layers": [0, layers - 2]}))
    if kept.get("allow"):
        kept["allow"] = [name for name in kept["allow"] if "select" in POLICIES[name].options]
    return kept

"""Loads policies of other distributions from the entry point group `vllm_evict.policies`: name -> class."""

import logging
from importlib.metadata import EntryPoint, entry_points

from ..config import REGISTRY
from ..config.errors import shown
from .base import CACHED, QUERIED, RUNNING, Policy

GROUP = "vllm_evict.policies"
logger = logging.getLogger("vllm.evict")


def add_from_outside() -> None:
    """Add all such policies to the registry. A configuration that names a broken one is refused with the reason."""
    for entry in entry_points(group=GROUP):
        try:
            REGISTRY.add(_loaded(entry))
        except Exception as error:  # the module may raise anything
            whose = entry.dist.name if entry.dist else "an unknown distribution"
            why = f"of {whose} ({entry.value}) can't be used: {type(error).__name__}: {error}"
            if entry.name not in REGISTRY:
                REGISTRY.broken[entry.name] = why
            logger.warning("KV policy %r %s", entry.name, why)


def _loaded(entry: EntryPoint) -> Policy:
    """Load the policy of an entry point.

    Raises:
        TypeError, ValueError: the entry point is not a policy, or the policy has flags for policies of the package.
    """
    policy = entry.load()
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise TypeError(f"got {shown(policy)}; expected a subclass of vllm_evict.policies.Policy")
    if getattr(policy, "name", None) != entry.name:
        raise ValueError(f"the class is called {shown(getattr(policy, 'name', None))}; expected {entry.name!r}")
    old = getattr(policy, "splits", "") or getattr(policy, "pools", False)  # what allocators say now
    if policy.allocator.splits or old or policy.reconstructs or policy.profiles:
        raise ValueError(
            "got an allocator of its own, splits, pools, reconstructs or profiles; expected none of them: they are for "
            "policies of vllm_evict"
        )
    if not policy.measures <= RUNNING | CACHED | QUERIED or len(policy.measures & RUNNING) > 1:
        raise ValueError(
            f"measures {', '.join(sorted(policy.measures))}; expected any of {', '.join(sorted(CACHED | QUERIED))}, "
            f"and one of {', '.join(sorted(RUNNING))}"
        )
    return policy()

"""The line of the log that says, when the engine starts, what the policy does."""

from collections import Counter
from typing import Any

from ...core.mechanisms import Pressure
from ..start.describe import facts, what_is_held
from .managers import ChunkManager, StateManager
from .spec import EvictableSpec
from .view import EngineView


def start_up_line(scheduler: EngineView) -> str:
    """Return one line: policy, bound, model runner, attention backend, KV groups."""
    groups = [scheduler.kv_cache_config.kv_cache_groups[each.kv_cache_group_id] for each in scheduler.kv_managers]
    spec: EvictableSpec = groups[0].kv_cache_spec
    bounds = [
        scheduler.kv_policy.of_class(group.kv_cache_spec.head_class).bound(spec.block_size, scheduler.max_model_len)
        for group in groups
    ]
    known = [bound for bound in bounds if bound is not None]
    bound = sum(known) if len(known) == len(bounds) else None
    # Bands of one policy share its budget; classes of heads have policies of their own.
    split = scheduler.kv_policy.allocator.splits == "classes"
    parts = scheduler.kv_policy.classes.values() if split else [scheduler.kv_policy]
    if len(groups) == 1:
        stages = scheduler.vllm_config.parallel_config.pipeline_parallel_size
        what = f"1 KV group of {len(groups[0].layer_names)} layers"
        what += f" in the first of {stages} stages" if stages > 1 else ""
    elif not spec.head_class:
        what = f"{len(groups)} KV groups of {sum(len(group.layer_names) for group in groups)} layers"
    else:
        counts = Counter(group.kv_cache_spec.head_class for group in groups)
        listed = ", ".join(f"{count} {head_class}" for head_class, count in counts.items())
        what = f"{len(groups)} KV groups of {spec.num_kv_heads} heads ({listed})"
    kinds = Counter(map(_kind, scheduler.other_managers))
    if kinds:
        beside = " and ".join(f"{count} with {kind}" for kind, count in kinds.items())
        what += f", beside {beside}, managed by vLLM"
    pool, alone = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, len(groups) == 1 and not kinds
    holds = f"the pool has {pool:,} blocks" + f", {pool * spec.block_size:,} tokens" * alone
    if bound is not None:
        holds += " (vLLM's KV cache size is of requests at their bounds)"
    return (
        facts(
            scheduler.kv_policy,
            what_is_held(scheduler.kv_policy, bound, spec.block_size, Pressure.serves(scheduler.kv_policy)),
            scheduler.vllm_config,
        )
        + f"; attention backend {spec.backend}; {what}; {holds}"
        + "".join(f"; {words}" for mechanism in scheduler.mechanisms if (words := mechanism.described))
        + "".join(f"; {words}" for part in parts if (words := part.became(spec.block_size)))
    )


def _kind(manager: Any) -> str:
    """Return what the layers of a KV group without holes have."""
    named = {StateManager: "states", ChunkManager: "chunks of local attention"}
    return named.get(type(manager), "sliding windows")

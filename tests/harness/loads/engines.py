"""Schedulers of engines without a model, as vLLM's engine core makes them, from a program's settings (scheduler.py)."""

import copy
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import (
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_evict.integration.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_evict.integration.engine.spec import EvictableSpec, policy_config
from vllm_evict.integration.start import attending
from vllm_evict.integration.worker import layers

from .program import HEADS, LAYERS, VOCABULARY, Settings


class _Config(VllmConfig):
    """vLLM's configuration, for a model runner that the program names."""

    runner = 1

    @property
    def use_v2_model_runner(self) -> bool:
        return self.runner == 2


@functools.cache
def _base() -> VllmConfig:
    """A configuration of a model without weights; programs change copies of it."""
    with tempfile.TemporaryDirectory() as folder:
        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16 * HEADS,
            "intermediate_size": 16,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "torch_dtype": "float32",
        }
        Path(folder, "config.json").write_text(json.dumps(model))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, seed=0)
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig.default_factory(max_model_len=512),
            cache_config=CacheConfig(block_size=32),
            device_config=DeviceConfig("cpu"),
        )
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def engine_config(settings: Settings) -> VllmConfig:
    """vLLM's configuration of an engine, without the size of its pool."""
    config = copy.copy(_base())
    config.__class__, config.runner = _Config, settings.runner
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.length
    config.scheduler_config = SchedulerConfig(
        max_model_len=settings.length,
        is_encoder_decoder=False,
        max_num_batched_tokens=settings.chunk,
        max_num_seqs=settings.seqs,
        long_prefill_token_threshold=settings.long,
        policy="priority" if settings.priorities else "fcfs",
        watermark=settings.watermark,
        scheduler_reserve_full_isl=settings.whole,
        async_scheduling=settings.ahead,
    )
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = settings.block
    config.cache_config.enable_prefix_caching = settings.caching
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null") if settings.events else None
    config.speculative_config = None
    if settings.drafts:
        if min(settings.chunk // settings.seqs, settings.long or settings.chunk) <= settings.drafts:
            raise ValueError(f"{settings}: vLLM has no step for a token and its drafts")
        config.speculative_config = SpeculativeConfig(
            method="ngram_gpu" if settings.ahead else "ngram",
            num_speculative_tokens=settings.drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        # A drafter with layers computes tokens after those of a step, and has a model of its own, which is not needed.
        config.speculative_config.method = settings.drafter or config.speculative_config.method
    config.additional_config = {} if settings.policy is None else {"kv_policy": settings.policy}
    return config


def cache_specs(settings: Settings, config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The KV cache specs of the model's layers, or of the pages that a policy splits heads or layers into."""
    full = FullAttentionSpec(
        block_size=settings.block, num_kv_heads=HEADS, head_size=16, head_size_v=16, dtype=torch.float32
    )
    specs: dict[str, KVCacheSpec] = {f"layer.{layer}": full for layer in range(LAYERS)}
    if settings.policy is not None:
        policy = policy_config(config)
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        layer = SimpleNamespace(get_kv_cache_spec=lambda _: full, attn_backend=backend)
        if (placed := attending.layout(config, policy)) is not None:
            return {
                f"kv_evict.{name}.{part}": layers._spec(config, policy, layer, placed.width, name, part)
                for part, name in enumerate(placed.groups)
            }
        (head_class,) = policy.classes
        spec = EvictableSpec(**vars(full), backend="CPU_ATTN", head_class=head_class)
        specs = dict.fromkeys(specs, spec)
    if settings.window:
        sizes = dict(block_size=settings.block, num_kv_heads=HEADS, head_size=16, dtype=torch.float32)
        window = (
            SlidingWindowSpec(**sizes, sliding_window=settings.window)
            if settings.window > 0
            else ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=-settings.window)
        )
        specs |= {f"layer.{layer}": window for layer in range(settings.sliding)}
    return specs


def least_pool(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """Blocks of the smallest pool that start-up accepts, vLLM's null block included."""
    groups = get_kv_cache_groups(config, dict(specs))
    needed = _max_memory_usage_bytes_from_groups(config, groups)
    return math.ceil(needed / _pool_bytes_per_block(config, groups)) + 1


def cache_config(config: VllmConfig, specs: dict[str, KVCacheSpec], blocks: int) -> KVCacheConfig:
    """vLLM's plan of a pool of so many blocks.

    Raises:
        ValueError: start-up refuses it.
    """
    config.cache_config.num_gpu_blocks_override = blocks
    (planned,) = get_kv_cache_configs(config, [dict(specs)], [1 << 40])
    planned = generate_scheduler_kv_cache_config([planned])
    config.cache_config.num_gpu_blocks = planned.num_blocks
    return planned


@functools.cache
def _structured() -> StructuredOutputManager:
    return StructuredOutputManager(_base())


def make_scheduler(settings: Settings) -> Scheduler:
    """The scheduler of an engine, as vLLM's engine core makes it."""
    config = engine_config(settings)
    specs = cache_specs(settings, config)
    planned = cache_config(config, specs, least_pool(config, specs) + settings.extra)
    kinds = (Scheduler, AsyncScheduler) if settings.policy is None else (EvictionScheduler, AsyncEvictionScheduler)
    before = os.environ.get("VLLM_EVICT_POISON")
    os.environ["VLLM_EVICT_POISON"] = str(int(settings.poison))
    try:
        return kinds[settings.ahead](
            vllm_config=config,
            kv_cache_config=planned,
            structured_output_manager=_structured(),
            block_size=settings.block,
            hash_block_size=settings.block,
            log_stats=settings.stats,
        )
    finally:
        if before is None:
            del os.environ["VLLM_EVICT_POISON"]
        else:
            os.environ["VLLM_EVICT_POISON"] = before


@functools.cache
def make_hasher(block: int) -> Callable[[Request], list[Any]]:
    from vllm.utils.hashing import get_hash_fn_by_name

    init_none_hash(get_hash_fn_by_name("sha256"))
    return get_request_block_hasher(block, get_hash_fn_by_name("sha256"))

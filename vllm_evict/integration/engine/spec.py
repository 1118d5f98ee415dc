"""The KV cache spec of layers whose blocks may be evicted; importing this registers it with vLLM."""

import math
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ...config import KVPolicyConfig, KVPolicyError
from ..seams import replaces
from ..start.attending import kv_heads
from ..start.drafters import has_layers, lookahead
from .managers import EvictableManager


@replaces(
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    methods="max_memory_usage_bytes merge is_uniform_with_collection",
    why="vLLM sizes its pool by what a request may hold; layers specify it (`customize_spec` of their backends)",
    remove_when="never: vLLM has specs of plugins",
)
@replaces(
    "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    methods="merge",
    why="merged specs keep the plugin's fields",
    remove_when="vLLM merges all fields of a spec",
)
@dataclass(frozen=True, kw_only=True)
class _Evictable(KVCacheSpec):
    """Mixed into vLLM's specs of layers with evictable blocks.

    Attributes:
        backend: name of the attention backend that reads the blocks (for the start-up line).
        head_class: class of the heads, where heads are split (see `KVPolicyConfig.classes`).
        part: number of the group among the groups of its class, which may not share a block table.
        sink, window: leading and trailing blocks of a cached prefix that a request can use without the others; None: it
            needs all blocks.
    """

    backend: str = ""
    head_class: str = ""
    part: int = 0
    sink: int | None = None
    window: int | None = None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the most bytes that one request may hold, in flight included. vLLM plans its pool and concurrency with
        it.
        """
        full = super().max_memory_usage_bytes(vllm_config)
        config = policy_config(vllm_config).of_class(self.head_class)
        return min(full, most_blocks(vllm_config, config, self.block_size) * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list["_Evictable"]) -> "_Evictable":
        # vLLM's merge rebuilds the spec from vLLM's fields; the plugin's fields would become defaults.
        own = {name: getattr(specs[0], name) for name in OWN_FIELDS}
        # vLLM merges specs to see whether layers can share a block table.
        assert all(specs[0].is_alike(spec) for spec in specs), "head classes have block tables of their own"
        return replace(super().merge(specs), **own)

    def is_alike(self, other: KVCacheSpec) -> bool:
        """Return whether two specs agree in all fields of the plugin."""
        return all(getattr(self, name) == getattr(other, name, None) for name in OWN_FIELDS)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        alike = all(self.is_alike(spec) for spec in kv_cache_specs.values())
        return alike and super().is_uniform_with_collection(kv_cache_specs)


@dataclass(frozen=True, kw_only=True)
class EvictableSpec(_Evictable, FullAttentionSpec):
    """Full attention over the resident blocks of a policy."""


@dataclass(frozen=True, kw_only=True)
class EvictableLatentSpec(_Evictable, MLAAttentionSpec):
    """Multi-head latent attention (MLA) over the resident blocks of a policy."""


#: vLLM's specs -> the plugin's.
EVICTABLE: dict[type[KVCacheSpec], type[_Evictable]] = {
    FullAttentionSpec: EvictableSpec,
    MLAAttentionSpec: EvictableLatentSpec,
}


def most_blocks(vllm_config: VllmConfig, config: KVPolicyConfig, block_size: int) -> int:
    """Return the most blocks of a KV group that one request under a policy may need, in flight included."""
    longest = vllm_config.model_config.max_model_len
    bound = config.bound(block_size, longest)
    if bound is None or vllm_config.kv_transfer_config is not None:  # a connector's blocks arrive all at once
        return math.ceil(longest / block_size)
    # Eviction follows the step, so a request holds whole chunks on top while steps are in flight.
    return bound + math.ceil((vllm_config.max_in_flight_tokens + lookahead(vllm_config)) / block_size) + 1


def most_held(vllm_config: VllmConfig, config: KVPolicyConfig, block_size: int) -> int:
    """Return the most blocks that a request under a policy holds; under pressure it may hold all of its blocks."""
    most = math.ceil(vllm_config.model_config.max_model_len / block_size)
    return most if config.when == "pressure" else min(most, most_blocks(vllm_config, config, block_size))


def covers(group: KVCacheGroupSpec, other: KVCacheGroupSpec) -> bool:
    """Return whether the layers of a KV group have all bytes that another group has in its blocks.

    A block is of one group at a time. In it the first layer of each group has the same bytes, and so on.
    """
    spec, its = group.kv_cache_spec, other.kv_cache_spec
    padded = getattr(spec, "page_size_padded", None) is not None
    return (
        len(other.layer_names) <= len(group.layer_names) and spec.page_size_bytes == its.page_size_bytes and not padded
    )


def alike_bytes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, number: int) -> int:
    """Return the bytes of a block in all layers of a KV group on one rank; 0 if layers may differ in KV heads.

    A drafter's layers count, which may have pages of other sizes.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 and has_layers(vllm_config):
        sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
        # Since 0.32 each of them names the whole allocation.
        whole = max(sizes) if hasattr(kv_cache_config.kv_cache_tensors[0], "layer_stride") else sum(sizes)
        return whole // kv_cache_config.num_blocks
    spec = groups[number].kv_cache_spec
    alike = len(groups) > 1 or isinstance(spec, MLAAttentionSpec)
    return len(groups[number].layer_names) * spec.page_size_bytes if alike else 0


def host_blocks(
    vllm_config: VllmConfig, config: KVPolicyConfig, block_bytes: int, block_size: int | None = None
) -> int:
    """Return how many host blocks evicted blocks may take, 0 without `host`; each tensor-parallel rank has its share.

    Args:
        block_bytes: of a block in all layers of one rank.
        block_size: tokens of a block; None: those of vLLM's configuration.

    Raises:
        KVPolicyError: there is no room for one.
    """
    if config.host is None:
        return 0
    ranks = vllm_config.parallel_config.tensor_parallel_size
    blocks = int(config.host // (ranks * block_bytes))
    if not blocks:
        raise KVPolicyError(
            f"host: {config.host} bytes hold no block of {block_bytes} bytes on {ranks} ranks; expected at least "
            f"{ranks * block_bytes}"
        )
    longest = math.ceil(vllm_config.model_config.max_model_len / (block_size or vllm_config.cache_config.block_size))
    if blocks < longest:  # a request that finds no room there keeps its blocks on the device
        raise KVPolicyError(
            f"host: {config.host} bytes hold {blocks} blocks; expected at least the {longest} of a request of "
            f"{vllm_config.model_config.max_model_len} tokens, {longest * ranks * block_bytes} bytes; set host to "
            "more, or --max-model-len to less"
        )
    return blocks


#: Fields that the plugin's specs add.
OWN_FIELDS = ("backend", "head_class", "part", "sink", "window")


def policy_config(vllm_config: VllmConfig) -> KVPolicyConfig:
    """Return the server's policy, from vLLM's configuration."""
    heads, ranks = kv_heads(vllm_config.model_config), vllm_config.parallel_config.tensor_parallel_size
    config = KVPolicyConfig.parse(vllm_config.additional_config["kv_policy"])
    return config.for_model(len(heads), min(heads), ranks)


# A spec reaches the engine core by pickle, which imports this module: so every process with a spec has it registered.
KVCacheSpecRegistry._ensure_registered()
for _spec in EVICTABLE.values():
    KVCacheSpecRegistry.register(_spec, EvictableManager, uniform_type_base_spec=FullAttentionSpec)

"""The KV cache spec of layers whose blocks may be evicted; importing this registers it with vLLM."""

import math
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ..config import KVPolicyConfig
from .manager import EvictableManager


@dataclass(frozen=True, kw_only=True)
class EvictableSpec(FullAttentionSpec):
    """Full attention over what a policy keeps resident.

    Attributes:
        backend: name of the attention backend that reads the blocks (for the start-up line).
    """

    backend: str = ""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Most bytes that one request may hold, in flight included: vLLM plans its pool and concurrency with it."""
        full = super().max_memory_usage_bytes(vllm_config)
        bound = policy_config(vllm_config).bound(self.block_size, vllm_config.model_config.max_model_len)
        if bound is None:
            return full
        # Eviction follows the step, so whole chunks are held on top while steps are in flight.
        in_flight = math.ceil(vllm_config.max_in_flight_tokens / self.block_size) + 1
        return min(full, (bound + in_flight) * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list["EvictableSpec"]) -> "EvictableSpec":
        # FullAttentionSpec.merge rebuilds the spec from its own fields; ours would silently become defaults.
        return replace(super().merge(specs), backend=specs[0].backend)


def policy_config(vllm_config: VllmConfig) -> KVPolicyConfig:
    """The server's policy, as it travels in vLLM's configuration."""
    return KVPolicyConfig.parse(vllm_config.additional_config["kv_policy"])


# A spec reaches the engine core by pickle, which imports this module first: whoever holds one has it registered.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(EvictableSpec, EvictableManager, uniform_type_base_spec=FullAttentionSpec)

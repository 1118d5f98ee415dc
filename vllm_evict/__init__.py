"""KV cache eviction for vLLM: heavy hitters, sinks and windows, with blocks really given back to the pool."""

from .config import KVPolicyConfig, KVPolicyError

__version__ = "0.1.0"
__all__ = ["KVPolicyConfig", "KVPolicyError"]

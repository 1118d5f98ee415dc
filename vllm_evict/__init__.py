"""KV cache eviction for vLLM: heavy hitters, sinks and windows, with blocks really given back to the pool."""

from importlib import metadata

from . import policies  # noqa: F401 - which configurations look up by name
from .config import KVPolicyConfig, KVPolicyError

try:
    __version__ = metadata.version("vllm-evict")
except metadata.PackageNotFoundError:  # a checkout on sys.path that is not installed
    __version__ = "0+unknown"
__all__ = ["KVPolicyConfig", "KVPolicyError"]

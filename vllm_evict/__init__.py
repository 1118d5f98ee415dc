"""KV cache eviction for vLLM: frees KV blocks of running requests and returns them to vLLM's pool."""

from importlib import metadata

from . import policies  # noqa: F401 - fills the registry
from .config import KVPolicyConfig, KVPolicyError

try:
    __version__ = metadata.version("vllm-evict")
except metadata.PackageNotFoundError:  # a checkout on sys.path that is not installed
    __version__ = "0+unknown"
__all__ = ["KVPolicyConfig", "KVPolicyError"]

"""KV cache eviction for vLLM: policies choose blocks of running requests, which go back to vLLM's pool."""

from importlib import metadata

from . import policies  # noqa: F401 - fills the registry, in which configurations look up names
from .config import KVPolicyConfig, KVPolicyError

try:
    __version__ = metadata.version("vllm-evict")
except metadata.PackageNotFoundError:  # a checkout on sys.path that is not installed
    __version__ = "0+unknown"
__all__ = ["KVPolicyConfig", "KVPolicyError"]

"""KV connectors beside eviction: which of them are served."""

from collections.abc import Mapping
from typing import Any

#: vLLM's connectors that bring a prompt's blocks from the engine that computed it.
ARRIVING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "DecodeBenchConnector",
    "ExampleConnector",
)
#: vLLM's connectors that keep blocks of the prefix cache in host memory or on disk.
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def hands_on(params: Any) -> bool:
    """Return whether a request's `extra_args` ask that another engine gets its blocks when it ends."""
    transfer = (params or {}).get("kv_transfer_params")
    return isinstance(transfer, Mapping) and bool(transfer.get("do_remote_decode"))

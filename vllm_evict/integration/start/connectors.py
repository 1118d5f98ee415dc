"""KV connectors beside eviction: which of them are served, and which requests hand their blocks on."""

from collections.abc import Iterator, Mapping
from typing import Any

#: vLLM's connectors that bring a prompt's blocks from the engine that computed it, and hand blocks on when asked to.
ARRIVING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "DecodeBenchConnector",
    "ExampleConnector",
)
#: vLLM's connectors that keep blocks of the prefix cache in host memory, on disk, or in LMCache's server.
OFFLOADING = ("OffloadingConnector", "LMCacheMPConnector", "SimpleCPUOffloadConnector")
#: Connectors that are served, alone and in a MultiConnector.
SERVED = (*ARRIVING, *OFFLOADING)
#: What is said of a server that `prefills_alone`.
PREFILLS = "this server prefills for others (kv_producer): it evicts nothing and runs as stock vLLM"


def parts(transfer: Any) -> Iterator[Any]:
    """Yield the settings of a connector, or of each connector in a MultiConnector, as vLLM makes them."""
    if transfer.kv_connector != "MultiConnector" or transfer.kv_connector_module_path:
        yield transfer
        return
    for each in transfer.kv_connector_extra_config.get("connectors", ()):
        yield from parts(type(transfer)(**{"engine_id": transfer.engine_id, **each}))


def each_connector(connector: Any) -> Iterator[Any]:
    """Yield a connector, or each connector in a MultiConnector: in the order of `parts`."""
    if type(connector).__name__ != "MultiConnector":
        yield connector
        return
    for each in connector._connectors:
        yield from each_connector(each)


def hands_on(transfer: Any) -> bool:
    """Return whether a request's `kv_transfer_params` ask that another engine gets its blocks when it ends."""
    return isinstance(transfer, Mapping) and bool(transfer.get("do_remote_decode"))


def prefills_alone(vllm_config: Any) -> bool:
    """Return whether a server computes prompts for other engines and nothing else: then it evicts nothing."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector is not None and transfer.kv_role == "kv_producer"

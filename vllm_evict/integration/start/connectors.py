"""KV connectors beside eviction: which of them are served, and which requests hand their blocks on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...config import KVPolicyError
from ...core.plan import Payload

#: vLLM's connectors that bring a prompt's blocks from the engine that computed it, and hand blocks on when asked to.
ARRIVING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "DecodeBenchConnector",
    "ExampleConnector",
)
LMCACHE = "LMCacheMPConnector"
#: vLLM's connectors that keep blocks of the prefix cache in host memory, on disk, or in LMCache's server.
OFFLOADING = ("OffloadingConnector", LMCACHE, "SimpleCPUOffloadConnector")
#: Connectors that are served, alone and in a MultiConnector.
SERVED = (*ARRIVING, *OFFLOADING)
#: Those for which vLLM switches its hybrid KV cache manager off; not for the connector of LMCache's own package.
ONE_TABLE = ("ExampleConnector", LMCACHE)
#: What is said of a server that `prefills_alone`.
PREFILLS = "this server prefills for others (kv_producer): it evicts nothing and runs as stock vLLM"


@dataclass(slots=True)
class Unread(Payload):
    """Requests of which other processes may still read blocks; the step waits until they have."""

    feature = "connectors"

    req_ids: set[str] = field(default_factory=set)


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


def named(vllm_config: Any, connector: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the connector of each one that `each_connector` yields."""
    names = (each.kv_connector for each in parts(vllm_config.kv_transfer_config))
    yield from zip(names, each_connector(connector), strict=True)


def of_lmcache(part: Any, *names: str) -> str:
    """Return which of some attributes a part of LMCache's connector has; releases name it differently.

    Raises:
        KVPolicyError: it has none of them.
    """
    if (found := next((name for name in names if hasattr(part, name)), None)) is not None:
        return found
    try:
        release = version("lmcache")
    except PackageNotFoundError:
        release = "of an unknown release"
    raise KVPolicyError(
        f"{LMCACHE} of LMCache {release} got a {type(part).__name__} without {' and '.join(names)}; expected "
        f"{' or '.join(names)}, which tells what is stored; install LMCache 0.5.1, or leave --kv-policy out"
    )


def asks_to_hand_on(params: Any) -> bool:
    """Return whether a request's `kv_transfer_params` ask that another engine gets its blocks when it ends."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def hands_on(vllm_config: Any, params: Any) -> bool:
    """Return whether another engine gets the blocks of a request with these `kv_transfer_params`.

    Connectors of `ARRIVING` hand blocks on, in another role than kv_consumer. In that role some end the engine if they
    are asked to.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None or not asks_to_hand_on(params):
        return False
    roles = [each.kv_role for each in parts(transfer) if each.kv_connector in ARRIVING]
    return bool(roles) and "kv_consumer" not in roles


def prefills_alone(vllm_config: Any) -> bool:
    """Return whether a server computes prompts for other engines and nothing else: then it evicts nothing."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector is not None and transfer.kv_role == "kv_producer"

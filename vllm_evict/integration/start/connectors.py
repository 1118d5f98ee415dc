"""KV connectors beside eviction: which of them are served."""

from collections.abc import Mapping
from typing import Any

from ...config import KVPolicyConfig

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


def check(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """What is refused of a configuration with a KV connector: (whether, what, what to do instead)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    name, role = transfer.kv_connector, transfer.kv_role
    connector = f"the KV connector {name}"
    own = bool(transfer.kv_connector_module_path)
    return [
        (
            role == "kv_producer",
            'kv_role "kv_producer": it would evict blocks of a prompt before the other engine has them',
            'leave --kv-policy out on the server that prefills, and set it where prompts arrive ("kv_consumer")',
        ),
        (
            own or name not in (*ARRIVING, *OFFLOADING),
            f"{connector}{' of your own' if own else ''}, which may store blocks that were computed over holes",
            f"use {', '.join(ARRIVING[:4])} as kv_consumer, or {' or '.join(OFFLOADING)}, or leave --kv-policy out",
        ),
        (
            name in ARRIVING and role != "kv_consumer",
            f"{connector} and kv_role {role!r}: an engine that evicts has no whole prompts to send",
            'set "kv_role": "kv_consumer" here, and prefill on a server without --kv-policy',
        ),
        (
            name in ARRIVING and bool(transfer.get_from_extra_config("bidirectional_kv_xfer", False)),
            f"{connector} and bidirectional_kv_xfer, which reads blocks of requests that have ended here",
            "leave bidirectional_kv_xfer out",
        ),
        (config.evict == "host", f"evict: host and {connector}", "set evict: drop"),
        (config.context is not None, f"a context and {connector}", "leave context out"),
        (
            config.reconstructs,
            f"{connector} while requests may use kvzip, which reads prompts again",
            "leave kvzip out; keydiff, h2o and snapkv need no second pass",
        ),
        (
            len(config.classes) > 1,
            f"{connector}, because it puts heads into pages that other engines and the host don't know",
            "use a policy for whole layers, such as h2o, keydiff or sink-window",
        ),
        (
            config.when == "pressure" and vllm_config.max_concurrent_batches > 1,
            f"when: pressure, {connector} and async scheduling: what it evicts is free a step too late",
            "set when: budget, or --no-async-scheduling",
        ),
    ]


def hands_on(params: Any) -> bool:
    """Whether a request's `extra_args` ask that another engine gets its blocks when it ends."""
    transfer = (params or {}).get("kv_transfer_params")
    return isinstance(transfer, Mapping) and bool(transfer.get("do_remote_decode"))

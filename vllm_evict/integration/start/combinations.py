"""Refusals of what a policy cannot be combined with: features of a server, latents, and layers beside full attention.

Those of speculative decoding are in `speculation`.

A refusal is (whether it applies, what is refused, what to do instead).
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ...compute.attention.ops import READ_HEADS
from ...config import KVPolicyConfig
from . import advice, connectors, windows
from .fallback import use_v1

Refusal = tuple[bool, str, str]

#: The control groups of this process.
OWN_GROUPS = "/proc/self/cgroup"
#: Controller of memory in `OWN_GROUPS` -> where its groups are, and the file with the most bytes that one may take. The
#: groups of version 2 name no controller.
CONTROL_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


def memory_bytes() -> int:
    """Bytes of memory that the machine has, or that this process may take of it."""
    limits = (_read(path).strip() for path in _limits())
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def _limits() -> Iterator[Path]:
    """Files with limits of this process's control groups and of all groups around them.

    A container may see its own group as the root, under a name that it does not have there.
    """
    own = {"": "/", "memory": "/"}
    for line in _read(Path(OWN_GROUPS)).splitlines():
        _, controllers, group = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), group)
    for controller, (root, file) in CONTROL_GROUPS.items():
        place = PurePosixPath(own[controller])
        for each in (place, *place.parents):
            yield Path(f"{root}{each}", file)


def _read(path: Path) -> str:
    """Text of a file; "" if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def tier(vllm_config: Any, config: KVPolicyConfig, platform: str) -> list[Refusal]:
    """What is refused where evicted blocks go to the host."""
    if config.evict != "host":
        return []
    memory, engines = memory_bytes(), vllm_config.parallel_config.data_parallel_size_local
    drop = "set evict: drop"
    needed = config.host if config.host_path is None else 0
    if config.recall != "none":  # least and largest keys of a block take as much as one of its tokens
        needed += config.host // vllm_config.cache_config.block_size
    return [
        (
            slides(vllm_config),
            "evict: host and layers with sliding windows, whose blocks are gone when tokens are computed again",
            drop,
        ),
        (
            vllm_config.model_config.is_hybrid,
            "evict: host and layers with states, which can't compute tokens again",
            drop,
        ),
        (
            platform != "cpu" and config.host_path is not None,
            "host_path on a GPU, whose copies would wait for a disk",
            "leave host_path out",
        ),
        (
            needed * engines > memory,
            f"host: {needed} bytes on a machine of {memory}" + (f" with {engines} engines" * (engines > 1)),
            "set less than the machine, or its container, has for each engine, beside what the model takes",
        ),
    ]


def selection(vllm_config: Any, config: KVPolicyConfig, platform: str) -> list[Refusal]:
    """What is refused where decodes select blocks."""
    if not config.selects:
        return []
    dense = "leave select out"
    return [
        (platform != "cpu", "select on a GPU, where no kernel selects blocks yet", dense),
        (
            slides(vllm_config),
            "select and layers with sliding windows, among which the first layers are not counted",
            dense,
        ),
    ]


def stages(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """What is refused under pipeline parallelism."""
    model, parallel, beside = vllm_config.model_config, vllm_config.parallel_config, "pipeline parallelism"
    if parallel.pipeline_parallel_size == 1:
        return []
    ranks = "use --tensor-parallel-size in place of --pipeline-parallel-size"
    measuring = [part for part in config.classes.values() if part.statistics]
    return [
        (
            len(config.classes) > 1,
            f"{beside}, because it puts heads of all layers into pages that stages would have to share",
            f"use a policy for whole layers, such as h2o, keydiff or sink-window, or {ranks}",
        ),
        (
            any("max" in (part.heads, part.layers) for part in measuring),
            f"heads or layers: max and {beside}, whose stages add up what they measure",
            f"set sum or mean, or {ranks}",
        ),
        (config.granularity == "token", f"granularity: token and {beside}", f"set granularity: block, or {ranks}"),
        (config.reconstructs, f"kvzip and {beside}", f'leave kvzip out of name and "allow", or {ranks}'),
        (config.context is not None, f"a context and {beside}", f"leave context out, or {ranks}"),
        (config.evict == "host", f"evict: host and {beside}", f"set evict: drop, or {ranks}"),
        (config.selects, f"select and {beside}", f"leave select out, or {ranks}"),
        (
            slides(vllm_config) or model.is_hybrid,
            f"{beside} and layers with sliding windows or states, which vLLM groups over all stages",
            ranks,
        ),
        (model.use_mla, f"{beside} and multi-head latent attention (MLA), which no test runs", ranks),
        (vllm_config.speculative_config is not None, f"{beside} and speculative decoding", ranks),
        (
            vllm_config.kv_transfer_config is not None,
            f"{beside} and a KV connector",
            f"leave --kv-transfer-config and --kv-offloading-size out, or {ranks}",
        ),
        (
            bool(vllm_config.use_v2_model_runner),
            f"{beside} on Model Runner V2, which no test runs",
            f"{use_v1(vllm_config)}, or {ranks}",
        ),
        (
            parallel.distributed_executor_backend == "external_launcher",
            f"{beside} under an external launcher, whose stages each have a scheduler",
            f"leave --distributed-executor-backend out, or {ranks}",
        ),
    ]


def connected(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """What is refused beside a KV connector."""
    if vllm_config.kv_transfer_config is None:
        return []
    name = vllm_config.kv_transfer_config.kv_connector
    return [
        *connectors.check(vllm_config, config),
        (
            slides(vllm_config),
            f"the KV connector {name} and layers with sliding windows, which no test runs",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (
            vllm_config.speculative_config is not None,
            f"the KV connector {name} and speculative decoding",
            "leave --speculative-config out, or --kv-transfer-config and --kv-offloading-size",
        ),
        (
            vllm_config.model_config.use_mla or vllm_config.model_config.is_hybrid,
            f"the KV connector {name} and layers of latents or states",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (config.selects, f"select and the KV connector {name}", "leave select out"),
    ]


#: What to do where attention can't be measured.
UNSCORED = 'use sink-window, and leave policies that score out of "allow"'
#: What to do where the plugin can't read keys.
UNREAD = 'a policy without scores, context, recall and select (sink-window), and leave others out of "allow"'


def reads_keys(config: KVPolicyConfig) -> bool:
    """Whether the plugin's kernels read keys of the cache."""
    return bool(config.statistics or config.context or config.recall != "none" or config.selects)


def heads(model: Any, config: KVPolicyConfig, platform: str) -> list[Refusal]:
    """Refusals for heads that the plugin's kernels for GPUs do not read, as far as the configuration says their size.

    `layers.settle` looks at loaded layers.
    """
    if platform != "cuda" or model.use_mla or not (reads_keys(config) or len(config.classes) > 1):
        return []
    size, read = advice.head_size(model), f"{READ_HEADS[0]} to {READ_HEADS[-1]}"
    what = f"heads of {size} dimensions, of which the plugin's kernels read {read}"
    return [(size not in READ_HEADS, what, f"use {UNREAD}")]


def sparse(text: Any) -> list[Refusal]:
    """Refusals for models whose queries see few tokens, which an indexer chooses."""
    why = "whose indexer has a cache of its own that would have to lose the same blocks"
    reads = "they read few tokens of their cache already; leave --kv-policy out"
    return [
        (
            getattr(text, "index_topk", None) is not None,
            f"sparse attention (DSA), {why}",
            f"{reads}, and set --attention-config.hisparse_config to keep the cache in host memory",
        ),
        (
            getattr(text, "compress_ratios", None) is not None,
            f"compressed sparse attention (CSA), {why}",
            f"{reads}: the cache is compressed, too",
        ),
        (
            getattr(text, "sparse_attention_config", None) is not None,
            f"block-sparse attention (MSA), {why}",
            reads,
        ),
    ]


def split(heads: list[int], config: KVPolicyConfig) -> list[Refusal]:
    """Refusals for models whose layers differ in their numbers of KV heads, which are `heads`."""
    return [
        (
            len(config.classes) > 1 and len(set(heads)) > 1,
            f"layers of {' and '.join(map(str, sorted(set(heads))))} KV heads, because it deals equally many heads of "
            "each layer to its pages",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        )
    ]


def distances(config: KVPolicyConfig, *terms: str) -> list[Refusal]:
    """Refusals for attention that counts how far back a token stands in the block table; empty `terms` do not apply.

    Keys carry their rotation, which holes do not change. Such a term is the backend's: it would count tokens of a view,
    and tokens in front of a hole would come nearer.
    """
    return [
        (
            bool(term) and config.allowed != {"full"},
            f"{term}: how far back tokens stand would change where blocks between are evicted",
            'use {"name": "full", "allow": []}, which evicts nothing, or leave --kv-policy out for this model',
        )
        for term in terms
    ]


def unlike(text: Any) -> list[Refusal]:
    """Refusals for models whose values have other dimensions than their keys (MiMo-V2)."""
    values = getattr(text, "v_head_dim", None)
    # transformers raises for the head_dim of a model whose layers differ in it (Gemma 4).
    keys = None if values is None else getattr(text, "head_dim", None)
    return [
        (
            None not in (keys, values) and keys != values and getattr(text, "kv_lora_rank", None) is None,
            f"keys of {keys} and values of {values} dimensions, whose attention backends (FLASH_ATTN_DIFFKV, "
            "TRITON_ATTN_DIFFKV) have pages that the plugin can't read",
            "leave --kv-policy out for this model",
        )
    ]


def latent(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """Refusals for models with multi-head latent attention (MLA)."""
    latent = "multi-head latent attention (MLA)"
    return [
        (
            len(config.classes) > 1,
            f"{latent}, whose query heads all read one latent head, so that heads and layers can't be split",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        ),
        (
            config.context is not None,
            f"a context and {latent}, which rotates a part of its keys only",
            "leave context out for this model",
        ),
        (
            config.reconstructs,
            f"{latent} while requests may use kvzip, which scores each KV head's own keys",
            "leave kvzip out; snapkv, h2o and keydiff need no second pass",
        ),
        (
            config.granularity == "token",
            f"granularity: token and {latent}, for which no kernel of the plugin gathers tokens",
            "set granularity: block",
        ),
        (
            config.evict == "host",
            f"evict: host and {latent}, whose blocks no test recalls yet",
            "set evict: drop",
        ),
        (
            config.selects,
            f"select and {latent}, for which no kernel of the plugin decodes",
            "leave select out",
        ),
        (
            bool(vllm_config.model_config.is_hybrid) and vllm_config.speculative_config is not None,
            f"{latent} beside linear attention and speculative decoding, which no test runs",
            "leave --speculative-config out",
        ),
    ]


def sharing(config: KVPolicyConfig) -> list[Refusal]:
    """Refusals for models some of whose layers read the cache of another layer."""
    beside = "layers that share a cache, which no test runs"
    return [
        (
            len(config.classes) > 1,
            "layers that share a cache, whose heads can't be split",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        ),
        (config.context is not None, f"a context and {beside}", "leave context out for this model"),
        (config.reconstructs, f"kvzip and {beside}", "leave kvzip out; snapkv, h2o and keydiff need no second pass"),
        (config.evict == "host", f"evict: host and {beside}", "set evict: drop"),
        (config.selects, f"select and {beside}", "leave select out"),
    ]


class Kind(NamedTuple):
    """Layers without holes that stand beside full attention.

    Attributes:
        what: their name.
        alone: why a model of such layers alone is not served.
        positions: why keys of full attention can't be rotated beside them.
        lacks: what the prefix cache lacks to repeat a prompt.
    """

    what: str
    alone: str
    positions: str
    lacks: str


WINDOWS = Kind(
    "sliding-window attention",
    "which recycle their blocks themselves",
    "where only layers with windows may have positions",
    "blocks of windows",
)
STATES = Kind(
    "Mamba, linear attention or short convolutions",
    "whose states do not grow",
    "whose states keep the positions that keys lose",
    "states",
)


def beside(vllm_config: Any, config: KVPolicyConfig, kind: Kind, others: bool = True) -> list[Refusal]:
    """Refusals for models with layers of a kind; `others`: whether some layers have full attention."""
    beside = f"{kind.what} beside full attention"
    return [
        (
            not others,
            f"{kind.what} in all layers, {kind.alone}",
            "there is nothing to evict; leave --kv-policy out for this model",
        ),
        (
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            f"{beside} without vLLM's hybrid KV cache manager: all layers share one block table then",
            "leave --disable-hybrid-kv-cache-manager out",
        ),
        (
            len(config.classes) > 1,
            f"{beside}, because it puts heads into pages that belong to no layer",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        ),
        (config.context is not None, f"{beside}, {kind.positions}", "leave context out for this model"),
        (
            config.reconstructs,
            f"{beside}, where the prefix cache lacks {kind.lacks} to repeat a prompt",
            "leave kvzip out; snapkv, h2o and keydiff need no second pass",
        ),
    ]


def beside_states(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """Refusals for models with states. vLLM turns its hybrid manager off for some connectors, so these come first."""
    why = f"beside {STATES.what}, which no test has run"
    return [
        (config.selects, f"select {why}", "leave select out"),
        (
            vllm_config.kv_transfer_config is not None,
            f"a KV connector {why}",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        *beside(vllm_config, config, STATES),
    ]


def slides(vllm_config: Any) -> bool:
    """Whether some layers have windows that hide tokens, by the configuration; all have if the cache's has one."""
    model = vllm_config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    some = model.get_sliding_window() if "sliding_attention" in kinds else None
    return windows.bounds(some, vllm_config) or windows.bounds(vllm_config.cache_config.sliding_window, vllm_config)

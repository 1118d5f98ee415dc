"""Puts the backends of a loaded model's attention layers behind views.

vLLM asks each layer for its backend when it makes KV cache specs and metadata builders, both after the model is loaded.
The plugin replaces the backend of each layer then. That changes one engine's layers and no registry, and works for
every backend.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, replace_as

from ...compute.attention.backends import ops_for
from ...compute.attention.ops import BackendOps
from ...compute.graphs import Attends
from ...compute.group import GroupRuntime
from ...compute.kernel_blocks import whole_blocks
from ...compute.runtime import EvictionRuntime
from ...compute.shape import Shape
from ...compute.store import Store
from ...config import STREAMING, KVPolicyConfig, KVPolicyError
from ...config.features import READ_OF_LAYERS, READ_OF_SOME, UNREAD, reads_keys
from ...core.layout import Layout
from ...environment import decode_kernel
from ...policies import RUNNING
from ..engine.spec import EvictableSpec, most_held
from ..seams import become, replaces
from ..start import advice, attending, drafters, windows
from ..start.capabilities import of_layers, refuse
from ..start.capabilities.server import Layers
from ..start.versions import import_moved
from . import flash
from .backend import PLACE, drafting_backend, resident_backend, working_impl
from .latents import latent_types, name_as_others, working_latent
from .split import part_of, split_impl

_SPECS = "vllm.v1.core.kv_cache_utils"
_get_kv_cache_groups_uniform_page_size = import_moved(_SPECS, "_get_kv_cache_groups_uniform_page_size")
unify_kv_cache_spec_page_size = import_moved(_SPECS, "unify_kv_cache_spec_page_size")

#: Attribute of a layer whose heads are split that holds its `LayerPart`s.
PARTS = "kv_evict_parts"


@replaces(
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    methods="get_attn_backend get_kv_cache_spec",
    why="stands in for the heads of many layers",
    remove_when="vLLM has KV groups of heads",
)
class HeadSlots(AttentionLayerBase):
    """A stand-in layer whose pages hold heads of many layers: vLLM gives one cache to one layer name.

    Args:
        spec: of the pages.
        backend: attention backend of the layers.
        like: one of these layers, which are alike in what builders ask for.
    """

    def __init__(self, spec: EvictableSpec, backend: type, like: Attention) -> None:
        self.spec, self.backend, self.num_heads, self.impl = spec, backend, like.num_heads, like.impl

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> EvictableSpec:
        return self.spec


def install(
    vllm_config: VllmConfig,
    config: KVPolicyConfig,
    model: torch.nn.Module,
    specs: Mapping[str, KVCacheSpec] | None = None,
) -> EvictionRuntime:
    """Put all full attention layers of the model behind one runtime, with a `GroupRuntime` for each KV group.

    Layers with sliding windows, chunks or states keep vLLM's backend.

    Args:
        vllm_config: the worker's.
        config: the server's policy.
        model: the loaded model.
        specs: vLLM's own specs of all layers, by which it groups them; needed if some layers have no full attention.

    Raises:
        KVPolicyError: a layer cannot be served (see `capabilities`).
    """
    every = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    states = [name for name, layer in every.items() if isinstance(layer, MambaBase)]
    for name, layer in every.items():
        if type(layer) in latent_types():
            name_as_others(layer)
        elif type(layer) not in (Attention, ChunkedLocalAttention) and name not in states:
            raise KVPolicyError(f"{name} is a {type(layer).__name__} layer: KV policies need plain attention layers")
    drafting = drafters.mark(vllm_config, model, every)
    layers = _evictable(vllm_config)
    sharing = {
        name: layer.kv_sharing_target_layer_name for name, layer in (layers | drafting).items() if _shares(layer)
    }
    others = len(layers) + len(states) + len(drafting) < len(every)
    refuse.check_layers(vllm_config, config, Layers(bool(layers), others, bool(states), bool(sharing)))
    drafters.check_states(vllm_config, {name: every[name] for name in states})
    for name, layer in layers.items():
        of_layers.check_layer(name, layer, config, vllm_config)
    drafters.check(drafting, next(iter(layers.values())))
    # The block size is final here; it may have changed since the configuration was checked.
    heads, longest = attending.kv_heads(vllm_config.model_config), vllm_config.model_config.max_model_len
    names, block_bytes = [[name for name in every if name not in sharing]], 0
    block_size = vllm_config.cache_config.block_size
    if len(layers) + len(drafting) < len(every):
        names, block_size, block_bytes = _grouped(config, layers, dict(specs or {}))
        of_layers.check_groups(config, len(names))
        drafters.check_groups(drafting.keys() - sharing.keys(), names)
    config.check(block_size, len(layers), min(heads), longest, vllm_config.max_in_flight_tokens)
    placed, attended = attending.layout(vllm_config, config), set[Any]()
    # vLLM makes blocks of hybrids as large as states; kernels may read smaller ones.
    ops = _ops(next(iter(layers.values())).attn_backend.get_name(), block_size if states else None)
    if placed is not None:
        of_layers.check_alike(layers, [sum(place.heads for place in places) for places in placed.places[0]])
        return _split(vllm_config, config, layers, placed, ops, attended)
    if not refuse.measures_mass(vllm_config):
        config = config.without_mass()
    measures_in_graphs, in_graphs = _scratch(vllm_config, config, layers, ops, block_size)
    readers = [(every[name], target) for name, target in sharing.items()]
    groups = [
        _whole(
            vllm_config,
            config,
            {name: every[name] for name in group},
            readers,
            ops,
            attended,
            in_graphs,
            block_size,
        )
        for group in names
    ]
    for group in groups:
        group.source.loads = vllm_config.kv_transfer_config is not None
        for part in group.parts:
            part.loaded(vllm_config, model, layers)
    return EvictionRuntime(
        groups,
        ops,
        measures_in_graphs=measures_in_graphs,
        names=names,
        block_bytes=block_bytes,
        speculates=vllm_config.speculative_config is not None,
        ahead=bool(vllm_config.scheduler_config.async_scheduling),
        attended=attended,
    )


def _ops(backend: str, block_size: int | None) -> BackendOps:
    """Return the plugin's operations for a backend; `block_size` as `ops_for` takes it."""
    ops = ops_for(backend, block_size)
    if backend in flash.MODULES:
        vars(ops)["capture_lse"] = partial(flash.capture_lse, backend)
    return ops


def _evictable(vllm_config: VllmConfig, drafting: bool = False) -> dict[str, Attention]:
    """Return the model's layers without windows and chunks, by name: the layers that policies work on.

    Layers that read another layer's cache are among them. `drafting`: the drafter's layers instead.
    """
    layers = get_layers_from_vllm_config(vllm_config, (Attention, *latent_types()))
    plain = ((name, layer) for name, layer in layers.items() if not windows.recycles(layer))
    return {name: layer for name, layer in plain if hasattr(layer, drafters.DRAFTS) is drafting}


def backend_name(vllm_config: VllmConfig) -> str:
    """Return the name of the attention backend of the layers that policies work on."""
    return next(iter(_evictable(vllm_config).values())).attn_backend.get_name()


def _shares(layer: Any) -> bool:
    """Return whether a layer has no cache and reads another layer's."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def _grouped(
    config: KVPolicyConfig, layers: Mapping[str, Attention], specs: dict[str, KVCacheSpec]
) -> tuple[list[list[str]], int, int]:
    """Return names of `layers` by vLLM's future KV groups, tokens of their blocks, and bytes of a block of the pool.

    vLLM makes groups of equally many layers, each with one kind of layers: full attention, windows of one size, states
    of one shape. There may be several of each. Layers with smaller pages get larger blocks, or padded pages.
    """
    specs = unify_kv_cache_spec_page_size(specs)
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    names = [group.layer_names for group in groups if group.layer_names[0] in layers]
    block_size = of_layers.check_blocks(config, {specs[name].block_size for name in layers.keys() & specs.keys()})
    page = next(iter(specs.values())).page_size_bytes
    return names, block_size, max(len(group.layer_names) for group in groups) * page


def _whole(
    vllm_config: VllmConfig,
    config: KVPolicyConfig,
    named: dict[str, Attention],
    readers: Sequence[tuple[Attention, str]],
    ops: BackendOps,
    attended: set[Any],
    in_graphs: int,
    block_size: int,
) -> GroupRuntime:
    """Return the runtime of a KV group with all heads of its layers.

    Args:
        named: name -> layer, of the layers whose caches are in the group.
        readers: layers without a cache, and the name of the layer whose cache they read. It may be in any group.
        attended: gets each layer that has attended in a step.
        in_graphs: as returned by `_scratch`.
    """
    ((head_class, part),) = config.classes.items()
    drafting = [layer for layer in named.values() if hasattr(layer, drafters.DRAFTS)]
    layers = [layer for layer in named.values() if layer not in drafting]
    # A layer of the model that reads another's cache has its place: the mass of both adds up.
    at = {name: layers.index(layer) for name, layer in named.items() if layer in layers}
    reading = [(at[name], layer) for layer, name in readers if name in at]
    places = [*enumerate(layers), *(each for each in reading if not hasattr(each[1], drafters.DRAFTS))]
    passing = [*drafting, *(layer for _, layer in reading if hasattr(layer, drafters.DRAFTS))]
    backends = dict.fromkeys(layer.attn_backend for layer in (*passing, *(layer for _, layer in places)))
    latent = isinstance(layers[0], latent_types())

    def caches(of: Sequence[Attention]) -> Iterator[tuple[Attention, Any]]:
        """Yield each layer and its cache, by the pool's blocks."""
        for layer in of:
            yield layer, whole_blocks(layer.kv_cache, block_size) if latent else layer.kv_cache

    store = Store(ops, partial(caches, layers), partial(caches, drafting))
    group = _group(vllm_config, part, store, [layer.num_kv_heads for layer in layers], in_graphs, block_size)
    resident = {backend: resident_backend(backend, group, ops, head_class) for backend in backends}
    for layer in passing:
        layer.attn_backend = drafting_backend(resident[layer.attn_backend])
    # An MLA layer attends itself, by two methods of its `AttentionImpl`.
    attending = list(layers) if latent else [layer.impl for _, layer in places]
    make = partial(working_latent, block_size=block_size) if latent else working_impl
    working = {each: make(each, ops, attended) for each in set(map(type, attending))}
    for (place, layer), attends in zip(places, attending):
        layer.attn_backend = resident[layer.attn_backend]
        become(attends, working[type(attends)])
        setattr(layer.impl, PLACE, place)
        group.layers[layer] = layer.layer_name
    return group


def _split(
    vllm_config: VllmConfig,
    config: KVPolicyConfig,
    layers: dict[str, Attention],
    placed: Layout,
    ops: BackendOps,
    attended: set[Any],
) -> EvictionRuntime:
    """Return the runtime of layers whose heads lie in several KV groups; loading has put the heads in their order."""
    first, backend = next(iter(layers.values())), next(iter(layers.values())).attn_backend
    rank = placed.places[get_tp_group().rank_in_group]
    groups, pages, block_size = [], [], vllm_config.cache_config.block_size
    measures_in_graphs, in_graphs = _scratch(vllm_config, config, layers, ops, block_size)
    for index, head_class in enumerate(placed.groups):
        name = f"kv_evict.{head_class}.{index}"
        store = Store(ops, partial(_caches_of, layers, name))
        heads, numbers = [], []
        for number, layer in enumerate(rank):
            for place in (place for place in layer if place.group == index):
                heads.append(place.heads)
                numbers.append(number)
        group = _group(vllm_config, config.of_class(head_class), store, heads, in_graphs, block_size, numbers)
        resident = resident_backend(backend, group, ops, head_class, first.num_kv_heads)
        spec = _spec(vllm_config, config, first, placed.width, head_class, index)
        slots = HeadSlots(spec, resident, first)
        vllm_config.compilation_config.static_forward_context[name] = slots
        groups.append(group)
        pages.append(name)
    working = working_impl(type(first.impl), ops, attended)
    counts: Counter[int] = Counter()
    for layer, places in zip(layers.values(), rank, strict=True):
        parts, head = [], 0
        for place in places:
            holder = vllm_config.compilation_config.static_forward_context[pages[place.group]]
            where = head, place.heads, place.first, counts[place.group]
            parts.append(part_of(layer, pages[place.group], holder, ops.heads_dim, *where))
            become(parts[-1].impl, working)
            counts[place.group] += 1
            head += place.heads
            groups[place.group].layers[layer] = layer.layer_name
        setattr(layer, PARTS, parts)
        become(layer.impl, split_impl(type(layer.impl), parts, ops, attended))
        # vLLM sees a layer without a cache of its own, which reads the cache and metadata of its first part.
        layer.kv_sharing_target_layer_name = parts[0].pages
        layer.attn_backend = vllm_config.compilation_config.static_forward_context[parts[0].pages].backend
    speculates = vllm_config.speculative_config is not None
    names = [[page] for page in pages]
    return EvictionRuntime(groups, ops, pages, measures_in_graphs, names, speculates=speculates, attended=attended)


def _scratch(
    vllm_config: VllmConfig, config: KVPolicyConfig, layers: dict[str, Attention], ops: BackendOps, block_size: int
) -> tuple[Attends | None, int]:
    """Choose the size of the decode kernel's scratch, and how full CUDA graphs measure.

    Returns:
        What attends in graphs that measure, and resident blocks of the longest request in them; None and 0 if no graph
        measures.
    """
    if not ops.compiles:  # on a CPU kernels take their own scratch
        return None, 0
    measures, requests = bool(config.statistics & RUNNING), vllm_config.scheduler_config.max_num_seqs
    decodes = decode_kernel() != "stock" and all(ops.fit(layer).decodes for layer in layers.values())
    decodes &= measures or len(config.classes) > 1
    latent = isinstance(next(iter(layers.values())), latent_types())
    # The kernel decodes one query a request, and graphs of a server that speculates have one for each draft beside it.
    own, queries = decodes and vllm_config.speculative_config is None, 1 + vllm_config.num_speculative_tokens
    # vLLM captures no full graphs of a model with chunks of local attention.
    chunks = get_layers_from_vllm_config(vllm_config, ChunkedLocalAttention)
    largest = (not chunks and vllm_config.compilation_config.max_cudagraph_capture_size) or 0
    in_graphs = ops.scratch.size_for(
        # Beside vLLM's kernel it is launched for requests that are measured query by query. Of latents the mass beside
        # vLLM's kernel takes scratch.
        requests if decodes or "pivots" in config.statistics or (latent and (measures or config.runs_shadows)) else 0,
        min(requests, -(-largest // queries)) if own or measures else 0,
        max(layer.num_heads for layer in layers.values()),
        block_size,
        max(most_held(vllm_config, part, block_size) for part in config.classes.values()),
        any(part.granularity == "token" for part in config.classes.values()) and measures,
    )
    if not in_graphs:
        return None, 0
    return Attends.OWN if own else Attends.BESIDE, in_graphs


def _group(
    vllm_config: VllmConfig,
    config: KVPolicyConfig,
    store: Store,
    heads: list[int],
    in_graphs: int,
    block_size: int,
    places: list[int] | None = None,
) -> GroupRuntime:
    """Make a runtime; `heads`: KV heads of each of its layers on this rank; `in_graphs` as of `_scratch`; `places`:
    numbers of the layers, if some layers of the model are not among them."""
    heads, parallel = heads or [1], vllm_config.parallel_config
    of_stages = None
    if parallel.pipeline_parallel_size > 1:
        every = attending.kv_heads(vllm_config.model_config)
        of_stages = [max(each // parallel.tensor_parallel_size, 1) for each in every]
    shape = Shape(
        block_size=block_size,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        kv_heads=max(heads),
        layers=len(heads),
        device=torch.device(vllm_config.device_config.device_type),
        heads=of_stages or heads,
        places=places or (),
        graph_blocks=in_graphs,
        graph_queries=1 + vllm_config.num_speculative_tokens,
        most_held=most_held(vllm_config, config, block_size),
        **sizes(vllm_config),
    )
    return GroupRuntime(config, shape, store)


def _spec(
    vllm_config: VllmConfig, config: KVPolicyConfig, layer: Attention, width: int, head_class: str, part: int
) -> EvictableSpec:
    """Return the spec of pages with `width` head slots, each like a head of `layer`."""
    own: dict[str, Any] = {"head_class": head_class}
    if head_class == STREAMING:
        limits = config.of_class(head_class).limits(vllm_config.cache_config.block_size, 1)
        assert limits is not None  # streaming heads have a budget
        own |= {"sink": limits.sink, "window": limits.budget - limits.sink}
    else:
        # vLLM puts as many layers into a group as the rarest spec has. Streaming groups share one spec, because they
        # have to hit together.
        own["part"] = part
    spec = layer.get_kv_cache_spec(vllm_config)
    return replace_as(spec, EvictableSpec, num_kv_heads=width, backend=layer.attn_backend.get_name(), **own)


def _caches_of(layers: dict[str, Attention], pages: str) -> Iterator[tuple[Attention, Any]]:
    """Yield each layer with heads in a KV group, and the cache of these heads."""
    for layer in layers.values():
        for part in getattr(layer, PARTS):
            if part.pages == pages:
                yield layer, part.kv_cache


def settle(
    vllm_config: VllmConfig, config: KVPolicyConfig, runtime: EvictionRuntime, kv_cache_config: KVCacheConfig
) -> None:
    """Find the plugin's groups among vLLM's KV groups, and choose the kernel that attends to requests with holes.

    The caller waits until metadata builders exist, because these fix the packing of keys.

    Raises:
        KVPolicyError: the score pass cannot read a layer's keys; names the reason.
    """
    given = [group.layer_names for group in kv_cache_config.kv_cache_groups]
    layers = _evictable(vllm_config)
    holders = layers.keys() | set(runtime.pages)
    runtime.numbers = [number for number, names in enumerate(given) if names[0] in holders]
    made = [kv_cache_config.kv_cache_groups[number].kv_cache_spec for number in runtime.numbers]
    sizes = [spec.block_size for spec in made]
    if [given[number] for number in runtime.numbers] != runtime.names or set(sizes) != {runtime.groups[0].block_size}:
        raise KVPolicyError(
            f"vLLM put full attention into KV groups {given} with blocks of {sizes} tokens; expected {runtime.names} "
            f"and {runtime.groups[0].block_size} tokens; set VLLM_KV_CACHE_LAYOUT to a layout of whole layers, or "
            "leave --kv-policy out for this model"
        )
    ops, decodes = runtime.ops, decode_kernel() != "stock"
    read = reads_keys(config)
    for name, layer in (layers | _evictable(vllm_config, drafting=True)).items():
        if not (reason := ops.fit(layer).unreadable):
            continue
        if read:
            own = "" if advice.is_own_dtype(vllm_config) else f"{advice.own_dtype(vllm_config)}, or "
            raise KVPolicyError(f"{name} {reason}: use {own}{UNREAD}")
        for group in runtime.groups:
            group.leave_out()
    fits = [ops.fit(layer) for layer in layers.values()]
    decodes &= all(fit.decodes for fit in fits)
    if not decodes and (READ_OF_LAYERS.of(config) or READ_OF_SOME.of(config)):
        raise KVPolicyError(
            "read: the plugin's decode kernel does not run here (VLLM_EVICT_DECODE=stock, a CPU without AVX2, ALiBi "
            "slopes), so all layers read alike: leave dense_layers, a list of leaders and policies that score or split "
            "heads out"
        )
    runtime.settle(decodes, all(fit.outruns for fit in fits), _is_exact(vllm_config, config, ops))


def _is_exact(vllm_config: VllmConfig, config: KVPolicyConfig, ops: BackendOps) -> bool:
    """Return whether the backend's kernel attends for all requests without holes.

    `exact` of any class of heads decides. The default on a CPU is True if other requests may read computed blocks, and
    under pressure. The default on a device is False, since with True measured decodes without holes replay no full CUDA
    graph.
    """
    given = [part.exact for part in config.classes.values() if part.exact is not None]
    if given:
        return any(given)
    if ops.compiles:
        return False
    shares = vllm_config.cache_config.enable_prefix_caching or vllm_config.kv_transfer_config is not None
    return shares or config.when == "pressure"


def sizes(vllm_config: VllmConfig) -> dict[str, int]:
    """Return what `Shape` has of the widest layer, `head_size`, `itemsize` and `queries`, and `step_tokens`."""
    layers = _evictable(vllm_config).values()
    dims, itemsize = max(layer.impl.head_size for layer in layers), vllm_config.model_config.dtype.itemsize
    heads = max(layer.num_heads for layer in layers)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return {"head_size": dims, "itemsize": itemsize, "queries": tokens * heads * dims * itemsize, "step_tokens": tokens}


def block_bytes(runtime: EvictionRuntime, specs: dict[str, KVCacheSpec]) -> int:
    """Return the bytes of one block of the pool: in all layers, or in one KV group if there are several."""
    pages = [spec.page_size_bytes for spec in specs.values()]
    return runtime.block_bytes or (max(pages) if runtime.pages else sum(pages))


def warm_up(vllm_config: VllmConfig, runtime: EvictionRuntime, tables: Sequence[torch.Tensor]) -> None:
    """Compile the plugin's kernels, once `settle` has chosen; `tables` are vLLM's block tables of the KV groups."""
    # This module needs Triton.
    from ...compute.attention.warmup import LayerHeads, warm_up

    layers, group_of = [], {name: group for group, names in enumerate(runtime.names) for name in names}
    for name, layer in _evictable(vllm_config).items():
        if not runtime.pages and _shares(layer):
            name = layer.kv_sharing_target_layer_name
        cache = layer.kv_cache
        if isinstance(layer, latent_types()):
            cache = whole_blocks(cache, runtime.groups[0].block_size).unsqueeze(1)
        every = slice(0, layer.num_heads)
        whole = [LayerHeads(group_of[name], every, cache, getattr(layer.impl, PLACE))] if name in group_of else []
        parts = (
            LayerHeads(group_of[part.pages], part.query_heads, part.kv_cache) for part in getattr(layer, PARTS, ())
        )
        layers.append((layer, [*whole, *parts]))
    queries = vllm_config.scheduler_config.max_num_batched_tokens
    blocks = -(-vllm_config.model_config.max_model_len // runtime.groups[0].block_size)
    warm_up(runtime, layers, tables, queries, blocks)

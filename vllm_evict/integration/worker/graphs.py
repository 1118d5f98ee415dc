"""Full CUDA graphs: two for each batch size, one of which measures (`compute.graphs.Attends`).

vLLM captures a graph for each batch size and keeps graphs by descriptors. Graphs that measure have descriptors of a
class of their own, so both kinds lie in one table. The plugin chooses between them where vLLM chooses among graphs. A
step that fits neither runs like a batch that is not all decodes. Decodes with `k` drafts have `1 + k` queries each.

Data-parallel ranks of a dense model are separate engines. Ranks of a mixture of experts agree on the size and the mode
of each step (V1: `coordinate_batch_across_dp`, V2: `sync_cudagraph_and_dp_padding`). So a rank votes for a mode that it
can run. Each rank chooses by itself which of the two graphs of that size it replays.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from ...compute.graphs import Attends
from ...compute.runtime import EvictionRuntime
from ..seams import become, replaces


@dataclass(frozen=True)
class OwnBatch(BatchDescriptor):
    """V1: descriptor of a graph that measures."""


@replaces(
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
    methods="initialize_cudagraph_keys dispatch",
    why="V1: two graphs for each batch size; the dispatcher that a runner has made becomes one of this class",
    remove_when="vLLM lets backends add descriptors of graphs, and choose one",
)
class EvictionDispatcher(CudagraphDispatcher):
    """V1: keeps descriptors of both kinds of graphs, and chooses one for each step."""

    kv_evict: EvictionRuntime

    def initialize_cudagraph_keys(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_cudagraph_keys(*args, **kwargs)
        if self.kv_evict.measures_in_graphs is not None:
            full = self.cudagraph_keys[CUDAGraphMode.FULL]
            full.update([_as(OwnBatch, batch) for batch in full])

    def dispatch(self, *args: Any, invalid_modes: Any = None, **kwargs: Any) -> tuple[CUDAGraphMode, BatchDescriptor]:
        mode, batch = super().dispatch(*args, invalid_modes=invalid_modes, **kwargs)
        attends = self.kv_evict.choose_graph(mode == CUDAGraphMode.FULL)
        if mode == CUDAGraphMode.FULL and attends is None:
            return super().dispatch(*args, invalid_modes={CUDAGraphMode.FULL, *(invalid_modes or ())}, **kwargs)
        return mode, _as(OwnBatch, batch) if mode == CUDAGraphMode.FULL and attends is not Attends.STOCK else batch


def install_v1(runner: Any, runtime: EvictionRuntime) -> None:
    """Before the runner's KV cache is initialised."""
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.kv_evict = runtime
    become(dispatcher, EvictionDispatcher)
    capture_v1.on(runner, runtime)


@replaces(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
    why="V1: a graph is captured with the work that it will be replayed with",
    remove_when="vLLM captures a graph for each descriptor, and tells backends which one",
)
def capture_v1(capture: Callable[..., None], runtime: EvictionRuntime) -> Callable[..., None]:
    def _warmup_and_capture(
        desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> None:
        attends = _captured(runtime, cudagraph_runtime_mode, type(desc) is OwnBatch)
        with runtime.capturing(attends), runtime.trying(graph=True) if attends else nullcontext():
            capture(desc, cudagraph_runtime_mode, *args, **kwargs)

    return _warmup_and_capture


def install_v2(runner: Any, runtime: EvictionRuntime) -> None:
    """Before the runner's KV cache is initialised."""
    # vLLM has this module only with Triton.
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

    @dataclass(frozen=True)
    class OwnExecution(BatchExecutionDescriptor):
        """Descriptor of a graph that measures."""

    @replaces(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        methods="capture",
        why="V2: a graph is captured with the work that it will be replayed with",
        remove_when="vLLM captures a graph for each descriptor, and tells backends which one",
    )
    class Capturing(CudaGraphManager):
        """A second base, after `ModelCudaGraphManager`, which makes a graph's inputs."""

        def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            def create(desc: BatchExecutionDescriptor, *args: Any, **kwargs: Any) -> Callable[[CUDAGraphMode], None]:
                attends = _captured(runtime, desc.cg_mode, type(desc) is OwnExecution)
                with runtime.capturing(attends):
                    forward = create_forward_fn(desc, *args, **kwargs)

                def captured(mode: CUDAGraphMode) -> None:
                    with runtime.capturing(attends), runtime.trying(graph=True) if attends else nullcontext():
                        forward(mode)

                return captured

            super().capture(create, *args, **kwargs)

    @replaces(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        methods="dispatch",
        why="V2: two graphs for each batch size; the manager that a runner has made becomes one of this class",
        remove_when="vLLM lets backends add descriptors of graphs, and choose one",
    )
    class EvictionGraphs(ModelCudaGraphManager, Capturing):
        """Keeps graphs by descriptors, and chooses one for each step."""

        def dispatch(
            self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
        ) -> BatchExecutionDescriptor:
            desc = super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            attends = runtime.choose_graph(desc.cg_mode == CUDAGraphMode.FULL)
            return desc if attends in (None, Attends.STOCK) else _as(OwnExecution, desc)

    if runner.speculator is not None:
        draft_without_full_graphs.on(runner.speculator)
    gather_batch.on(runner, runtime)
    prepare_attn.on(runner.model_state, runtime)
    initialize_graphs.on(runner, runner, runtime, EvictionGraphs, OwnExecution)


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
    why="V2: a rank whose step fits no graph votes for none",
    remove_when="vLLM lets backends choose among graphs before ranks agree",
)
def gather_batch(gather: Callable[..., Any], runtime: EvictionRuntime) -> Callable[..., Any]:
    def gather_batch_req_state(*args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        batch, uniform_token_count = gather(*args, **kwargs)
        # Set here, not in `dispatch`, so that other data-parallel ranks get it: all run without a full graph.
        if uniform_token_count is not None and runtime.graph is None:
            uniform_token_count = None
        return batch, uniform_token_count

    return gather_batch_req_state


@replaces(
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
    why="V2: ranks may have agreed on no graph",
    remove_when="vLLM tells backends the mode of a step before they build metadata",
)
def prepare_attn(prepare: Callable[..., Any], runtime: EvictionRuntime) -> Callable[..., Any]:
    def prepare_attn(input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any) -> Any:
        if cudagraph_mode != CUDAGraphMode.FULL:
            runtime.choose_graph(False)  # ranks may have agreed on no graph after dispatch
        return prepare(input_batch, cudagraph_mode, *args, **kwargs)

    return prepare_attn


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
    why="V2: the manager of graphs that the runner makes here gets descriptors of both kinds",
    remove_when="vLLM lets backends add descriptors of graphs, and choose one",
)
def initialize_graphs(
    initialize: Callable[..., Any], runner: Any, runtime: EvictionRuntime, graphs: type, own: type
) -> Callable[..., Any]:
    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        manager = runner.cudagraph_manager
        become(manager, graphs)
        full = manager._capture_descs.get(CUDAGraphMode.FULL, [])
        if runtime.measures_in_graphs is not None:
            # Largest first, both graphs of a size together: vLLM's profiling extrapolates from the first two graphs.
            full[:] = [each for desc in full for each in (desc, _as(own, desc))]
        return result

    return initialize_kv_cache


@replaces(
    "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.init_cudagraph_manager",
    why="V2's drafter captures piecewise graphs at most, as V1's does: its passes read views at several addresses",
    remove_when="the plugin's views of a drafter's passes have fixed addresses",
)
def draft_without_full_graphs(init: Callable[[CUDAGraphMode], None]) -> Callable[[CUDAGraphMode], None]:
    def init_cudagraph_manager(cudagraph_mode: CUDAGraphMode) -> None:
        piecewise = cudagraph_mode.has_piecewise_cudagraphs()
        init(CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE)

    return init_cudagraph_manager


def _captured(runtime: EvictionRuntime, mode: CUDAGraphMode, measures: bool) -> Attends | None:
    if mode != CUDAGraphMode.FULL:
        return None
    return runtime.measures_in_graphs if measures else Attends.STOCK


def _as(cls: type, descriptor: Any) -> Any:
    return cls(**{field.name: getattr(descriptor, field.name) for field in fields(descriptor)})

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
from functools import wraps
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from ...compute.graphs import Attends
from ...compute.runtime import EvictionRuntime


@dataclass(frozen=True)
class OwnBatch(BatchDescriptor):
    """V1: descriptor of a graph that measures."""


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
    dispatcher, capture = runner.cudagraph_dispatcher, runner._warmup_and_capture
    dispatcher.kv_evict = runtime
    dispatcher.__class__ = EvictionDispatcher

    @wraps(capture)
    def _warmup_and_capture(
        desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> None:
        attends = _captured(runtime, cudagraph_runtime_mode, type(desc) is OwnBatch)
        with runtime.capturing(attends), runtime.trying(graph=True) if attends else nullcontext():
            capture(desc, cudagraph_runtime_mode, *args, **kwargs)

    runner._warmup_and_capture = _warmup_and_capture


def install_v2(runner: Any, runtime: EvictionRuntime) -> None:
    """Before the runner's KV cache is initialised."""
    # vLLM has this module only with Triton.
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

    @dataclass(frozen=True)
    class OwnExecution(BatchExecutionDescriptor):
        """Descriptor of a graph that measures."""

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

    class EvictionGraphs(ModelCudaGraphManager, Capturing):
        """Keeps graphs by descriptors, and chooses one for each step."""

        def dispatch(
            self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
        ) -> BatchExecutionDescriptor:
            desc = super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            attends = runtime.choose_graph(desc.cg_mode == CUDAGraphMode.FULL)
            return desc if attends in (None, Attends.STOCK) else _as(OwnExecution, desc)

    if runner.speculator is not None:
        _leave_drafter_without_full_graphs(runner.speculator)
    gather, initialize = runner.gather_batch_req_state, runner.initialize_kv_cache
    prepare = runner.model_state.prepare_attn

    @wraps(gather)
    def gather_batch_req_state(*args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        batch, uniform_token_count = gather(*args, **kwargs)
        # Set here, not in `dispatch`, so that other data-parallel ranks get it: all run without a full graph.
        if uniform_token_count is not None and runtime.graph is None:
            uniform_token_count = None
        return batch, uniform_token_count

    @wraps(prepare)
    def prepare_attn(input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any) -> Any:
        if cudagraph_mode != CUDAGraphMode.FULL:
            runtime.choose_graph(False)  # ranks may have agreed on no graph after dispatch
        return prepare(input_batch, cudagraph_mode, *args, **kwargs)

    @wraps(initialize)
    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        manager = runner.cudagraph_manager
        manager.__class__ = EvictionGraphs
        full = manager._capture_descs.get(CUDAGraphMode.FULL, [])
        if runtime.measures_in_graphs is not None:
            # Largest first, both graphs of a size together: vLLM's profiling extrapolates from the first two graphs.
            full[:] = [each for desc in full for each in (desc, _as(OwnExecution, desc))]
        return result

    runner.gather_batch_req_state, runner.initialize_kv_cache = gather_batch_req_state, initialize_kv_cache
    runner.model_state.prepare_attn = prepare_attn


def _leave_drafter_without_full_graphs(speculator: Any) -> None:
    """Have V2's drafter capture piecewise graphs at most, as V1's does: its passes read views at several addresses."""
    init = speculator.init_cudagraph_manager

    @wraps(init)
    def init_cudagraph_manager(mode: CUDAGraphMode) -> None:
        init(CUDAGraphMode.PIECEWISE if mode.has_piecewise_cudagraphs() else CUDAGraphMode.NONE)

    speculator.init_cudagraph_manager = init_cudagraph_manager


def _captured(runtime: EvictionRuntime, mode: CUDAGraphMode, measures: bool) -> Attends | None:
    if mode != CUDAGraphMode.FULL:
        return None
    return runtime.measures_in_graphs if measures else Attends.STOCK


def _as(cls: type, descriptor: Any) -> Any:
    return cls(**{field.name: getattr(descriptor, field.name) for field in fields(descriptor)})

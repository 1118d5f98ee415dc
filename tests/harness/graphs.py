"""CUDA graphs without a GPU: what is launched during a capture is written down, and launched again at each replay.

A launch is an ATen or custom op that runs, a Triton kernel (under the interpreter), or a function that stands in for a
compiled kernel (`kernel`). A replay runs no Python of the model, of vLLM or of a backend. As with CUDA graphs:

- nothing has run when a capture ends: memory from outside of it is as it was before;
- Python's numbers and a launch's grid are what they were at capture;
- memory of the capture's own is the graph's, and holds garbage (every byte 0xFF, a NaN) before each replay;
- memory from outside is not kept alive: a replay raises where it is gone;
- reading device memory on the host, shapes that depend on data, and copies from unpinned host memory are refused.

Everything is taken for device memory. So `.to("cpu")` passes unseen, and so does pinned memory. Random numbers are not
covered: they are refused too. A graph's memory is not shared with other graphs, as in a pool it may be. Memory from
outside counts as there while anything refers to it, a cycle that waits for the garbage collector included.
"""

import functools
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

#: The interpreter's copies of arguments from and to a device, which keep them alive until garbage is collected.
_IN_PLACE = {"_init_args_hst": lambda _, *args: args, "_restore_args_dev": lambda *_: None}
#: The capture that is under way.
_current: "_Capture | None" = None
#: Whether a worker captures its graphs, on requests that are made up: all their tokens are in vLLM's null block.
made_up = False


class CaptureError(RuntimeError):
    """An operation that a CUDA graph can't hold, or would hold wrongly."""


class Memory:
    """A storage as a graph knows it: its own, or a weak reference to one from outside."""

    def __init__(self, storage, own):
        self.storage = storage if own else None
        self.weak = StorageWeakRef(storage)
        self.address = storage.data_ptr()

    def find(self):
        found = self.storage
        if found is None:
            found = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if found is None or found.data_ptr() != self.address:
            raise CaptureError("it was allocated outside of the capture, and is gone")
        return found


@dataclass(frozen=True)
class Place:
    """Where a launch reads or writes: a tensor without its memory."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple
    stride: tuple
    offset: int

    def tensor(self):
        return torch.empty(0, dtype=self.dtype).set_(self.memory.find(), self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Launch:
    """One node of a graph: `function` of `args` and `kwargs`, whose tensors are `Place`s, and new tensors it returns."""

    name: str
    function: object
    args: tuple
    kwargs: dict
    returned: dict[int, Place]

    def __call__(self):
        try:
            args, kwargs = tree_map_only(Place, Place.tensor, (self.args, self.kwargs))
        except CaptureError as error:
            raise CaptureError(f"memory of {self.name}: {error}") from None
        results = tree_flatten(self.function(*args, **kwargs))[0]
        for index, place in self.returned.items():
            place.tensor().copy_(results[index])


class Graph:
    """In the place of torch.cuda.CUDAGraph.

    Attributes:
        launches: in order.
        replays: so far.
    """

    def __init__(self, keep_graph=False):
        self.launches: list[Launch] = []
        self.replays = 0
        self._memory: dict[int, Memory] = {}

    @property
    def names(self):
        """Launches of a replay, in order: Triton kernels and stand-ins by name, ops as "aten.mm"."""
        return [launch.name for launch in self.launches]

    def replay(self):
        assert _current is None, "a replay inside of a capture"
        self._forget()
        with torch.inference_mode():
            for launch in self.launches:
                launch()
        self.replays += 1

    def _forget(self):
        for memory in self._memory.values():
            if memory.storage is not None:
                torch.empty(0, dtype=torch.uint8).set_(memory.storage).fill_(255)


class _Capture(TorchDispatchMode):
    """Writes down what runs into a graph."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.memory = graph, graph._memory
        self.inside = False  # of a launch
        self._host: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        name = str(func).removesuffix(".default")
        _refuse(func, name, args)
        # Composite ops are their parts, and those written in Python what their Python runs.
        with self:
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            space, op = func._schema.name.split("::")
            for key in ("CPU", "CompositeExplicitAutograd"):
                if f"{space}/{op}/{key}" in torch.library._impls:
                    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            storage = args[0].untyped_storage()
            self._host[storage._cdata] = storage
            return func(*args, **kwargs)
        if op.startswith(("empty", "new_empty")):
            return self._own(func(*args, **kwargs))
        return self.launch(name, func, args, kwargs, func._schema)

    def launch(self, name, function, args, kwargs, schema=None):
        """Run `function`, and write it down unless it only makes views. Without a schema it may write to any argument."""
        if schema is not None and not schema.is_mutable and not schema.returns:
            schema = None  # it says too little
        self.inside = True
        try:
            places = tree_map_only(torch.Tensor, functools.partial(self._place, name, schema), (args, kwargs))
            for tensor in _written(args, kwargs, schema):
                memory = self.memory.get(tensor.untyped_storage()._cdata)
                if memory is not None and memory.storage is None:
                    self._before.setdefault(id(memory), (memory, memory.find().clone()))
            results = function(*args, **kwargs)
            returned = {
                index: self._place(name, schema, self._own(each))
                for index, each in enumerate(tree_flatten(results)[0])
                if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self.memory
            }
        finally:
            self.inside = False
        if returned or schema is None or schema.is_mutable:
            self.graph.launches.append(Launch(name, function, *places, returned))
        return results

    def end(self):
        for memory, content in self._before.values():
            memory.find().copy_(content)
        self.graph._forget()

    def _own(self, tensor):
        storage = tensor.untyped_storage()
        self.memory.setdefault(storage._cdata, Memory(storage, own=True))
        return tensor

    def _place(self, name, schema, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in self._host:
            if tensor.dim() == 0 and schema is not None and name != "aten.copy_":
                return tensor.clone()  # an op hands its kernel the number
            raise CaptureError(f"{name} during a capture: reads unpinned host memory, which Python or numpy data is in")
        memory = self.memory.setdefault(storage._cdata, Memory(storage, own=False))
        return Place(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _refuse(func, name, args):
    tags = set(func.tags)
    masked = name.startswith(("aten.index", "aten._index_put", "aten._unsafe_index"))
    if masked:
        tags.discard(torch.Tag.dynamic_output_shape)
        indices = args[1] if isinstance(args[1], (list, tuple)) else ()
        bools = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
        if bools and not ("index_put" in name and args[2].numel() == 1):
            tags.add(torch.Tag.dynamic_output_shape)
    if torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"{name} during a capture: reads device memory on the host")
    if torch.Tag.dynamic_output_shape in tags:
        raise CaptureError(f"{name} during a capture: the shape of its result depends on data")
    if torch.Tag.nondeterministic_seeded in tags:
        raise CaptureError(f"{name} during a capture: random numbers are not covered")


def _written(args, kwargs, schema):
    """Tensors that a launch may write to."""
    if schema is not None:
        named = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        args, kwargs = [named.get(each.name) for each in schema.arguments if each.is_write], {}
    return [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]


@contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode="global"):
    """In the place of torch.cuda.graph."""
    global _current
    assert _current is None and not graph.launches, "captures don't nest, and a graph is captured once"
    tape = _current = _Capture(graph)
    run = InterpretedFunction.run

    def launch(self, *args, grid, warmup, **kwargs):
        if warmup or tape.inside:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        baked = []
        once = (lambda meta: baked.append(grid(meta)) or baked[0]) if callable(grid) else grid

        def program(*args, **kwargs):
            with patch.multiple(GridExecutor, **_IN_PLACE):
                return run(self, *args, grid=baked[0] if baked else once, warmup=False, **kwargs)

        return tape.launch(self.__name__, program, args, kwargs)

    def refused(method):
        def read(self, *args, **kwargs):
            if not tape.inside:
                raise CaptureError(f"Tensor.{method.__name__} during a capture: reads device memory on the host")
            return method(self, *args, **kwargs)

        return read

    reads = {name: refused(getattr(torch.Tensor, name)) for name in ("tolist", "numpy", "cpu", "__array__")}
    try:
        with patch.object(InterpretedFunction, "run", launch), patch.multiple(torch.Tensor, **reads), tape:
            yield
    finally:
        tape.end()
        _current = None


def kernel(function):
    """A stand-in for a compiled kernel: one call is one launch, which may write to any of its arguments."""

    @functools.wraps(function)
    def launch(*args, **kwargs):
        if _current is None or _current.inside:
            return function(*args, **kwargs)
        return _current.launch(function.__name__, function, args, kwargs)

    return launch


class FullGraphs:
    """Full CUDA graphs of decode steps in vLLM's engines, captured at their start as a GPU's worker does it.

    Engines that are made with the arguments `options` have them: `engine(policy, **graphs.options)`.

    Attributes:
        captured: all graphs, in order.
        replayed: a graph for each replay, in order.
    """

    def __init__(self, sizes=(1, 2, 4)):
        modes = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(sizes)}
        self.options = {"enforce_eager": False, "compilation_config": modes}
        self.captured: list[Graph] = []
        self.replayed: list[Graph] = []

    @staticmethod
    def of(engine):
        """vLLM's own graphs of an engine, by its descriptor of the batch."""
        runner = engine.worker.model_runner
        if hasattr(runner, "cudagraph_manager"):
            return runner.cudagraph_manager.graphs
        entries = getattr(runner.model, "concrete_cudagraph_entries", {})
        return {key: entry.cudagraph for key, entry in entries.items()}

    @staticmethod
    def without(engine):
        """Context in which vLLM replays none of them."""
        runner = engine.worker.model_runner
        if hasattr(runner, "cudagraph_manager"):
            return patch.object(runner.cudagraph_manager, "_graphs_captured", False)
        return patch.object(runner.cudagraph_dispatcher, "keys_initialized", False)

    def install(self, monkeypatch):
        from vllm.compilation import cuda_graph
        from vllm.config import CUDAGraphMode
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.worker import cpu_model_runner, cpu_worker, gpu_model_runner, workspace
        from vllm.v1.worker.gpu import cudagraph_utils

        log = self

        class Logged(Graph):
            def replay(self):
                super().replay()
                log.replayed.append(self)

        @contextmanager
        def logged(graph, *args, **kwargs):
            with capture(graph, *args, **kwargs):
                yield
            log.captured.append(graph)

        for name, in_place in _IN_PLACE.items():
            monkeypatch.setattr(GridExecutor, name, in_place)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Logged)
        monkeypatch.setattr(torch.cuda, "graph", logged)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: _current is not None)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (0, 0))
        for module in (cudagraph_utils, gpu_model_runner):
            monkeypatch.setattr(module, "graph_capture", lambda **_: nullcontext())
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(CpuPlatform, "graph_pool_handle", lambda _: (0, 0), raising=False)
        monkeypatch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda _: True))
        check = CpuPlatform.check_and_update_config.__func__

        def keep_sizes(cls, config):
            sizes = config.compilation_config.cudagraph_capture_sizes
            check(cls, config)
            config.compilation_config.cudagraph_capture_sizes = sizes

        monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_sizes))
        warm_up = cpu_worker.CPUWorker.compile_or_warm_up_model

        def captured(worker):
            if not worker.model_config.enforce_eager:
                monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(worker.device))
                with patch.dict(globals(), made_up=True):
                    worker.model_runner.capture_model()
            return warm_up(worker)

        monkeypatch.setattr(cpu_worker.CPUWorker, "compile_or_warm_up_model", captured)
        load = cpu_model_runner.CPUModelRunner.load_model

        def wrapped(runner, *args, **kwargs):
            load(runner, *args, **kwargs)
            if runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
                runner.model = cuda_graph.CUDAGraphWrapper(runner.model, runner.vllm_config, CUDAGraphMode.FULL)

        monkeypatch.setattr(cpu_model_runner.CPUModelRunner, "load_model", wrapped)
        monkeypatch.setattr(cpu_model_runner.CPUModelRunner, "get_model", gpu_model_runner.GPUModelRunner.get_model)

"""vLLM's workers with eviction."""

from collections.abc import Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from ...compute.memory import described, needs, put_aside
from ...compute.needs import Needs
from ...compute.parts import Capacity
from ...compute.runtime import EvictionRuntime
from ...compute.step_parts import StepPart
from ...core.plan import REPORTS, Reports
from ..engine.spec import alike_bytes, host_blocks, policy_config
from ..seams import replaces
from ..start import attending, windows
from ..start.describe import ignored_settings, kernels_line
from . import layers, runners
from .ranks import Ranks
from .reorder import guard_reload, reordering
from .staging import left_by_sources, longer
from .step_parts import KINDS

logger = init_logger("vllm.evict")

#: One of vLLM's workers comes after the mixin in each class.
Base: Any = object


@replaces(
    "vllm.v1.worker.cpu_worker:CPUWorker",
    "vllm.v1.worker.gpu_worker:Worker",
    methods="load_model get_kv_cache_spec determine_available_memory initialize_from_config execute_model "
    "sample_tokens compile_or_warm_up_model",
    why="carries out plans and reports; `worker_cls` of vLLM's configuration names it",
    remove_when="never: vLLM has workers of plugins",
)
class EvictionWorkerMixin(Base):
    """Carries out the plan on each `SchedulerOutput`, and returns reports on the step's `ModelRunnerOutput`."""

    kv_evict: EvictionRuntime
    _installed = False
    _needs = Needs()
    _reports: list[Reports] = []
    _told: dict[str, Any] = {}
    _copied: Any = None
    _ranks: Ranks
    _parts: Sequence[StepPart] = ()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        placed = attending.layout(self.vllm_config, policy_config(self.vllm_config))
        if placed is None or placed.order is None:
            super().load_model(*args, **kwargs)
            return
        guard_reload.on(self.model_runner)
        with reordering(self.vllm_config, placed.order):
            super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> Any:
        # vLLM calls this first after the model is loaded and the block size is final. Layers then change their specs.
        if not self._installed:
            self._installed = True
            windows.widen(self.vllm_config)
            specs = super().get_kv_cache_spec()
            self.kv_evict = layers.install(self.vllm_config, policy_config(self.vllm_config), self.get_model(), specs)
            runners.install(self.model_runner, self.kv_evict, self.use_v2_model_runner)
            self._ranks = Ranks()
            self._parts = [kind(self) for kind in KINDS if kind.serves(policy_config(self.vllm_config))]
        return super().get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        if self.kv_evict.ops.compiles:
            self.kv_evict.reserve()
            self._needs = needs(self.kv_evict.groups)
            between = max([self._needs.between, *(part.scratch for part in self._parts)])
            self._needs = self._needs._replace(between=between)
            with runners.profiling(self.model_runner, self._needs.step, self._needs.between, self.device):
                available = super().determine_available_memory()
        else:
            available = super().determine_available_memory()
        config, block = policy_config(self.vllm_config), layers.block_bytes(self.kv_evict, self.get_kv_cache_spec())
        left = self._needs.left(available, block)
        return left_by_sources(self.vllm_config, config, self.kv_evict, block, left)

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        pages = max(group.source.staging for group in self.kv_evict.groups)
        allocated = longer(kv_cache_config, pages) if pages else kv_cache_config
        super().initialize_from_config(allocated, *args, **kwargs)
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        config = policy_config(self.vllm_config)
        layers.settle(self.vllm_config, config, self.kv_evict, kv_cache_config)
        ahead, tables = self.kv_evict.ops.compiles, []
        if ahead:
            self.kv_evict.reserve()
            tables = runners.block_tables(self.model_runner, self.kv_evict, self.use_v2_model_runner)
        block = layers.block_bytes(self.kv_evict, self.get_kv_cache_spec())
        block = alike_bytes(self.vllm_config, kv_cache_config, self.kv_evict.numbers[0]) or block
        on_host = host_blocks(self.vllm_config, config, block, self.kv_evict.groups[0].block_size)
        self.kv_evict.allocate(Capacity(kv_cache_config.num_blocks, on_host, ahead), tables)
        for part in self._parts:
            part.allocated()
        if self.rank == 0:
            backend = layers.backend_name(self.vllm_config)
            logger.info(kernels_line(self.vllm_config, config, self.kv_evict, backend))
            if self.kv_evict.ops.compiles:
                logger.info(described(config.name, self.kv_evict, self._needs, kv_cache_config.num_blocks))
            if (line := put_aside(config.name, self.kv_evict)) is not None:
                logger.info(line)
            if (line := ignored_settings(self.kv_evict, backend)) is not None:
                logger.warning(line)

    def compile_or_warm_up_model(self) -> Any:
        # Before vLLM captures graphs, and before its monitor reports compilations.
        if self.kv_evict.ops.compiles and self.vllm_config.kernel_config.enable_jit_warmup:
            self._warm_up()
        result = super().compile_or_warm_up_model()
        if self.kv_evict.ops.compiles:
            runners.check_paths(self.model_runner, self.kv_evict)
        return result

    @torch.inference_mode()
    def _warm_up(self) -> None:
        start = perf_counter()
        try:
            tables = runners.block_tables(self.model_runner, self.kv_evict, self.use_v2_model_runner)
            layers.warm_up(self.vllm_config, self.kv_evict, tables)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        except Exception:
            logger.warning(
                "Kernels of KV policies could not be compiled ahead. Each is compiled when a request first needs it, "
                "and the request waits.",
                exc_info=True,
            )
        else:
            logger.info("Kernels of KV policies were compiled in %.1f s", perf_counter() - start)

    @torch.inference_mode()  # once for vLLM's part and the plugin's
    def execute_model(self, scheduler_output: Any) -> Any:
        self.kv_evict.begin(scheduler_output)
        plan = self.kv_evict.plan
        if (plan.orders or plan.writes) and has_kv_transfer_group():
            # A connector may still read the blocks that the plan writes. vLLM waits for that too, but after this.
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        for part in self._parts:
            part.before_orders(plan)
        self.kv_evict.rearrange(self._ranks.over_tensors)
        for part in self._parts:
            part.after_orders(plan)
        self._ranks.begin()
        try:
            output = super().execute_model(scheduler_output)
            self.kv_evict.check_attended()
        except BaseException:
            self.kv_evict.abandon()
            raise
        reports = self.kv_evict.end(self._ranks.over_all)
        self._reports, self._told = (reports, self.kv_evict.told) if self._ranks.are_last else ([], {})
        self._copied = self.kv_evict.copied
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self.kv_evict.drafted()
        reports, self._reports, told, self._told = self._reports, [], self._told, {}
        copied = self._copied
        if any(reports):
            told = {REPORTS: reports, **told}
        for part in self._parts:
            its, event = part.told()
            told, copied = {**told, **its}, event or copied
        return with_reports(output, told, copied) if told else output


def with_reports(output: Any, told: Mapping[str, Any], copied: Any = None) -> Any:
    """Return the output with what a worker tells, at once or when it is awaited.

    Args:
        output: vLLM's output of the step.
        told: attribute of the output -> value.
        copied: event after which the values are on the host; None if they are.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return _Reporting(output, told, copied)
    if isinstance(output, ModelRunnerOutput):
        if copied is not None:
            copied.synchronize()
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # one object for all steps
            output = copy(output)
        for name, value in told.items():
            setattr(output, name, value)
    return output


@replaces(
    "vllm.v1.outputs:AsyncModelRunnerOutput",
    methods="get_output",
    why="reports wait with the step's output, until it is awaited",
    remove_when="outputs of vLLM carry fields of plugins",
)
class _Reporting(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, *told: Any) -> None:
        self._output, self._told = output, told

    def get_output(self) -> ModelRunnerOutput:
        return with_reports(self._output.get_output(), *self._told)

    def get_kv_connector_output(self) -> Any:
        """Abstract since vLLM 0.33."""
        return self._output.get_kv_connector_output()

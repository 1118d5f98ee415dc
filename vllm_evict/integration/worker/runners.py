"""Writes holes and moved blocks into the block tables of model runners V1 and V2; views are built from these tables.

Both runners update their tables by the scheduler's new blocks only. vLLM never tells them that a block was evicted.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.logger import init_logger

from ...compute.runtime import EvictionRuntime
from ...config import KVPolicyError
from ..seams import replaces
from . import graphs

logger = init_logger("vllm.evict")


def install(runner: Any, runtime: EvictionRuntime, v2: bool) -> None:
    """Give `runtime` the runner's batches, and write its holes into the runner's tables."""
    if v2:
        update_requests.on(runner, runner, runtime)
        prepare_attn.on(runner, runtime)
    else:
        update_states.on(runner, runner, runtime)
    (graphs.install_v2 if v2 else graphs.install_v1)(runner, runtime)


@replaces(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    why="V1: holes and moved blocks are written into the runner's block tables",
    remove_when="vLLM's scheduler can tell runners that entries of a block table changed",
)
def update_states(update: Callable[..., Any], runner: Any, runtime: EvictionRuntime) -> Callable[..., Any]:
    def _update_states(scheduler_output: Any) -> Any:
        runtime.check_begun(scheduler_output)
        corrections = update(scheduler_output)
        tables = [runner.input_batch.block_table[number].block_table for number in runtime.numbers]
        for number, table, group in zip(runtime.numbers, tables, runtime.groups):
            for req_id, blocks in group.changes():
                request = runner.requests.get(req_id)
                if request is None:
                    continue
                # vLLM rebuilds rows of the batch from these lists when a request resumes.
                for block, physical in blocks.items():
                    request.block_ids[number][block] = physical
                row = runner.input_batch.req_id_to_index.get(req_id)
                if row is not None:
                    table.np[row, list(blocks)] = list(blocks.values())
        runtime.batch.req_ids = runner.input_batch.req_ids
        # vLLM fills the tables before it builds metadata. It clears rows of padding later; their length is 0 by then.
        runtime.views.tables = [table.gpu for table in tables]
        return corrections

    return _update_states


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
    why="V2: holes and moved blocks are written into the runner's block tables",
    remove_when="vLLM's scheduler can tell runners that entries of a block table changed",
)
def update_requests(update: Callable[..., None], runner: Any, runtime: EvictionRuntime) -> Callable[..., None]:
    def update_requests(scheduler_output: Any) -> None:
        runtime.check_begun(scheduler_output)
        update(scheduler_output)
        for number, group in zip(runtime.numbers, runtime.groups):
            table = runner.block_tables.block_tables[number]
            for req_id, blocks in group.changes():
                row = runner.req_states.req_id_to_index.get(req_id)
                if row is not None:
                    for start, length in _runs(sorted(blocks)):
                        table.stage_write(row, start, [blocks[start + offset] for offset in range(length)])

    return update_requests


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
    why="V2: views are built from the block tables of the step's batch",
    remove_when="metadata builders get the requests of a batch, and the block tables of all KV groups",
)
def prepare_attn(prepare: Callable[..., Any], runtime: EvictionRuntime) -> Callable[..., Any]:
    def prepare_attn(input_batch: Any) -> Any:
        runtime.batch.req_ids = input_batch.req_ids
        tables, slots = prepare(input_batch)
        runtime.views.tables = [tables[number] for number in runtime.numbers]
        return tables, slots

    return prepare_attn


def profiling(runner: Any, step: int, between: int, device: torch.device) -> AbstractContextManager[None]:
    """Let vLLM's memory profiling include the plugin's memory of a step.

    Args:
        runner: vLLM's model runner.
        step: bytes while layers run.
        between: bytes before or after that.
        device: where the memory is.
    """
    return profile_run.during(runner, step, between, device)


@replaces(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run",
    why="vLLM's memory profiling includes the plugin's memory of a step",
    remove_when="vLLM asks backends for the memory that they need",
)
def profile_run(profile: Callable[..., None], step: int, between: int, device: torch.device) -> Callable[..., None]:
    def profile_run(*args: Any, **kwargs: Any) -> None:
        held = torch.empty(step, dtype=torch.uint8, device=device)
        profile(*args, **kwargs)
        del held
        torch.empty(between, dtype=torch.uint8, device=device)

    return profile_run


def check_paths(runner: Any, runtime: EvictionRuntime) -> None:
    """Check by dummy steps that the model calls each layer's attention: in steps of decodes, and beside a prompt.

    Raises:
        KVPolicyError: it does not, so the plugin's kernels could not do their part.
    """
    scheduling, model = runner.scheduler_config, runner.model_config
    tokens = min(scheduling.max_num_seqs + 1, scheduling.max_num_batched_tokens, model.max_model_len)
    decode = getattr(runner, "uniform_decode_query_len", None) or runner.decode_query_len
    for count, how in ((decode, {"uniform_decode": True}), (tokens, {"create_mixed_batch": True})):
        try:
            with runtime.trying():
                runner._dummy_run(count, force_attention=True, skip_eplb=True, **how)
        except KVPolicyError:
            raise
        except Exception:
            logger.warning(
                "KV policies could not try a step of %d tokens at start: each step checks it", count, exc_info=True
            )


def block_tables(runner: Any, runtime: EvictionRuntime, v2: bool) -> list[torch.Tensor]:
    """vLLM's block table of each group, int32 [requests, width], whose first rows metadata builders get."""
    if v2:
        return [runner.block_tables.input_block_tables[number] for number in runtime.numbers]
    tables = runner.input_batch.block_table
    return [tables[number].get_device_tensor(runner.max_num_reqs) for number in runtime.numbers]


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Ascending indices as (start, length) of their consecutive runs."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def fill_blocks(runner: Any, blocks: list[int], value: float) -> None:
    """Overwrite whole blocks in all layers (tests: poison freed blocks, clean allocated ones)."""
    num_blocks = runner.kv_cache_config.num_blocks
    # Layers whose heads are split share one tensor. States are shorter than the pages that they begin with.
    for cache in {(cache.data_ptr(), cache.shape): cache for cache in runner.kv_caches}.values():
        if cache.dtype == torch.uint8:  # fp8: NaN of e4m3fn is NaN of e5m2 too
            cache = cache.view(torch.float8_e4m3fn)
        # A page of states is bytes: all bits set are NaN in each dtype.
        filled = (-1 if value != value else value) if cache.dtype == torch.int8 else value
        # Kernels may read smaller blocks than the pool's, several for each of these.
        cache.unflatten(0, (num_blocks, -1))[blocks] = filled

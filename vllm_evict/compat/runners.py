"""Model runners V1 and V2: holes into their block tables, and the order of requests in a batch.

Both runners rebuild their tables from the scheduler's new blocks only; neither is ever told that a block went away.
"""

from functools import wraps
from typing import Any

from ..worker.runtime import EvictionRuntime


def install(runner: Any, runtime: EvictionRuntime, v2: bool) -> None:
    """Let `runtime` see the runner's batches and write its holes."""
    (_install_v2 if v2 else _install_v1)(runner, runtime)


def _install_v1(runner: Any, runtime: EvictionRuntime) -> None:
    update = runner._update_states

    @wraps(update)
    def _update_states(scheduler_output: Any) -> Any:
        corrections = update(scheduler_output)
        table = runner.input_batch.block_table[0].block_table.np
        for req_id, holes in runtime.holes.items():
            request = runner.requests.get(req_id)
            if request is None:
                continue
            # Rows of the batch are rebuilt from here when a request comes back after a pause.
            for block in holes:
                request.block_ids[0][block] = 0
            row = runner.input_batch.req_id_to_index.get(req_id)
            if row is not None:
                table[row, holes] = 0
        runtime.req_ids = runner.input_batch.req_ids
        return corrections

    runner._update_states = _update_states


def _install_v2(runner: Any, runtime: EvictionRuntime) -> None:
    update, prepare = runner.update_requests, runner.prepare_attn

    @wraps(update)
    def update_requests(scheduler_output: Any) -> None:
        update(scheduler_output)
        table = runner.block_tables.block_tables[0]
        for req_id, holes in runtime.holes.items():
            row = runner.req_states.req_id_to_index.get(req_id)
            if row is not None:
                for start, length in _runs(holes):
                    table.stage_write(row, start, [0] * length)

    @wraps(prepare)
    def prepare_attn(input_batch: Any) -> Any:
        runtime.req_ids = input_batch.req_ids
        return prepare(input_batch)

    runner.update_requests, runner.prepare_attn = update_requests, prepare_attn


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
    """Overwrite whole blocks in all layers (tests: poison what is freed, clean what is handed out again)."""
    for cache in runner.kv_caches:
        cache[blocks] = value

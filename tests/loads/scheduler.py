"""A load on the schedulers without a model: vLLM's scheduler, managers and block pool, a worker double, and invariants.

`run` drives one program (see `program.Program`) and checks after each step:

- *books*: each block of the pool is in the free queue or held, and its reference count is the number of its holders;
- *tables*: scheduler and worker agree on every request's blocks and holes;
- *reads*: what a request reads is what it has written, or what others computed of the same prefix with nothing missing;
- *purity*: what is published under a hash was computed of that hash's tokens, with nothing missing;
- *bound*: a request whose step is done, and whose scores came, holds no more than its policy lets it;
- *floor*: what is evicted is no sink and no recent token, and leaves a request its budget;
- *scores*: a prompt is reconstructed if there was room for it all the time (kvzip);
- *vain*: blocks are evicted under pressure only if the request that lacked some gets them, and of no request that is
  more important;
- *stall*: requests get on, see `Simulation._stall`;
- *left*: once all requests are done, every block is in the pool and nothing is remembered of any request.

From the command line, from the project's root:

    python -m tests.loads.scheduler --requests 100000           # random programs, policies in turn
    python -m tests.loads.scheduler --replay program.json       # one that was printed
"""

import argparse
import atexit
import copy
import functools
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import (
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    generate_scheduler_kv_cache_config,
    get_block_hash,
    get_group_id,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_evict.config import KVPolicyError
from vllm_evict.core.plan import PLAN
from vllm_evict.integration import layers
from vllm_evict.integration.reconstruction import OVERLAP, parts
from vllm_evict.integration.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_evict.integration.spec import EvictableSpec, policy_config
from vllm_evict.policies import POLICIES

from .double import SALTS, Fault, Row, Worker, prompt_tokens
from .program import HEADS, LAYERS, STOP, VOCABULARY, Maker, Op, Program, Settings, shrink

#: Steps beyond what follows from the requests in which nothing needs to get on.
PATIENCE = 64


class _Config(VllmConfig):
    """vLLM's configuration, for a model runner that the program names."""

    runner = 1

    @property
    def use_v2_model_runner(self) -> bool:
        return self.runner == 2


@functools.cache
def _base() -> VllmConfig:
    """A configuration of a model without weights; programs change copies of it."""
    with tempfile.TemporaryDirectory() as folder:
        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16 * HEADS,
            "intermediate_size": 16,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "torch_dtype": "float32",
        }
        Path(folder, "config.json").write_text(json.dumps(model))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, seed=0)
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig.default_factory(max_model_len=512),
            cache_config=CacheConfig(block_size=32),
            device_config=DeviceConfig("cpu"),
        )
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def engine_config(settings: Settings) -> VllmConfig:
    """vLLM's configuration of an engine, without the size of its pool."""
    config = copy.copy(_base())
    config.__class__, config.runner = _Config, settings.runner
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.length
    config.scheduler_config = SchedulerConfig(
        max_model_len=settings.length,
        is_encoder_decoder=False,
        max_num_batched_tokens=settings.chunk,
        max_num_seqs=settings.seqs,
        long_prefill_token_threshold=settings.long,
        policy="priority" if settings.priorities else "fcfs",
        watermark=settings.watermark,
        scheduler_reserve_full_isl=settings.whole,
        async_scheduling=settings.ahead,
    )
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = settings.block
    config.cache_config.enable_prefix_caching = settings.caching
    config.additional_config = {} if settings.policy is None else {"kv_policy": settings.policy}
    return config


def cache_specs(settings: Settings, config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The KV cache specs of the model's layers, or of the pages that a policy splits heads or layers into."""
    full = FullAttentionSpec(
        block_size=settings.block, num_kv_heads=HEADS, head_size=16, head_size_v=16, dtype=torch.float32
    )
    specs: dict[str, KVCacheSpec] = {f"layer.{layer}": full for layer in range(LAYERS)}
    if settings.policy is not None:
        policy = policy_config(config)
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        layer = SimpleNamespace(get_kv_cache_spec=lambda _: full, attn_backend=backend)
        if (placed := layers.layout(config, policy)) is not None:
            return {
                f"kv_evict.{name}.{part}": layers._spec(config, policy, layer, placed.width, name, part)
                for part, name in enumerate(placed.groups)
            }
        (head_class,) = policy.classes
        spec = EvictableSpec(**vars(full), backend="CPU_ATTN", head_class=head_class)
        specs = dict.fromkeys(specs, spec)
    if settings.window:
        window = SlidingWindowSpec(
            block_size=settings.block,
            num_kv_heads=HEADS,
            head_size=16,
            dtype=torch.float32,
            sliding_window=settings.window,
        )
        specs |= {f"layer.{layer}": window for layer in range(settings.sliding)}
    return specs


def least_pool(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """Blocks of the smallest pool that start-up accepts, vLLM's null block included."""
    groups = get_kv_cache_groups(config, dict(specs))
    needed = _max_memory_usage_bytes_from_groups(config, groups)
    return math.ceil(needed / _pool_bytes_per_block(config, groups)) + 1


def cache_config(config: VllmConfig, specs: dict[str, KVCacheSpec], blocks: int) -> KVCacheConfig:
    """vLLM's plan of a pool of so many blocks.

    Raises:
        ValueError: start-up refuses it.
    """
    config.cache_config.num_gpu_blocks_override = blocks
    (planned,) = get_kv_cache_configs(config, [dict(specs)], [1 << 40])
    planned = generate_scheduler_kv_cache_config([planned])
    config.cache_config.num_gpu_blocks = planned.num_blocks
    return planned


@functools.cache
def _structured() -> StructuredOutputManager:
    return StructuredOutputManager(_base())


def make_scheduler(settings: Settings) -> Scheduler:
    """The scheduler of an engine, as vLLM's engine core makes it."""
    config = engine_config(settings)
    specs = cache_specs(settings, config)
    planned = cache_config(config, specs, least_pool(config, specs) + settings.extra)
    kinds = (Scheduler, AsyncScheduler) if settings.policy is None else (EvictionScheduler, AsyncEvictionScheduler)
    before = os.environ.get("VLLM_EVICT_POISON")
    os.environ["VLLM_EVICT_POISON"] = str(int(settings.poison))
    try:
        return kinds[settings.ahead](
            vllm_config=config,
            kv_cache_config=planned,
            structured_output_manager=_structured(),
            block_size=settings.block,
            hash_block_size=settings.block,
            log_stats=settings.stats,
        )
    finally:
        if before is None:
            del os.environ["VLLM_EVICT_POISON"]
        else:
            os.environ["VLLM_EVICT_POISON"] = before


@functools.cache
def _hasher(block: int) -> Callable[[Request], list[Any]]:
    from vllm.utils.hashing import get_hash_fn_by_name

    init_none_hash(get_hash_fn_by_name("sha256"))
    return get_request_block_hasher(block, get_hash_fn_by_name("sha256"))


class Simulation:
    """One program as it runs.

    Attributes:
        counts: what happened.
        live: requests that were sent and have not ended, in the order of their arrival.
    """

    def __init__(self, program: Program) -> None:
        settings = program.settings
        self.program, self.settings = program, settings
        self.scheduler = make_scheduler(settings)
        self.cache = self.scheduler.kv_cache_manager
        self.pool = self.cache.block_pool
        self.managers = self.cache.coordinator.single_type_managers
        self.evictable = list(getattr(self.scheduler, "kv_managers", ()))
        groups = [manager.kv_cache_group_id for manager in self.evictable]
        windows = [getattr(manager.kv_cache_spec, "sliding_window", None) or 0 for manager in self.managers]
        config = getattr(self.scheduler, "kv_policy", None)
        context = config.context if config is not None and config.context != "model" else None
        self.worker = Worker(settings, self.pool.num_gpu_blocks, groups, windows, context)
        self.counts: Counter[str] = Counter()
        self.live: dict[str, Request] = {}
        #: Steps in flight: the plan, what will come back, and the rows and turns that requests had.
        self._queue: deque[tuple[Any, Any, dict[str, tuple[Row, int]]]] = deque()
        self._depth = self.scheduler.vllm_config.max_concurrent_batches
        self._hashes: list[Any] = [None] * self.pool.num_gpu_blocks
        #: Block hash -> content of a block of these tokens, and for each request how many of its hashes are in it.
        self._meaning: dict[Any, np.ndarray] = {}
        self._known: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._outputs: Counter[str] = Counter()
        self._furthest: dict[str, int] = {}
        self._since = self._since_oldest = 0
        self._paused = 0
        #: Requests that are to have their prompts reconstructed: whether there was room in each step so far.
        self._room: dict[str, bool] = {}
        if getattr(self.scheduler, "pressure", None) is not None:
            self._watch_pressure()
        if settings.priorities:
            self._withdraw_what_is_not_computed()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Run the program to its end; returns `counts`.

        Raises:
            Fault: an invariant does not hold.
        """
        ops, at = deque(self.program.ops), 0
        while True:
            middle = []
            while ops and ops[0].at <= at:
                op = ops.popleft()
                if op.middle:
                    middle.append(op)
                else:
                    self._apply(op)
            at += 1
            if self._paused:
                self._paused -= 1
                if not self._paused:
                    self.scheduler.set_pause_state(PauseState.UNPAUSED)
            ran = self._step(middle)
            if ran:
                continue
            if ops:
                at = max(at, ops[0].at)
            elif self._paused:
                continue
            elif self.live:
                self._end_sessions()
            else:
                break
        self._check_nothing_left()
        self.counts.update({name: value for name, value in vars(self.worker.counts).items()})
        return self.counts

    def _step(self, middle: list[Op]) -> bool:
        """One turn of the engine core's loop (`EngineCore.step` and `step_with_batch_queue`); False: nothing to do."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            answer = self.worker.run(output)
            rows = {req_id: self.worker.rows[req_id] for req_id in output.num_scheduled_tokens}
            self._queue.append((output, answer, {req_id: (row, row.turns) for req_id, row in rows.items()}))
            self._learn(output.num_scheduled_tokens)
            self._check(self.worker.written)
            if self.evictable:
                self._check_floors(getattr(output, PLAN))
            self._stall(output)
            more = output.total_num_scheduled_tokens > 0 or scheduler.has_requests()
            if len(self._queue) < self._depth and more:
                for op in middle:
                    self._apply(op)
                return True
        elif not self._queue:
            for op in middle:
                self._apply(op)
            return bool(middle)
        output, answer, rows = self._queue.popleft()
        for op in middle:
            self._apply(op)
        taken = scheduler.update_from_output(output, answer)
        self._take(taken)
        self._learn(output.num_scheduled_tokens)
        if self.settings.ahead and self.settings.caching:
            self._check_published(())  # what was sampled may fill a block
        if self.evictable:
            self._check_bounds(output, rows)
            if self.scheduler.reconstructions is not None and not (self.settings.lost or self.settings.late):
                self._check_reconstructions()
        return True

    # --- clients ------------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> None:
        scheduler = self.scheduler
        if op.do == "add":
            self._add(op)
        elif op.do == "turn":
            self._turn(op)
        elif op.do == "close":
            self._close(op.id)
        elif op.do == "abort":
            for req_id in (op.id, *(f"{op.id}.{copy}" for copy in range(1, 3))):
                if req_id in self.live:
                    scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
                    self._ended(req_id)
                    self.counts["aborted"] += 1
        elif op.do == "reset":
            self._reset(op.running)
        elif op.do == "pause":
            scheduler.set_pause_state(PauseState(op.level))
            self._paused = op.steps
        else:
            raise ValueError(f"no such operation: {op.do}")

    def _params(self, op: Op) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=op.tokens,
            ignore_eos=True,
            stop_token_ids=[STOP] if op.stops else None,
            extra_args=dict(op.ask) or None,
            detokenize=False,
        )

    def _refused(self, op: Op) -> bool:
        """Whether the front end refuses what a request asks for."""
        if not op.ask or self.settings.policy is None:
            return False
        try:
            self.scheduler.kv_policy.for_request(op.ask, op.length, self.settings.block)
        except KVPolicyError:
            self.counts["refused"] += 1
            return True
        return False

    def _add(self, op: Op) -> None:
        if op.id in self.live or op.length >= self.settings.length or self._refused(op):
            return
        tokens = prompt_tokens(op.id, op.length, op.family, min(op.shared, op.length))
        for copy_ in range(op.n):
            self._send(op, f"{op.id}.{copy_}" if copy_ else op.id, tokens)

    def _send(self, op: Op, req_id: str, tokens: list[int]) -> None:
        self.counts["requests"] += 1
        request = Request(
            req_id,
            list(tokens),
            self._params(op),
            None,
            arrival_time=float(self.counts["requests"]),
            priority=op.priority,
            block_hasher=_hasher(self.settings.block) if self.settings.caching else None,
            resumable=op.session,
        )
        if op.hot:
            self.worker.hot.add(req_id)
        self.live[req_id] = request
        self._sent[req_id] = len(tokens) + op.tokens
        self._outputs[req_id] = 0
        self.scheduler.add_request(request)

    def _turn(self, op: Op) -> None:
        """The next turn of a session, if its context has room for it."""
        session = self.live.get(op.id)
        longest = self._sent.get(op.id, 0) + op.length + op.tokens
        if session is None or not session.resumable or longest >= self.settings.length or self._refused(op):
            return
        tokens = prompt_tokens(f"{op.id}+{self._sent[op.id]}", op.length, op.family, 0)
        self._sent[op.id] = longest
        turn = Request(op.id, tokens, self._params(op), None, arrival_time=session.arrival_time, resumable=True)
        self.scheduler.add_request(turn)

    def _close(self, req_id: str) -> None:
        """No more turns. A request of the same name says so."""
        session = self.live.get(req_id)
        if session is not None and session.resumable:
            self.scheduler.add_request(Request(req_id, [0], self._params(Op()), None, resumable=False))
            if req_id not in self.scheduler.requests:
                self._ended(req_id)

    def _end_sessions(self) -> None:
        """The program is over, and sessions wait for turns."""
        if self._end_lost_sessions():
            return
        waiting = [req_id for req_id, request in self.live.items() if request.resumable]
        if not waiting:
            raise Fault("stall", f"{list(self.live)} live, and the scheduler has nothing to do")
        for req_id in waiting:
            self._close(req_id)

    def _reset(self, running: bool) -> None:
        self._since = self._since_oldest = 0
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            # Sessions between two turns hold blocks that vLLM cannot take from them.
            if not self.scheduler.kv_holding_waiting:
                raise
        self.counts["resets"] += 1

    def _ended(self, req_id: str) -> None:
        del self.live[req_id]
        self._furthest.pop(req_id, None)
        self._room.pop(req_id, None)
        self._since = 0

    def _take(self, taken: dict[int, Any]) -> None:
        """Outputs to clients."""
        for client in taken.values():
            for output in client.outputs:
                if output.request_id not in self.live:
                    raise Fault("outputs", f"an output for {output.request_id}, which no client waits for")
                self._outputs[output.request_id] += len(output.new_token_ids)
                if output.request_id not in self.scheduler.requests:
                    self._ended(output.request_id)
                    self.counts["finished"] += 1
            stats = client.scheduler_stats
            if stats is not None and self.evictable and not stats.kv_evict:
                raise Fault("books", "statistics without the plugin's")
        for req_id in [req_id for req_id in self.live if req_id not in self.scheduler.requests]:
            self._ended(req_id)  # a session that ended with its last turn

    # --- invariants ---------------------------------------------------------------------------------------------------

    def _learn(self, req_ids: Any) -> None:
        """Note which tokens the hashes of requests' blocks stand for."""
        block = self.settings.block
        for req_id in req_ids:
            request, row = self.scheduler.requests.get(req_id) or self.live.get(req_id), self.worker.rows.get(req_id)
            if request is None or row is None:
                continue
            known, count = self._known.get(req_id, 0), len(request.block_hashes)
            if request.resumable:
                known, count = 0, min(count, request.num_computed_tokens // block)
            row.learn()
            for at in range(known, min(count, row.counted // block)):
                self._meaning[request.block_hashes[at]] = row.known[at * block : (at + 1) * block]
            self._known[req_id] = max(min(count, row.counted // block), known)

    def _check(self, written: Any) -> None:
        """*books*, *tables* and *purity*."""
        ids: list[int] = []
        rows, pool = self.worker.rows, self.pool
        for group, manager in enumerate(self.managers):
            slides = bool(self.worker.windows[group])
            for req_id, blocks in manager.req_to_blocks.items():
                table = [block.block_id for block in blocks]
                ids += table
                if not table:
                    continue
                row = rows.get(req_id)
                if row is None:
                    raise Fault("tables", f"{req_id} holds {table}, and no worker knows it")
                own = row.tables[group]
                if slides:
                    own = [block if there else 0 for block, there in zip(own, table)]
                if own != table or not row.active:
                    raise Fault("tables", f"{req_id}, group {group}: scheduler {table}, worker {own}")
        holders = np.bincount(ids, minlength=pool.num_gpu_blocks).tolist()
        refs = [block.ref_cnt for block in pool.blocks]
        refs[0] = holders[0] = 0
        if refs != holders:
            wrong = [(i, ref, count) for i, (ref, count) in enumerate(zip(refs, holders)) if ref != count]
            raise Fault("books", f"(block, reference count, holders): {wrong}")
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        if len(free) != pool.get_num_free_blocks() or len(set(free)) < len(free):
            raise Fault("books", f"the free queue says {pool.get_num_free_blocks()} and has {free}")
        if any(holders[block] for block in free) or len(free) + sum(map(bool, holders)) != pool.num_gpu_blocks - 1:
            lost = set(range(1, len(holders))) - set(free) - {i for i, count in enumerate(holders) if count}
            raise Fault("books", f"blocks both free and held, or lost: {[b for b in free if holders[b]]}, {lost}")
        if self.settings.caching:
            self._check_published(written)

    def _check_published(self, written: Any) -> None:
        hashes = [block.block_hash for block in self.pool.blocks]
        changed = {at for at, (new, old) in enumerate(zip(hashes, self._hashes)) if new is not old}
        self._hashes = hashes
        for at in changed.union(written):
            if (key := hashes[at]) is None:
                continue
            meaning = self._meaning.get(get_block_hash(key))
            if meaning is None:
                raise Fault("purity", f"block {at} is published under a hash that no request has")
            same = self.worker.memory[at] == meaning + SALTS[get_group_id(key)]
            if not same.all():
                raise Fault("purity", f"block {at} is published, and holds something else than its hash says")

    def _check_bounds(self, output: Any, rows: dict[str, tuple[Row, int]]) -> None:
        """Requests whose step is done hold no more than they may. Those that wait for scores may hold all.

        Tokens are gathered in private blocks. A request finds enough of them if it shares nothing, or if the pool has
        room for all requests that are decided on in this step. Without these it tries again with its next block.
        """
        due = [group.due.keys() for group in getattr(output, PLAN).groups]
        pools = self.scheduler.kv_policy.policy.pools
        for req_id, (row, turns) in rows.items():
            request = self.scheduler.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if self.worker.rows.get(req_id) is not row or row.turns != turns:
                continue  # it started over, or its next turn has begun, with a step that is not done
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            total, most = 0, 0
            for manager, decided in zip(self.evictable, due):
                resident = manager.residents[req_id]
                limits, policy = resident.limits, resident.config.policy
                waits = policy.profiles or (policy.reconstructs and resident.prompt_scores is None)
                if limits is None or resident.under_pressure or waits or resident.misses:
                    break
                table = manager.req_to_blocks[req_id][: -(-settled // self.settings.block)]
                held = sum(not block.is_null for block in table)
                alone = all(block.ref_cnt == 1 for block in table if not block.is_null)
                roomy = self.pool.get_num_free_blocks() >= held * len(decided)
                compacts = req_id in decided and (alone or roomy)
                if not pools and held > limits.trigger and (compacts or resident.config.granularity == "block"):
                    raise Fault("bound", f"{req_id}: {held} blocks of {settled} tokens, above {limits.trigger}")
                total, most = total + held, most + limits.trigger
            else:
                if pools and total > most:
                    raise Fault("bound", f"{req_id}: {total} blocks of all groups together, above {most}")

    def _check_floors(self, plan: Any) -> None:
        """What went since the last step is neither sink nor recent, and leaves what the policy keeps."""
        block, pools = self.settings.block, self.scheduler.kv_policy.policy.pools
        for manager, group in zip(self.evictable, plan.groups):
            for req_id, holes in group.holes.items():
                request, resident = self.scheduler.requests[req_id], manager.residents[req_id]
                limits = resident.limits
                if limits is None or request.resumable:
                    continue  # a session's next turn may have other sizes already
                settled = request.num_computed_tokens - request.num_in_flight_tokens
                recent = max(settled - limits.recent, 0) // block
                if min(holes) < limits.sink or max(holes) >= recent:
                    raise Fault("floor", f"{req_id} lost {holes}, {limits.sink} are sinks, from {recent} on recent")
                table = manager.req_to_blocks[req_id][: -(-settled // block)]
                held = sum(not block.is_null for block in table)
                least = max(math.ceil(resident.config.floor * limits.budget), 1) if pools else limits.budget
                if held < least:
                    raise Fault("floor", f"{req_id} has {held} blocks left, its budget is {limits.budget}")

    def _check_reconstructions(self) -> None:
        """A request does without scores only where its prompt is too long to be repeated, or there was no room."""
        scheduler, block = self.scheduler, self.settings.block
        for req_id, resident in self.evictable[0].residents.items():
            request = self.live.get(req_id)
            if request is None or not resident.config.policy.reconstructs or request.resumable:
                continue
            scores = resident.prompt_scores
            if scores is not None and not len(scores.index) and self._room.pop(req_id, False):
                raise Fault("scores", f"{req_id} goes without scores, and there was room for its reconstruction")
            if scores is not None or request.status != RequestStatus.RUNNING:
                self._room[req_id] = False
                continue
            if request.num_computed_tokens - request.num_in_flight_tokens < request.num_prompt_tokens:
                self._room.pop(req_id, None)
                continue
            config, prompt = resident.config, request.num_prompt_tokens
            repeated = parts(prompt, config.chunk, len(config.instruction), self.settings.length)
            longest = max((end - max(start - OVERLAP, 0) for start, end in repeated), default=0)
            needed = math.ceil((prompt + len(config.instruction) + longest) / block) - prompt // block
            free = self.pool.get_num_free_blocks() - self.cache.watermark_blocks
            slots = len(scheduler.running) + scheduler.num_waiting_for_streaming_input < self.settings.seqs
            shadows = sum(map(scheduler.reconstructions.is_shadow, self.evictable[0].residents))
            room = (
                bool(repeated) and prompt >= block and (shadows or (slots and free >= needed + len(scheduler.running)))
            )
            self._room[req_id] = self._room.get(req_id, True) and bool(room)

    def _withdraw_what_is_not_computed(self) -> None:
        """Mend a fault of vLLM's, which is no matter of this load.

        With priorities a request may be preempted that the very step has planned for, and its blocks published: these
        stay in the prefix cache, and nobody ever computes them (vLLM's pull request 43569).
        """
        preempt = self.scheduler._preempt_request

        def mended(request: Request, *args: Any, **kwargs: Any) -> None:
            computed = request.num_computed_tokens // self.settings.block
            planned = [manager.req_to_blocks.get(request.request_id, [])[computed:] for manager in self.managers]
            for block in (block for blocks in planned for block in blocks if not block.is_null):
                self.counts["published by vLLM, and not computed"] += self.pool._maybe_evict_cached_block(block)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = mended

    def _watch_pressure(self) -> None:
        """*vain*: see what each allocation that lacked blocks has cost, and whether it succeeded."""
        allocate = self.cache.allocate_slots

        def watched(request: Request, *args: Any, **kwargs: Any) -> Any:
            groups = self.scheduler._plan.groups
            before = [{req_id: len(holes) for req_id, holes in group.holes.items()} for group in groups]
            blocks = allocate(request, *args, **kwargs)
            lost = {
                req_id
                for group, known in zip(groups, before)
                for req_id, holes in group.holes.items()
                if len(holes) > known.get(req_id, 0)
            }
            if lost and blocks is None:
                raise Fault("vain", f"{sorted(lost)} lost blocks for {request.request_id}, which gets none")
            for req_id in lost if self.settings.priorities else ():
                if self.scheduler.requests[req_id].priority < request.priority:
                    raise Fault("priority", f"{req_id} lost blocks for {request.request_id}, which is less important")
            self.counts["relieved"] += bool(lost)
            return blocks

        self.cache.allocate_slots = watched

    def _stall(self, output: Any) -> None:
        """*stall*: requests get on.

        Counted are steps in a row in which no request ends and none computes a token that it has not computed before,
        not even before it was preempted. Allowed are four times the steps that all live requests would take one after
        the other, and 64. The same is asked of the oldest request on its own, unless priorities say that others go
        first. Steps in which the scheduler is paused, or all requests are sessions that wait for a turn, do not count.
        """
        if self._paused or not self.scheduler.get_num_unfinished_requests():
            return
        self._since += 1
        self._since_oldest += 1
        oldest = next((r for r in self.live.values() if r.status != RequestStatus.WAITING_FOR_STREAMING_REQ), None)
        for req_id in output.num_scheduled_tokens:
            request = self.live.get(req_id)
            if request is None:
                continue  # a shadow
            computed = request.num_computed_tokens
            if computed > self._furthest.get(req_id, 0):
                self._furthest[req_id] = computed
                self._since = 0
                if request is oldest:
                    self._since_oldest = 0
        if oldest is None or oldest.request_id not in self._furthest or self.settings.priorities:
            self._since_oldest = 0
        if max(self._since, self._since_oldest) <= PATIENCE:
            return
        chunk = min(self.settings.chunk, self.settings.long or self.settings.chunk)
        steps = sum(math.ceil(r.num_tokens / chunk) + r.max_tokens for r in self.live.values())
        if max(self._since, self._since_oldest) > 4 * steps + PATIENCE:
            if self._held_by_sessions():
                return
            states = [
                (r.request_id, r.status.name, r.num_computed_tokens, r.num_preemptions) for r in self.live.values()
            ]
            oldest_only = "" if self._since > 4 * steps + PATIENCE else f" of {oldest.request_id}, the oldest,"
            raise Fault(
                self._kind_of_stall(),
                f"no progress{oldest_only} in {max(self._since, self._since_oldest)} steps in a pool of "
                f"{self.pool.num_gpu_blocks - 1} blocks; requests, computed tokens, preemptions: {states}",
            )

    def _kind_of_stall(self) -> str:
        """With what may be the reason, so that different ones are told apart."""
        reasons = []
        if self.evictable:
            residents = [resident for manager in self.evictable for resident in manager.residents.values()]
            lost = self.worker.counts.lost or self.settings.late
            for reason, holds in (
                ("under pressure", any(resident.under_pressure for resident in residents)),
                ("by token", any(resident.config.granularity == "token" for resident in residents)),
                ("reports lost", lost),
            ):
                reasons += [reason] if holds else []
        return ", ".join(["stall", *reasons])

    def _end_lost_sessions(self) -> bool:
        """End sessions that vLLM has lost; whether there were any.

        A session that is preempted while a step of it is in flight, and whose turn ends with that step's output, is put
        into a queue for its next turn, and taken out again with requests that ended while they were preempted.
        """
        scheduler = self.scheduler
        queued = {r.request_id for r in (*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting)}
        lost = [req_id for req_id, request in self.live.items() if request.resumable and req_id not in queued]
        for req_id in lost:
            scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self._ended(req_id)
            self.counts["sessions lost by vLLM"] += 1
        return bool(lost)

    def _held_by_sessions(self) -> bool:
        """Whether sessions between turns, which vLLM never preempts, have all the blocks; one is ended if so."""
        if self._end_lost_sessions():
            self._since_oldest = 0
            return True
        sessions = [r for r in self.live.values() if r.resumable and r.status != RequestStatus.RUNNING]
        holders = [r.request_id for r in sessions if r.num_computed_tokens]
        if not holders or (len(holders) == 1 and len(self.live) == 1):
            return False
        self.scheduler.finish_requests(holders[-1], RequestStatus.FINISHED_ABORTED)
        self._ended(holders[-1])
        self._since_oldest = 0
        self.counts["sessions ended to go on"] += 1
        return True

    def _check_nothing_left(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        if scheduler.requests or scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting:
            raise Fault("left", f"requests: {list(scheduler.requests)}")
        if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise Fault("left", f"{pool.get_num_free_blocks()} blocks are free of {pool.num_gpu_blocks - 1}")
        if self.worker.rows:
            raise Fault("left", f"workers were not told of the end of {list(self.worker.rows)}")
        for manager in self.managers:
            for name in ("req_to_blocks", "num_cached_block", "residents"):
                if getattr(manager, name, None):
                    raise Fault("left", f"{name} of group {manager.kv_cache_group_id}: {getattr(manager, name)}")
        if not self.evictable:
            return
        for manager in self.evictable:
            if any(manager.held.values()) or manager.take_over_trigger():
                raise Fault("left", f"group {manager.kv_cache_group_id}: held {manager.held}")
        if scheduler._stoppable:
            raise Fault("left", f"usage of {list(scheduler._stoppable)}")
        for group in scheduler._plan.groups:
            told = {name: getattr(group, name) for name in group.__slots__ if name not in ("forgotten",)}
            if any(told.values()):
                raise Fault("left", f"of plans: {told}")
        if scheduler._plan.compactions or scheduler._plan.rotations:
            raise Fault("left", f"orders: {scheduler._plan}")
        if (reconstructions := scheduler.reconstructions) is not None:
            for name in ("_jobs", "_shadow", "_hidden"):
                if getattr(reconstructions, name):
                    raise Fault("left", f"reconstructions: {name} {getattr(reconstructions, name)}")
            forgotten = set(scheduler._plan.groups[0].forgotten)
            kept = {scores for _, scores in reconstructions.scores._prompts.values() if isinstance(scores, int)}
            if self.worker.prompts.keys() - forgotten != kept:
                raise Fault("left", f"scores of prompts {set(self.worker.prompts)} at workers, {kept} at the scheduler")


@contextmanager
def quiet() -> Iterator[None]:
    """vLLM and the plugin log faults that programs provoke."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(program: Program) -> Counter[str]:
    """Run a program; returns what happened.

    Raises:
        Fault: an invariant does not hold, or the scheduler raised.
    """
    with quiet():
        try:
            return Simulation(program).run()
        except Fault:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {last.name}"
            raise Fault(kind, f"{error}\n{traceback.format_exc()}") from error


def failure(program: Program) -> Fault | None:
    try:
        run(program)
    except Fault as fault:
        return fault
    return None


def shortest(program: Program, fault: Fault, seconds: float = 60.0) -> Program:
    """A short program that fails in the same way."""

    def fails(candidate: Program) -> bool:
        found = failure(candidate)
        return found is not None and found.kind == fault.kind

    return shrink(program, fails, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", action="append", choices=[*sorted(POLICIES), "stock"], help="all, if left out")
    parser.add_argument("--faithful", action="store_true", help="no report is lost or late")
    parser.add_argument("--replay", help="a file with a program, as it was printed; - for standard input")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to shorten a failing program; 0: do not")
    parser.add_argument("--most", type=int, default=1, help="stop after so many kinds of faults")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # a million objects of modules, which the collector would traverse again and again
    atexit.register(gc.unfreeze)
    if options.replay:
        text = sys.stdin.read() if options.replay == "-" else Path(options.replay).read_text()
        print(dict(run(Program.parse(text))))
        return
    maker = Maker(options.seed, options.policy, options.faithful)
    sys.exit(search(maker, options.requests, options.shrink, options.most))


def search(maker: Maker, requests: int, seconds: float, most: int) -> int:
    """Run random programs; prints failing ones, shortened, and returns how many kinds of faults they show.

    Args:
        maker: of the programs.
        requests: to stop after.
        seconds: to shorten a program.
        most: kinds of faults to stop after.
    """
    counts, found = Counter(), Counter()
    start, programs = time.monotonic(), 0
    while counts["requests"] < requests and len(found) < most:
        program = maker.program()
        programs += 1
        try:
            counts.update(run(program))
        except Fault as fault:
            name = f"{fault.kind} ({(program.settings.policy or {'name': 'stock'})['name']})"
            found[name] += 1
            counts["requests"] += len(program.ops)
            if found[name] == 1:
                print(f"--- program {programs}: {name}\n{fault}", flush=True)
                if seconds:
                    program = shortest(program, fault, seconds)
                    print(f"shortened: {failure(program)}")
                print(program, flush=True)
    print(f"{programs} programs in {time.monotonic() - start:.0f} s: {dict(counts)}")
    print(f"faults: {dict(found)}" if found else "no faults")
    return len(found)


if __name__ == "__main__":
    main()

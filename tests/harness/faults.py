"""The faults that mutants.py seeds, each with the tests that have to find it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One seeded fault.

    Attributes:
        name: what is wrong.
        file: below vllm_evict/.
        old: text that stands once in the file.
        new: what takes its place.
        tests: test files that have to fail, as they stand in tests/*/test_*.py; "file -k words" runs a part of one.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    # What a decision takes.
    Mutant(
        "a sink may go",
        "core/blocks.py",
        "searchsorted((self.limits.sink, recent, blocks))",
        "searchsorted((max(self.limits.sink - 1, 0), recent, blocks))",
        ("residency",),
    ),
    Mutant(
        "a recent block may go",
        "core/blocks.py",
        "recent = max(computed_tokens - self.limits.recent, 0) // self.block_size\n        recent = min",
        "recent = max(computed_tokens - self.limits.recent, 0) // self.block_size + 1\n        recent = min",
        ("residency",),
    ),
    Mutant(
        "one block too many goes",
        "core/blocks.py",
        "return candidates, min(spare, len(candidates))",
        "return candidates, min(spare + 1, len(candidates))",
        ("residency",),
    ),
    Mutant(
        "the most important goes",
        "core/blocks.py",
        'return np.sort(candidates[np.argsort(importance, kind="stable")[:spare]])',
        'return np.sort(candidates[np.argsort(importance, kind="stable")[-spare:]])',
        ("residency",),
    ),
    Mutant(
        "a decision at the trigger",
        "core/blocks.py",
        "if self.limits is None or self.limits.budget + spare <= self.limits.trigger:",
        "if self.limits is None or self.limits.budget + spare < self.limits.trigger:",
        ("residency",),
    ),
    Mutant(
        "importance read by place, not by index",
        "core/blocks.py",
        "at = report.index.searchsorted(candidates)\n",
        "at = np.arange(len(candidates))\n",
        ("residency",),
    ),
    Mutant(
        "the mean divides by nothing",
        "core/blocks.py",
        'statistics["mass"] = statistics["mass"] / self._age(candidates, computed_tokens)',
        'statistics["mass"] = statistics["mass"] * 1',
        ("residency",),
    ),
    Mutant(
        "a restart keeps its holes",
        "core/blocks.py",
        "self.residence, self._of_mechanisms = Residence(self.block_size), {}",
        "pass",
        ("residency",),
    ),
    Mutant(
        "a restart is not counted",
        "core/blocks.py",
        "self.incarnation += 1\n        self.started",
        "self.started",
        ("residency",),
    ),
    Mutant(
        "purity grows with a later eviction",
        "core/blocks.py",
        "if self.pure_tokens is None:\n            self.pure_tokens = computed_tokens",
        "self.pure_tokens = computed_tokens",
        ("residency",),
    ),
    Mutant(
        "a step that reads less ends no purity",
        "core/blocks.py",
        "            self.pure_tokens = first",
        "            pass",
        ("read", "load_scheduler"),
    ),
    Mutant(
        "a turn's purity is not clamped",
        "core/blocks.py",
        "self.pure_tokens = min(self.pure_tokens, computed_tokens)",
        "pass",
        ("residency",),
    ),
    Mutant(
        "a shared budget is each group's own",
        "core/blocks.py",
        "spare = sum(held) - len(groups) * limits.budget",
        "spare = sum(held) - len(groups) * limits.budget - 1",
        ("bands", "load_scheduler -k adakv"),
    ),
    # What is booked.
    Mutant(
        "a hole off by one",
        "integration/engine/managers.py",
        "dict.fromkeys(gone, self._null_block)",
        "dict.fromkeys([index - 1 for index in gone], self._null_block)",
        ("load_scheduler",),
    ),
    Mutant(
        "a block freed twice",
        "integration/engine/managers.py",
        "self._give_back(given_back)",
        "self._give_back(given_back + given_back[:1])",
        ("load_scheduler",),
    ),
    Mutant(
        "a block never freed",
        "integration/engine/managers.py",
        "self._give_back(given_back)",
        "self._give_back(given_back[:-1])",
        ("load_scheduler",),
    ),
    Mutant(
        "impure blocks are published",
        "integration/engine/managers.py",
        "num_tokens = min(num_tokens, pure)",
        "pass",
        ("load_scheduler",),
    ),
    Mutant(
        "a published block counts as private",
        "integration/engine/managers.py",
        "return block.ref_cnt == 1 and block.block_hash is None",
        "return block.ref_cnt == 1",
        ("tokens -k no_request_can_hit",),
    ),
    Mutant(
        "a shared block counts as private",
        "integration/engine/managers.py",
        "return block.ref_cnt == 1 and block.block_hash is None",
        "return block.block_hash is None",
        ("tokens -k no_request_can_hit",),
    ),
    Mutant(
        "growth is not noted",
        "integration/engine/scheduler.py",
        "                    # The limits of a session's next turn may have changed. Blocks that a connector loaded came "
        "before.\n                    manager.note(req_id)",
        "                    pass",
        ("load_scheduler",),
    ),
    Mutant(
        "admission counts the whole prompt",
        "integration/engine/managers.py",
        "num_tokens = min(num_tokens, most * self.block_size)",
        "pass",
        ("load_scheduler", "serving"),
    ),
    Mutant(
        "sessions and loads of connectors wait unseen",
        "integration/start/versions.py",
        '("waiting", "kv_holding_waiting", "skipped_waiting")',
        '("waiting",)',
        ("load_scheduler", "sessions", "connectors"),
    ),
    Mutant(
        "growth is not counted",
        "integration/engine/scheduler.py",
        "                    manager.count(req_id)",
        "                    pass",
        ("load_scheduler", "serving_shown"),
    ),
    Mutant(
        "admission is never bounded",
        "integration/engine/scheduler.py",
        "admits = changes and any_waits(self)",
        "admits = False",
        ("load_scheduler", "serving", "known_bugs"),
    ),
    Mutant(
        "a hit of any length",
        "integration/engine/hits.py",
        "bisect.bisect_right(range(whole + 1), pool, key=most_held)",
        "bisect.bisect_right(range(whole + 1), 2 * pool, key=most_held)",
        ("load_scheduler",),
    ),
    Mutant(
        "streaming heads hit without their window",
        "integration/engine/managers.py",
        "*hit[-window:]]",
        "*hit[-window:-1], self._null_block]",
        ("duo -k too_long",),
    ),
    # What travels.
    Mutant(
        "holes travel a step late",
        "integration/engine/managers.py",
        "taken, self.changes = self.changes, {}",
        "taken, self.changes, self._late = getattr(self, '_late', {}), {}, self.changes",
        ("load_scheduler",),
    ),
    Mutant(
        "plans of a request that ended stay",
        "core/plan.py",
        "self.orders = [order for order in self.orders if order.req_id != req_id]",
        "pass",
        ("load_scheduler", "tokens", "context"),
    ),
    Mutant(
        "a report of an earlier life counts",
        "core/mechanisms/base.py",
        "if request is not None and group.residents[req_id].incarnation == incarnation:",
        "if request is not None:",
        ("residency",),
    ),
    Mutant(
        "a flawed report is taken",
        "core/reports.py",
        "if not np.isfinite(values).all():",
        "if False:",
        ("missing_reports",),
    ),
    Mutant(
        "missing reports are waited for without end",
        "core/mechanisms/base.py",
        "patient = misses.count < MOST_MISSES and",
        "patient =",
        ("missing_reports", "guarantee", "load_scheduler"),
    ),
    # Pressure.
    Mutant(
        "pressure takes shared blocks",
        "integration/engine/pressure.py",
        "return block.ref_cnt == 1 and block.block_id not in kept",
        "return block.block_id not in kept",
        ("pressure", "load_scheduler"),
    ),
    Mutant(
        "pressure takes what the waiting request hits",
        "integration/engine/pressure.py",
        "return block.ref_cnt == 1 and block.block_id not in kept",
        "return block.ref_cnt == 1",
        ("guarantee", "pressure"),
    ),
    Mutant(
        "pressure takes of higher priorities",
        "integration/engine/pressure.py",
        "givers = [giver for giver in givers if giver.priority >= request.priority]",
        "pass",
        ("guarantee",),
    ),
    Mutant(
        "pressure evicts though it is too little",
        "core/mechanisms/pressure.py",
        "        if freed < missing:\n            return []\n",
        "",
        ("guarantee", "pressure", "load_scheduler"),
    ),
    Mutant(
        "pressure takes blocks in a step that publishes",
        "core/mechanisms/pressure.py",
        "if publishes or not blocks.started",
        "if not blocks.started",
        ("pressure -k published", "hybrids -k end"),
    ),
    Mutant(
        "pressure goes below the floor",
        "core/mechanisms/pressure.py",
        "left[owner[at]] -= 1",
        "left[owner[at]] -= 0",
        ("pressure", "load_scheduler"),
    ),
    Mutant(
        "pressure admits who waits",
        "integration/engine/pressure.py",
        "if not self._admits and not",
        "if False and not",
        ("pressure", "load_scheduler"),
    ),
    Mutant(
        "a request under pressure starts with its floor",
        "core/blocks.py",
        "if self.under_pressure and not self.config.admit and whole <= room:",
        "if False:",
        ("pressure",),
    ),
    # What workers do.
    Mutant(
        "a stale view",
        "compute/views.py",
        "        self._made = {}\n\n    def memory",
        "        self._made = self._made\n\n    def memory",
        ("oracle_parity", "serving"),
    ),
    Mutant(
        "holes of a finished request stay",
        "compute/holes.py",
        "for req_id in gone | tables.keys():",
        "for req_id in tables.keys():",
        ("pressure", "oracle_parity", "sessions", "load_engine"),
    ),
    Mutant(
        "a hole that workers know is none",
        "compute/holes.py",
        "if (physical == HOLE) != (block in holes)}",
        "if physical == HOLE or block in holes}",
        ("host_memory",),
    ),
    Mutant(
        "resident tokens off by a block",
        "compute/holes.py",
        "return seq_lens - self.lacking(req_ids) if self.of_request else seq_lens",
        "return seq_lens - self.lacking(req_ids) - self._block_size if self.of_request else seq_lens",
        ("oracle_parity",),
    ),
    Mutant(
        "sums of the request before",
        "compute/sums.py",
        "        slot = self._slot(req_id)\n        self._sums[slot] = 0",
        "        slot = self._slot(req_id)",
        ("sums",),
    ),
    Mutant(
        "weights by bounds of lengths",
        "compute/sums.py",
        "if slack is not None and measured.by_place:",
        "if 0:",
        ("unsure",),
    ),
    Mutant("keys of rejected drafts", "compute/cached.py", ", row.verified)", ")", ("drafters_async -k keydiff",)),
    Mutant("ended turns", "core/mechanisms/budget.py", "*self._ended_turns(plan)", "*()", ("sessions -k within",)),
    Mutant("reports of drafts", "core/plan.py", "if end is None:", "if True:", ("drafters_async -k h2o",)),
    Mutant(
        "windows never end",
        "compute/sums.py",
        "self._sums.index_fill_(0, self._to_device(slots), 0.0)",
        "pass",
        ("sums",),
    ),
    Mutant(
        "queries of the pattern all count",
        "compute/sums.py",
        "        last = self._last(weights, batch.starts)\n        return MassStep(",
        "        last, memory = None, memory._replace(weights=None)\n        return MassStep(",
        ("oracle_parity", "sums"),
    ),
    Mutant(
        "the newest token is not counted",
        "compute/tokens.py",
        "self._newest[slots] = batch.resident_tokens[rows], batch.seq_lens[rows] - 1",
        "self._newest[slots] = batch.resident_tokens[rows], batch.seq_lens[rows]",
        ("tokens",),
    ),
    Mutant(
        "scores stay where tokens moved",
        "compute/tokens.py",
        "scores = gathered(self._scores(slot), first, count, keep)",
        "scores = self._scores(slot)[..., : self._lengths[slot] - count + keep.shape[2]]",
        ("tokens",),
    ),
    Mutant(
        "moved keys turn twice",
        "features/context/worker.py",
        "keys = restored([kept[block] for block in blocks], self._device)",
        "keys = self._store.keys(source)",
        ("context_keys",),
    ),
    Mutant(
        "runner V1 forgets holes",
        "integration/worker/runners.py",
        "table.np[row, list(blocks)] = list(blocks.values())",
        "pass",
        ("serving", "poison"),
    ),
    Mutant(
        "a decode is counted twice",
        "compute/work.py",
        "return self._of_stock if weights is None else self._of_stock * weights",
        "return weights",
        ("oracle_parity",),
    ),
    Mutant(
        "mass by kernel blocks is added to one block of the pool",
        "compute/attention/by_kernel_blocks.py",
        "out.add_(split.unflatten(2, (-1, count)).sum(3))",
        "out.add_(split[:, :, ::count])",
        ("kernel_blocks",),
    ),
    Mutant(
        "drafters read holes",
        "integration/worker/backend.py",
        "views.drafting_view(common_attn_metadata)",
        "common_attn_metadata",
        ("drafters -k sees",),
    ),
    Mutant(
        "a stage reports its own layers alone",
        "integration/worker/ranks.py",
        "            values += before\n",
        "            pass\n",
        ("pipeline_parallel -k h2o",),
    ),
    # What KV connectors load and store.
    Mutant(
        "a connector stores blocks computed over holes",
        "integration/engine/followers.py",
        "status.max_offload_tokens = pure_tokens if asked is None else min(asked, pure_tokens)",
        "status.max_offload_tokens = asked",
        ("offloading -k hits",),
    ),
    Mutant(
        "a connector stores evicted blocks by their old numbers",
        "integration/engine/followers.py",
        "state.block_ids[chunk.start : chunk.stop] = [0] * len(chunk)",
        "pass",
        ("offloading -k stored_late",),
    ),
    Mutant(
        "a connector's blocks are written before they are stored",
        "integration/engine/followers.py",
        "self._fence(status, set(blocks.values()))",
        "pass",
        ("offloading -k stored",),
    ),
    Mutant(
        "LMCache stores what was computed over holes",
        "integration/engine/followers.py",
        "setattr(tracker, counted, STOPPED)",
        "pass",
        ("cache_server -k stock",),
    ),
    Mutant(
        "a request whose blocks go to another engine loses some",
        "integration/engine/admission.py",
        "if not handed_on:",
        "if True:",
        ("handing_on -k whole",),
    ),
    Mutant(
        "a connector loads into blocks that a step in flight reads",
        "integration/engine/scheduler.py",
        "if self.defer_block_free and self.sched_step_seq > self.processed_step_seq:",
        "if False:",
        ("connectors -k in_flight",),
    ),
    Mutant(
        "blocks that a connector loaded are not looked at",
        "integration/engine/scheduler.py",
        "grown += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]",
        "pass",
        ("connectors -k decode_engine",),
    ),
    Mutant(
        "what a connector failed to load counts",
        "integration/engine/scheduler.py",
        "        self._failed_loads = affected",
        "        pass",
        ("connectors -k does_not_come",),
    ),
    # Preempted requests on the host, layers without a cache, audits.
    Mutant(
        "a layer that reads another's cache does not add to its scores",
        "integration/worker/layers.py",
        "places = [*enumerate(layers), *(each for each in reading if not hasattr(each[1], drafters.DRAFTS))]",
        "places = [*enumerate(layers)]",
        ("sharing",),
    ),
    Mutant(
        "an audit publishes",
        "features/audit/engine.py",
        "pure_tokens = hit.tokens",
        "pure_tokens = None",
        ("audits -k notices",),
    ),
    Mutant(
        "the row after the token",
        "features/audit/engine.py",
        "answer.token_ids[first + 1 : end + 1]",
        "answer.token_ids[first:end]",
        ("audits -k full_gave",),
    ),
    Mutant(
        "a room takes the free blocks of a hit",
        "integration/engine/pressure.py",
        "        pool.touch(taken)\n",
        "        taken = []\n",
        ("load_scheduler -k failed_once",),
    ),
    Mutant(
        "queries of the prompt count in missed mass",
        "features/audit/engine.py",
        "start=shadow.answer.first, summed=True",
        "start=0, summed=True",
        ("audits -k oracle",),
    ),
]

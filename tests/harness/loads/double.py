"""A worker without a model: obeys plans, keeps its own tables, and knows what every slot of every block holds.

A slot's content is a number. Where nothing of the request was missing when a token was computed, the number follows
from the tokens up to it and nothing else; so requests with one prefix compute the same content, as a real model does.
Where something was missing, the number is one that no other request computes. What a request reads has to be what it
has written, or what others computed of the same prefix with nothing missing.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from parts import orders_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_evict.core.actions import Compaction, Judged
from vllm_evict.core.plan import PLAN, REPORTS, EvictionPlan, Report, Reports
from vllm_evict.core.residence import HOLE
from vllm_evict.features.audit.plan import SCORED, AuditedRows
from vllm_evict.features.context.plan import KeyRotation
from vllm_evict.features.kvzip.plan import Repetitions
from vllm_evict.integration.engine.poison import Fills
from vllm_evict.policies import RUNNING

from .contents import MASK, POISON, SALTS, SCORES, TURN, Counts, Fault, Row, scored
from .host import HostTier
from .program import VOCABULARY, Settings


@dataclass
class Worker:
    """Runs steps in the order in which they were planned.

    Args:
        settings: of the program.
        blocks: of the pool.
        groups: numbers of the KV groups that may have holes, among all.
        windows: of all KV groups, tokens that a query sees; 0: all of them; below 0: those of its chunk of so many.
        context: how far back a query may look, in tokens after keys were rotated; None: no limit.
        host: host memory; None: evicted blocks are dropped.
        read: of each of `groups`, blocks that a decode attends to, and those that a chunk of a prompt does; 0: all of
            them.
    """

    settings: Settings
    blocks: int
    groups: list[int]
    windows: list[int]
    context: int | None = None
    host: HostTier | None = None
    read: list[list[int]] = field(default_factory=lambda: [[], []])
    rows: dict[str, Row] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    #: Requests whose sampled tokens are their own.
    hot: set[str] = field(default_factory=set)
    #: Physical blocks that the last step wrote into.
    written: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.block = self.settings.block
        self.memory = np.zeros((self.blocks, self.block), np.uint64)
        self.longest = -(-(self.settings.length + self.settings.drafts) // self.block) + 1
        self._nonces = 0
        #: Scores by token of reconstructed prompts: number -> tokens, those repeated so far; and shadows that run.
        self.prompts: dict[int, tuple[int, set[int]]] = {}
        self._repeating: dict[str, Any] = {}
        self._late: list[Reports] = [{} for _ in self.groups]
        #: Tokens by which a plan counts more of a request's as computed than there are.
        self._unsure: dict[str, int] = {}
        #: Requests that decode in the step.
        self._decodes: set[str] = set()

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Obey a step's plan, compute its tokens, check what it reads; returns what a real worker would."""
        plan = getattr(output, PLAN, None) or EvictionPlan.empty(len(self.groups))
        preempted = output.preempted_req_ids or set()
        for req_id in output.finished_req_ids | preempted:
            self._repeating.pop(req_id, None)
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
        for req_id in preempted & self.rows.keys():
            self.rows[req_id].active = False
        self.written, self._unsure = set(), {}
        after = self._rearrange(plan)
        if self.host is not None:
            self.host.obey(plan, self)
        if (fills := Fills.within(plan)) is not None:
            self.memory[fills.poison], self.memory[fills.clean] = POISON, 0
            self.written.update(fills.poison, fills.clean)
        starts = self._take_blocks(output, plan)
        self._take_changes(plan, after, {new.req_id for new in output.scheduled_new_reqs})
        if self.host is not None:
            self.host.take(plan, self)
        self._take_orders(plan)
        drafts = {req_id: len(each) for req_id, each in output.scheduled_spec_decode_tokens.items()}
        self._decodes = {req_id for req_id in output.num_scheduled_tokens if self.rows[req_id].decodes(starts[req_id])}
        sampled = []
        for req_id, count in output.num_scheduled_tokens.items():
            sampled.append(self._verify(req_id, starts[req_id], count, drafts.get(req_id, 0)))
            self._write(req_id, starts[req_id], count, drafts.get(req_id, 0))
        for req_id, count in output.num_scheduled_tokens.items():
            self._read(req_id, starts[req_id], count)
        for req_id, told in zip(output.num_scheduled_tokens, sampled):
            told += self._sample(req_id, self.rows[req_id].computed)
        self.counts.steps += 1
        self.counts.tokens += output.total_num_scheduled_tokens
        req_ids = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(req_ids, {req_id: at for at, req_id in enumerate(req_ids)}, sampled)
        settled = {req_id: count - drafts.get(req_id, 0) for req_id, count in output.num_scheduled_tokens.items()}
        for told in plan.groups:
            for req_id, number in judged.numbers.items() if (judged := Judged.within(told)) else ():
                self._alive(req_id, "a decision").judged.add(number)
        reports = self._reports(plan, starts, settled)
        if any(reports):
            setattr(made, REPORTS, reports)
        if (asked := AuditedRows.within(plan)) is not None:
            setattr(made, SCORED, scored(self.rows, starts, asked.of_requests, self.counts))
        return made

    # --- plans --------------------------------------------------------------------------------------------------------

    def _alive(self, req_id: str, what: str) -> Row:
        row = self.rows.get(req_id)
        if row is None or not row.active:
            raise Fault("orders", f"{what} of {req_id}, which is gone")
        return row

    def _rearrange(self, plan: EvictionPlan) -> dict[tuple[str, int], list[int]]:
        """Gather tokens and move blocks up; returns the tables that should come of it."""
        after: dict[tuple[str, int], list[int]] = {}
        for each in orders_of(plan, Compaction):
            group, bs = self.groups[each.group], self.block
            row = self._alive(each.req_id, "compaction")
            table = after.setdefault((each.req_id, each.group), list(row.tables[group]))
            # Blocks of steps in flight are in the table already; a compaction is about computed ones.
            resident = [at for at, block in enumerate(table) if block]
            if [table[at] for at in resident[: len(each.source)]] != each.source:
                raise Fault("compaction", f"{each.req_id} holds {table}, the plan says {each.source}")
            places = resident[each.first : each.first + each.count]
            self._same(each.req_id, group, row, places, source := [table[at] for at in places])
            keep = len(each.target)
            if keep >= each.count or len(set(each.target)) < keep or 0 in each.target:
                raise Fault("compaction", f"{each.req_id}: {each.count} blocks into {each.target}")
            if places[-1] * bs + bs - 1 > each.position:
                raise Fault("compaction", f"{each.req_id}: block {places[-1]} has tokens after {each.position}")
            # Sizes that are not given follow the budget, and may be less than the policy's.
            sink, recent = (getattr(each.config, size) * (size in each.config.given) for size in ("sink", "recent"))
            if each.config.protect and (places[0] * bs < sink or places[-1] >= (each.position + 1 - recent) // bs):
                raise Fault("compaction", f"{each.req_id}: {places} have sinks or recent tokens")
            if row.tracked[each.group] and each.judged not in row.judged:
                raise Fault("compaction", f"{each.req_id}: no scores were copied for decision {each.judged}")
            total = each.count * bs
            order = np.argsort(self._scores(row, total, each.position), kind="stable")
            chosen = np.sort(order[: keep * bs])
            gathered = self.memory[source].reshape(-1)[chosen].reshape(keep, bs)
            self.memory[np.array(each.target, int)] = gathered
            self.written.update(each.target)
            row.expected[group][places[:keep]] = gathered
            for at, block in zip(places[:keep], each.target):
                table[at] = block
            for at in places[keep:]:
                table[at] = 0
            row.reduced = True
            self.counts.compactions += 1
        for each in orders_of(plan, KeyRotation):
            self._move(each, after)
        return after

    def _move(self, move: KeyRotation, after: dict[tuple[str, int], list[int]]) -> None:
        group = self.groups[move.group]
        row = self._alive(move.req_id, "move")
        table = after.setdefault((move.req_id, move.group), list(row.tables[group]))
        # Holes of this plan were decided before the move; their entries are still there.
        where = {block: at for at, block in enumerate(table) if block}
        if not all(block in where for block in move.source) or len(set(move.target)) < len(move.target):
            raise Fault("move", f"{move.req_id} holds {table}, the plan moves {move.source} to {move.target}")
        places = [where[block] for block in move.source]
        self._same(move.req_id, group, row, places, move.source)
        turned = np.array(move.tokens, np.int64)
        self.memory[move.target] = self.memory[move.source] + turned.astype(np.uint64)[:, None] * TURN
        self.written.update(move.target)
        row.expected[group][places] = self.memory[move.target]
        row.turned[group][places] += turned
        for at, block in zip(places, move.target):
            table[at] = block
        row.reduced = True
        self.counts.moves += 1

    def _take_blocks(self, output: SchedulerOutput, plan: EvictionPlan) -> dict[str, int]:
        """Rows of requests that start, start again or go on; returns where each one's tokens of this step begin."""
        starts = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            tables = [list(blocks) for blocks in new.block_ids]
            self._start(new.req_id, list(tokens), len(new.prompt_token_ids), tables, new.num_computed_tokens, plan)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            starts[req_id] = computed
            if req_id in cached.resumed_req_ids:
                tokens = cached.all_token_ids.get(req_id, self.rows[req_id].tokens)
                prompt = self.rows[req_id].prompt
                self._start(req_id, list(tokens), prompt, [list(each) for each in blocks], computed, plan)
                continue
            row = self._alive(req_id, "a step")
            if self.settings.drafts:
                # A plan made ahead counts all drafts in flight as accepted.
                starts[req_id], self._unsure[req_id] = row.computed, computed - row.computed
            if row.computed != computed and (
                row.computed > computed or not (self.settings.drafts and self.settings.ahead)
            ):
                raise Fault("steps", f"{req_id} goes on at {computed}, it has {row.computed} tokens")
            for table, new_blocks in zip(row.tables, blocks or ()):
                table.extend(new_blocks)
        return starts

    def _start(
        self, req_id: str, tokens: list[int], prompt: int, blocks: list[list[int]], computed: int, plan: EvictionPlan
    ) -> None:
        row = self.rows.get(req_id)
        if row is not None and row.active:
            return self._go_on(req_id, row, tokens, blocks, computed)
        if row is not None:
            self.counts.restarts += 1
        elif req_id.startswith("reconstruct-"):
            self.counts.shadows += 1
        groups, bs = len(self.windows), self.block
        self._nonces += 1
        row = self.rows[req_id] = Row(
            zlib.crc32(req_id.encode()),
            tokens,
            prompt,
            np.zeros(self.longest * bs, np.uint64),
            blocks,
            [np.zeros((self.longest, bs), np.uint64) for _ in range(groups)],
            [np.zeros(self.longest, np.int64) for _ in range(groups)],
            ["" for _ in self.groups],
            hot=req_id in self.hot,
            nonce=self._nonces * 0x2545F4914F6CDD1D & MASK,
        )
        row.computed = computed
        row.learn()
        if computed % bs:
            raise Fault("hit", f"{req_id} starts at {computed}, within a block")
        hit = computed // bs
        self.counts.hits += hit > 0
        prefix = row.known[:computed].reshape(hit, bs)
        for group, expected in enumerate(row.expected):
            expected[:hit] = prefix + SALTS[group]
        row.reduced = self.host is None and any(0 in row.tables[group] for group in self.groups)
        return None

    def _go_on(self, req_id: str, row: Row, tokens: list[int], blocks: list[list[int]], computed: int) -> None:
        """A session's next turn: a new request to vLLM, with the blocks that it has."""
        self.counts.turns += 1
        if tokens[:computed] != row.tokens[:computed]:
            raise Fault("session", f"{req_id}: the first {computed} tokens are not what was computed")
        row.prompt, row.tokens, row.counted, row.turns = len(tokens), tokens, min(computed, row.counted), row.turns + 1
        row.computed = computed
        row.learn()
        row.following = blocks

    def _take_changes(
        self,
        plan: EvictionPlan,
        after: dict[tuple[str, int], list[int]],
        new: set[str],
    ) -> None:
        """Holes, and blocks that others took the place of."""
        for number, (group, told) in enumerate(zip(self.groups, plan.groups)):
            for req_id, changes in told.changes.items():
                row = self._alive(req_id, "holes")
                holes = [at for at, block in changes.items() if block == HOLE]
                moved = {at: block for at, block in changes.items() if block != HOLE}
                table = row.tables[group]
                if any(not table[at] for at in changes):
                    raise Fault("holes", f"{req_id}, group {group}: {changes}, some are holes already: {table}")
                for at, block in moved.items():
                    table[at] = block
                for at in holes:
                    self.counts.holes += table[at] > 0
                    table[at] = 0
                row.reduced |= self.host is None
                expected = after.pop((req_id, number), table)
                if [block if at not in holes else 0 for at, block in enumerate(expected)] != table[: len(expected)]:
                    raise Fault("tables", f"{req_id}, group {group}: {table}, its orders say {expected}")
        for (req_id, number), expected in after.items():  # blocks that are written where they are
            if expected != (table := self.rows[req_id].tables[self.groups[number]])[: len(expected)]:
                raise Fault("tables", f"{req_id}, group {number}: {table} without a change, its orders say {expected}")
        for req_id in new:
            row = self.rows[req_id]
            following, row.following = row.following, None
            if following is None:
                continue
            for group, blocks in enumerate(following):
                own = row.tables[group]
                if group in self.groups and blocks[: len(own)] != own:
                    raise Fault("tables", f"{req_id}, group {group}: a turn with {blocks} after {own}")
                row.tables[group] = blocks

    def _take_orders(self, plan: EvictionPlan) -> None:
        """Note which requests are measured, and take scores of reconstructed prompts."""
        for number, told in enumerate(plan.groups):
            for req_id in told.untrack:
                if req_id in self.rows:
                    self.rows[req_id].tracked[number] = ""
            for req_id, scoring in told.track.items():
                self._alive(req_id, "scoring").tracked[number] = scoring.statistic
            for req_id in told.triggers:
                if not self._alive(req_id, "a trigger").tracked[number]:
                    raise Fault("orders", f"{req_id} has a trigger and is not measured")
            if (repetitions := Repetitions.within(told)) is None:
                continue
            for req_id, repetition in repetitions.repeats.items():
                self._alive(req_id, "a repetition")
                self._repeating[req_id] = repetition
                self.prompts.setdefault(repetition.prompt, (repetition.length, set()))
            for req_id, (prompt, length) in repetitions.scored.items():
                self._alive(req_id, "scores")
                if prompt not in self.prompts:
                    raise Fault("scores", f"{req_id} is to have scores of prompt {prompt}, which are not there")
                tokens, repeated = self.prompts[prompt]
                if len(repeated) < tokens or length > tokens:
                    raise Fault(
                        "scores", f"{req_id}: {len(repeated)} of {tokens} tokens were repeated, {length} wanted"
                    )
            for prompt in repetitions.forgotten:
                self.prompts.pop(prompt, None)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _verify(self, req_id: str, start: int, count: int, drafts: int) -> list[int]:
        """Accept some drafts of a step, which become tokens of the request; returns them."""
        row, end = self.rows[req_id], start + count - drafts
        row.learn()
        if end > len(row.tokens) or (drafts and end < len(row.tokens)):
            raise Fault("tokens", f"{req_id} computes up to {end} of {len(row.tokens)} tokens, and {drafts} drafts")
        any_number = (row.key * 0x9E3779B1 + 0x85EBCA6B * end + self.settings.seed) % 1013 % (drafts + 1)
        accepted = {"none": 0, "all": drafts, "any": any_number}[self.settings.accepted]
        self.counts.drafts += drafts
        self.counts.accepted += accepted
        tokens = []
        for at in range(accepted):
            tokens += self._sample(req_id, end + at)
            row.learn()
        row.computed = end + accepted
        return tokens

    def _write(self, req_id: str, start: int, count: int, drafts: int) -> None:
        row, bs, end = self.rows[req_id], self.block, start + count
        if self._reads_less(row, req_id in self._decodes, end - drafts):
            row.reduced, self.counts.read_less = True, self.counts.read_less + 1
        if self.host is not None:
            row.reduced |= self.host.reads_less(row, self.groups[0], req_id in self._decodes)
        values = row.known[start:end].copy()
        values[row.computed - start :] = POISON + np.uint64(row.nonce)  # drafts that were rejected
        if row.reduced:
            values = values + np.uint64(row.nonce)
        if count == 1:
            at, place = divmod(start, bs)
            for group, table in enumerate(row.tables):
                block = table[at] if at < len(table) else 0
                if not block:
                    raise Fault("holes", f"{req_id}, group {group}: token {start} has no block")
                self.memory[block, place] = row.expected[group][at, place] = (values + SALTS[group])[0]
                self.written.add(block)
            return
        places = np.arange(start, end)
        at, place = places // bs, places % bs
        first, last = start // bs, (end - 1) // bs
        for group, table in enumerate(row.tables):
            blocks = table[first : last + 1]
            if len(blocks) <= last - first or 0 in blocks:
                raise Fault("holes", f"{req_id}, group {group}: no block for some of tokens {start} to {end}: {table}")
            content = values + SALTS[group]
            self.memory[np.array(blocks)[at - first], place] = content
            row.expected[group][at, place] = content
            self.written.update(blocks)

    def _reads_less(self, row: Row, decodes: bool, end: int) -> bool:
        held = [end - self.block * row.tables[group][: -(-end // self.block)].count(0) for group in self.groups]
        return any(most and tokens > most * self.block for most, tokens in zip(self.read[not decodes], held))

    def _same(self, req_id: str, group: int, row: Row, at: list[int], blocks: list[int]) -> None:
        """Check that whole blocks hold what the request expects."""
        same = (self.memory[blocks] == row.expected[group][at]).all(1)
        if not same.all():
            wrong = [(at[i], blocks[i]) for i in np.flatnonzero(~same).tolist()]
            raise Fault("reads", f"{req_id}, group {group}: (logical, physical) blocks {wrong} hold something else")

    def _read(self, req_id: str, start: int, count: int) -> None:
        row, bs, end = self.rows[req_id], self.block, start + count
        blocks, rest = -(-end // bs), end % bs
        for group, table in enumerate(row.tables):
            window, least = self.windows[group], 0
            if window:
                least = start // -window * -window if window < 0 else max(start - window + 1, 0)
            first = least // bs
            if len(table) < blocks:
                raise Fault("tables", f"{req_id}, group {group}: {len(table)} blocks for {end} tokens")
            physical = np.array(table[first:blocks])
            resident = physical.nonzero()[0]
            unread = range(0)
            if self.host is not None and group in self.groups:
                unread = self.host.bring(req_id, row, group, end, req_id in self._decodes, self)
            same = self.memory[physical[resident]] == row.expected[group][first:blocks][resident]
            same[np.isin(resident + first, unread)] = True
            if rest and len(resident) and resident[-1] == blocks - first - 1:
                same[-1, rest:] = True
            if window:
                skipped = least - first * bs
                if len(resident) < len(physical):
                    raise Fault("holes", f"{req_id}, group {group}: holes within its window: {table}")
                same[0, :skipped] = True
            if not same.all():
                wrong = np.flatnonzero(~same.all(1))
                wrong = [(int(resident[i]) + first, int(physical[resident[i]])) for i in wrong]
                raise Fault(
                    "reads", f"{req_id}, group {group}: tokens {start} to {end} read (logical, physical) blocks {wrong}"
                )
            if self.context is not None and not window and len(resident):
                place = int(((resident * bs) + row.turned[group][resident]).min())
                if end - place > self.context:
                    raise Fault("context", f"{req_id} looks {end - place} tokens back, its context is {self.context}")
        if (repetition := self._repeating.get(req_id)) is not None:
            self._repeat(repetition, row, end)

    def _repeat(self, repetition: Any, row: Row, end: int) -> None:
        """Note what a shadow has repeated: its prompt ends with the part, after an overlap."""
        if end == len(row.tokens):
            part = list(range(repetition.start, repetition.end))
            if row.tokens[end - len(part) : end] != row.tokens[part[0] : part[-1] + 1]:
                raise Fault("scores", f"a shadow repeats something else than {part[0]} to {part[-1]}")
            self.prompts[repetition.prompt][1].update(part)

    def _sample(self, req_id: str, end: int) -> list[int]:
        """A token that follows from all tokens before it, if those are computed."""
        row = self.rows[req_id]
        if end < len(row.tokens):
            return []
        seen = int(row.known[end - 1]) ^ (row.key if row.hot else 0) ^ (row.nonce if row.reduced else 0)
        token = (seen * 0xD1342543DE82EF95 + self.settings.seed & MASK) >> 40
        row.tokens.append(token % VOCABULARY)
        return [row.tokens[-1]]

    # --- scores -------------------------------------------------------------------------------------------------------

    def _scores(self, row: Row, count: int, position: int) -> np.ndarray:
        """float64 [count]"""
        answers = self.settings.answers
        if answers == "equal":
            return np.zeros(count)
        if answers in ("rising", "falling"):
            values = np.arange(count, dtype=float)
            return values if answers == "rising" else values[::-1].copy()
        first = (row.key + 31 * position + self.settings.seed) % (len(SCORES) - count)
        values = SCORES[first : first + count].copy()
        if answers == "nan":
            values[values > 0.7] = np.nan
        return values

    def _reports(self, plan: EvictionPlan, starts: dict[str, int], counts: dict[str, int]) -> list[Reports]:
        reports, self._late = self._late, [{} for _ in self.groups]
        # A late report never takes the place of a newer one.
        for number, (group, told) in enumerate(zip(self.groups, plan.groups)):
            for req_id, names in told.report.items():
                row = self._alive(req_id, "a report")
                if req_id not in counts:
                    raise Fault("reports", f"{req_id} is to report in a step that it is not in")
                if names & RUNNING and row.tracked[number] not in names:
                    raise Fault("reports", f"{req_id}, group {group} is to report {set(names)}, and is not measured")
                end = starts[req_id] + counts[req_id]
                chance = (row.key * 0x9E3779B1 + 0x85EBCA6B * end + self.settings.seed) % 1009 / 1009
                # Which of the last blocks only drafts have begun, the host of a real worker does not know.
                known = end + self._unsure.get(req_id, 0)
                index = np.flatnonzero(row.tables[group][: -(-known // self.block)])
                report = Report(index, {name: self._scores(row, len(index), end + at) for at, name in enumerate(names)})
                self.counts.reports += 1
                if chance < self.settings.lost:
                    self.counts.lost += 1
                else:
                    chance -= self.settings.lost
                    if chance >= self.settings.late:
                        reports[number][req_id] = report
                    if chance < self.settings.late + self.settings.doubled:
                        self._late[number][req_id] = report
        return reports

"""Programs for the scheduler's load: what they are, and how they are made up.

A program is plain data: settings of an engine, and operations, each with the step before which it happens. The same
program always runs the same way, so a failing one can be printed as JSON, kept and run again.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.config.allocators import ALLOCATION, ALLOCATORS
from vllm_evict.config.options import names_of
from vllm_evict.policies import POLICIES

from .tier import on_host, reading

#: Layers and KV heads of the model that is not there.
LAYERS, HEADS = 4, 4
#: Bytes of a token in all of them: keys and values of 16 dimensions in float32.
TOKEN_BYTES = 2 * LAYERS * HEADS * 16 * 4
#: Token ids are below this number.
VOCABULARY = 48
#: The token id that ends requests which have stop tokens.
STOP = 7
#: How the worker double makes up scores: at random, all equal, the newest or the oldest blocks least, or not a number.
ANSWERS = ("random", "equal", "rising", "falling", "nan")
#: Kinds of drafters.
DRAFTERS = ("", "draft_model", "eagle")
#: How many drafts of a step the worker double accepts: none, all, or any number of them.
ACCEPTED = ("none", "all", "any")


@dataclass(frozen=True)
class Settings:
    """An engine.

    Attributes:
        policy: as `KVPolicyConfig.parse` takes it; None: stock vLLM, as the control of this load.
        block: tokens of a block.
        chunk: `max_num_batched_tokens`.
        length: `max_model_len`.
        seqs: `max_num_seqs`.
        extra: blocks of the pool above the least that start-up accepts.
        caching: prefix caching.
        ahead: async scheduling, which plans a step before the output of the one before is there.
        runner: 1 or 2, for which of vLLM's model runners the scheduler writes its messages.
        priorities: priority scheduling instead of first come, first served.
        watermark: share of the pool that admissions leave free.
        long: `long_prefill_token_threshold`.
        whole: `scheduler_reserve_full_isl`, admission asks whether the whole prompt fits.
        window: tokens of sliding-window layers beside the others; 0: there are none; below 0: of chunks in their place.
        sliding: how many of the layers have the window.
        answers: one of `ANSWERS`.
        lost, late, doubled: share of reports that never come, of those that come with the next step's output instead of
            their own, and of those that come with both.
        poison: the scheduler names freed blocks to be filled with NaN, as in `VLLM_EVICT_POISON=1`.
        stats: the scheduler makes statistics of each step.
        events: the scheduler makes KV events.
        drafts: most draft tokens of a request in a step; 0: the server does not speculate.
        accepted: one of `ACCEPTED`.
        drafter: "" (n-grams), or a method whose drafter has layers: "draft_model" or "eagle".
        seed: of the worker's scores and sampled tokens.
    """

    policy: dict[str, Any] | None = None
    block: int = 4
    chunk: int = 16
    length: int = 64
    seqs: int = 4
    extra: int = 0
    caching: bool = True
    ahead: bool = False
    runner: int = 1
    priorities: bool = False
    watermark: float = 0.0
    long: int = 0
    whole: bool = True
    window: int = 0
    sliding: int = 2
    answers: str = "random"
    lost: float = 0.0
    late: float = 0.0
    doubled: float = 0.0
    poison: bool = False
    stats: bool = False
    events: bool = False
    drafts: int = 0
    accepted: str = "any"
    drafter: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Op:
    """Something that happens before a step.

    Attributes:
        at: the step.
        do: "add" a request, send the next "turn" of a session or "close" it, "abort" a request, "reset" the prefix
            cache, or "pause" the scheduler.
        id: of the request.
        length: tokens of the prompt, or of a turn.
        family, shared: the first `shared` tokens of the prompt are those of all prompts of this family.
        tokens: `max_tokens`.
        n: as many requests with this one prompt.
        priority: of the request; the least number is the most important.
        ask: what the request asks for, as its `extra_args`.
        stops: whether a sampled token may end the request.
        session: whether the request is a session, to which turns can be sent.
        hot: whether sampled tokens differ between requests that have computed the same.
        middle: whether it happens between the step's plan and its output.
        running: of a reset, whether running requests are preempted for it.
        steps: of a pause; `level` 1: no new requests, 2: none at all.
    """

    at: int = 0
    do: str = "add"
    id: str = ""
    length: int = 8
    family: int = 0
    shared: int = 0
    tokens: int = 1
    n: int = 1
    priority: int = 0
    ask: dict[str, Any] = field(default_factory=dict)
    stops: bool = False
    session: bool = False
    hot: bool = False
    middle: bool = False
    running: bool = False
    steps: int = 1
    level: int = 1


@dataclass(frozen=True)
class Program:
    settings: Settings
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        ops = ",\n    ".join(json.dumps(_brief(op)) for op in self.ops)
        return f'{{"settings": {json.dumps(_brief(self.settings))},\n "ops": [\n    {ops}]}}'

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Return the object that `str` has written."""
        values = json.loads(text)
        return cls(Settings(**values["settings"]), tuple(Op(**op) for op in values["ops"]))


def default_of(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def _brief(item: Settings | Op) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = asdict(item)
    return {each.name: values[each.name] for each in fields(item) if values[each.name] != default_of(each)}


# --- made up at random ------------------------------------------------------------------------------------------------


class Maker:
    """Makes up programs.

    Args:
        seed: of all that is made up.
        only: names of the policies that servers may run, "stock" for none, "tova+ada" with an allocator; None: all
            policies, some with an allocator.
        faithful: whether workers send every report, at once.
        requests: of a program, at most.
        drafts: whether servers speculate.
        host: whether all servers have blocks on the host; else a part of those under `full` does, if none speculates.
        audits: share of servers that audit all answers, of those that can.
        priorities: share of servers with priority scheduling.
    """

    def __init__(
        self,
        seed: int,
        only: list[str] | None = None,
        faithful: bool = False,
        requests: int = 40,
        drafts: bool = False,
        host: bool = False,
        audits: float = 0.0,
        priorities: float = 0.2,
    ) -> None:
        self.random, self.only, self.faithful, self.requests = random.Random(seed), only, faithful, requests
        self.drafts, self.host, self.priorities = drafts, host, priorities
        #: Of its own, so that other programs of a seed stay what they were.
        self.reads = random.Random(f"select {seed}")
        self.reads_beside = random.Random(f"select beside {seed}")
        self.allocates = random.Random(f"allocate {seed}")
        self.chunks = random.Random(f"chunks {seed}")
        self.events = random.Random(f"events {seed}")
        self.audits, self.audited = audits, random.Random(f"audit {seed}")

    def program(self) -> Program:
        while True:
            settings = self._settings()
            if settings is not None:
                ops = tuple(self._ops(settings))
                return Program(self._auditing(self._reading(settings)), ops)

    def _auditing(self, settings: Settings) -> Settings:
        """The same server with audits, if it can have them and it is its turn."""
        config = parsed(settings)
        if config is None or settings.window or settings.drafts or self.audited.random() >= self.audits:
            return settings
        if config.allocator.splits or config.sparse_heads or config.context is not None or config.evict == "host":
            return settings
        return replace(settings, policy={**(settings.policy or {}), "audit": 1.0})

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _settings(self) -> Settings | None:
        pick = self.random.choice
        block, seqs = pick((2, 4, 4, 8, 8, 16)), pick((1, 2, 2, 3, 4, 4, 6, 8))
        length = block * self.random.randint(6, 48) - self.random.randrange(block)
        chunk = max(block * pick((1, 2, 3, 4, 6, 8, 12)) + self.random.choice((0, 0, 0, -1, 1, block // 2)), seqs)
        name = pick(self.only or sorted(POLICIES))
        name, _, allocate = name.partition("+")
        policy = None if name == "stock" else self._policy(name, block, length)
        if (
            policy
            and not (self.only or self.host)
            and "allocate" in POLICIES[name].options
            and self.allocates.random() < 0.2
        ):
            allocate = self.allocates.choice(("ada", "pyramid"))
        if allocate:
            policy = self._allocating(policy, allocate)
        elif not self.drafts and (self.host or (name == "full" and self._chance(0.5))):
            # A chunk of one token waits for a step with more.
            policy, chunk = on_host(self.random, block, length, TOKEN_BYTES), max(chunk, 2)
        ahead = self._chance(0.4)
        whole = self.random.random()
        settings = Settings(
            policy=policy,
            block=block,
            chunk=chunk,
            length=length,
            seqs=seqs,
            extra=pick((0, 0, 0, 1, 2, 3, 5, 8, 16, 32, 64)),
            caching=self._chance(0.85),
            ahead=ahead,
            runner=pick((1, 1, 2)),
            priorities=self._chance(self.priorities),
            watermark=pick((0.0, 0.0, 0.0, 0.01, 0.05, 0.1)),
            long=pick((0, 0, 0, 0, block, 2 * block)),
            whole=whole < 0.8,
            answers=pick((*ANSWERS, "random", "random", "random")),
            lost=pick((0.0, 0.0, 0.0, 0.1, 0.5, 1.0)),
            late=pick((0.0, 0.0, 0.0, 0.2)),
            doubled=pick((0.0, 0.0, 0.0, 0.2)),
            poison=self._chance(0.3),
            stats=self._chance(0.1),
            seed=self.random.randrange(1 << 16),
            events=policy is not None and "evict" in policy and self.events.random() < 0.5,
        )
        if self.drafts:
            drafts = min(pick((1, 2, 3, 3, 5, 9)), block - 1)
            chunk, long = max(chunk, (1 + drafts) * seqs), settings.long and max(settings.long, 1 + drafts)
            settings = replace(settings, chunk=chunk, long=long, drafts=drafts, accepted=pick((*ACCEPTED, "any")))
            settings = replace(settings, drafter=pick(DRAFTERS))
            if settings.drafter == "draft_model":  # vLLM keeps a token of the step for each request's drafter
                settings = replace(settings, chunk=max(chunk, (2 + drafts) * seqs))
        if policy is None:
            return settings
        if self.faithful:
            settings = replace(settings, lost=0.0, late=0.0, doubled=0.0)
        config = parsed(settings)
        if config is None:
            return None
        if config.reconstructs and self._chance(0.5):
            # Room for repetitions, and so many steps that requests wait for each other's.
            length = block * self.random.randint(48, 120)
            chunk, seqs = max(min(chunk, 2 * block), 8), max(seqs, 4)
            settings = replace(settings, extra=pick((64, 512)), length=length, chunk=chunk, seqs=seqs)
        alone = config.reconstructs or config.context is not None or settings.drafter
        if len(config.classes) == 1 and not alone and self._chance(0.25):
            # With one layer vLLM makes several KV groups of the others, of which only one can have a host.
            sliding = self.random.randint(2 if config.evict == "host" else 1, 3)
            window = self.random.randint(1, 4 * block)
            if self.chunks.random() < 0.3 and config.granularity == "block" and config.evict != "host":
                window = -block * -(-window // block)
            settings = replace(settings, window=window, sliding=sliding)
        return settings

    def _allocating(self, policy: dict[str, Any], allocate: str) -> dict[str, Any]:
        """The same policy with an allocator, without fields that do not go with it."""
        rand, lacks = self.allocates, ALLOCATORS[allocate].lacks
        kept = {field: value for field, value in policy.items() if field not in lacks}
        kept |= {"allocate": allocate, "bands": rand.randint(1, 4)}
        kept |= (
            {"floor": rand.choice((0.0, 0.2, 1.0))} if allocate == "ada" else {"beta": rand.choice((1.0, 4.0, 20.0))}
        )
        if "allow" in kept:
            kept["allow"] = rand.choice(([], ["full"]))
        return kept

    def _reading(self, settings: Settings) -> Settings:
        """The same settings, or for some policies those of a server whose decodes read a part of their blocks."""
        policy, reads = settings.policy, self.reads_beside if settings.drafts or settings.window else self.reads
        if policy is None or reads.random() > 0.3 or "evict" in policy:
            return settings
        own = policy.get("retrieval") or policy
        if "read" not in POLICIES[own["name"]].options or "allocate" in own:
            return settings
        chosen = reading(reads, own, settings.block, LAYERS)
        chosen = replace(settings, policy=chosen if own is policy else {**policy, "retrieval": chosen})
        return settings if parsed(chosen) is None else chosen

    def _policy(self, name: str, block: int, length: int) -> dict[str, Any]:
        """A policy in sizes that suit blocks and lengths; not all of them are allowed."""
        pick, policy = self.random.choice, POLICIES[name]

        def tokens(most: int) -> int:
            return max(block * self.random.randint(0, most) + pick((0, 0, 0, -1, 1)), 0)

        chosen: dict[str, Any] = {"name": name}
        sink, recent = tokens(2), tokens(3)
        if policy.allocator.splits == "classes":
            rows = [[pick("01") for _ in range(HEADS)] for _ in range(LAYERS)]
            pattern = ["".join(row) for row in rows]
            chosen |= {"gates": "made up", "pattern": pattern, "sink": sink, "recent": max(recent, 1)}
            if self._chance(0.7):
                names = [
                    each for each in POLICIES if not POLICIES[each].allocator.splits and not POLICIES[each].reconstructs
                ]
                chosen["retrieval"] = self._policy(pick(sorted(names)), block, length)
                chosen["retrieval"].pop("allow", None)
            return chosen
        options = policy.options - (names_of(ALLOCATION) if "allocate" in policy.options else set())
        values: dict[str, Any] = {
            "sink": sink,
            "recent": recent,
            "buffer": tokens(3),
            "budget": pick((sink + recent + block * self.random.randint(1, 6), self.random.random(), None)),
            "when": pick(("budget", "pressure")),
        }
        if name == "sink-window" and self._chance(0.5):
            del values["budget"]
        elif values["budget"] is None and not policy.window_is_the_budget:
            values["budget"] = sink + recent + 2 * block
        rare = {
            "protect": False,
            "min_prompt": self.random.randint(1, length),
            "accumulate": pick(("sum", "mean", "ema", "last")),
            "window": self.random.randint(1, 3 * block),
            "every": self.random.randint(1, 5),
            "context": self.random.randint(4 * block, length),
            "bands": self.random.randint(1, 4),
            "floor": pick((0.0, 0.2, 1.0)),
            "beta": pick((1.0, 4.0, 20.0)),
            "recovery": pick((0.1, 0.5, 0.95, 1.0)),
            "chunk": block * self.random.randint(1, 8),
            "instruction": [1, 2, 3],
            "prompt": "whole",
        }
        values |= {option: value for option, value in rare.items() if self._chance(0.3)}
        if "granularity" in options and self._chance(0.35):
            values |= {"granularity": "token", "when": "budget"}
            if self._chance(0.2):
                values["merge"] = pick(("d2o", "ems"))
        if name == "full":  # its sizes are for blocks on the host
            options -= {"budget", "buffer", "sink", "recent", "when"}
        chosen |= {option: value for option, value in values.items() if option in options}
        chosen |= {"when": "budget"} if chosen.get("when") not in policy.triggers and "when" in chosen else {}
        if "context" in chosen:
            chosen |= {"granularity": "block"} if "granularity" in chosen else {}
            chosen.pop("merge", None)
            chosen |= {"when": "budget", "min_prompt": 0, "prompt": "chunks"}
            if isinstance(chosen.get("budget"), float):
                chosen["budget"] = sink + recent + 2 * block
        if chosen.get("prompt") == "whole":
            chosen["when"] = "budget"
        if chosen.get("when") == "pressure" and "admit" in options:
            chosen["admit"] = self._chance(0.5)
        if self._chance(0.2):  # what is not given follows the budget
            chosen = {option: value for option, value in chosen.items() if option not in ("sink", "recent")}
        if self._chance(0.5):
            others = [each for each in POLICIES if not POLICIES[each].allocator.splits]
            chosen["allow"] = [] if self._chance(0.5) else self.random.sample(others, 3)
            if policy.allocator.splits:
                chosen["allow"] = pick(([], ["full"]))
        return chosen

    def _ops(self, settings: Settings) -> Iterator[Op]:
        """Arrivals and what happens beside them, in the order of their steps."""
        rand, config = self.random, parsed(settings)
        count = rand.randint(1, self.requests)
        spacing = rand.choice((0, 0.3, 1, 3, 10))
        families, longest = rand.randint(1, 4), settings.length - 1
        aborts, resets, sessions = rand.choice((0, 0, 0.1, 0.3)), rand.choice((0, 0, 0.02)), rand.choice((0, 0, 0.2))
        if settings.drafts and settings.policy is None:
            sessions = 0  # vLLM keeps tokens of accepted drafts after the end of a turn, whose keys are of other tokens
        pauses, stops = rand.choice((0, 0, 0, 0.02)), 0.2
        if self._chance(0.1):
            resets = 0.5
        elif self._chance(0.1) and not (settings.drafts and settings.policy is None):
            sessions, stops = 0.8, 0.8
        typical = rand.choice((0.2, 0.5, 1.0))
        outputs = rand.choice((2, 8, 8, 30))
        if config is not None and config.reconstructs:
            outputs, typical = rand.choice((2, 8, 60, 120)), rand.choice((0.2, 0.4, 0.4, 1.0))
            count = min(count, 20)
        ops, at = [], 0.0
        for number in range(count):
            at += rand.expovariate(1) * spacing
            step, req_id = int(at), f"r{number}"
            length = max(int(longest * min(typical * rand.uniform(0.1, 1.2), 1.0)), 1)
            shared = rand.choice((0, 0, length, length // 2, rand.randint(0, length)))
            tokens = rand.choice((1, rand.randint(1, outputs), rand.randint(1, outputs), rand.randint(1, 4 * outputs)))
            session = rand.random() < sessions
            if session:
                length = max(length // 3, 1)
            ops.append(
                Op(
                    at=step,
                    id=req_id,
                    length=length,
                    family=rand.randrange(families),
                    shared=min(shared, length),
                    tokens=tokens,
                    n=1 if session else rand.choice((1, 1, 1, 1, 1, 2, 3)),
                    priority=rand.randint(-1, 2) if settings.priorities else 0,
                    ask=self._asks(config, settings) if self._chance(0.25) else {},
                    stops=self._chance(stops),
                    session=session,
                    hot=self._chance(0.3),
                )
            )
            if rand.random() < aborts:
                ops.append(Op(step + rand.randint(0, 30), "abort", req_id, middle=self._chance(0.5)))
            if session:
                later = step
                for _ in range(rand.randint(0, 4)):
                    later += rand.randint(0, 20)
                    turn = Op(
                        later, "turn", req_id, rand.randint(1, max(length, 2)), tokens=rand.randint(1, outputs),
                        stops=self._chance(stops),
                        ask=self._asks(config, settings) if self._chance(0.3) else {},
                    )  # fmt: skip
                    ops.append(replace(turn, family=rand.randrange(families)))
                if self._chance(0.8):
                    ops.append(Op(later + rand.randint(0, 20), "close", req_id))
            if rand.random() < resets:
                ops.append(Op(step + rand.randint(0, 30), "reset", running=self._chance(0.6)))
            if rand.random() < pauses:
                ops.append(Op(step, "pause", steps=rand.randint(1, 10), level=rand.randint(1, 2)))
        yield from sorted(ops, key=lambda op: op.at)

    def _asks(self, config: KVPolicyConfig | None, settings: Settings) -> dict[str, Any]:
        """Return the fields of a request, mostly such as it may have."""
        if config is None:
            return {}
        ask: dict[str, Any] = {}
        if self._chance(0.6):
            ask["kv_policy"] = self.random.choice(sorted(config.allowed))
        if self._chance(0.5):
            ask["kv_budget"] = self.random.choice((self.random.random(), settings.block * self.random.randint(1, 10)))
        if self._chance(0.2):
            ask["kv_sink"] = self.random.randint(0, 2 * settings.block)
        if self._chance(0.2):
            ask["kv_recent"] = self.random.randint(0, 3 * settings.block)
        if self._chance(0.2):
            ask["kv_usage"] = True
        return ask


def parsed(settings: Settings) -> KVPolicyConfig | None:
    """The server's policy for the model; None if start-up refuses it."""
    if settings.policy is None:
        return None
    try:
        config = KVPolicyConfig.parse(settings.policy).for_model(LAYERS, HEADS, 1)
        ahead = settings.chunk * (2 if settings.ahead else 1)
        config.check(settings.block, LAYERS, HEADS, settings.length, ahead)
        if isinstance(config.budget, int):
            config.limits(settings.block, settings.length)
        if config.reconstructs and not settings.caching:
            return None
        if settings.drafts and (config.reconstructs or config.context is not None):
            return None
        late = settings.ahead and config.granularity == "token"
        if settings.drafter and (len(config.classes) > 1 or late):
            return None
        return config
    except KVPolicyError:
        return None


# --- made short -------------------------------------------------------------------------------------------------------

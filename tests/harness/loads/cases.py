"""Cases, which are engines, and programs, which are what requests do in them; both follow from their numbers (embedded.py)."""

import json
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from drafting import MODEL, NGRAM, make_eagle, speculative
from engine import V2, Engine
from latent import make_latent, reference_mla
from oracle.hybrids import HYBRIDS, make_tiny_hybrid
from oracle.searched import make_searched
from oracle.tiny import make_tiny_llama
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from loads.pages import Stock

#: Blocks of the longest request.
LONGEST = 16

MODELS = {
    "plain": {},
    "heads": {"layers": 4, "heads": 8, "kv_heads": 4},
    "windows": {"layers": 4, "windows": [48, 0, 48, 0]},
    "latent": {},
    "drafted": MODEL,
}
#: Models in which layers differ: KV heads of each layer, 0 for a layer without attention.
SEARCHED = {"searched": (2, 4, 0, 1), "gaps": (4, 0, 4, 4, 0, 4)}
BLOCK_POLICIES = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "rkv", "knorm", "keydiff"]
BLOCK_POLICIES += ["pagedeviction", "quest", "random", "h2o"]
SELECTING = ["sink-window", "strided", "knorm", "keydiff", "pagedeviction", "quest", "random"]
TOKEN_POLICIES = ["h2o", "tova", "snapkv", "rkv", "knorm", "keydiff"]
ADD_UP = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "h2o", "random"]
#: Layers x KV heads: one layer has no retrieval head, one has nothing else.
RETRIEVAL = [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def _others(names, name):
    return [each for each in names if each != name]


def _blocks(rng, sizes):
    name = rng.choice(BLOCK_POLICIES)
    return {"name": name, **sizes, "allow": [*_others(BLOCK_POLICIES, name), "full"]}


def _tokens(rng, sizes):
    name = rng.choice(TOKEN_POLICIES)
    policy = {"name": name, "granularity": "token", "sets": rng.choice(["head", "all"]), **sizes}
    policy["merge"] = rng.choice([None, None, "d2o", "ems"])
    return {**policy, "allow": [*_others(TOKEN_POLICIES, name), "sink-window", "full"]}


def _pressure(rng, sizes):
    name = rng.choice(ADD_UP)
    return {"name": name, "when": "pressure", **sizes, "allow": [*_others(ADD_UP, name), "full"]}


def _kvzip(rng, sizes):
    if rng.random() < 0.5:
        return {"name": "kvzip", **sizes, "allow": ["h2o", "full"]}
    return {"name": "snapkv", "granularity": "token", **sizes, "allow": ["kvzip", "keydiff", "full"]}


def _bands(rng, sizes):
    return {"name": rng.choice(["adakv", "pyramidkv", "fastgen"]), "bands": 2, **sizes, "allow": ["full"]}


def _allocated(rng, sizes):
    scores = {"name": rng.choice(["h2o", "tova", "keydiff", "quest", "rkv", "pagedeviction"]), **sizes}
    if scores["name"] in ADD_UP and rng.random() < 0.3:
        scores["when"] = "pressure"
    return {**scores, "allocate": rng.choice(["ada", "pyramid"]), "bands": 2, "allow": ["full"]}


def _duo(rng, sizes):
    retrieval = rng.choice([None, {"name": "h2o", **sizes}, {"name": "snapkv", "granularity": "token", **sizes}])
    policy = {"name": "duo", "gates": "HEADS", "sink": sizes["sink"], "recent": 3 * sizes["recent"]}
    return policy if retrieval is None else {**policy, "retrieval": retrieval, "allow": ["full"]}


def _context(rng, sizes):
    name = rng.choice(["sink-window", "h2o", "keydiff"])
    return {"name": name, **sizes, "context": "CONTEXT", "allow": _others(["sink-window", "h2o", "keydiff"], name)}


def _host(rng, sizes):
    # From one block of the model's on; most hold less than one request loses.
    blocks = rng.choice([1, 3, 8, 32, 512]) * sizes["sink"]
    policy = _blocks(rng, sizes) | {"evict": "host", "host": blocks << 10}
    policy |= {"recall": "quest", "recall_every": rng.choice([1, 2, 8]), "recall_blocks": rng.choice([1, 3, 8])}
    policy |= {"again": rng.choice([0, 40, 256]), "again_rounds": rng.choice([1, 2])}
    return policy | {"preempt": rng.choice(["host", "recompute"])}


def _select(rng, sizes):
    size = sizes["sink"]
    select = {"select": size * rng.choice([4, 5, 6]), "select_sink": size, "select_recent": size}
    select |= rng.choice([{"dense_layers": 0}, {"dense_layers": 1, "select_every": 3}, {"filter_layers": [0, 2]}])
    kind = rng.choice(["full", "block", "host", "duo"])
    if kind == "duo":
        select = {field: value for field, value in select.items() if field != "filter_layers"}
        retrieval = {"name": "full", **select}
        return {"name": "duo", "gates": "HEADS", "sink": size, "recent": 3 * sizes["recent"], "retrieval": retrieval}
    if kind == "full":
        return {"name": "full", **select, "allow": ["sink-window", "keydiff"]}
    policy = _host(rng, sizes) if kind == "host" else dict(sizes)
    if kind == "host":
        policy["host"] *= 4  # the model's blocks are as many times as large
    name = rng.choice(SELECTING)
    return {**policy, "name": name, **select, "allow": [*_others(SELECTING, name), "full"]}


def _latent(rng, sizes):
    return _pressure(rng, sizes) if rng.random() < 0.3 else _blocks(rng, sizes)


def _reach(rng, sizes):
    # The host holds the longest request at least.
    host = rng.choice([LONGEST, 3 * LONGEST // 2, 512]) * sizes["sink"] << 10
    read = {
        "read": rng.choice([0, 4 * sizes["sink"]]),
        "hold": rng.choice([1, 3, 8]),
        "index": rng.choice(["signs", "box"]),
    }
    return {"name": "full", **sizes, "evict": "host", "host": host, **read}


def _audited(rng, sizes):
    return {**rng.choice([_blocks, _tokens, _pressure, _kvzip])(rng, sizes), "audit": 1.0}


def _full(rng, sizes):
    return {"name": "full"}


#: Kinds that have to be named: their models are slow, or numbers of cases are older than they are.
BY_NAME = {
    "reach": ("plain", _reach),
    "hybrid": ("falcon_h1", _blocks),
    "hybrid-tokens": ("falcon_h1", _tokens),
    "gdn": ("qwen3_next", _blocks),
}
#: Kind -> model, and what makes a policy of it.
KINDS = {
    "blocks": ("plain", _blocks),
    "tokens": ("plain", _tokens),
    "pressure": ("plain", _pressure),
    "kvzip": ("plain", _kvzip),
    "bands": ("plain", _bands),
    "duo": ("heads", _duo),
    "context": ("plain", _context),
    "windows": ("windows", _blocks),
    "full": ("plain", _full),
    "host": ("plain", _host),
    "latent": ("latent", _latent),
    "drafts": ("drafted", _blocks),
    "select": ("heads", _select),
    "searched": ("searched", None),
    "gaps": ("gaps", None),
    "allocated": ("plain", _allocated),
    "fp8": ("plain", None),
    "audited": ("plain", _audited),
}
#: Kinds whose cases are like those of other kinds, on another model or with fp8 caches. Heads are split only where all layers have as many.
LIKE = {
    "searched": ["blocks", "tokens", "pressure", "kvzip", "context", "host"],
    "gaps": ["bands", "duo", "select"],
    "fp8": ["blocks", "tokens", "pressure", "kvzip", "context", "host"],
}


@dataclass
class Case:
    """An engine's arguments.

    Attributes:
        number, kind: see `make_case`.
        model: one of `MODELS`.
        policy: of the server; "HEADS" and "CONTEXT" stand for a file of gates and a number of tokens.
        block_size: tokens.
        blocks: of the pool; None: the smallest one that start-up accepts.
        options: further engine arguments; "EAGLE" stands for a drafter of the model with random weights, which is wrong,
            "SAME" for one with the model's own weights, which is right.
    """

    number: int
    kind: str
    model: str
    policy: dict
    block_size: int
    blocks: int | None
    options: dict

    @property
    def longest(self):
        """Tokens of the longest request."""
        return LONGEST * self.block_size

    def reads_all(self, tokens):
        """Whether each step of a request of so many tokens reads all of them."""
        most = self.policy.get("select") or (self.policy.get("retrieval") or {}).get("select")
        return not most or tokens <= most


def make_case(number, kind=None, smallest=False):
    """The case of this number: kinds take turns unless one is named."""
    rng = random.Random(f"case {number}")
    kind = kind or list(KINDS)[number % len(KINDS)]
    like = random.Random(f"like {number}").choice(LIKE.get(kind, [kind]))
    model, (_, make_policy) = {**KINDS, **BY_NAME}[kind][0], {**KINDS, **BY_NAME}[like]
    size = 32 if V2 else rng.choice([32, 32, 32, 64])
    sizes = {"budget": size * rng.choice([4, 5, 6]), "sink": size, "recent": size, "buffer": rng.choice([0, size])}
    if model == "windows":
        size = 32
        sizes = {"budget": 160, "sink": 32, "recent": 32, "buffer": rng.choice([0, 32])}
    if model == "latent":
        size = 16
        sizes = {"budget": 16 * rng.choice([4, 5, 6]), "sink": 16, "recent": 16, "buffer": rng.choice([0, 16])}
    policy = make_policy(rng, sizes)
    if "gates" not in policy and random.Random(f"unsaid {number}").random() < 0.25:
        # What is not given follows the budget, and may raise it.
        policy = {field: value for field, value in policy.items() if field not in ("sink", "recent")}
    if model == "searched" and "host" in policy:
        policy["host"] *= 2  # a block of the model is 1.75 times as large
    asynchronous = rng.random() < 0.4
    chunk = size * rng.choice([2, 3, 5, 8])
    if like == "context":
        # Room for the budget, the buffer, a block and two chunks in flight.
        policy["context"] = sizes["budget"] + sizes["buffer"] + size + 2 * chunk + size
    seqs = rng.choice([2, 4, 8, 8, 16])
    groups = {
        "bands": 2,
        "allocated": 2,
        "duo": 2,
        "windows": 2,
        "hybrid": 2,
        "hybrid-tokens": 2,
        "gdn": 3,
        "select": 2,
    }.get(like, 1)
    options = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 16 if like == "pressure" else seqs,
        # vLLM's CPU engine has none for latents.
        "enable_prefix_caching": like == "kvzip" or (rng.random() < 0.85 and kind != "latent"),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": asynchronous,
    }
    if kind == "drafts":
        # vLLM proposes n-grams on the host, so not under async scheduling.
        options["speculative_config"] = rng.choice(["EAGLE", "SAME"] if asynchronous else ["EAGLE", "SAME", NGRAM])
    if kind == "fp8":
        options["kv_cache_dtype"] = random.Random(f"fp8 {number}").choice(["fp8", "fp8_e5m2"])
    # Room for the longest request whole; for two of them where small pools are known to stall.
    roomy = like in ("tokens", "pressure", "kvzip", "duo")
    blocks = (
        None if smallest else 1 + int(groups * LONGEST * rng.choice([2, 2.5, 3, 4] if roomy else [1.25, 1.5, 2, 3]))
    )
    return Case(number, kind, model, policy, size, blocks, options)


def make_program(case, number, requests):
    """What requests do: a list of dicts in the order of their steps, ready for JSON.

    Each dict has `at`, the step before which it happens. A reset of the prefix cache has `reset` (True: running requests
    start over). A request has its `number`, `prompt` (pieces of random prompts: seed, tokens), `tokens` (max_tokens) and
    `priority`, and may have `after` (number of a request whose prompt and answer so far come first), `n`, `extra` (its
    extra_args), `stop`, `prompt_logprobs`, `abort` (steps from its arrival), `turns` (of a session: further pieces, and
    tokens of each).
    """
    rng = random.Random(f"program {case.number} {case.kind} {number}")
    size, longest, program, at = case.block_size, case.longest, [], 0
    crowded = rng.choice([0.5, 1, 2, 5])
    allowed = [case.policy["name"], *case.policy.get("allow", ["sink-window", "h2o"] if case.kind == "full" else [])]
    for index in range(requests):
        at += int(rng.expovariate(1 / crowded))
        if rng.random() < 0.01:
            program.append({"at": at, "reset": rng.random() < 0.5})
        shared = rng.choice([0, 1, 2.3, 4, 4, 7]) * size
        own = rng.choice([1, size // 2, size, 2 * size, int(size * rng.uniform(1, 8))])
        request = {
            "number": index,
            "at": at,
            "prompt": [[number * 1000 + rng.randrange(3), int(shared)], [number * 1000 + 10 + index, own]],
            "tokens": rng.choice([1, 2, 5, 10, 20, 40, int(1.5 * size), int(3.2 * size)]),
            "priority": rng.randrange(3),
        }
        if index and rng.random() < 0.15:
            request |= {"after": rng.randrange(index), "prompt": request["prompt"][1:]}
        if rng.random() < 0.5:
            request["extra"] = _extra(rng, case, allowed)
        kind = rng.random()
        if kind < 0.08:
            request["n"] = rng.choice([2, 3])
        elif kind < 0.16:
            turns = rng.randrange(1, 4)
            request["turns"] = [
                [[number * 1000 + 500 + 4 * index + turn, rng.randrange(1, 3 * size)], rng.choice([1, 3, 10, 2 * size])]
                for turn in range(turns)
            ]
            request.pop("after", None)
        elif kind < 0.2:
            request["stop"] = True
        elif kind < 0.25:
            request["prompt_logprobs"] = True
        if rng.random() < 0.12:
            request["abort"] = rng.choice([0, 1, 2, 5, 20, 60])
        if "turns" in request:
            pieces = [*request["prompt"], *(piece for piece, _ in request["turns"])]
            total = sum(length for _, length in pieces) + request["tokens"] + sum(t for _, t in request["turns"])
            if total > longest - 2:
                request.pop("turns")
        program.append(request)
    return program


def _extra(rng, case, allowed):
    """A request's extra_args. Some are refused."""
    size = case.block_size
    if rng.random() < 0.04:
        return rng.choice([{"kv_budget": 10**9}, {"kv_policy": "h3o"}, {"kv_buget": 1}, {"kv_budget": -1}])
    extra = {"kv_policy": rng.choice(allowed)} if rng.random() < 0.8 else {}
    if extra.get("kv_policy") != "full" and case.kind != "duo":
        if rng.random() < 0.5:
            extra["kv_budget"] = rng.choice([3 * size, 4 * size, 4 * size + 7, 0.5])
        if rng.random() < 0.1:
            extra["kv_sink"] = rng.choice([0, 2 * size])
    if rng.random() < 0.1:
        extra["kv_usage"] = True
    return extra


def _arguments(model):
    """Engine arguments that a model needs."""
    if model in SEARCHED:
        return {"trust_remote_code": True}
    return {"dtype": str(HYBRIDS[model][1]).removeprefix("torch.")} if model in HYBRIDS else {}


class Models:
    """Random models in a folder, and a stock engine of each. Each is made when it is first needed."""

    def __init__(self, folder):
        self.folder, self._stocks = Path(folder), {}

    def path(self, name):
        path = self.folder / name / ("searched" if name in SEARCHED else "")
        if not (path / "config.json").exists():
            if name in SEARCHED:
                make_searched(path.parent, SEARCHED[name])
            elif name == "latent":
                make_latent(path, "DeepseekV3ForCausalLM")
            elif name in HYBRIDS:
                make_tiny_hybrid(path, name)
            else:
                make_tiny_llama(path, **MODELS[name])
        return path

    def _made(self, case, *policy, **options):
        """An engine of the case's model."""
        with reference_mla() if case.model == "latent" else nullcontext():
            return Engine(self.path(case.model), *policy, **options)

    def gates(self, sink, recent):
        """A file of `RETRIEVAL`, for windows of this size."""
        folder = self.folder / f"gates-{sink}-{recent}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / "heads.tsv", np.array(RETRIEVAL, float), delimiter="\t")
        (folder / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
        return str(folder / "heads.tsv")

    def _eagle(self, model):
        path = self.folder / f"{model}-eagle"
        return path if path.exists() else make_eagle(path, self.path(model), "eagle")

    def stock(self, case):
        cache = case.options.get("kv_cache_dtype", "auto")
        key = case.model, case.block_size, cache
        if key not in self._stocks:
            longest = case.longest + case.block_size
            engine = self._made(
                case,
                block_size=case.block_size,
                blocks=8 * LONGEST,
                max_model_len=longest,
                max_num_batched_tokens=longest,
                enable_prefix_caching=False,
                async_scheduling=False,
                kv_cache_dtype=cache,
                **_arguments(case.model),
            )
            self._stocks[key] = Stock(engine)
        return self._stocks[key]

    def engine(self, case):
        """A new engine that fills freed blocks with NaN."""
        # vLLM's CPU kernel for Mamba2 makes no state inside a chunk; without blocks for these, chunks end at states.
        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
        policy = dict(case.policy)
        if policy.get("gates") == "HEADS":
            policy["gates"] = self.gates(policy.pop("sink"), policy.pop("recent"))
        options = {
            "max_model_len": case.longest,
            "block_size": case.block_size,
            **_arguments(case.model),
            **case.options,
        }
        if options.get("speculative_config") == "EAGLE":
            options["speculative_config"] = speculative("eagle", self._eagle(case.model))
        if options.get("speculative_config") == "SAME":
            options["speculative_config"] = speculative("draft_model", self.path(case.model))
        poison, os.environ["VLLM_EVICT_POISON"] = os.environ.get("VLLM_EVICT_POISON"), "1"
        try:
            if case.blocks is not None:
                return self._made(case, policy, blocks=case.blocks, **options)
            return self._smallest(case, policy, options)
        finally:
            del os.environ["VLLM_EVICT_POISON"]
            if poison is not None:
                os.environ["VLLM_EVICT_POISON"] = poison

    def _smallest(self, case, policy, options):
        for blocks in range(2, 100):
            try:
                return self._made(case, policy, blocks=blocks, **options)
            except ValueError:
                continue
        raise AssertionError("start-up accepts no pool")

    def close(self):
        for stock in self._stocks.values():
            stock.engine.close()
        self._stocks.clear()

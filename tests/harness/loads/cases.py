"""Cases, which are engines, and programs, which are what requests do in them; both follow from their numbers
(embedded.py).
"""

import random
from dataclasses import dataclass

from drafting import NGRAM
from engine import V2
from lora import RANK
from oracle.images import IMAGE, VOCAB

from loads.adapters import ADAPTERS
from loads.models import LONGEST

BLOCK_POLICIES = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "rkv", "knorm", "keydiff"]
BLOCK_POLICIES += ["pagedeviction", "keybound", "random", "h2o"]
READING = ["sink-window", "strided", "knorm", "keydiff", "pagedeviction", "keybound", "random"]
TOKEN_POLICIES = ["h2o", "tova", "snapkv", "rkv", "knorm", "keydiff"]
ADD_UP = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "h2o", "random"]


def _others(names, name):
    return [each for each in names if each != name]


def _blocks(rng, sizes):
    name = rng.choice(BLOCK_POLICIES)
    return {"name": name, **sizes, "allow": [*_others(BLOCK_POLICIES, name), "full"]}


def _tokens(rng, sizes):
    name = rng.choice(TOKEN_POLICIES)
    policy = {"name": name, "granularity": "token", "sets": rng.choice(["head", "layer", "all"]), **sizes}
    policy["unit"] = rng.choice([1, 1, 4, 16])
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
    scores = {"name": rng.choice(["h2o", "tova", "keydiff", "keybound", "rkv", "pagedeviction"]), **sizes}
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


def _of_prompts(read, prompts):
    """Fields of prompts that read less, which choose by signs where decodes choose by bits."""
    return {"read_prompts": prompts, "index": {"bits": "signs"}.get(read["index"], read["index"])}


def _read(rng, sizes):
    size = sizes["sink"]
    read = {
        "read": size * rng.choice([4, 5, 6]),
        "index": rng.choice(["bits", "box"]),
        "hold": rng.choice([1, 3, 8]),
    }
    read |= rng.choice([{"leaders": 2}, {"dense_layers": 1}, {"leaders": [0, 2]}])
    kind = rng.choice(["full", "block", "duo", "prompts"])
    if kind == "duo":
        read |= {"leaders": 1}
        retrieval = {"name": "full", "sink": size, "recent": size, **read}
        return {"name": "duo", "gates": "HEADS", "sink": size, "recent": 3 * sizes["recent"], "retrieval": retrieval}
    if kind == "full":
        return {"name": "full", "sink": size, "recent": size, **read, "allow": ["sink-window", "keydiff"]}
    if kind == "prompts":
        alike = {"leaders": 2, "dense_layers": 0} if "dense_layers" in read or read["leaders"] != 2 else {}
        return {
            "name": "full",
            "sink": size,
            "recent": size,
            **read,
            **alike,
            **_of_prompts(read, size * rng.choice([6, 8])),
        }
    name = rng.choice(READING)
    return {**sizes, "name": name, **read, "allow": [*_others(READING, name), "full"]}


def _read_alike(rng, sizes):
    """Beside other layers all layers read alike."""
    read = {"read": sizes["sink"] * rng.choice([4, 5, 6]), "index": rng.choice(["bits", "box"])}
    return {"name": "full", "sink": sizes["sink"], "recent": 1, **read, "hold": rng.choice([1, 3]), "leaders": 2}


def _read_prompts(rng, sizes):
    prompts = sizes["sink"] * rng.choice([6, 8]) if rng.random() < 0.6 else 0
    read = _read_alike(rng, sizes)
    return read | _of_prompts(read, prompts) if prompts else read


def _by_block(rng, sizes):
    return _pressure(rng, sizes) if rng.random() < 0.3 else _blocks(rng, sizes)


def _reach(rng, sizes):
    # The host holds the longest request at least.
    host = rng.choice([LONGEST, 3 * LONGEST // 2, 512]) * sizes["sink"] << 10
    read = {
        "read": rng.choice([0, 4 * sizes["sink"]]),
        "hold": rng.choice([1, 3, 8]),
        "index": rng.choice(["bits", "box"]),
        "leaders": rng.choice([1, 1, 2]),
        "fetch": rng.choice([0, 0, 1]),
        "when": rng.choice(["budget", "pressure"]),
    }
    return {"name": "full", **sizes, "evict": "host", "host": host, **read}


def _audited(rng, sizes):
    return {**rng.choice([_blocks, _tokens, _pressure, _kvzip])(rng, sizes), "audit": 1.0}


def _full(rng, sizes):
    return {"name": "full"}


#: Kinds that have to be named: their models are slow, or numbers of cases are older than they are.
BY_NAME = {
    "reach-windows": ("windows", _reach),
    "reach-latent": ("latent", _reach),
    "reach-hybrid": ("falcon_h1", _reach),
    "reach-drafts": ("drafted", _reach),
    "reach-drafts-windows": ("drafted-window", _reach),
    "reach-drafts-latent": ("latent", _reach),
    "reach-drafts-gdn": ("qwen3_next", _reach),
    "read-drafts": ("drafted", _read_prompts),
    "read-drafts-windows": ("drafted-window", _read_prompts),
    "read-drafts-gdn": ("qwen3_next", _read_prompts),
    "read-windows": ("windows", _read_prompts),
    "read-chunks": ("llama4_text", _read_prompts),
    "read-shared": ("gemma3n_text", _read_prompts),
    "read-latent": ("latent", _read_alike),
    "read-hybrid": ("falcon_h1", _read_prompts),
    "read-gdn": ("qwen3_next", _read_prompts),
    "hybrid": ("falcon_h1", _blocks),
    "hybrid-tokens": ("falcon_h1", _tokens),
    "gdn": ("qwen3_next", _blocks),
    "chunks": ("llama4_text", _by_block),
    "unlike": ("mimo_v2_flash", _blocks),
    "reach-unlike": ("mimo_v2_flash", _reach),
    "images": ("llava", _by_block),
    "images-tokens": ("llava", _tokens),
    "reach-images": ("llava", _reach),
    "read-images": ("llava", _read_prompts),
    "drafts-chunks": ("llama4_text", _blocks),
    "connected": ("drafted", _blocks),
    "drafts-windows": ("drafted-windows", _blocks),
    "drafts-latent": ("latent", _by_block),
    "drafts-gdn": ("qwen3_next", _blocks),
    "adapters": ("plain", _by_block),
    "reach-adapters": ("plain", _reach),
    "units": ("falcon_h1", _pressure),
    "reach-units": ("falcon_h1", _reach),
}
#: Kind -> its drafters, as of `Case.options`. vLLM proposes n-grams on the host, so not under async scheduling.
DRAFTERS = {
    "drafts": ["EAGLE", "SAME", NGRAM],
    "drafts-chunks": [NGRAM],
    "drafts-windows": ["EAGLE", NGRAM],
    "drafts-latent": ["EAGLE3", NGRAM],
    "drafts-gdn": ["MTP", NGRAM],
}
for kind in DRAFTERS if V2 else ():
    DRAFTERS[kind] += ["DSPARK"] * (kind not in ("drafts-latent", "drafts-chunks"))
DRAFTERS |= {f"reach-{kind}": DRAFTERS[kind] for kind in ("drafts", "drafts-windows", "drafts-latent", "drafts-gdn")}
DRAFTERS |= {f"read-{kind}": DRAFTERS[kind] for kind in ("drafts", "drafts-windows", "drafts-gdn")}
DRAFTERS["connected"] = DRAFTERS["drafts"]
_ON_HOST = {"cpu_bytes_to_use": 16 << 20, "spec_name": "HostSpec", "spec_module_path": "connector"}
#: Connectors of the kind "connected", as of `Case.options`; doubles stand for what is behind them (connector.py).
CONNECTORS = [
    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": _ON_HOST},
]
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
    "reach": ("plain", _reach),
    "latent": ("latent", _by_block),
    "drafts": ("drafted", _blocks),
    "read": ("heads", _read),
    "searched": ("searched", None),
    "gaps": ("gaps", None),
    "allocated": ("plain", _allocated),
    "fp8": ("plain", None),
    "audited": ("plain", _audited),
}
#: Kinds whose cases are like those of other kinds, on another model or with fp8 caches. Heads are split only where all layers have as many.
LIKE = {
    "searched": ["blocks", "tokens", "pressure", "kvzip", "context", "reach"],
    "gaps": ["bands", "duo", "read"],
    "fp8": ["blocks", "tokens", "pressure", "kvzip", "context", "reach"],
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
        options: further engine arguments; "EAGLE", "EAGLE3", "MTP" and "DSPARK" stand for drafters of the model with
            random weights, which are wrong, "SAME" for one with the model's own weights, which is right.
        by_chance: whether drafts are accepted by chance (vLLM's `synthetic` rejections), whatever the model says.
    """

    number: int
    kind: str
    model: str
    policy: dict
    block_size: int
    blocks: int | None
    options: dict
    by_chance: bool = False

    @property
    def longest(self):
        """Tokens of the longest request."""
        return LONGEST * self.block_size

    @property
    def words(self):
        """Tokens below this number are words, for prompts and answers."""
        return IMAGE if self.model == "llava" else VOCAB

    def reads_all(self, tokens):
        """Whether each step of a request of so many tokens reads all of them."""
        most = self.policy.get("read") or (self.policy.get("retrieval") or {}).get("read")
        return not most or tokens <= min(most, self.policy.get("read_prompts") or most)


def make_case(number, kind=None, smallest=False):
    """The case of this number: kinds take turns unless one is named."""
    rng = random.Random(f"case {number}")
    kind = kind or list(KINDS)[number % len(KINDS)]
    like = random.Random(f"like {number}").choice(LIKE.get(kind, [kind]))
    model, (_, make_policy) = {**KINDS, **BY_NAME}[kind][0], {**KINDS, **BY_NAME}[like]
    drafts = kind.removeprefix("reach-").removeprefix("read-") if kind in DRAFTERS else ""
    size = 32 if V2 else rng.choice([32, 32, 32, 64])
    sizes = {"budget": size * rng.choice([4, 5, 6]), "sink": size, "recent": size, "buffer": rng.choice([0, size])}
    if model in ("windows", "drafted-windows", "drafted-window", "llama4_text", "gemma3n_text"):
        size = 32
        sizes = {"budget": 160, "sink": 32, "recent": 32, "buffer": rng.choice([0, 32])}
    if model == "latent":
        size = 16
        sizes = {"budget": 16 * rng.choice([4, 5, 6]), "sink": 16, "recent": 16, "buffer": rng.choice([0, 16])}
    if model == "mimo_v2_flash":
        # Blocks of its full attention are twice as large: pages of its windows have twice the heads.
        size = 16
        sizes = {"budget": 96, "sink": 32, "recent": 32, "buffer": rng.choice([0, 32])}
    policy = make_policy(rng, sizes)
    if "gates" not in policy and random.Random(f"unsaid {number}").random() < 0.25:
        # What is not given follows the budget, and may raise it.
        policy = {field: value for field, value in policy.items() if field not in ("sink", "recent")}
    if policy.get("when") == "pressure":
        draw = random.Random(f"admit {number}")
        policy["admit"] = draw.random() < 0.5
        if draw.random() < 0.3:
            policy["budget"] = draw.choice([0.25, 0.5, 0.75])
    if "host" in policy:
        # A block of these models is up to so many times as large, with layers of a drafter.
        policy["host"] *= {"searched": 2, "latent": 7, "drafted": 6, "drafted-window": 6, "qwen3_next": 36}.get(
            model, 1
        )
    # CPU_MLA takes rows with drafts for chunks of prompts, whose lengths it has from the host. Under async scheduling,
    # which vLLM switches off on a CPU, the host does not know them: stock vLLM's own answers are wrong there (EAGLE-3 on
    # V2: log-probabilities are off by up to 0.8, and by 1e-6 without async scheduling or without drafts).
    asynchronous = rng.random() < 0.4 and drafts not in ("drafts-latent", "drafts-chunks")
    wide = _wide(kind)
    chunk = size * rng.choice([5, 8, 10] if wide else [2, 3, 5, 8])
    if like == "context":
        # Room for the budget, the buffer, a block and two chunks in flight.
        policy["context"] = sizes["budget"] + sizes["buffer"] + size + 2 * chunk + size
    seqs = rng.choice([8, 16, 32] if wide else [2, 4, 8, 8, 16])
    groups = {
        "bands": 2,
        "allocated": 2,
        "duo": 2,
        "windows": 2,
        "chunks": 2,
        "unlike": 2,
        "drafts-chunks": 2,
        "hybrid": 2,
        "reach-unlike": 2,
        "reach-windows": 2,
        "reach-hybrid": 2,
        "read-windows": 2,
        "read-chunks": 2,
        "read-shared": 2,
        "read-hybrid": 2,
        "read-gdn": 3,
        "hybrid-tokens": 2,
        "units": 2,
        "reach-units": 2,
        "gdn": 3,
        "drafts-windows": 3,
        "drafts-gdn": 3,
        "read": 2,
    }.get(drafts or like, 1)
    options = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 16 if like == "pressure" else seqs,
        # vLLM's CPU engine has none for latents, and for states beside drafts on V2 alone.
        "enable_prefix_caching": like == "kvzip"
        or (rng.random() < 0.85 and model not in ("latent", "mimo_v2_flash") and (V2 or drafts != "drafts-gdn")),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": asynchronous,
    }
    if kind in DRAFTERS:
        drafters = [each for each in DRAFTERS[kind] if not (asynchronous and each is NGRAM)]
        options["speculative_config"] = rng.choice(drafters)
    if kind == "connected":
        options["kv_transfer_config"] = rng.choice(CONNECTORS)
    if kind.endswith("adapters"):
        options |= {"enable_prefix_caching": True, "enable_lora": True, "max_lora_rank": RANK}
        options |= random.Random(f"adapters {number}").choice(
            [{"max_loras": 1}, {"max_loras": 2}, {"max_loras": 2, "max_cpu_loras": ADAPTERS}]
        )
    if kind.endswith("units"):
        # A block has several hashes; vLLM publishes the end of a prompt by the last of them, and the state there.
        unit = random.Random(f"unit {number}").choice([8, 16])
        options |= {"enable_prefix_caching": True, "mamba_cache_mode": "align", "prefix_match_unit": unit}
    if drafts == "drafts-latent":
        # vLLM's CPU engine computes prompts of latents whole. Beside drafts it sets `max_num_scheduled_tokens` before it
        # enlarges its steps for them, so stock vLLM (0.32.0) never starts a prompt longer than the steps asked for.
        options["max_num_batched_tokens"] = LONGEST * size
    if kind == "fp8":
        options["kv_cache_dtype"] = random.Random(f"fp8 {number}").choice(["fp8", "fp8_e5m2"])
    # Room for the longest request whole; for two of them where small pools are known to stall, and for wide batches.
    roomy = wide or like in ("tokens", "pressure", "kvzip", "duo")
    blocks = (
        None if smallest else 1 + int(groups * LONGEST * rng.choice([2, 2.5, 3, 4] if roomy else [1.25, 1.5, 2, 3]))
    )
    wrong = kind in DRAFTERS and options["speculative_config"] != "SAME"
    by_chance = V2 and wrong and random.Random(f"by chance {number}").random() < 0.7
    return Case(number, kind, model, policy, size, blocks, options, by_chance)


def _wide(kind):
    """Whether many requests with short answers share each step: those of V2 beside drafts take 30 ms of Python."""
    return V2 and kind in DRAFTERS


def make_program(case, number, requests):
    """Return the program of requests: a list of dicts in the order of their steps, ready for JSON.

    Each dict has `at`, the step before which it happens. A reset of the prefix cache has `reset` (True: running requests
    start over). An adapter that is loaded again has its number as `reload`, and `in_place`. A request has its `number`, `prompt` (pieces of random prompts: seed, tokens), `tokens` (max_tokens) and
    `priority`, and may have `after` (number of a request whose prompt and answer so far come first), `n`, `extra` (its
    extra_args), `adapter` (its number), `stop`, `prompt_logprobs`, `abort` (steps from its arrival), `turns` (of a session: further pieces, and
    tokens of each).
    """
    rng = random.Random(f"program {case.number} {case.kind} {number}")
    size, longest, program, at = case.block_size, case.longest, [], 0
    wide = _wide(case.kind)
    crowded = rng.choice([0.2, 0.5, 1] if wide else [0.5, 1, 2, 5])
    answers = [1, 2, 5, 10, 20, 40, *([] if wide else [int(1.5 * size), int(3.2 * size)])]
    allowed = [case.policy["name"], *case.policy.get("allow", ["sink-window", "h2o"] if case.kind == "full" else [])]
    for index in range(requests):
        at += int(rng.expovariate(1 / crowded))
        if rng.random() < 0.01:
            program.append({"at": at, "reset": rng.random() < 0.5})
        shared = rng.choice([0, 1, 2.3, 4, 4, 7]) * size
        own = rng.choice([1, size // 2, size, 2 * size, int(size * rng.uniform(1, 8))])
        if case.kind.endswith("drafts-gdn"):
            # A prompt of one token, beside requests that generate, gets placeholders for drafts on Model Runner V2, and
            # runs as a chunk of a prompt: stock vLLM (0.32.0) goes on from a state with these placeholders in it.
            own = max(own, 2)
        request = {
            "number": index,
            "at": at,
            "prompt": [[number * 1000 + rng.randrange(3), int(shared)], [number * 1000 + 10 + index, own]],
            "tokens": rng.choice(answers),
            "priority": rng.randrange(3),
        }
        if case.kind == "connected" and index and rng.random() < 0.3:
            # Prompts that another engine asks for, and that come again.
            request["prompt"] = program[-1]["prompt"] if "prompt" in program[-1] else request["prompt"]
            if rng.random() < 0.5:
                request |= {"extra": {"kv_transfer_params": {"do_remote_decode": True}}, "tokens": 1}
                program.append(request)
                continue
        if case.kind.endswith("units") and index and rng.random() < 0.4 and "prompt" in program[-1]:
            # It goes on where another prompt ended.
            request["prompt"] = [*program[-1]["prompt"], request["prompt"][-1]]
        if case.kind.endswith("adapters"):
            request["adapter"] = rng.randrange(ADAPTERS)
            if rng.random() < 0.08:
                program.append({"at": at, "reload": rng.randrange(ADAPTERS), "in_place": rng.random() < 0.5})
                if rng.random() < 0.5:
                    program.append({"at": at, "reset": True})
        if case.words < VOCAB:
            for place in sorted(rng.sample(range(3), rng.choice([0, 1, 1, 2])), reverse=True):
                request["prompt"].insert(place, [number * 1000 + rng.choice([0, 1, 2, 10 + index]), None])
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
        elif kind < 0.25 and "adapter" not in request:  # which vLLM's CPU engine cannot give beside adapters
            request["prompt_logprobs"] = True
        if rng.random() < 0.12:
            request["abort"] = rng.choice([0, 1, 2, 5, 20, 60])
        if "turns" in request:
            pieces = [*request["prompt"], *(piece for piece, _ in request["turns"])]
            total = sum(length or 0 for _, length in pieces) + request["tokens"] + sum(t for _, t in request["turns"])
            # Stock vLLM (0.32.0) publishes a wrong block beside states and drafts where a turn ends near a block's end.
            # Prompts of sessions go to vLLM's core without its front end, which sees images.
            images = any(length is None for _, length in request["prompt"])
            if total > longest - 2 or images or case.kind.endswith("drafts-gdn"):
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

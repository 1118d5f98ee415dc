"""Makes what all peers get: model files, prompts as token ids, budgets. Written to one JSON, so that no peer tokenizes.

All have `model`, and `converted`, a folder for the model in a peer's own format.

load     random prompts for a Llama with random weights (benchmarks/models.py), in a pool that is too small:
         `prompts`, `warm`, `output`, `pool`, `block`, `chunk`, `sink`, `recent`, `budget` in tokens,
         `kv_bytes_per_token`, `gates` [L, Hkv], `dtype` of model and cache, `batches`: numbers of requests
bfloat16 the same in bfloat16, all requests at once; as many tokens fit into the pool
fp8      three times as many requests, all at once, in as many bytes: a cache of 8 bits holds four times the tokens;
         `cache` is what OpenVINO calls one
served   the same, with questions for the embedded model: the last `question` tokens of each prompt ask for its needle,
         and the first `answer` tokens of each output are kept
needles  questions for the embedded model: `samples` with `context`, `question` and `max_tokens`, `length` of a
         context, `budgets` by name, in tokens
"""

import json
from dataclasses import dataclass
from pathlib import Path

from engines import random_prompts
from load import DTYPES, KV_NUMBERS
from models import Shape, make_model

from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.run import RunOptions, all_cases
from vllm_evict.tools.eval.score import contains
from vllm_evict.tools.eval.tasks import Sample

ROOT = Path(__file__).parents[2]
NEEDLE = ROOT / "examples/needle/model"
GATES = ROOT / "configs/heads/needle/full_attention_heads.tsv"
DEPTHS = (0.17, 0.33, 0.47, 0.61, 0.79)
TASKS = ("niah", "multikey", "twostage", "vt")
BLOCK = 32
#: Tasks of `served`: their questions have equally many tokens, as a batch of kvpress needs.
SERVED = ("niah", "multikey", "vt")
#: The row of benchmarks/pressure.py that has small projections.
SHAPE = Shape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=704)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases; a dry run has smaller ones."""

    requests: int = 16
    prompt: int = 2000
    output: int = 500
    pool: int = 8192
    budget: int = 320
    #: vLLM compiles models by default.
    eager: bool = False
    #: Prompts of each task and depth, as questions and in the load that asks them.
    samples: int = 1
    asked: int = 2
    length: int = 2048
    depths: tuple[float, ...] = DEPTHS

    @property
    def budgets(self) -> dict[str, int]:
        """Tenth, quarter and half of a context, in whole blocks."""
        return {f"{share}%": -(-self.length * share // (100 * BLOCK)) * BLOCK for share in (10, 25, 50)}

    @property
    def plan(self) -> RunOptions:
        """The questions as `vllm-evict eval` makes them."""
        return self.plan_of(TASKS, self.samples)

    def plan_of(self, tasks: tuple[str, ...], samples: int) -> RunOptions:
        """Of so many prompts of each of these tasks and each depth."""
        return RunOptions(
            model=str(NEEDLE),
            out=Path("."),
            tasks=tasks,
            policies="full",
            lengths=(self.length,),
            depths=self.depths,
            samples=samples,
            chunk=self.length,
            block_size=BLOCK,
            buffer=2 * BLOCK,
        )


DRY = Sizes(requests=2, prompt=128, output=16, pool=2048, budget=128, eager=True, asked=1, length=1024, depths=(0.5,))


def samples_of(plan: RunOptions, prompts: Prompts) -> list[Sample]:
    return [case.sample() for case in all_cases(plan, prompts.count)]


def right(answers: list[str], samples: list[Sample]) -> list[bool]:
    return [contains(answer, sample) > 0 for answer, sample in zip(answers, samples, strict=True)]


def write(folder: Path, sizes: Sizes) -> Path:
    """Write the model and the cases into a folder. Returns the path of the JSON."""
    prompts = Prompts(str(NEEDLE))
    samples = samples_of(sizes.plan, prompts)
    asked = [prompts.ids(sample) for sample in samples_of(sizes.plan_of(SERVED, sizes.asked), prompts)]
    gates = [[float(gate) for gate in row.split()] for row in GATES.read_text().splitlines()]
    load = {
        "model": str(make_model(folder / "llama", SHAPE)),
        "converted": str(folder / "llama-openvino"),
        "prompts": random_prompts(sizes.requests, sizes.prompt, SHAPE.vocab),
        "warm": random_prompts(sizes.requests, sizes.prompt // 8, SHAPE.vocab, seed=1),
        **{"output": sizes.output, "pool": sizes.pool, "block": BLOCK, "chunk": 2048},
        **{"sink": 32, "recent": 64, "budget": sizes.budget, "eager": sizes.eager},
        **{"dtype": "float32", "kv_bytes_per_token": SHAPE.kv_bytes_per_token()},
        "batches": [1, sizes.requests],
        # Half of the heads of each layer, as of all random heads.
        "gates": [[1.0, 0.0] * (SHAPE.kv_heads // 2)] * SHAPE.layers,
    }
    half = {"dtype": "bfloat16", "kv_bytes_per_token": SHAPE.kv_bytes_per_token(DTYPES["bfloat16"])}
    half = load | half | {"batches": [sizes.requests]}
    many = 3 * sizes.requests
    fp8 = load | {"prompts": random_prompts(many, sizes.prompt, SHAPE.vocab), "batches": [many], "cache": "u8"}
    (question,) = {len(ids) - sizes.length for ids in asked}
    served = load | {
        "model": str(NEEDLE),
        "converted": str(folder / "needle-openvino"),
        "prompts": asked,
        "warm": [ids[: sizes.length // 8] for ids in asked],
        **{"batches": [len(asked)], "question": question},
        "answer": 16,
        "kv_bytes_per_token": KV_NUMBERS * DTYPES["float32"],
        "gates": gates,
    }
    needles = {
        "model": str(NEEDLE),
        "converted": str(folder / "needle-openvino"),
        "samples": [
            {"context": ids[: sizes.length], "question": ids[sizes.length :], "max_tokens": sample.max_tokens}
            for sample, ids in ((sample, prompts.ids(sample)) for sample in samples)
        ],
        **{"length": sizes.length, "budgets": sizes.budgets, "sink": 32, "recent": 64, "block": BLOCK, "gates": gates},
        "dtype": "float32",
        "sizes": {"samples": sizes.samples, "length": sizes.length, "depths": sizes.depths},
    }
    path = folder / "cases.json"
    path.write_text(json.dumps({"load": load, "bfloat16": half, "fp8": fp8, "served": served, "needles": needles}))
    return path

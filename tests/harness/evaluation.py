"""Shared by tests of the evaluation harness: documents, policies, rows of results."""

import gc
import json
from pathlib import Path

import pytest

from vllm_evict.tools.eval import tasks, words
from vllm_evict.tools.eval.prompts import Prompts

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "eval"
NEEDLE = ROOT / "examples" / "needle" / "model"
SECOND, THIRD = NEEDLE.parent / "aggregates", NEEDLE.parent / "counts"
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}

SIZES = {"sink": 32, "recent": 32, "buffer": 0}

needle_model = pytest.mark.skipif(not (NEEDLE / "model.safetensors").exists(), reason=f"no model in {NEEDLE}")


def words_of(text):
    return len(text.split())


def sample_of(task, length=300, depth=0.5, index=0, seed=0, count=words_of, later=None, haystack="grammar"):
    pairs = haystack == "pairs"
    return tasks.make(task, length, depth, index, seed, count, words.HAYSTACKS[haystack](), later, pairs)


def expecting(*answers, metric="contains", classes=()):
    return tasks.Sample("t", "", "", answers, metric, 1, 1, classes=classes)


def duo(**options):
    """duo on the needle model's heads, as an entry of --policies."""
    return json.dumps({"name": "duo", "gates": str(ROOT / "configs/heads/needle"), **options})


HALF = {"name": "h2o", "budget": 0.5, "sink": 32, "recent": 32, "accumulate": "last"}
SPLIT = [duo(sparsity=0.5), duo(threshold=0.5), duo(sparsity=0.5, retrieval=HALF), duo(sparsity=0.5, retrieval="knorm")]
SWAPPED = '{"name": "duo", "pattern": ["11", "11", "00", "00"], "sink": 32, "recent": 64}'


def own(name, **options):
    """A policy at the sizes that policies given by name have here, as an entry of --policies."""
    return json.dumps({"name": name, "sink": 32, "recent": 32, "buffer": 0, **options})


def row_of(policy="full", budget=None, task="niah", index=0, score=1.0, **fields):
    base = {
        **{"task": task, "setting": "agnostic", "chunk": 256, "length": 1024, "depth": 0.5, "index": index, "seed": 0},
        **{
            "policy": policy,
            "budget": budget,
            "policy_config": {"name": policy},
            "model": "m",
            "prompt_sha256": str(index),
        },
        **{"metric": "contains", "score": score, "budget_tokens": budget, "peak_blocks": 8, "evicted_tokens": 0},
        **{"ttft_s": 0.5, "tokens_per_s": 100.0, "versions": {"vllm": "0"}, "hardware": {"cpu": "c"}, "engine": {}},
    }
    return {**base, **fields, "key": f"{policy}{budget}{task}{index}{fields}"}


@pytest.fixture(autouse=True)
def collected_once(monkeypatch):
    """Engines collect the whole heap nine times between start and end: half a second each."""
    monkeypatch.setattr(gc, "collect", lambda *args: 0)


def needles():
    """Ten questions behind contexts of 2,048 tokens: name -> sample, and name -> its token ids."""
    prompts, filler, samples = Prompts(str(NEEDLE)), words.Filler(), {}
    for task in ("niah", "multikey"):
        for depth in (0.1, 0.17, 0.25, 0.33, 0.41):
            samples[f"{task}-{depth}"] = tasks.make(task, 2048, depth, 0, 0, prompts.count, filler)
    return samples, {name: prompts.ids(sample) for name, sample in samples.items()}

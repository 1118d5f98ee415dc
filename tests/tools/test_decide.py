"""benchmarks/decide.py: every policy decides and reports, on random keys and on those of a model."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_evict.compute.kernels.alike import ALIKE
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.tasks import make
from vllm_evict.tools.eval.words import Filler

NEEDLE = str(Path(__file__).parents[2] / "examples" / "needle" / "model")


@pytest.fixture
def decide(script):
    return script("decide")


@pytest.fixture
def options(decide, monkeypatch):
    monkeypatch.setattr("sys.argv", ["decide"])
    options = decide.parse_arguments()
    options.repeats, options.batch, options.resident = 2, 2, 1024
    return options


@pytest.mark.parametrize("model", [None, NEEDLE], ids=["random", "needle"])
def test_each_decision_and_report_is_timed(decide, options, model):
    from vllm_evict.policies import CACHED, POLICIES, RUNNING

    options.model = model
    shape = decide.Shape(**{size.name: getattr(options, size.name) for size in fields(decide.Shape)})
    shape = decide.shape_of(model) if model else shape
    taken = decide.decide_child({"options": vars(options), "shape": asdict(shape)})
    assert taken.keys() == set(options.policies) >= {"h2o", "rkv", "keydiff"}
    for name, times in taken.items():
        measures = POLICIES[name].measures
        assert times["choose"] > 0 and times["steps"] % options.block_size == 0
        assert (times["running"] > 0, times["cached"] > 0) == (bool(measures & RUNNING), bool(measures & CACHED))


def test_keys_of_a_model_are_those_of_its_forward_pass(decide):
    """By transformers, of two documents in one batch; rotation makes the keys of their common beginning equal."""
    layers, shape = decide.keys_of(NEEDLE, 2, 256), decide.shape_of(NEEDLE)
    assert [each.shape for each in layers] == [(2, 256, shape.kv_heads, shape.head_dim)] * shape.layers
    prompts, llama = Prompts(NEEDLE), AutoModelForCausalLM.from_pretrained(NEEDLE, dtype=torch.float32)
    samples = [make("multikey", 256, 0.5, index, 0, prompts.count, Filler()) for index in range(2)]
    with torch.inference_mode():
        cache = llama(torch.tensor([prompts.ids(sample)[:256] for sample in samples])).past_key_values
    for layer, keys in zip(cache.layers, layers, strict=True):
        torch.testing.assert_close(layer.keys.transpose(1, 2), keys, atol=1e-4, rtol=1e-4)


def test_spheres_around_the_keys_of_blocks_exclude_none_of_a_model_s(decide):
    """Why `rkv` does not search blocks by their means first: no key is so far from a block that none there is alike."""
    for keys in decide.keys_of(NEEDLE, 1, 2048):
        units = torch.nn.functional.normalize(keys[0].transpose(0, 1), dim=-1)
        blocks = units.unflatten(1, (-1, 32))
        means = blocks.mean(2)
        radii = (blocks - means[:, :, None]).norm(dim=-1).amax(2)
        assert (units @ means.transpose(1, 2) + radii[:, None] > ALIKE).all()

"""LoRA adapters on one server: an adapter's requests share prefixes and scores with each other, and with no other's."""

import itertools
import json

import numpy as np
import pytest
import torch
from engine import Engine, logprobs_of, random_prompt
from oracle.model import DenseLlama
from parity import assert_like_oracle, assert_tokens_like_oracle
from safetensors.torch import load_file, save_file
from test_kvzip import reconstructed
from test_serving_cache import pure_tokens
from vllm.lora.request import LoRARequest

from vllm_evict.config import KVPolicyConfig
from vllm_evict.integration.engine.reconstruction import Reconstructions

pytestmark = pytest.mark.minutes

BLOCK, RANK, SCALE = 32, 8, 2.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "h2o": {"name": "h2o", **BASE},
    "h2o-tokens": {"name": "h2o", **BASE, "granularity": "token"},
}
#: One adapter more than there are: vLLM's CPU kernels let requests without an adapter read the last one's memory.
SERVES = dict(enable_lora=True, max_loras=3, max_lora_rank=RANK, max_num_batched_tokens=1024)
#: Names of adapters; None: none.
ADAPTERS = (None, "a", "b")


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    """Adapter -> (its `LoRARequest`, the oracle of the model with the adapter's product added to its weights)."""
    root, made = tmp_path_factory.mktemp("adapters"), {None: (None, DenseLlama(tiny))}
    for number, name in enumerate(ADAPTERS[1:], 1):
        merged = DenseLlama(tiny)
        for key, added in write_adapter(tiny, root / name, number).items():
            merged.w[key] = merged.w[key] + added
        made[name] = (LoRARequest(name, number, str(root / name)), merged)
    return made


def serve(server, adapters, names, prompts, tokens=60):
    """(output, trace) of each prompt by adapter: one batch of all adapters for each prompt."""
    batches = []
    for prompt in prompts:
        requests = [(prompt, dict(max_tokens=tokens, logprobs=1, lora_request=adapters[name][0])) for name in names]
        batches.append(dict(zip(names, zip(*server.traced(requests)))))
    return batches


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("kind", POLICIES)
def test_adapters_answer_as_servers_of_their_own_do(engine, tiny, adapters, poisoned, kind):
    """All have one prompt, and then another with its prefix: each hits the blocks that its own adapter has computed."""
    policy, prefix = POLICIES[kind], random_prompt(300, 1)
    compare = assert_tokens_like_oracle if "granularity" in policy else assert_like_oracle
    prompts = [[*prefix, *random_prompt(30, seed)] for seed in (2, 3)]
    server = engine(policy, **SERVES)
    together = serve(server, adapters, ADAPTERS, prompts)
    server.assert_nothing_left()
    for name in ADAPTERS:
        alone = Engine(tiny, policy, **SERVES)
        answers = serve(alone, adapters, [name], prompts)
        alone.assert_nothing_left()
        alone.close()
        (_, first), (_, second) = (batch[name] for batch in together)
        assert first.start == 0 and second.start == min(pure_tokens(first), len(prefix)) // BLOCK * BLOCK > 0
        for prompt, batch, answer in zip(prompts, together, answers, strict=True):
            (output, trace), (single, single_trace) = batch[name], answer[name]
            assert output.outputs[0].token_ids == single.outputs[0].token_ids
            assert trace.evicted == single_trace.evicted and sum(map(len, trace.evicted)) > 5
            assert logprobs_of(output) == pytest.approx(logprobs_of(single), abs=1e-3)
            compare(adapters[name][1], prompt, output, trace, policy)
    answered = {tuple(output.outputs[0].token_ids) for output, _ in together[0].values()}
    assert len(answered) == len(ADAPTERS), "the adapters change nothing"


def test_kvzip_repeats_a_prompt_under_the_adapter_of_its_request(engine, adapters):
    """The scores of one prompt are other ones under each adapter, and are kept apart."""
    policy = {"name": "kvzip", "budget": 192, "buffer": 64, "sink": 32, "recent": 64, "instruction": [7, 8, 9]}
    server, prompt = engine(policy, **SERVES), random_prompt(330, 1)
    (batch,) = serve(server, adapters, ADAPTERS, [prompt], tokens=100)
    scores = [stored for _, stored in server.scheduler.part(Reconstructions).scores._prompts.values()]
    assert len(scores) == len(ADAPTERS)
    for name in ADAPTERS:
        mass = reconstructed(adapters[name][1], prompt, KVPolicyConfig.parse(policy))
        assert sum(np.allclose(stored, mass, rtol=1e-3) for stored in scores) == 1
        assert sum(map(len, batch[name][1].evicted)) > 3
    server.assert_nothing_left()

"""Speculative decoding beside latents (MLA): rows with drafts are chunks of a prompt there; transformers is the oracle."""

import pytest
import test_reach_drafts
import torch
from drafting import NGRAM, SERVED, VOCAB, Drafter, LayeredDrafter, prompt_of, serve, speculative
from interpreter import in_place_of
from latent import (
    DenseAbsorbed,
    DenseLatent,
    add_mtp,
    keep_what_is_asked,
    make_eagle3,
    make_latent,
    reference_mla,
    stand_in,
)
from parity import assert_like_oracle
from safetensors.torch import load_file
from test_drafters import assert_full_is_stock
from test_drafters_async import check_late_holes
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from vllm_evict.config import KVPolicyError

pytestmark = SERVED

BLOCK = 16
BASE = {"budget": 96, "buffer": 32, "sink": 16, "recent": 16}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 96, "sink": 16},
    "h2o": {"name": "h2o", **BASE, "accumulate": "ema", "decay": 0.95},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
}
OPTIONS = {"block_size": BLOCK, "attention_backend": "CPU_MLA"}
MTP = {"vocab_size": VOCAB, "num_nextn_predict_layers": 1}
#: Architecture -> sizes; the last model has no layer for MTP.
MODELS = {
    "DeepseekV3ForCausalLM": {**MTP, "first_k_dense_replace": 4},
    "Glm4MoeLiteForCausalLM": MTP,
    "DeepseekV2ForCausalLM": {"vocab_size": VOCAB},
}
DEEPSEEK, GLM, PLAIN = MODELS


@pytest.fixture(autouse=True)
def latents(monkeypatch):
    keep_what_is_asked(monkeypatch)
    with reference_mla():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Architecture -> directory of a model."""
    made = {}

    def make(architecture):
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("latents") / architecture
            make_latent(made[architecture], architecture, **MODELS[architecture])
            if architecture != PLAIN:
                add_mtp(made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def dense(folders):
    return DenseLatent(folders(DEEPSEEK))


@pytest.fixture(scope="module")
def drafters(folders, tmp_path_factory):
    """Drafter -> `speculative_config` and double."""
    head = make_eagle3(tmp_path_factory.mktemp("latents") / "eagle3", folders(DEEPSEEK))
    return {
        "ngram": (NGRAM, Drafter),
        "mtp": (speculative("mtp"), LayeredDrafter),
        "eagle3": (speculative("eagle3", head), LayeredDrafter),
    }


@pytest.mark.parametrize(("architecture", "drafter"), [(DEEPSEEK, "ngram"), (DEEPSEEK, "eagle3"), (GLM, "mtp")])
def test_full_serves_as_stock_does(engine, folders, drafters, architecture, drafter):
    assert_full_is_stock(engine, folders(architecture), drafters[drafter][0], **OPTIONS)


@pytest.mark.oracle("latents")
@pytest.mark.both_runners("mtp-snapkv")
@pytest.mark.parametrize("drafter, name", [("ngram", "h2o"), ("mtp", "snapkv"), ("eagle3", "sink-window")])
def test_evictions_and_logprobs_match_transformers(engine, folders, drafters, dense, monkeypatch, drafter, name):
    def check(prompt, output, trace):
        like = dict(block_size=BLOCK, atol=3e-5, tie=2e-6)
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], **like) >= 2

    config, double = drafters[drafter]
    served = serve(engine, folders(DEEPSEEK), POLICIES[name], check, monkeypatch, config, double, tokens=100, **OPTIONS)
    assert drafter == "ngram" or served.runs > 100


@pytest.mark.oracle("latents")
@pytest.mark.both_runners("mtp-host")
@pytest.mark.nightly(push=("ngram-host", "mtp-host", "ngram-full", "mtp-full"))
@pytest.mark.parametrize(
    "drafter, name", [("ngram", "host"), ("mtp", "host"), ("eagle3", "host"), ("ngram", "full"), ("mtp", "full")]
)
def test_rows_with_drafts_choose_what_they_read(engine, folders, drafters, monkeypatch, drafter, name):
    """On the host, or on the device alone."""
    folder = folders(DEEPSEEK)
    like = (DenseAbsorbed(folder), monkeypatch, *drafters[drafter], test_reach_drafts.CHOOSING[name])
    test_reach_drafts.check_drafts(engine, folder, *like, size=BLOCK, **OPTIONS)


@pytest.mark.oracle("latents")
@pytest.mark.nightly(push=("mtp",))
@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_holes_come_a_step_late_on_a_backend_of_a_device(
    async_engine, folders, drafters, dense, poisoned, monkeypatch, drafter
):
    """FLASH_ATTN_MLA decodes rows with drafts, by lengths on the device. CPU_MLA takes them for chunks of prompts."""
    stand_in(monkeypatch, "FLASH_ATTN_MLA")
    with in_place_of("CPU_MLA", "latent.Shown"):
        check_late_holes(
            *(async_engine, folders(DEEPSEEK), drafters[drafter][0], "sink-window", dense),
            **dict(block=BLOCK, tokens_each=100, **OPTIONS),
        )


def test_what_was_computed_over_holes_is_never_hit(engine, folders, dense, poisoned):
    """A request repeats another one with its answer: it hits blocks of the prompt alone, and answers as the oracle."""
    server = engine(POLICIES["h2o"], model=folders(DEEPSEEK), speculative_config=speculative("mtp"), **OPTIONS)
    prompt = prompt_of(150, 5)
    (first,), _ = server.traced([(prompt, {"max_tokens": 60})])
    assert first.kv_usage.evicted_blocks > 4
    longer = [*prompt, *first.outputs[0].token_ids]
    (output,), (trace,) = server.traced([(longer, {"max_tokens": 30, "logprobs": 5})])
    assert 96 < output.num_cached_tokens <= 144
    like = dict(block_size=BLOCK, atol=3e-5, tie=2e-6)
    assert assert_like_oracle(dense, longer, output, trace, POLICIES["h2o"], **like) >= 2
    server.assert_nothing_left()


class Reference:
    """transformers' layer of the weights of a server's layer for MTP, beside each of its passes over one request.

    Attributes:
        inputs: position -> what the layer last got there.
        apart: of each pass the largest difference between the layers' outputs, and whether there were holes.
    """

    def __init__(self, server, folder):
        self.server, self.inputs, self.apart = server, {}, []
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers).eval()
        weights, prefix = load_file(folder / "model.safetensors"), f"model.layers.{config.num_hidden_layers}."
        own = {name: weights[prefix + name] for name in self.layer.state_dict()}
        self.layer.load_state_dict(own)
        self.rotation = DeepseekV3RotaryEmbedding(config)
        (predictor,) = server.worker.model_runner.drafter.model.model.layers.values()
        predictor.mtp_block.register_forward_hook(self.look, with_kwargs=True)

    @torch.no_grad()
    def look(self, _, args, given, output):
        if not (tables := self.server.manager.req_to_blocks):
            return
        positions, (table,) = given["positions"].tolist(), tables.values()
        self.inputs |= zip(positions, given["hidden_states"].clone())
        end, first = positions[-1] + 1, positions[0]
        everything = torch.stack([self.inputs[position] for position in range(end)])[None]
        there = torch.tensor([not table[position // BLOCK].is_null for position in range(end)])
        mask = torch.zeros(1, 1, end, end).masked_fill(~(torch.ones(end, end).tril().bool() & there), -torch.inf)
        mask[..., range(end), range(end)] = 0.0  # rows of evicted tokens
        rotated = self.rotation(everything, torch.arange(end)[None])
        want = self.layer(everything, attention_mask=mask, position_embeddings=rotated)[0, first:]
        self.apart.append(((want - sum(output)).abs().max().item(), not there.all()))


@pytest.mark.v1(why="on V2 a drafter's pass has rejected tokens, at positions of an earlier step")
def test_a_layer_for_mtp_sees_what_is_left(engine, folders, poisoned):
    """In each of its passes: over the tokens of a step, then over each draft."""
    model = folders(DEEPSEEK)
    server = engine(POLICIES["h2o"], model=model, speculative_config=speculative("mtp"), **OPTIONS)
    reference = Reference(server, model)
    (output,), _ = server.traced([(prompt_of(150, 3), {"max_tokens": 60})])
    assert output.kv_usage.evicted_blocks > 4
    assert sum(holes for _, holes in reference.apart) > 100 and not all(holes for _, holes in reference.apart)
    assert max(apart for apart, _ in reference.apart) < 1e-4
    server.assert_nothing_left()


def test_a_draft_model_beside_latents_is_refused(engine, folders):
    message = 'a draft model beside latents .*set "method" in .* to mtp or eagle3, .*, or to ngram'
    with pytest.raises(KVPolicyError, match=message):
        engine("h2o", model=folders(PLAIN), speculative_config=speculative("draft_model", folders(PLAIN)), **OPTIONS)

"""Architectures whose layers see a window or all, with random weights, against transformers under explicit masks."""

import json
from collections import Counter
from importlib.metadata import version

import numpy as np
import pytest
import torch
from engine import exactly, logprobs_of, random_prompt
from oracle.tiny import write_tokenizer
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.since("0.31", "its CPU engine computes sinks in bfloat16 alone", kind="GptOss")

BLOCK, WINDOW = 32, 48
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=256, max_position_embeddings=2048, sliding_window=WINDOW, initializer_range=0.2, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
WINDOWS, TURNS = ["sliding_attention"] * 3 + ["full_attention"], ["sliding_attention", "full_attention"] * 2
GEMMA4 = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=256)
CHUNK = 64
#: Chunks of local attention in the place of windows, without experts.
CHUNKS = dict(
    layer_types=["chunked_attention"] * 3 + ["full_attention"], no_rope_layers=[1, 1, 1, 0], attention_chunk_size=CHUNK,
    interleave_moe_layer_step=5, num_local_experts=1, num_experts_per_tok=1, intermediate_size_mlp=128, sliding_window=None,
)  # fmt: skip
#: Architecture -> its type in transformers and what is its own.
MODELS = {
    "Cohere2ForCausalLM": ("cohere2", dict(layer_types=WINDOWS, tie_word_embeddings=True)),
    "Exaone4ForCausalLM": ("exaone4", dict(layer_types=WINDOWS, sliding_window_pattern="LLLG")),
    "Gemma2ForCausalLM": ("gemma2", dict(layer_types=TURNS, query_pre_attn_scalar=32, tie_word_embeddings=True)),
    "Gemma3ForCausalLM": ("gemma3_text", dict(layer_types=WINDOWS, query_pre_attn_scalar=32)),
    # Pages of layers with windows are smaller, so vLLM gives these blocks of 64 tokens; and the other way round.
    "Gemma4ForCausalLM": ("gemma4_text", dict(layer_types=WINDOWS, global_head_dim=64, **GEMMA4)),
    "Gemma4ForCausalLM-few-heads": (
        "gemma4_text",
        dict(
            layer_types=WINDOWS,
            global_head_dim=64,
            num_key_value_heads=4,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            **GEMMA4,
        ),
    ),
    "GptOssForCausalLM": ("gpt_oss", dict(layer_types=TURNS, num_local_experts=2, num_experts_per_tok=1)),
    "Llama4ForCausalLM": ("llama4_text", CHUNKS),
    "MinistralForCausalLM": ("ministral", dict(layer_types=TURNS)),
    "Olmo3ForCausalLM": ("olmo3", dict(layer_types=WINDOWS)),
}
H2O = {"name": "h2o", "budget": 128, "sink": 32, "recent": 32, "buffer": 32}


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """Architecture -> directory, and transformers' model."""
    made = {}

    def make(architecture):
        if architecture not in made:
            kind, own = MODELS[architecture]
            config = AutoConfig.for_model(kind, **{**SIZES, **own})
            config.architectures = [architecture.split("-")[0]]
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
            # vLLM has some of these classes compiled, once it has loaded a model of theirs.
            model.model.do_not_compile = True
            folder = tmp_path_factory.mktemp("models") / architecture
            model.save_pretrained(folder)
            write_tokenizer(folder, 256, 2048)
            made[architecture] = folder, model
        return made[architecture]

    return make


def masks(trace, tokens, window, block=BLOCK):
    """Return what each query sees: bool [tokens, tokens] of layers that see all that is left, and of those with a
    window.
    """
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen, first = back >= 0, 0
    for count, evicted in zip(trace.steps, trace.evicted):
        first += count
        for index in evicted:
            seen[first:, index * block : (index + 1) * block] = False
    chunk = torch.arange(tokens) // CHUNK
    return seen, (back >= 0) & (back < window), (back >= 0) & (chunk == chunk[:, None])


@pytest.mark.oracle("sliding windows")
@pytest.mark.parametrize("architecture", MODELS)
@torch.no_grad()
def test_full_is_stock_to_the_byte_and_evictions_are_a_mask(engine, truths, architecture):
    """Of prompts longer than a chunk, decoded past several decisions. Of Cohere's windows see one token more."""
    folder, model = truths(architecture)
    size, options = 64 if architecture.endswith("few-heads") else BLOCK, dict(model=folder, max_num_batched_tokens=192)
    policy = {**H2O, "budget": 64 + 2 * size, "allow": ["full", "sink-window"]}
    stock, server = engine(**options), engine(policy, **options)
    assert server.manager.block_size == size
    kinds = Counter(MODELS[architecture][1]["layer_types"])
    assert len(server.all_managers) == (4 if kinds["full_attention"] == 1 else 2) and len(server.managers) == 1
    whole = [random_prompt(300)], {"max_tokens": 16, "logprobs": 0}
    want = exactly(stock.generate(whole[0], **whole[1]))
    assert exactly(server.generate(whole[0], **whole[1], extra_args={"kv_policy": "full"})) == want
    asked = [{"max_tokens": 60, "logprobs": 0, "extra_args": {"kv_policy": name}} for name in ("h2o", "sink-window")]
    requests = [(random_prompt(400, seed), its) for seed, its in enumerate(asked, 1)]
    for prompt, output, trace in server.answered(requests):
        assert sum(map(len, trace.evicted)) > 256 // size
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        seen = masks(trace, len(ids), WINDOW + (architecture == "Cohere2ForCausalLM"), size)
        added = (
            torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None] for mask in seen
        )
        mapping = dict(zip(("full_attention", "sliding_attention", "chunked_attention"), added))
        logits = model(torch.tensor([ids]), attention_mask=mapping, use_cache=False).logits[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(logits.double(), -1)[range(60), output.outputs[0].token_ids]
        np.testing.assert_allclose(logprobs_of(output), logprobs, atol=1e-4)
    server.assert_nothing_left()


#: Windows of Step-3.5 have more query heads than full attention, and pages of another size here.
STEP = dict(
    model_type="step3p5", architectures=["Step3p5ForCausalLM"], vocab_size=256, hidden_size=64, intermediate_size=128,
    num_hidden_layers=4, num_attention_heads=4, num_attention_groups=2, head_dim=64, max_position_embeddings=2048,
    max_seq_len=2048, rope_theta=1e4, bos_token_id=None, eos_token_id=None, sliding_window=WINDOW, layer_types=WINDOWS,
    attention_other_setting=dict(
        attention_type="sliding_attention", num_attention_heads=6, num_attention_groups=2, head_dim=32
    ),
    use_head_wise_attn_gate=True, use_rope_layers=[], yarn_only_types=[], moe_layers_enum="1", moe_num_experts=2,
    moe_top_k=1, moe_intermediate_size=32, share_expert_dim=32, use_moe=True, use_moe_router_bias=True,
    norm_expert_weight=True, moe_router_scaling_factor=1.0, need_fp32_gate=True, swiglu_limits=None,
    swiglu_limits_shared=None, moe_router_activation="softmax",
)  # fmt: skip


def test_step_3_5_loses_blocks_and_full_is_stock_to_the_byte(engine, tmp_path, poisoned):
    """Its answers are compared with stock vLLM's alone, where all is resident; freed blocks are NaN."""
    (tmp_path / "config.json").write_text(json.dumps(STEP))
    write_tokenizer(tmp_path, 256, 2048)
    prompt, options = random_prompt(400), {"model": tmp_path, "load_format": "dummy"}
    want = engine(None, **options).generate([prompt], max_tokens=20, logprobs=0)
    server = engine({**H2O, "allow": ["full"]}, **options)
    sizes = [manager.block_size for manager in server.all_managers]
    # Since 0.33 its windows' heads are as long as the others.
    assert sizes == ([32] * 4 if Version(version("vllm")) >= Version("0.33") else [64, 64, 64, 32])
    assert server.manager.block_size == 32
    got = server.generate([prompt], max_tokens=20, logprobs=0, extra_args={"kv_policy": "full"})
    assert exactly(got) == exactly(want)
    (output,) = server.generate([random_prompt(400, 1)], max_tokens=60, logprobs=0)
    assert output.kv_usage.evicted_blocks > 8 and np.isfinite(logprobs_of(output)).all()
    server.assert_nothing_left()

"""Tiny models with multi-head latent attention (MLA), random weights, and transformers' own of the same weights."""

from unittest.mock import patch

import torch
from oracle.tiny import _write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

#: Sizes of the latent are DeepSeek's: vLLM's CPU kernel knows no others. Routers of experts differ, so
#: DeepSeek's layers are dense.
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    kv_lora_rank=512, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, vocab_size=256,
    max_position_embeddings=2048, initializer_range=0.12, tie_word_embeddings=False, moe_intermediate_size=32,
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
#: Architecture -> its type in transformers and what is its own.
MODELS = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", dict(first_k_dense_replace=3, q_lora_rank=None)),
    "DeepseekV3ForCausalLM": ("deepseek_v3", dict(first_k_dense_replace=3)),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        dict(mlp_layer_types=["dense", "dense", "sparse"], first_k_dense_replace=2, initializer_range=0.08),
    ),
}


def make_latent(folder, architecture, **sizes):
    """Write a random model to a directory; return it as transformers' model."""
    kind, own = MODELS[architecture]
    config = AutoConfig.for_model(kind, **{**SIZES, **own, **sizes})
    config.architectures = [architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    _write_tokenizer(folder, 256, 2048)
    return model


def mended_rotation():
    """Context in which engines rotate in torch, patched in vLLM.

    vLLM's CPU kernel (0.32.0) rotates wrong heads where pairs of neighbours rotate and a query has a dimension for heads.
    Stock's own answers then depend on what else a step computes.
    """
    return patch.object(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)

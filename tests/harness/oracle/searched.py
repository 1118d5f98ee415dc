"""Models by neural architecture search: layers that differ in KV heads, or have no attention (vLLM's DeciLM).

A layer with fewer KV heads computes what a layer does that has copies of them. So the dense Llama is the oracle, with
weights in which each KV head stands as often as the widest layer needs. A layer without attention is a layer of it whose
output projection is zero.
"""

import json

import torch
from safetensors.torch import load_file, save_file

from .model import DenseLlama
from .tiny import make_tiny_llama, write_tokenizer

HEADS = 8
#: transformers' own class of this model is a download of its publisher's.
CONFIGURATION = """
from transformers import PretrainedConfig


class Fields(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **others):
        self.block_configs = [Fields({part: Fields(its) for part, its in block.items()}) for block in block_configs]
        super().__init__(**others)
"""


def make_searched(folder, kv_heads, head_dim=32):
    """Write a model of layers with so many KV heads, 0: without attention; returns its directory and its oracle."""
    most, layers = max(kv_heads), len(kv_heads)
    dense = make_tiny_llama(
        folder / "dense", layers=layers, heads=HEADS, kv_heads=most, head_dim=head_dim, vocab=256, max_len=2048
    )
    weights = load_file(dense / "model.safetensors")
    searched = dict(weights)
    for layer, heads in enumerate(kv_heads):
        its = f"model.layers.{layer}.self_attn."
        for name in (f"{its}k_proj.weight", f"{its}v_proj.weight"):
            if heads:
                one_each = weights[name].unflatten(0, (heads, most // heads, head_dim))[:, 0]
                searched[name] = one_each.flatten(0, 1).contiguous()
                weights[name] = one_each.repeat_interleave(most // heads, 0).flatten(0, 1)
        if not heads:
            weights[f"{its}o_proj.weight"] = torch.zeros_like(weights[f"{its}o_proj.weight"])
            searched = {name: weight for name, weight in searched.items() if not name.startswith(its)}
            del searched[f"model.layers.{layer}.input_layernorm.weight"]
    save_file(weights, dense / "model.safetensors")
    path = folder / "searched"
    path.mkdir()
    save_file(searched, path / "model.safetensors")
    (path / "configuration.py").write_text(CONFIGURATION)
    write_tokenizer(path, 256, 2048)
    config = json.loads((dense / "config.json").read_text())
    blocks = [
        {
            "attention": {"no_op": not heads, "n_heads_in_group": HEADS // heads if heads else None},
            "ffn": {"no_op": False, "intermediate_size": config["intermediate_size"], "hidden_act": "silu"},
        }
        for heads in kv_heads
    ]
    del config["num_key_value_heads"]
    config |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration.DeciLMConfig"},
        "block_configs": blocks,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (path / "config.json").write_text(json.dumps(config))
    oracle = DenseLlama(dense)
    oracle.full = [layer for layer, heads in enumerate(kv_heads) if heads]  # the others have no scores
    return path, oracle

"""Small Llamas with quantised weights, as W8A8 (compressed-tensors), AWQ and GPTQ store them, and dense oracles of them.

The oracle has the weights that the quantised ones stand for. It does not quantise activations, which W8A8 does.
"""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from .model import DenseLlama
from .tiny import make_tiny_llama

#: Inputs that share a scale in AWQ and GPTQ.
GROUP = 32
#: Outputs of eight in the order in which AWQ packs them.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIGS = {
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
}


def make_quantised(folder, kind):
    """Write a model of this kind, one of `CONFIGS`; returns its directory and its oracle."""
    path = make_tiny_llama(folder / "dense", dtype="bfloat16")
    quantised = folder / "quantised"
    shutil.copytree(path, quantised)
    weights, stored = load_file(path / "model.safetensors"), {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        parts, weights[name] = PACK[kind](weight.float())
        stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file({name: weight.float() for name, weight in weights.items()}, path / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    return quantised, DenseLlama(path)


def _w8a8(weight):
    """A scale for each output. Weights are float32 [outputs, inputs] here and below."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    number = (weight / scale.float()).round().clamp(-127, 127)
    return {"weight": number.to(torch.int8), "weight_scale": scale}, number * scale.float()


def _awq(weight):
    """A scale and a zero point for `GROUP` inputs of an output; eight outputs are packed into one integer."""
    groups = weight.unflatten(1, (-1, GROUP))  # [outputs, groups, GROUP]
    least, most = groups.amin(2), groups.amax(2)
    scale = ((most - least) / 15).bfloat16()
    zero = (-least / scale.float()).round().clamp(0, 15)
    number = (groups / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
    parts = {
        "qweight": _packed(number.flatten(1).T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER]),
        "qzeros": _packed(zero.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER]),
        "scales": scale.T,
    }
    return parts, ((number - zero[:, :, None]) * scale.float()[:, :, None]).flatten(1)


def _gptq(weight):
    """A scale for `GROUP` inputs of an output; eight inputs are packed into one integer. Zero is 8, stored as 7."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7).bfloat16()
    number = (groups / scale.float()[:, :, None]).round().clamp(-8, 7) + 8
    inputs = torch.arange(weight.shape[1])
    parts = {
        "qweight": _packed(number.flatten(1).unflatten(1, (-1, 8))).T,
        "qzeros": _packed(torch.full((weight.shape[1] // GROUP, len(weight) // 8, 8), 7)),
        "scales": scale.T,
        "g_idx": (inputs // GROUP).int(),
    }
    return parts, ((number - 8) * scale.float()[:, :, None]).flatten(1)


def _packed(numbers):
    """Eight numbers of four bits, [..., 8], as one integer, the first in its lowest bits."""
    packed = (numbers.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


PACK = {"w8a8": _w8a8, "awq": _awq, "gptq": _gptq}

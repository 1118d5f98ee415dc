"""Files of LoRA adapters with random weights."""

import json

import torch
from safetensors.torch import load_file, save_file

RANK, SCALE = 8, 2.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def write_adapter(model, folder, seed):
    """Write an adapter's files; returns what it adds to each of the model's weights that it changes."""
    generator, own, added = torch.Generator().manual_seed(seed), {}, {}
    for key, weight in load_file(model / "model.safetensors").items():
        if any(each in key for each in TARGETS):
            (rows, columns), module = weight.shape, key.removesuffix(".weight")
            down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            up = torch.randn(rows, RANK, generator=generator) * RANK**-0.5
            own |= {f"base_model.model.{module}.lora_A.weight": down}
            own |= {f"base_model.model.{module}.lora_B.weight": up}
            added[key] = SCALE * up @ down
    folder.mkdir(exist_ok=True)
    save_file(own, folder / "adapter_model.safetensors")
    config = dict(peft_type="LORA", r=RANK, lora_alpha=SCALE * RANK, target_modules=TARGETS, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added

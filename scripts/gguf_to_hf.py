"""Converts a GGUF file of a Llama or a Gemma 3 (text) into a folder that vLLM serves, in bfloat16, with its tokenizer.

    python scripts/gguf_to_hf.py FILE.gguf FOLDER

Needs the packages `gguf`, `safetensors`, `torch` and `transformers`. `make models` calls this script.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

#: GGUF's architecture -> transformers' class of models.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma3": "Gemma3ForCausalLM"}
#: GGUF's names of tensors -> transformers' names.
MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OWN = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


class ConversionError(Exception):
    """A file cannot be converted; the message says why."""


def name_of(tensor: str, architecture: str) -> str:
    """Return transformers' name of a GGUF tensor.

    Raises:
        ConversionError: the architecture has no such tensor.
    """
    first, *rest = tensor.removesuffix(".weight").split(".")
    names = LAYER | OWN[architecture]
    if first in MODEL and not rest:
        return f"{MODEL[first]}.weight"
    if first == "blk" and len(rest) == 2 and rest[1] in names:
        return f"model.layers.{rest[0]}.{names[rest[1]]}.weight"
    raise ConversionError(f"tensor {tensor!r} is none of {architecture}; expected {', '.join((*MODEL, *names))}")


def as_stored(weight: torch.Tensor, tensor: str, architecture: str, heads: dict[str, int]) -> torch.Tensor:
    """Return a weight as transformers stores it.

    llama.cpp interleaves both halves of each head's rotated dimensions in a Llama, and adds the one that Gemma's norms
    add to their weights.

    Args:
        weight: float32, [out, in] or [out].
        tensor: its name in GGUF.
        architecture: a key of `ARCHITECTURES`.
        heads: attn_q and attn_k -> number of heads.
    """
    kind = tensor.removesuffix(".weight").split(".")[-1]
    if architecture == "llama" and kind in heads:
        halves = weight.reshape(heads[kind], -1, 2, weight.shape[-1])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gemma3" and kind.endswith("norm"):
        return weight - 1
    return weight


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, configuration and tokenizer into an empty folder.

    Raises:
        ConversionError: the file is no GGUF, or one of another architecture.
    """
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise ConversionError(f"{file} is no GGUF file ({error})") from None

    def field(name: str, default: Any = None) -> Any:
        return reader.fields[name].contents() if name in reader.fields else default

    architecture = field("general.architecture")
    if architecture not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise ConversionError(f"{file} got architecture {architecture!r}; expected {known}; give another file")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.architectures, config.dtype = [ARCHITECTURES[architecture]], torch.bfloat16
    heads = {
        "attn_q": field(f"{architecture}.attention.head_count"),
        "attn_k": field(f"{architecture}.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        name = name_of(tensor.name, architecture)
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weight = torch.from_numpy(values.reshape([int(size) for size in reversed(tensor.shape)]))
        weights[name] = as_stored(weight, tensor.name, architecture, heads).to(torch.bfloat16).contiguous()
    config.tie_word_embeddings = "lm_head.weight" not in weights
    for name in ("quantization_config", "_name_or_path"):
        vars(config).pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if field("tokenizer.ggml.add_bos_token", False):
        begin_with_bos(tokenizer)
    tokenizer.save_pretrained(folder)


def begin_with_bos(tokenizer: Any) -> None:
    """Let a tokenizer begin each text with its `bos` token, which transformers does not take from GGUF files."""
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ConversionError, OSError) as error:
        sys.exit(f"gguf_to_hf: {error}")


if __name__ == "__main__":
    main()

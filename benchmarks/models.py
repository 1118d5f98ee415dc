"""Makes random models for benchmarks and the demo: no download. Llamas have attention that is not uniform."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; the defaults make 14 million parameters."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1408
    vocab: int = 2048
    max_len: int = 16384

    def kv_bytes_per_token(self, itemsize: int = 4) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * itemsize


def make_model(path: str | Path, shape: Shape = Shape(), *, seed: int = 0, focus: float = 3.0) -> Path:
    """Write a random Llama with its tokenizer and chat template, float32, in Hugging Face format.

    Plain random weights attend almost evenly, so every block would have the same mass. Here attention is sharper, and
    all embeddings share one direction. Keys that match this direction draw attention from all queries: these are the
    heavy hitters.

    Args:
        path: directory, created if it is missing.
        shape: sizes.
        seed: same seed and shape, same weights.
        focus: standard deviation of a query's attention logits over random keys.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    weights = _weights(shape, torch.Generator().manual_seed(seed), focus)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_config(path, shape)
    _write(path / "generation_config.json", {"do_sample": False})
    _write_tokenizer(path, shape)
    return path


def write_config(path: str | Path, shape: Shape) -> Path:
    """Write a Llama's config.json only, for engines with dummy weights (`load_format="dummy"`)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "config.json", _config(shape))
    return path


#: Kind of a model that is no Llama -> its type in transformers, what is its own, and tokens of its blocks on a CPU, if
#: vLLM chooses them.
OTHERS = {
    "hybrid": (
        "falcon_h1",
        dict(mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4),
        None,
    ),
    "mla": (
        "deepseek_v3",
        dict(kv_lora_rank=512, q_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64),
        16,
    ),
}


def write_other(path: str | Path, kind: str, shape: Shape) -> Path:
    """Write configuration and tokenizer of a model in `OTHERS`, for engines with dummy weights."""
    from transformers import AutoConfig

    model_type, own, _ = OTHERS[kind]
    sizes = {name: value for name, value in _config(shape).items() if name not in ("architectures", "model_type")}
    if kind == "mla":  # without experts; each query head has its keys in the latent
        own = own | {"first_k_dense_replace": shape.layers, "num_key_value_heads": shape.heads}
        sizes.pop("head_dim")
    config = AutoConfig.for_model(model_type, **{**sizes, **own})
    config.architectures = [{"hybrid": "FalconH1ForCausalLM", "mla": "DeepseekV3ForCausalLM"}[kind]]
    config.save_pretrained(path)
    _write_tokenizer(Path(path), shape)
    return Path(path)


def _weights(shape: Shape, generator: torch.Generator, focus: float) -> dict[str, torch.Tensor]:
    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    hidden, ones = shape.hidden, torch.ones(shape.hidden)
    into, out_of = hidden**-0.5, shape.intermediate**-0.5
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    common = normal(hidden, std=1.0)
    weights = {
        "model.embed_tokens.weight": (common + normal(shape.vocab, hidden, std=1.0)) * 0.5**0.5,
        "model.norm.weight": ones,
        "lm_head.weight": _blind_to(common, normal(shape.vocab, hidden, std=4 * into)),
    }
    # A normalised token has RMS 1, so q.k / sqrt(head_dim) has standard deviation gain ** 2.
    gain = focus**0.5
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "self_attn.q_proj.weight": normal(queries, hidden, std=gain * into),
            prefix + "self_attn.k_proj.weight": normal(keys, hidden, std=gain * into),
            prefix + "self_attn.v_proj.weight": _blind_to(common, normal(keys, hidden, std=2 * into)),
            prefix + "self_attn.o_proj.weight": normal(hidden, queries, std=queries**-0.5),
            prefix + "post_attention_layernorm.weight": ones.clone(),
            prefix + "mlp.gate_proj.weight": normal(shape.intermediate, hidden, std=into),
            prefix + "mlp.up_proj.weight": normal(shape.intermediate, hidden, std=into),
            prefix + "mlp.down_proj.weight": normal(hidden, shape.intermediate, std=out_of),
        }
    return weights


def _blind_to(direction: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` without its response to `direction`, which would make all positions nearly equal."""
    unit = direction / direction.norm()
    return matrix - torch.outer(matrix @ unit, unit)


def _config(shape: Shape) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def _write_tokenizer(path: Path, shape: Shape) -> None:
    """Words w0, w1, ..., split at white space; any other word is w0."""
    words = {f"w{token}": token for token in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

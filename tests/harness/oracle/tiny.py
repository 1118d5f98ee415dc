"""Random tiny Llama directories in Hugging Face format, the tests' model fixture."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

HEAD_DIMS = (32, 64, 80, 96, 112, 128)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_tiny_llama(
    path,
    *,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=256,
    intermediate=128,
    max_len=2048,
    seed=0,
    dtype=torch.float32,
    scale=3.0,
    common=0.5,
    rope_theta=10000.0,
    tie=False,
    windows=None,
):
    """Write a random Llama to the directory `path` and return it as a `Path`.

    scale: aimed-at standard deviation, over keys, of a query's attention logits.
    common: share of every embedding's variance that is one vector common to all
        tokens. It gives the queries a common part, so that a key liked by one
        query tends to be liked by the others: heavy hitters exist, and differ.
    tie: tied input and output embeddings.
    windows: of each layer, how many tokens a query sees, itself included; 0: all. At most one size beside 0.
    The tokenizer knows the words t0 .. t{vocab-1}, split at white space (an
    unknown word is t0). No token stops a generation. Weights depend on `seed`
    and the sizes only (and are rounded to `dtype`).
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, not {head_dim}")
    if heads % kv_heads or hidden % heads:
        raise ValueError(f"heads {heads} must be a multiple of {kv_heads} and divide {hidden}")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, generator=gen, dtype=torch.float32) * std

    def norm_weight():
        return 1 + normal(hidden, std=0.1)

    def blind(matrix, norm):
        """`matrix` without its response to the common vector after `norm`."""
        direction = shared * norm / (shared * norm).norm()
        return matrix - (matrix @ direction)[:, None] * direction

    # The values and the output head are blind to the common vector, else every
    # position computes nearly the same and a few tokens are always the likeliest.
    # For a normalised input (RMS 1), q.k / sqrt(head_dim) has standard
    # deviation std**2 * hidden.
    qk_std = (scale / hidden) ** 0.5
    q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
    shared = normal(hidden)
    shared /= shared.square().mean().sqrt()
    weights = {
        "model.embed_tokens.weight": common**0.5 * shared + (1 - common) ** 0.5 * normal(vocab, hidden),
        "model.norm.weight": norm_weight(),
    }
    for i in range(layers):
        pre = f"model.layers.{i}."
        norm = norm_weight()
        weights |= {
            pre + "input_layernorm.weight": norm,
            pre + "self_attn.q_proj.weight": normal(q_dim, hidden, std=qk_std),
            pre + "self_attn.k_proj.weight": normal(kv_dim, hidden, std=qk_std),
            pre + "self_attn.v_proj.weight": blind(normal(kv_dim, hidden, std=2 * hidden**-0.5), norm),
            pre + "self_attn.o_proj.weight": normal(hidden, q_dim, std=q_dim**-0.5),
            pre + "post_attention_layernorm.weight": norm_weight(),
            pre + "mlp.gate_proj.weight": normal(intermediate, hidden, std=hidden**-0.5),
            pre + "mlp.up_proj.weight": normal(intermediate, hidden, std=hidden**-0.5),
            pre + "mlp.down_proj.weight": normal(hidden, intermediate, std=intermediate**-0.5),
        }
    if not tie:
        weights["lm_head.weight"] = blind(normal(vocab, hidden, std=4 * hidden**-0.5), weights["model.norm.weight"])
    save_file(
        {name: w.to(dtype).contiguous() for name, w in weights.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if windows is not None:
        (size,) = set(windows) - {0}
        assert len(windows) == layers
        config |= {
            "sliding_window": size,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"do_sample": False})
    write_tokenizer(path, vocab, max_len)
    return path


def write_tokenizer(path, vocab, max_len, special=None):
    """Write a tokenizer of the words t0, t1 ...; `special`: token -> its name, if it is no such word."""
    words = {(special or {}).get(i, f"t{i}"): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list((special or {}).values()))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")

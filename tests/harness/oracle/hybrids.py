"""Tiny hybrids with random weights, of transformers' classes, and what they compute under explicit masks.

Shapes: as in `oracle.model`; L counts the layers with full attention only.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .tiny import write_tokenizer

VOCAB, MAX_LEN = 256, 2048
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    max_position_embeddings=MAX_LEN,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4)
#: Model type -> its configuration beside `SIZES`, and the dtype in which vLLM's CPU engine computes it.
HYBRIDS = {
    "granitemoehybrid": (
        dict(
            layer_types=["mamba", "attention", "mamba", "mamba"],
            **MAMBA,
            mamba_expand=1,
            num_local_experts=0,
            shared_intermediate_size=128,
            position_embedding_type="rope",
        ),
        torch.float32,
    ),
    "falcon_h1": (dict(num_hidden_layers=2, mamba_d_ssm=128, **MAMBA), torch.float32),
    "nemotron_h": (
        dict(
            hybrid_override_pattern="M*-M",
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=1,
            conv_kernel=4,
            time_step_min=1e-9,  # transformers takes no shorter steps, vLLM has no bound
        ),
        torch.float32,
    ),
    "lfm2": (
        dict(
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            conv_L_cache=3,
            # Names that vLLM reads.
            conv_dim=128,
            conv_dim_out=128,
            block_dim=128,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,  # as vLLM does, whatever a configuration says
        ),
        torch.float32,
    ),
    "jamba": (
        dict(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=1,
            mamba_dt_rank=8,
        ),
        torch.float32,
    ),
    "qwen3_next": (
        dict(
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=256,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_conv_kernel_dim=4,
            num_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        torch.bfloat16,
    ),
}


def make_tiny_hybrid(path: Path, kind: str, **sizes: Any) -> Path:
    """Write a random model of a kind in `HYBRIDS` to a directory; `sizes` take the place of others."""
    options, dtype = HYBRIDS[kind]
    own = {**options, "initializer_range": 0.1 if dtype == torch.bfloat16 else 0.2, **sizes}
    config: PretrainedConfig = AutoConfig.for_model(kind, **{**SIZES, **own})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(dtype).save_pretrained(path)
    write_tokenizer(path, config.vocab_size, MAX_LEN)
    return path


class DenseHybrid:
    """A hybrid of `make_tiny_hybrid`, computed by transformers from its first token on with each step.

    It stands in for `oracle.model.DenseLlama`. Its cache holds the tokens so far and the mask of their queries.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        ALL_ATTENTION_FUNCTIONS.register("masked", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="masked").eval()
        config = self.model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dtype, self.head_dim = dtype, getattr(config, "head_dim", None) or SIZES["head_dim"]
        self._first, self._mask, self._masks, self._probs = 0, torch.ones(2, 2, dtype=torch.bool).tril(), {}, []
        self.model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        self.layers = len(self._probs)
        self.full = list(range(self.layers))

    def new_cache(self):
        return [torch.zeros(0, dtype=torch.long), {}]

    def crop(self, cache, length):
        """Crop as `DenseLlama.crop` does."""
        tokens, masks = cache
        cache[:] = tokens[:length], {layer: mask[:, :length, :length] for layer, mask in masks.items()}

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        """Compute as `DenseLlama.forward` does, with one mask for all heads, or a function that makes one of each
        layer.
        """
        tokens, self._masks = cache
        first = self._first = len(tokens)
        self._begin(mask)
        tokens = cache[0] = torch.cat([tokens, torch.as_tensor(ids, dtype=torch.long)])
        logits = self.model(tokens[None], use_cache=False).logits[0, first:]
        return logits, torch.stack(self._probs)[:, :, first:] if want_probs else None

    def _begin(self, mask):
        """Attend by this mask from here on; models that were made since have registered theirs."""
        ALL_ATTENTION_FUNCTIONS.register("masked", self._attend)
        self._mask, self._probs = mask, []

    def _attend(self, module, query, key, value, attention_mask, scaling, **kwargs):
        mask = self._seen(module, query, key)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3)) * scaling
        probs = scores.masked_fill(~mask, float("-inf")).float().softmax(-1)
        self._probs.append(probs[0])
        return (probs.to(value.dtype) @ value).transpose(1, 2).contiguous(), probs

    def _seen(self, module, query, key):
        """The mask of a layer: bool [H, N, N], or one for all heads."""
        layer, first, length = len(self._probs), self._first, key.shape[2]
        rows = self._mask
        if callable(rows):
            rows = rows(layer, query[0, :, first:].transpose(0, 1), key[0].transpose(0, 1))
        mask = torch.zeros(self.heads, length, length, dtype=torch.bool)
        mask[:, :first, :first] = self._masks.get(layer, False)
        mask[:, first:] = rows
        self._masks[layer] = mask
        return mask


def add_mtp(path: Path) -> None:
    """Give a model of kind qwen3_next a layer for multi-token prediction (MTP): random, like its full attention layer."""
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(7)
    config = json.loads((path / "config.json").read_text())
    like, hidden = f"model.layers.{config['layer_types'].index('full_attention')}.", config["hidden_size"]

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)

    for name in [name for name in weights if name.startswith(like)]:
        one = weights[name]
        weights[f"mtp.layers.0.{name.removeprefix(like)}"] = random(*one.shape) if one.dim() > 1 else one.clone()
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    # These norms multiply by their weight plus one.
    weights |= {f"mtp.{name}.weight": torch.zeros(hidden, dtype=torch.bfloat16) for name in norms}
    weights["mtp.fc.weight"] = random(hidden, 2 * hidden)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))

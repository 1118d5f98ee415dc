"""Tiny models with latents (MLA) beside linear attention, random weights, and what they compute under explicit masks.

`BailingMoeV2_5ForCausalLM` (Ling and Ring 2.5 and 2.6) has lightning attention: a state that decays by a rate of its
head (Qin et al., arXiv:2401.04658). `BailingMoeV3ForCausalLM` (Ling 3) has Kimi delta attention: a delta rule whose
state decays by channel (Kimi Team, arXiv:2510.26692), as has `KimiLinearForCausalLM`, whose latents have no rotation.
All are computed here token by token, by the papers' recurrences.

Shapes: as in `oracle.model`; T tokens, D dimensions of a head of linear attention. L counts layers with latents only.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from .tiny import write_tokenizer

VOCAB, MAX_LEN, THETA = 256, 4096, 10000.0
HIDDEN, HEADS, DIM, INNER = 64, 4, 32, 128
LATENT, ROPE, NOPE, VALUE = 512, 64, 32, 32
#: Kimi-Linear's delta attention has this epsilon whatever its configuration says.
EPS = 1e-5
LAYERS, GROUP, CONV = 4, 2, 4
#: Architecture -> what its configuration has of its own.
LATENT_HYBRIDS = {
    "BailingMoeV2_5ForCausalLM": dict(
        q_lora_rank=48, use_qk_norm=True, group_norm_size=2, partial_rotary_factor=0.5, num_key_value_heads=HEADS,
    ),
    "BailingMoeV3ForCausalLM": dict(
        q_lora_rank=None, no_kda_lora=True, kda_safe_gate=True, kda_lower_bound=-5.0, short_conv_kernel_size=CONV,
        gated_attention_proj_granularity_type="head_wise",
    ),
    "KimiLinearForCausalLM": dict(
        model_type="kimi_linear", q_lora_rank=None, mla_use_nope=True, num_experts=None, num_key_value_heads=HEADS,
        linear_attn_config=dict(
            kda_layers=[1, 3], full_attn_layers=[2, 4], num_heads=HEADS, head_dim=DIM, short_conv_kernel_size=CONV,
        ),
    ),
}  # fmt: skip


def make_latent_hybrid(path: Path, architecture: str, vocab: int = VOCAB) -> Path:
    """Write a random model of an architecture in `LATENT_HYBRIDS` to a directory."""
    own = LATENT_HYBRIDS[architecture]
    config = dict(
        architectures=[architecture], vocab_size=vocab, hidden_size=HIDDEN,
        intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=DIM,
        layer_group_size=GROUP, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE,
        max_position_embeddings=MAX_LEN, rms_norm_eps=EPS, rope_theta=THETA, first_k_dense_replace=LAYERS,
        num_experts_per_tok=1, num_shared_experts=1, moe_intermediate_size=32, n_group=1, topk_group=1,
        moe_shared_expert_intermediate_size=32, use_bias=False, use_qkv_bias=False, tie_word_embeddings=False,
        pad_token_id=None, eos_token_id=None, bos_token_id=None, dtype="float32",
        **{"model_type": "bailing_hybrid", "num_experts": 2, **own},
    )  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(own, architecture, vocab), path / "model.safetensors")
    write_tokenizer(path, vocab, MAX_LEN)
    return path


def names_of(architecture: str) -> dict[str, str]:
    """A checkpoint's names of its embeddings, attention, and the last projection of layers with latents."""
    if architecture == "KimiLinearForCausalLM":
        return {"embed": "model.embed_tokens.weight", "attention": "self_attn.", "out": "o_proj"}
    return {"embed": "model.word_embeddings.weight", "attention": "attention.", "out": "dense"}


def _weights(own: dict, architecture: str, vocab: int) -> dict[str, torch.Tensor]:
    generator, names = torch.Generator().manual_seed(0), names_of(architecture)
    kimi, delta = architecture == "KimiLinearForCausalLM", architecture != "BailingMoeV2_5ForCausalLM"

    def normal(*shape, std=0.12):
        return torch.randn(*shape, generator=generator) * std

    def norm(size):
        return 1 + normal(size, std=0.1)

    weights = {
        names["embed"]: normal(vocab, HIDDEN, std=1.0),
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": normal(vocab, HIDDEN, std=0.3),
    }
    width = HEADS * DIM
    for layer in range(LAYERS):
        pre = f"model.layers.{layer}."
        weights |= {
            f"{pre}input_layernorm.weight": norm(HIDDEN),
            f"{pre}post_attention_layernorm.weight": norm(HIDDEN),
            f"{pre}mlp.gate_proj.weight": normal(INNER, HIDDEN),
            f"{pre}mlp.up_proj.weight": normal(INNER, HIDDEN),
            f"{pre}mlp.down_proj.weight": normal(HIDDEN, INNER),
        }
        pre += names["attention"]
        if (layer + 1) % GROUP == 0:
            rank = own["q_lora_rank"]
            weights |= {
                f"{pre}kv_a_proj_with_mqa.weight": normal(LATENT + ROPE, HIDDEN),
                f"{pre}kv_a_layernorm.weight": norm(LATENT),
                f"{pre}kv_b_proj.weight": normal(HEADS * (NOPE + VALUE), LATENT, std=0.08),
                f"{pre}{names['out']}.weight": normal(HIDDEN, HEADS * VALUE, std=0.3),
            }
            queries = HEADS * (NOPE + ROPE)
            if rank is None:
                weights[f"{pre}q_proj.weight"] = normal(queries, HIDDEN, std=0.2)
            else:
                weights[f"{pre}q_a_proj.weight"] = normal(rank, HIDDEN)
                weights[f"{pre}q_a_layernorm.weight"] = norm(rank)
                weights[f"{pre}q_b_proj.weight"] = normal(queries, rank, std=0.25)
            if delta and not kimi:
                weights[f"{pre}g_proj.weight"] = normal(HEADS, HIDDEN)
        elif delta:
            for name in ("q_proj", "k_proj", "v_proj", *(() if kimi else ("f_proj", "g_proj"))):
                weights[f"{pre}{name}.weight"] = normal(width, HIDDEN)
            for name in "fg" if kimi else ():
                weights[f"{pre}{name}_a_proj.weight"] = normal(DIM, HIDDEN)
                weights[f"{pre}{name}_b_proj.weight"] = normal(width, DIM)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
                weights[f"{pre}{name}.weight"] = normal(width, 1, CONV, std=0.5)
            weights |= {
                f"{pre}b_proj.weight": normal(HEADS, HIDDEN),
                f"{pre}A_log": normal(HEADS, std=0.5),
                f"{pre}dt_bias": normal(width, std=0.5) - 3,
                f"{pre}o_norm.weight": norm(DIM),
                f"{pre}o_proj.weight": normal(HIDDEN, width),
            }
        else:
            weights |= {
                f"{pre}query_key_value.weight": normal(3 * width, HIDDEN),
                f"{pre}query_layernorm.weight": norm(DIM),
                f"{pre}key_layernorm.weight": norm(DIM),
                f"{pre}g_proj.weight": normal(width, HIDDEN),
                f"{pre}g_norm.weight": norm(width),
                f"{pre}dense.weight": normal(HIDDEN, width),
            }
    return weights


class DenseLatentHybrid:
    """A model of `make_latent_hybrid`, computed from its first token on with each step.

    It stands in for `oracle.model.DenseLlama`. Its cache holds the tokens so far and the mask of their queries.
    """

    dtype, heads, kv_heads, scale, head_dim = torch.float32, HEADS, 1, (NOPE + ROPE) ** -0.5, LATENT + ROPE

    def __init__(self, path: Path) -> None:
        self.own = json.loads((path / "config.json").read_text())
        self.w = load_file(path / "model.safetensors")
        (self.architecture,) = self.own["architectures"]
        self.names = names_of(self.architecture)
        self.latent = [layer for layer in range(LAYERS) if (layer + 1) % GROUP == 0]
        self.layers = len(self.latent)
        self.full = list(range(self.layers))
        #: Of each layer with latents, what the last `forward` would cache: [N, C + R].
        self.cached: list[torch.Tensor] = []

    def new_cache(self):
        return [torch.zeros(0, dtype=torch.long), {}]

    def crop(self, cache, length):
        """Crop as `DenseLlama.crop` does."""
        tokens, masks = cache
        cache[:] = tokens[:length], {layer: mask[..., :length, :length] for layer, mask in masks.items()}

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        """Compute as `DenseLlama.forward` does, with one mask for all heads, or a function of a layer, absorbed queries
        [Q, H, C + R] and cached keys [N, 1, C + R] that returns it.
        """
        tokens, masks = cache
        first = len(tokens)
        tokens = cache[0] = torch.cat([tokens, torch.as_tensor(ids, dtype=torch.long)])
        probs, self.cached = [], []
        x = self.w[self.names["embed"]][tokens]
        for layer in range(LAYERS):
            pre = f"model.layers.{layer}."
            h, attention = self._norm(x, f"{pre}input_layernorm.weight"), pre + self.names["attention"]
            if layer in self.latent:
                mixed, its = self._attend(h, attention, masks, mask, first)
                probs.append(its[:, first:])
            elif self.architecture == "BailingMoeV2_5ForCausalLM":
                mixed = self._lightning(h, attention, layer)
            else:
                mixed = self._delta(h, attention)
            x = x + mixed
            h = self._norm(x, f"{pre}post_attention_layernorm.weight")
            gated = F.silu(self._by(h, f"{pre}mlp.gate_proj")) * self._by(h, f"{pre}mlp.up_proj")
            x = x + self._by(gated, f"{pre}mlp.down_proj")
        logits = self._by(self._norm(x[first:], "model.norm.weight"), "lm_head")
        return logits, torch.stack(probs) if want_probs else None

    def _by(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def _low_rank(self, x, pre):
        """By one matrix, or by two of a smaller rank."""
        if f"{pre}_proj.weight" in self.w:
            return self._by(x, f"{pre}_proj")
        return self._by(self._by(x, f"{pre}_a_proj"), f"{pre}_b_proj")

    def _norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.w[name]

    def _attend(self, h, pre, masks, rows, first):
        if self.own["q_lora_rank"] is None:
            query = self._by(h, f"{pre}q_proj")
        else:
            query = self._by(self._norm(self._by(h, f"{pre}q_a_proj"), f"{pre}q_a_layernorm.weight"), f"{pre}q_b_proj")
        plain, turned = query.unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], -1)
        latent, shared = self._by(h, f"{pre}kv_a_proj_with_mqa").split([LATENT, ROPE], -1)
        latent = self._norm(latent, f"{pre}kv_a_layernorm.weight")
        if not self.own.get("mla_use_nope"):
            turned, shared = self._pairs(turned), self._pairs(shared[:, None])[:, 0]
        self.cached.append(torch.cat([latent, shared], -1))
        layer = len(self.cached) - 1
        if callable(rows):
            up = self.w[f"{pre}kv_b_proj.weight"].unflatten(0, (HEADS, -1))[:, :NOPE]
            queries = torch.cat([torch.einsum("qhd,hdc->qhc", plain[first:], up), turned[first:]], -1)
            rows = rows(layer, queries, self.cached[-1][:, None])
        seen = torch.zeros(HEADS, len(h), len(h), dtype=torch.bool)
        seen[:, :first, :first] = masks.get(layer, False)
        seen[:, first:] = rows
        masks[layer] = seen
        keys, values = self._by(latent, f"{pre}kv_b_proj").unflatten(-1, (HEADS, -1)).split([NOPE, VALUE], -1)
        scores = torch.einsum("qhd,khd->hqk", plain, keys) + torch.einsum("qhd,kd->hqk", turned, shared)
        probs = (scores * (NOPE + ROPE) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", probs, values)
        if f"{pre}g_proj.weight" in self.w:
            out = out * self._by(h, f"{pre}g_proj").sigmoid()[..., None]
        return self._by(out.flatten(1), pre + self.names["out"]), probs

    def _pairs(self, x):
        """Rotated, neighbours together: [T, H, R]."""
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self._angles(len(x), x.shape[-1])
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    def _halves(self, x, turned):
        """The first `turned` dimensions rotated, the first half of these with the second: [T, H, D]."""
        first, second, rest = x.split([turned // 2, turned // 2, x.shape[-1] - turned], -1)
        cos, sin = self._angles(len(x), turned)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    @staticmethod
    def _angles(tokens, dims):
        angles = torch.arange(tokens)[:, None] / THETA ** (torch.arange(0, dims, 2).float() / dims)
        return angles.cos()[:, None], angles.sin()[:, None]

    def _lightning(self, h, pre, layer):
        query, key, value = self._by(h, f"{pre}query_key_value").unflatten(-1, (3, HEADS, DIM)).unbind(1)
        query, key = (
            self._halves(self._norm(x, f"{pre}{name}_layernorm.weight"), int(DIM * self.own["partial_rotary_factor"]))
            for x, name in ((query, "query"), (key, "key"))
        )
        # Slopes of ALiBi, smaller in later layers.
        slopes = torch.tensor([2 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])
        decay = torch.exp(-slopes * (1 - layer / (LAYERS - 1) + 1e-5))[:, None, None]
        state, outs = torch.zeros(HEADS, DIM, DIM), []
        for q, k, v in zip(query * DIM**-0.5, key, value):
            state = decay * state + k[..., None] * v[:, None]
            outs.append((q[:, None] @ state)[:, 0])
        groups = torch.stack(outs).flatten(1).unflatten(-1, (self.own["group_norm_size"], -1))
        out = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)).flatten(1)
        out = out * self.w[f"{pre}g_norm.weight"] * self._by(h, f"{pre}g_proj").sigmoid()
        return self._by(out, f"{pre}dense")

    def _delta(self, h, pre):
        mixed = []
        for name in "qkv":
            padded = F.pad(self._by(h, f"{pre}{name}_proj"), (0, 0, CONV - 1, 0))
            taps = self.w[f"{pre}{name}_conv1d.weight"][:, 0].T
            convolved = sum(padded[tap : tap + len(h)] * taps[tap] for tap in range(CONV))
            mixed.append(F.silu(convolved).unflatten(-1, (HEADS, DIM)))
        query, key, value = mixed
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        rate = self.w[f"{pre}A_log"].exp()[:, None]
        gate = (self._low_rank(h, f"{pre}f") + self.w[f"{pre}dt_bias"]).unflatten(-1, (HEADS, DIM))
        if "kda_lower_bound" in self.own:
            decay = torch.exp(self.own["kda_lower_bound"] * torch.sigmoid(rate * gate))
        else:
            decay = torch.exp(-rate * F.softplus(gate))
        beta = self._by(h, f"{pre}b_proj").sigmoid()
        state, outs = torch.zeros(HEADS, DIM, DIM), []
        for q, k, v, a, b in zip(query / math.sqrt(DIM), key, value, decay, beta):
            state = state * a[..., None]
            error = (v - (k[:, None] @ state)[:, 0]) * b[:, None]
            state = state + k[..., None] * error[:, None]
            outs.append((q[:, None] @ state)[:, 0])
        out = self._norm(torch.stack(outs), f"{pre}o_norm.weight")
        out = out * self._low_rank(h, f"{pre}g").unflatten(-1, (HEADS, DIM)).sigmoid()
        return self._by(out.flatten(1), f"{pre}o_proj")

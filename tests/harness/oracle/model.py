"""A plain Llama with dense attention under explicit boolean masks.

Shapes: Q queries of a step, N tokens computed so far (the step's included),
H query heads, G KV heads, D head size, L layers.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def rounded(x):
    """Round to float8_e4m3fn, to the nearest."""
    return x.to(torch.float8_e4m3fn)


def truncated(x, dtype=torch.float8_e4m3fn):
    """Round to an fp8 dtype, toward zero: what vLLM's kernel for CPUs writes."""
    largest = torch.finfo(dtype).max
    near = x.clamp(-largest, largest).to(dtype)
    too_large = near.to(x.dtype).abs() > x.abs()
    return (near.view(torch.uint8) - too_large.to(torch.uint8)).view(dtype)


class DenseLlama:
    """Weights of a Hugging Face Llama directory, computed with in `dtype`.

    With `fp8_scales`, of keys and values, both are attended to as fp8 would hold them, divided by these and converted by
    `to_fp8`; so are queries, if there is a third scale.
    """

    def __init__(self, path, dtype=torch.float32, fp8_scales=None, to_fp8=rounded):
        path = Path(path)
        cfg = json.loads((path / "config.json").read_text())
        assert not cfg.get("attention_bias") and not cfg.get("mlp_bias")
        assert cfg.get("hidden_act", "silu") == "silu"
        rope = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
        assert rope.get("rope_type", "default") == "default"
        theta = rope.get("rope_theta") or cfg.get("rope_theta") or 10000.0

        self.dtype, self.fp8_scales, self.to_fp8 = dtype, fp8_scales, to_fp8
        self.layers = cfg["num_hidden_layers"]
        self.heads = cfg["num_attention_heads"]
        self.kv_heads = cfg.get("num_key_value_heads") or self.heads
        self.head_dim = cfg.get("head_dim") or cfg["hidden_size"] // self.heads
        self.eps = cfg.get("rms_norm_eps", 1e-6)
        # By layer, the last tokens that a query sees, itself included; None: all.
        kinds = cfg.get("layer_types") or ["full_attention"] * self.layers
        self.windows = [cfg["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
        self.full = [layer for layer, window in enumerate(self.windows) if window is None]
        # Angles are float32 whatever `dtype` is, as Llama implementations have them.
        even = torch.arange(0, self.head_dim, 2).float()
        self.inv_freq = 1.0 / theta ** (even / self.head_dim)  # [D/2]

        #: Of each layer, the rotated queries of the last `forward`: [Q, H, D].
        self.queries = []
        self.w = {}
        for file in sorted(path.glob("*.safetensors")):
            self.w |= {name: t.to(dtype) for name, t in load_file(file).items()}
        if "lm_head.weight" not in self.w:
            assert cfg.get("tie_word_embeddings")
            self.w["lm_head.weight"] = self.w["model.embed_tokens.weight"]

    def new_cache(self):
        """Per layer: keys (rotated) and values of every token, [0, G, D] each."""
        empty = torch.zeros(0, self.kv_heads, self.head_dim, dtype=self.dtype)
        return [(empty, empty) for _ in range(self.layers)]

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        """Compute the next Q tokens of a sequence; append their K/V to `cache`.

        ids: Q token ids. cache: from `new_cache`, updated in place.
        mask: bool [Q, N], true where the query may attend to the token; or
            [L, H, Q, N], where heads see different tokens; or a function of a
            layer, its queries [Q, H, D] and keys [N, G, D] that returns it.
            Layers with a sliding window see that, whatever the mask says.
        Returns logits [Q, vocab] and attention probabilities [L, H, Q, N]
        (None unless `want_probs`).
        """
        ids = torch.as_tensor(ids, dtype=torch.long)
        past, q_len = cache[0][0].shape[0], len(ids)
        if not callable(mask):
            assert mask.dtype == torch.bool and mask.shape[-2:] == (q_len, past + q_len)
            mask = mask.expand(self.layers, self.heads, -1, -1)
        # How far back each token lies from each query.
        back = torch.arange(past, past + q_len)[:, None] - torch.arange(past + q_len)
        cos, sin = self._rope(torch.arange(past, past + q_len))
        x = self.w["model.embed_tokens.weight"][ids]  # [Q, hidden]
        probs, self.queries = [], []
        for i in range(self.layers):
            pre = f"model.layers.{i}."
            h = self._norm(x, pre + "input_layernorm")
            q = self._linear(h, pre + "self_attn.q_proj").view(q_len, self.heads, -1)
            k = self._linear(h, pre + "self_attn.k_proj").view(q_len, self.kv_heads, -1)
            v = self._linear(h, pre + "self_attn.v_proj").view(q_len, self.kv_heads, -1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self.queries.append(q)
            if self.fp8_scales:
                held = [self.to_fp8(x / s).to(x.dtype) * s for x, s in zip((k, v, q), self.fp8_scales)]
                k, v, q = [*held, q][:3]
            k, v = torch.cat([cache[i][0], k]), torch.cat([cache[i][1], v])  # [N, G, D]
            cache[i] = (k, v)
            chosen = mask(i, q, k) if callable(mask) else mask[i]
            group = self.heads // self.kv_heads  # query head h reads KV head h // group
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,nhd->hqn", q, k) / self.head_dim**0.5
            window = self.windows[i]
            seen = chosen if window is None else (back >= 0) & (back < window)
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)  # [H, Q, N]
            attended = torch.einsum("hqn,nhd->qhd", p, v).flatten(1)
            x = x + self._linear(attended, pre + "self_attn.o_proj")
            h = self._norm(x, pre + "post_attention_layernorm")
            gate = F.silu(self._linear(h, pre + "mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(h, pre + "mlp.up_proj"), pre + "mlp.down_proj")
            probs.append(p)
        logits = self._linear(self._norm(x, "model.norm"), "lm_head")
        return logits, torch.stack(probs) if want_probs else None

    def crop(self, cache, length):
        """Leave the first `length` tokens in `cache`."""
        cache[:] = [(keys[:length], values[:length]) for keys, values in cache]

    def turn(self, cache, shift):
        """Rotate the keys of each token in `cache` by so many positions more. shift: int64 [N]."""
        cos, sin = self._rope(shift)
        cache[:] = [(_rotate(keys, cos, sin), values) for keys, values in cache]

    def _linear(self, x, name):
        return x @ self.w[name + ".weight"].T

    def _norm(self, x, name):
        rms = (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return x / rms * self.w[name + ".weight"]

    def _rope(self, positions):
        angles = positions[:, None].float() * self.inv_freq  # [Q, D/2]
        angles = torch.cat([angles, angles], -1)[:, None]  # [Q, 1, D]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x, cos, sin):
    """RoPE of x [Q, heads, D]: coordinate i turns with coordinate i + D/2."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin

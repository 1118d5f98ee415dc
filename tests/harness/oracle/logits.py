"""Random tiny models with attention of their own: soft caps (Gemma 2), learned sinks (gpt-oss), shared caches (Gemma
3n, 4), keys and values of unlike dimensions (MiMo-V2), chunks of local attention (Llama 4).

transformers computes everything but attention; attention is written out here, under explicit masks.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .tiny import write_tokenizer

VOCAB, MAX_LEN, WINDOW = 256, 2048, 48
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LEN, sliding_window=WINDOW, initializer_range=0.25,
    layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
#: Kind -> what is its own. The cap is near the logits, so that it bends most of them.
KINDS = {
    "gemma2": dict(query_pre_attn_scalar=32, tie_word_embeddings=True, attn_logit_softcapping=3.0),
    "gpt_oss": dict(num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=False),
    # Without experts. Full attention has no positions.
    "llama4_text": dict(
        layer_types=["chunked_attention", "full_attention"] * 2, attention_chunk_size=64, no_rope_layers=[1, 0] * 2,
        interleave_moe_layer_step=5, num_local_experts=1, num_experts_per_tok=1, intermediate_size_mlp=128,
        sliding_window=None, tie_word_embeddings=False,
    ),
}  # fmt: skip
#: The same, of models whose last layers read the caches of layers before them: layer 5 those of layer 3, 4 those of 2.
SHARED = dict(
    num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, tie_word_embeddings=True,
)  # fmt: skip
SHARING = {
    "gemma3n_text": dict(
        **SHARED, activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4, laurel_rank=8, altup_num_inputs=2
    ),
    "gemma4_text": dict(**SHARED, global_head_dim=32),
}
#: The same, of a model whose values have fewer dimensions than its keys. Its windows have sinks and twice the KV heads.
UNLIKE = {
    "mimo_v2_flash": dict(
        head_dim=48, v_head_dim=32, mlp_layer_types=["dense"] * 4, tie_word_embeddings=False,
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=base, partial_rotary_factor=0.5)
            for kind, base in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    ),
}  # fmt: skip
#: What vLLM reads of the configuration of checkpoints, which transformers 5 knows by other names.
UNLIKE_IN_VLLM = dict(
    architectures=["MiMoV2FlashForCausalLM"], hybrid_layer_pattern=[1, 0] * 2, moe_layer_freq=[0] * 4,
    swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=48, swa_v_head_dim=32, sliding_window_size=WINDOW,
    add_swa_attention_sink_bias=True, rope_theta=5e6, swa_rope_theta=1e4, partial_rotary_factor=0.5,
    layernorm_epsilon=1e-5,
)  # fmt: skip
#: Means of the sinks of gpt-oss' heads: one hardly counts, one takes most of a row. Sums of exponentials are about e^17.
SINKS = (4.0, 14.0, 18.0, 22.0)


def make_tiny(path: Path, kind: str, **sizes: int) -> Path:
    """Write a random model of a kind in `KINDS`, `SHARING` or `UNLIKE` to a directory; `sizes` take the place of
    others.
    """
    config = AutoConfig.for_model(kind, **{**SIZES, **(KINDS | SHARING | UNLIKE)[kind], **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for layer in model.model.layers if kind in ("gpt_oss", *UNLIKE) else ():
            if layer.self_attn.sinks is not None:
                layer.self_attn.sinks.data = torch.tensor(SINKS) + torch.randn(len(SINKS))
    config.update(UNLIKE_IN_VLLM if kind in UNLIKE else {})
    model.save_pretrained(path)
    write_tokenizer(path, config.vocab_size, MAX_LEN)
    return path


def make_assistant(path: Path, model: Path) -> Path:
    """Write a random assistant of a Gemma 4 to a directory: layers that read the caches of the model's last layers."""
    like = AutoConfig.from_pretrained(model).get_text_config()
    own = {name: getattr(like, name) for name in (*SIZES, "vocab_size") if hasattr(like, name)}
    own["global_head_dim"] = like.head_dim
    own |= dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=2)
    text = AutoConfig.for_model("gemma4_text", **own, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    config = AutoConfig.for_model("gemma4_assistant", text_config=text.to_dict(), backbone_hidden_size=like.hidden_size)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


class DenseLogits:
    """A model of `make_tiny`; stands in for `oracle.model.DenseLlama`.

    `capped` and `sinks` say whether soft caps and sinks are computed.
    """

    def __init__(self, path: Path, capped: bool = True, sinks: bool = True) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        # vLLM has some of these classes compiled, once it has loaded a model of theirs.
        self.model.model.do_not_compile = True
        config = self.model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers, self.dtype = config.num_hidden_layers, torch.float32
        self.head_dim = self.value_dim = SIZES["head_dim"]
        if config.model_type in UNLIKE:
            self.head_dim, self.value_dim = config.head_dim, config.v_head_dim
        self.scale = self.model.model.layers[0].self_attn.scaling
        kinds, own = config.layer_types, self.layers - getattr(config, "num_kv_shared_layers", 0)
        self.full = [layer for layer, kind in enumerate(kinds[:own]) if kind == "full_attention"]
        #: Layer -> the last layer of its kind that has a cache, which it reads.
        self.targets = {layer: own - 1 - kinds[:own][::-1].index(kinds[layer]) for layer in range(own, self.layers)}
        self.capped, self.sinks = capped, sinks
        #: Of a step: the cache, what its queries see, and of each layer their probabilities [H, Q, N].
        self._cache, self._seen, self._probs = [], None, {}

    def new_cache(self):
        """Of each layer keys and values of every token, [0, G, D] each."""
        windows = 2 * self.kv_heads if self.head_dim != self.value_dim else self.kv_heads
        heads = [self.kv_heads if kind == "full_attention" else windows for kind in self.model.config.layer_types]
        return [tuple(torch.zeros(0, its, dim) for dim in (self.head_dim, self.value_dim)) for its in heads]

    def crop(self, cache, length):
        """Crop as `DenseLlama.crop` does."""
        cache[:] = [(keys[:length], values[:length]) for keys, values in cache]

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        """Compute as `DenseLlama.forward` does. Layers that read a cache see what its layer sees, and add to its
        probabilities.
        """
        ids, first = torch.as_tensor(ids, dtype=torch.long), len(cache[0][0])
        positions = torch.arange(first, first + len(ids))
        self._cache, self._seen = cache, mask
        if not callable(mask):
            self._seen = dict(enumerate(mask.expand(self.layers, self.heads, -1, -1)))
        self._chosen = {}
        self._back = positions[:, None] - torch.arange(first + len(ids))
        ALL_ATTENTION_FUNCTIONS.register("written-out", self._attend)
        self.model.set_attn_implementation("written-out")
        logits = self.model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        probs = torch.stack([self._probs[layer] for layer in range(self.layers)])
        for layer, target in self.targets.items():
            probs[target] += probs[layer]
        return logits, probs if want_probs else None

    def _attend(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        **kwargs,
    ):
        layer = module.layer_idx
        source = self.targets.get(layer, layer)
        if source == layer:
            new = (each[0].transpose(0, 1) for each in (key, value))
            self._cache[layer] = tuple(map(torch.cat, zip(self._cache[layer], new, strict=True)))
        self._cache[layer] = keys, values = self._cache[source]
        if self.model.config.layer_types[layer] == "chunked_attention":  # these layers keep what they see
            place = torch.arange(self._back.shape[1]) % self.model.config.attention_chunk_size
            seen = (self._back >= 0) & (self._back <= place[-len(self._back) :, None])
            seen = seen.expand(self.heads, -1, -1)
        elif sliding_window is not None:
            seen = ((self._back >= 0) & (self._back < sliding_window)).expand(self.heads, -1, -1)
        elif not callable(self._seen):
            seen = self._seen[source]
        else:
            if source == layer:
                self._chosen[layer] = self._seen(layer, query[0].transpose(0, 1), keys)
            seen = self._chosen[source]
        keys, values = (each.repeat_interleave(self.heads // each.shape[1], 1) for each in (keys, values))
        scores = torch.einsum("hqd,nhd->hqn", query[0], keys) * scaling
        if softcap is not None and self.capped:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores - scores.amax()).masked_fill(~seen, 0.0)
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None and self.sinks:
            total = total + torch.exp(s_aux - scores.amax())[:, None, None]
        probs = weights / total
        self._probs[layer] = probs
        attended = torch.einsum("hqn,nhd->qhd", probs, values)
        return attended[None].contiguous(), probs

"""Tiny models with multi-head latent attention (MLA), random weights, and transformers' own of the same weights."""

import json
import sys
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from oracle.hybrids import DenseHybrid
from oracle.tiny import write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.mla import flashmla
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

#: Sizes of the latent are DeepSeek's: vLLM's CPU kernel knows no others. Routers of experts differ, so
#: DeepSeek's layers are dense.
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    kv_lora_rank=512, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, vocab_size=256,
    max_position_embeddings=2048, initializer_range=0.12, tie_word_embeddings=False, moe_intermediate_size=32,
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
#: Architecture -> its type in transformers and what is its own.
MODELS = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", dict(first_k_dense_replace=3, q_lora_rank=None)),
    "DeepseekV3ForCausalLM": ("deepseek_v3", dict(first_k_dense_replace=3)),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        dict(mlp_layer_types=["dense", "dense", "sparse"], first_k_dense_replace=2, initializer_range=0.08),
    ),
}


def make_latent(folder, architecture, **sizes):
    """Write a random model to a directory; return it as transformers' model."""
    kind, own = MODELS[architecture]
    config = AutoConfig.for_model(kind, **{**SIZES, **own, **sizes})
    config.architectures = [architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, 2048)
    return model


class DenseLatent(DenseHybrid):
    """Stands in for `oracle.model.DenseLlama`: transformers computes each step's tokens beside cached ones."""

    def new_cache(self):
        return DynamicCache()

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        first, ids = cache.get_seq_length(), torch.as_tensor(ids)[None]
        self._begin(mask)
        positions = torch.arange(first, first + ids.shape[1])[None]
        logits = self.model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[0]
        return logits, torch.stack(self._probs) if want_probs else None

    def _seen(self, module, query, key):
        return self._mask


class DenseAbsorbed(DenseLatent):
    """The same, with masks that are functions of absorbed queries [Q, H, C + R] and latent keys [N, 1, C + R]."""

    def __init__(self, path):
        super().__init__(path)
        self.kv_heads, self._latents = 1, {}
        self.scale = self.model.model.layers[0].self_attn.scaling
        for layer in self.model.model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(self._keep)

    def _keep(self, module, args, output):
        before = self._cache_latents.get(module, output[0, :0])
        self._cache_latents[module] = torch.cat((before, output[0]))

    def new_cache(self):
        cache = super().new_cache()
        cache.latents = {}
        return cache

    def crop(self, cache, length):
        cache.crop(length)
        cache.latents = {module: latents[:length] for module, latents in cache.latents.items()}

    def forward(self, ids, cache, mask, want_probs=False):
        self._cache_latents = cache.latents
        return super().forward(ids, cache, mask, want_probs)

    def _seen(self, module, query, key):
        if not callable(self._mask):
            return self._mask
        nope, rotated = query[0].split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        up = module.kv_b_proj.weight.unflatten(0, (self.heads, -1))[:, : module.qk_nope_head_dim]
        queries = torch.cat((nope @ up, rotated), -1)
        keys = torch.cat((self._cache_latents[module.kv_a_layernorm], key[0, 0, :, module.qk_nope_head_dim :]), -1)
        return self._mask(len(self._probs), queries.transpose(0, 1), keys[:, None])


def add_mtp(folder):
    """Give a model of `make_latent` a layer for multi-token prediction (MTP): random, and shaped like its last layer.

    The model was made with `num_nextn_predict_layers=1`, and with one more of `first_k_dense_replace` if its last layer
    is dense.
    """
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    prefix, like = f"model.layers.{last + 1}.", f"model.layers.{last}."

    def random(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    for name in [name for name in weights if name.startswith(like)]:
        one = weights[name]
        weights[prefix + name.removeprefix(like)] = random(*one.shape) if one.dim() == 2 else one.clone()
    embedded = weights["model.embed_tokens.weight"]
    hidden = embedded.shape[1]
    weights |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{prefix}eh_proj.weight": random(hidden, 2 * hidden)}
    weights |= {f"{prefix}embed_tokens.weight": embedded.clone()}
    weights |= {f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_eagle3(path, model):
    """Write an EAGLE-3 head of a model of `make_latent`: random, one dense layer with latents of the model's size."""
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    generator, hidden = torch.Generator().manual_seed(8), config["hidden_size"]

    def random(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    head = {"fc.weight": random(hidden, 2 * hidden), "norm.weight": torch.ones(hidden)}
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        rows, *columns = weights[name].shape
        wide = 2 if "a_proj" in name else 1  # of the embedded token and the model's hidden states
        own = random(rows, wide * columns[0]) if columns else torch.ones(rows)
        head[name.removeprefix("model.")] = own
    head |= {"layers.0.hidden_norm.weight": torch.ones(hidden), "lm_head.weight": weights["lm_head.weight"].clone()}
    path.mkdir(parents=True)
    save_file(head, path / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 1}
    own |= {"num_aux_hidden_states": 2, "eagle_aux_hidden_state_layer_ids": [1, 2]}
    (path / "config.json").write_text(json.dumps(config | own))
    return path


def mended_rotation():
    """Context in which engines rotate in torch, patched in vLLM.

    vLLM's CPU kernel (0.32.0) rotates wrong heads where pairs of neighbours rotate and a query has a dimension for heads.
    Stock's own answers then depend on what else a step computes.
    """
    return patch.object(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)


@contextmanager
def reference_mla():
    """Context of `mended_rotation` in which vLLM takes CPU_MLA on every CPU. On one with AMX it takes AMX_MLA, for drafts
    even beside `attention_backend="CPU_MLA"`, and AMX_MLA has no float32."""
    with mended_rotation(), patch("torch.cpu._is_amx_tile_supported", return_value=False):
        yield


def keep_what_is_asked(monkeypatch):
    """Chunks of prompts, prefix caching and blocks as asked for, where vLLM's CPU platform chooses for latents."""
    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls, vllm_config):
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunk, cached, size = scheduler.max_num_batched_tokens, cache.enable_prefix_caching, cache.block_size
        update(cls, vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = True, chunk
        cache.enable_prefix_caching, cache.block_size = cached, size

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))


def take_large_tiles(monkeypatch):
    """Fewer, larger tiles for Triton's interpreter, and two slices of a tiny model's heads."""
    from vllm_evict.compute.attention.latent_device import DeviceLatentOps
    from vllm_evict.triton_kernels import mass_from_lse, query_lse, tiles

    monkeypatch.setattr(DeviceLatentOps, "heads_at_once", 2)
    monkeypatch.setattr(tiles, "PART_DIM", 256)
    for kernel in (mass_from_lse, query_lse):
        monkeypatch.setattr(kernel, "FLOAT32_TILE_BYTES", 256 << 10)
        monkeypatch.setattr(kernel, "MIN_ROWS", 64)


class StandIn(CPUMLAImpl):
    """Decodes in torch, by the metadata of a backend for a device."""

    def forward_mqa(self, q, cache, metadata, layer):
        decode, query = metadata.decode, torch.cat(q, -1)
        lens, starts = decode.seq_lens.tolist(), metadata.query_start_loc.tolist()
        assert scheduled(decode) == lens and metadata.max_seq_len >= max(lens)
        out = torch.zeros(*query.shape[:2], self.kv_lora_rank, dtype=query.dtype)
        for row, length in enumerate(lens):
            rows = slice(starts[row], starts[row + 1])
            blocks = decode.block_table[row, : -(-length // cache.shape[1])].long()
            keys = cache[blocks].flatten(0, 1)[:length]
            out[rows] = attended(query[rows], keys, self.scale, self.kv_lora_rank)
        return out, None


def attended(query, keys, scale, rank):
    """Attention of the last queries [T, H, C + R] of a request to its latents [n, C + R]: [T, H, C]."""
    count, length = len(query), len(keys)
    scores = torch.einsum("thd,nd->htn", query, keys) * scale
    newest = length - count + torch.arange(count)
    scores = scores.masked_fill(torch.arange(length) > newest[:, None], -torch.inf).softmax(-1)
    return torch.einsum("htn,nc->thc", scores, keys[:, :rank])


#: Modules of FlashInfer's package, and what vLLM's backend for latents imports from them.
FLASHINFER = {
    "flashinfer": (),
    "flashinfer.decode": ("trtllm_batch_decode_with_kv_cache_mla",),
    "flashinfer.utils": ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"),
}


def flashinfer_mla():
    """vLLM's module of FLASHINFER_MLA, imported beside empty stand-ins for FlashInfer's package."""
    stubs = {name: ModuleType(name) for name in FLASHINFER}
    for name, stub in stubs.items():
        vars(stub).update(dict.fromkeys(FLASHINFER[name]))
    with patch.dict(sys.modules, stubs):
        module = import_module(f"{flashmla.__package__}.flashinfer_mla")
    sys.modules[module.__name__] = module
    return module


def of_flashinfer(module):
    """The backend's own decodes, and prompts of the CPU's backend."""

    class OfFlashInfer(StandIn):
        bmm1_scale = bmm2_scale = _mla_counter_bytes = None
        dcp_world_size, need_to_return_lse_for_decode, _mla_counter_max_batch = 1, False, 64
        forward_mqa = module.FlashInferMLAImpl.forward_mqa

    return OfFlashInfer


def trtllm_decode(
    *, query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
    bmm1_scale, bmm2_scale, return_lse, multi_ctas_kv_counter_buffer, cum_seq_lens_q=None, max_q_len=None,
):  # fmt: skip
    """FlashInfer's decode of latents in torch: queries [R, q, H, C + R'], or of several lengths [T, H, C + R']."""
    rows, heads, size = len(seq_lens), query.shape[-2], kv_cache.shape[2]
    assert kv_cache.shape[1] == 1 and size in (32, 64) and block_tables.dtype == seq_lens.dtype == torch.int32
    # FlashInfer's kernels read tables in steps of 128 tokens.
    assert len(block_tables) == rows and block_tables.shape[1] % (128 // size) == 0
    assert bmm2_scale == 1.0 and not return_lse and max_seq_len >= int(seq_lens.max())
    starts = cum_seq_lens_q if query.dim() == 3 else torch.arange(rows + 1) * query.shape[1]
    query, parts = query.reshape(-1, heads, query.shape[-1]), []
    for row, (first, last) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        length = int(seq_lens[row])
        keys = kv_cache[block_tables[row, : -(-length // size)].long(), 0].flatten(0, 1)[:length]
        parts.append(attended(query[first:last], keys, bmm1_scale, kv_lora_rank))
    return torch.cat(parts)


def scheduled(decode):
    """Lengths by which a backend has planned its kernel, as the stand-ins below tell them."""
    plan = decode.scheduler_metadata
    return (plan if isinstance(plan, torch.Tensor) else plan.lens).tolist()


def stand_in(monkeypatch, name):
    """Put a backend for a device, with its own builder, where vLLM looks for `latent.Shown`; compiled functions are replaced."""
    impl = StandIn
    if name == "FLASHMLA":
        plan = lambda lens, *args, **kwargs: (SimpleNamespace(lens=lens.clone()), None)  # noqa: E731
        monkeypatch.setattr(flashmla, "get_mla_metadata", plan)
        monkeypatch.setattr(flashmla, "num_compute_units", lambda _: 132)
        backend = flashmla.FlashMLABackend
    elif name == "FLASHINFER_MLA":
        module = flashinfer_mla()
        monkeypatch.setattr(module, "trtllm_batch_decode_with_kv_cache_mla", trtllm_decode)
        monkeypatch.setattr(module, "get_device_sm_count", lambda _: 148)
        monkeypatch.setattr(module, "get_trtllm_gen_multi_ctas_kv_counter_bytes", lambda *_: 64)
        monkeypatch.setattr(module, "_get_workspace_buffer", lambda return_lse: torch.zeros(16, dtype=torch.int8))
        backend, impl = module.FlashInferMLABackend, of_flashinfer(module)
    else:
        functions = {
            "flash_attn_varlen_func": None,
            "get_scheduler_metadata": lambda cache_seqlens, **_: cache_seqlens.clone(),
            "get_flash_attn_version": lambda: 3,
        }
        for function, replaced in functions.items():
            monkeypatch.setattr(fa_utils, function, replaced, raising=False)
        monkeypatch.delitem(sys.modules, f"{flashmla.__package__}.flashattn_mla", raising=False)
        backend = import_module(f"{flashmla.__package__}.flashattn_mla").FlashAttnMLABackend
    shown = type("Shown", (backend,), {"get_impl_cls": staticmethod(lambda: impl)})
    monkeypatch.setattr(sys.modules[__name__], "Shown", shown, raising=False)

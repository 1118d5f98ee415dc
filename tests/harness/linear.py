"""Engines for latents beside linear attention, for GDN and for Mamba: vLLM's kernels of states have stand-ins in torch.

Layers, states' pages and indices, metadata, block tables and the path of the latents are vLLM's own.
"""

import numpy as np
import torch
import torch.nn.functional as F
from engine import V2, _register_kernels_once
from transformers import AutoConfig, PretrainedConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear import bailing_linear_attn, minimax_linear_attn
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models import bailing_moe_v3
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class BailingConfig(PretrainedConfig):
    """Ling's configurations, which transformers does not have."""

    model_type = "bailing_hybrid"


def stand_in(monkeypatch):
    """Let vLLM's CPU engine compute Ling 2.5 and 3: kernels of states, and sizes of blocks.

    vLLM's CPU_MLA says that it takes blocks of 16 tokens alone. vLLM splits multiples of 16 into kernel blocks, as for
    backends of a device (FLASHMLA). Its CPU runner (0.32.0) then clears kernel blocks by the numbers of the pool's.
    """
    AutoConfig.register("bailing_hybrid", BailingConfig, exist_ok=True)
    monkeypatch.delattr(CPUMLABackend, "supports_block_size")
    monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", zero_blocks)
    monkeypatch.setattr(minimax_linear_attn, "lightning_attention", lightning_attention)
    monkeypatch.setattr(minimax_linear_attn, "linear_decode_forward_triton", lightning_decode)
    monkeypatch.setattr(bailing_linear_attn, "layernorm_fn", layernorm)
    monkeypatch.setattr(bailing_linear_attn.BailingGroupRMSNormGate, "forward", group_norm)
    for function in (fused_kda_gate, chunk_kda, fused_recurrent_kda):
        monkeypatch.setattr(bailing_moe_v3, function.__name__, function)


def stand_in_for_kimi(monkeypatch):
    """Let vLLM's CPU engine compute Kimi-Linear by the model for NVIDIA GPUs: fused kernels of latents and of states."""
    _register_kernels_once()  # vLLM's scan of modules fails on one that Kimi's import
    from vllm.models.kimi_k3.nvidia import mla, model

    make = mla.MultiHeadLatentAttention.__init__

    def made(layer, *args, **kwargs):
        make(layer, *args, **kwargs)
        layer.kv_b_proj._cpu_skip_gemm_dispatch = True  # as `MLAAttention` asks: a CPU would pack the weights

    monkeypatch.setattr(mla.MultiHeadLatentAttention, "__init__", made)
    if not V2:  # vLLM has a stand-in of its own there
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(model, "maybe_init_gemm_rs_ar", lambda *_: False)  # imports CUTLASS
    monkeypatch.setattr(KimiGatedDeltaNetAttention, "_forward", kimi_forward)
    fused = (fused_mla_key_concat_kv_cache_insert, fused_mla_decode_q_concat_kv_cache_insert, fused_mla_kv_concat)
    for function in fused:
        monkeypatch.setattr(mla, function.__name__, function)
    monkeypatch.setattr(CPUSDPAMLAPrefillBackend, "supports_out", lambda self: False)
    monkeypatch.setattr(mla.ops, "gather_and_maybe_dequant_cache", gather_cache)


def stand_in_for_mamba(monkeypatch):
    """Let vLLM's CPU engine compute Jamba: its scan of prompts is CUDA's, its update (0.32.0) takes one step a head."""
    make = mamba_mixer.MambaMixer.__init__

    def made(layer, *args, **options):
        # Layers for LoRA make what they multiply contiguous, as products on a CPU want.
        make(layer, *args, **{**options, "is_lora_enabled": True})

    monkeypatch.setattr(mamba_mixer.MambaMixer, "__init__", made)
    monkeypatch.setattr(mamba_mixer, "selective_scan_fn", selective_scan)
    monkeypatch.setattr(mamba_mixer, "selective_state_update", selective_update)


def stand_in_for_gdn():
    """Let vLLM's CPU engine compute Qwen3-Next in float32, also beside drafts: its kernel of states is for bfloat16 alone.

    Beside drafts that kernel (0.32.0) rounds in another way than without. Of a row with fewer drafts than a step may have
    it puts the convolution's inputs where the next step does not look for them: stock's own answers are wrong after it.
    """
    gdn_attention.register_cpu_gdn_attention_ops()
    if (real := torch.ops.vllm.cpu_gdn_attention_core) is not gdn_core:
        gdn_core.real = real
        torch.ops.vllm.cpu_gdn_attention_core = gdn_core


def gdn_core(mixed_qkv, b, a, core_attn_out, layer_name):
    """Stands in for vLLM's operator of that name on float32: mixed_qkv [N, channels], b and a [N, H], output [N, H, D]."""
    if mixed_qkv.dtype != torch.float32:
        return gdn_core.real(mixed_qkv, b, a, core_attn_out, layer_name)
    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]

    def parts(tokens, convolved):
        q, k, v = (each[0] for each in layer.rearrange_mixed_qkv(convolved))
        q, k = (each.repeat_interleave(v.shape[1] // each.shape[1], 1) for each in (q, k))
        gate = -layer.A_log.exp() * F.softplus(a[tokens] + layer.dt_bias)
        return q, k, v, gate[..., None], b[tokens].sigmoid()

    caches = gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)
    take_steps(context.attn_metadata[layer.prefix], mixed_qkv, *caches, layer.conv1d, parts, core_attn_out)


def take_steps(metadata, mixed_qkv, inputs, states, conv1d, parts, out):
    """Convolution and delta rule of all requests of a step.

    Args:
        mixed_qkv: [N, channels].
        inputs, states: of all slots, [S, channels, inputs of a convolution] and [S, H, D, D].
        parts: (tokens, their convolved inputs) -> arguments of `delta`.
        out: gets outputs, [N, H, D].
    """
    weight = conv1d.weight.flatten(1)
    before = weight.shape[1] - 1
    for tokens, slots, accepted, known in gdn_rows(metadata, len(mixed_qkv)):
        # Of a row with drafts slot t has the state after its token t, and slot 0 all inputs.
        kept, state = inputs[slots[0], :, accepted - 1 :][:, :before].T, states[slots[accepted - 1]]
        seen = torch.cat([kept if known else torch.zeros_like(kept), mixed_qkv[tokens]])
        state = state if known else torch.zeros_like(state)
        convolved = F.silu((seen.unfold(0, before + 1, 1) * weight).sum(-1))
        given = parts(tokens, convolved)
        out[tokens], after = delta(*given, state)
        after = after if len(slots) > 1 else after[-1:]
        states[slots[: len(after)]] = after
        seen = seen[1:] if len(slots) > 1 else seen[-before:]
        inputs[slots[0], :, : len(seen)] = seen.T


def gdn_rows(metadata, count):
    """Yield (tokens, slots of states, accepted tokens of the step before, whether there is a state) of each request."""
    everything = torch.arange(count)
    if metadata.spec_sequence_masks is not None:
        starts, tokens = metadata.spec_query_start_loc.tolist(), metadata.spec_token_indx
        for row in range(metadata.num_spec_decodes):
            slots, accepted = metadata.spec_state_indices_tensor[row].tolist(), int(metadata.num_accepted_tokens[row])
            yield tokens[starts[row] : starts[row + 1]], slots, accepted, True
    if (starts := metadata.non_spec_query_start_loc) is not None:
        starts, known = starts.tolist(), metadata.has_initial_state
        tokens = everything if metadata.spec_sequence_masks is None else metadata.non_spec_token_indx
        for row in range(metadata.num_decodes + metadata.num_prefills):
            slot = int(metadata.non_spec_state_indices_tensor[row])
            yield tokens[starts[row] : starts[row + 1]], [slot], 1, row < metadata.num_decodes or bool(known[row])


def zero_blocks(runner, block_ids):
    """`CPUModelRunner._zero_block_ids`, by the pool's blocks."""
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names if isinstance(group.kv_cache_spec, FullAttentionSpec) else ():
            cache = runner.compilation_config.static_forward_context[name].kv_cache
            cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1))[block_ids] = 0


def selective_scan(
    u, ssm_states, delta, A, B, C, D, z, delta_bias, cache_indices, has_initial_state, query_start_loc, **how
):
    """Chunks of prompts, one after the other in the last dimension: u, delta and z [D, T], B and C [N, T], A [D, N].

    The state of row b is ssm_states[cache_indices[b]], [D, N].
    """
    steps, out, starts = F.softplus(delta + delta_bias[:, None]), torch.empty_like(u), query_start_loc.tolist()
    for first, last, slot, known in zip(starts, starts[1:], cache_indices.tolist(), has_initial_state.tolist()):
        state = ssm_states[slot] if known else torch.zeros_like(ssm_states[slot])
        for place in range(first, last):
            each, step = u[:, place, None], steps[:, place, None]
            state = torch.exp(step * A) * state + step * B[:, place] * each
            out[:, place] = state @ C[:, place] + D * each[:, 0]
        ssm_states[slot] = state
    return out * F.silu(z)


def selective_update(state, x, dt, A, B, C, D, dt_bias, z, state_batch_indices, out, **how):
    """One token of each request: x, dt and z [R, D], B and C [R, N]; the state of row b is state[state_batch_indices[b]]."""
    slots, step = state_batch_indices.flatten()[: len(x)].long(), F.softplus(dt + dt_bias)[..., None]
    state[slots] = torch.exp(step * A) * state[slots] + step * B[:, None] * x[..., None]
    out.copy_(((state[slots] @ C[..., None])[..., 0] + D * x) * F.silu(z))


def layernorm(x, weight, bias, eps, is_rms_norm):
    assert bias is None and is_rms_norm
    return F.rms_norm(x, x.shape[-1:], weight.float(), eps)


def group_norm(self, x, z):
    assert self.norm_before_gate and self.activation == "sigmoid"
    groups = x.unflatten(-1, (-1, self.group_size))
    return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight * z.sigmoid()


def lightning_attention(q, k, v, ed, block_size, kv_history):
    """Chunk of one request: q, k and v [1, H, T, D], kv_history [1, H, D, D]; returns output and states [1, H, 1, D, D]."""
    rate, places = ed.reshape(1, -1, 1, 1), torch.arange(q.shape[2])
    back = places[:, None] - places
    decay = torch.exp(-rate * back.clamp(min=0)).masked_fill(back < 0, 0)
    out = (q @ k.transpose(2, 3) * decay) @ v + (q * torch.exp(-rate * (places[:, None] + 1))) @ kv_history
    left = torch.exp(-rate * (len(places) - 1 - places[:, None]))
    state = torch.exp(-rate * len(places)) * kv_history + (k * left).transpose(2, 3) @ v
    return out, state[:, :, None]


def lightning_decode(q, k, v, kv_caches, slope_rate, slot_idx, block_size):
    """One token of each request: q, k and v [B, H, 1, D]; the state of row b is kv_caches[slot_idx[b]]."""
    slots = slot_idx.long()
    state = torch.exp(-slope_rate.reshape(1, -1, 1, 1)) * kv_caches[slots] + k.transpose(2, 3) @ v
    kv_caches[slots] = state.to(kv_caches.dtype)
    return (q @ state).squeeze(2).flatten(1)


def fused_kda_gate(g, A, head_k_dim, g_bias=None, lower_bound=None):
    g = (g.float() + g_bias).unflatten(-1, (-1, head_k_dim))
    rate = A.reshape(-1, 1).exp()
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def delta(q, k, v, g, beta, state):
    """Tokens of one request: q, k, v and g [T, H, D], beta [T, H], state [H, D, D]; returns outputs, and the state after
    each token, [T, H, D, D].

    One token after the other, by numpy: tiny operations of torch take several times as long.
    """
    q, k = (F.normalize(x.float(), dim=-1, eps=0) for x in (q, k))
    given = (
        (q * q.shape[-1] ** -0.5)[:, :, None],
        k[:, :, None],
        v[:, :, None],
        g.exp()[..., None],
        beta[..., None, None],
    )
    given, state = [each.float().numpy() for each in given], state.float().numpy()
    outs, states = np.empty(given[2].shape, np.float32), np.empty((len(q), *state.shape), np.float32)
    for at, (query, key, value, gate, rate) in enumerate(zip(*given)):
        state = state * gate
        state += key.swapaxes(1, 2) * ((value - key @ state) * rate)
        outs[at], states[at] = query @ state, state
    return torch.from_numpy(outs[:, :, 0]).to(v.dtype), torch.from_numpy(states)


def chunk_kda(q, k, v, g, beta, initial_state, cu_seqlens, **how):
    """Chunks of prompts, one after the other in the second dimension; initial_state [R, H, D, D]."""
    outs, states, starts = [], [], cu_seqlens.tolist()
    for first, last, state in zip(starts, starts[1:], initial_state):
        out, after = delta(*(x[0, first:last] for x in (q, k, v, g, beta)), state)
        outs.append(out)
        states.append(after[-1])
    return torch.cat(outs)[None], torch.stack(states)


def fused_recurrent_kda(q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, **how):
    """One token of each request; the state of row b is initial_state[ssm_state_indices[b]]."""
    slots = ssm_state_indices[: len(cu_seqlens) - 1].long()
    out, states = chunk_kda(q, k, v, g, beta, initial_state[slots], cu_seqlens)
    initial_state[slots] = states
    return out, initial_state


def kimi_forward(layer, mixed_qkv, g1, g2, beta, core_attn_out):
    """Of a Kimi-Linear's layer: mixed_qkv [N, 3 * H * D], g1 and the output [1, N, H, D], beta [1, N, H]."""
    metadata = (get_forward_context().attn_metadata or {}).get(layer.prefix)
    if metadata is None:
        return

    def parts(tokens, convolved):
        q, k, v = convolved.unflatten(-1, (3, *g1.shape[-2:])).unbind(1)
        gate = fused_kda_gate(
            g1[0, tokens].flatten(-2), layer.A_log, layer.head_dim, layer.dt_bias, layer.gate_lower_bound
        )
        return q, k, v, gate, beta[0, tokens].float().sigmoid()

    inputs, states = layer.kv_cache
    if inputs.shape[1] != mixed_qkv.shape[1]:  # before vLLM 0.33
        inputs = inputs.transpose(1, 2)
    mixed_qkv = mixed_qkv[: metadata.num_actual_tokens]
    take_steps(metadata, mixed_qkv, inputs, states, layer.conv1d, parts, core_attn_out[0])
    core_attn_out.copy_(layer.o_norm(core_attn_out, g2))


def insert(kv_cache, kv_c_normed, k_pe, slot_mapping):
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping] = torch.cat([kv_c_normed, k_pe.flatten(1)], -1)


def fused_mla_kv_concat(k_nope, k_pe):
    return torch.cat([k_nope, k_pe.reshape(len(k_pe), 1, -1).expand(-1, k_nope.shape[1], -1)], -1)


def fused_mla_key_concat_kv_cache_insert(
    q, k_nope, k_pe, kv_c_normed, kv_cache, slot_mapping, positions=None, cos_sin_cache=None
):
    assert cos_sin_cache is None
    insert(kv_cache, kv_c_normed, k_pe, slot_mapping)
    return fused_mla_kv_concat(k_nope, k_pe)


def fused_mla_decode_q_concat_kv_cache_insert(
    ql_nope, q_pe, kv_c_normed, k_pe, kv_cache, slot_mapping, positions=None, cos_sin_cache=None
):
    assert cos_sin_cache is None
    insert(kv_cache, kv_c_normed, k_pe, slot_mapping)
    return torch.cat([ql_nope, q_pe], -1)


def gather_cache(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, seq_starts, **how):
    """Latents of a chunk of a context, one request after the other."""
    rows, size = token_to_seq[:num_tokens].long(), src_cache.shape[1]
    places = torch.arange(num_tokens) - cu_seq_lens[rows] + seq_starts[rows]
    dst[:num_tokens] = src_cache[block_table[rows, places // size].long(), places % size]

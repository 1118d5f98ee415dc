"""FlashAttention without a GPU: the compiled functions that vLLM's backend calls, in plain torch, exacting about
arguments.

The backend itself, its metadata builder and its layers' code are vLLM's own.
"""

import graphs
import torch
from vllm.v1.attention.backends import flash_attn, flash_attn_diffkv


class FlashAttention:
    """Stands in for the functions of one version of FlashAttention, in the module of vLLM's backend.

    Attributes:
        attended: calls of the attention kernel.
        scheduled: those that came with a schedule made ahead.
        schedules: made ahead.
        asked: those that were asked for their LSE too.
    """

    def __init__(self, version):
        self.version, self.attended, self.scheduled, self.schedules, self.asked = version, 0, 0, 0, 0

    def install(self, monkeypatch):
        for module, *functions in (
            (flash_attn, self.flash_attn_varlen_func, self.get_scheduler_metadata, reshape_and_cache_flash),
            (flash_attn_diffkv, self.flash_attn_varlen_func, triton_reshape_and_cache_flash_diffkv),
        ):
            for function in functions:
                monkeypatch.setattr(module, function.__name__, graphs.kernel(function), raising=False)
            monkeypatch.setattr(module, "get_flash_attn_version", lambda *_, **__: self.version)
            monkeypatch.setattr(module, "is_flash_attn_varlen_func_available", lambda: True)
        monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)

    def get_scheduler_metadata(
        self,
        *,
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype,
        cu_seqlens_q,
        page_size,
        causal,
        window_size,
        num_splits,
    ):
        assert self.version == 3, "only FlashAttention 3 is scheduled ahead"
        assert causal is True and tuple(window_size) == (-1, -1) and cache_seqlens.dtype == torch.int32
        assert len(cache_seqlens) == batch_size and cache_seqlens.max() <= max_seqlen_k
        self.schedules += 1
        return _schedule(cache_seqlens, cu_seqlens_q, num_heads_q, num_heads_kv, headdim)

    def flash_attn_varlen_func(
        self,
        *,
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        alibi_slopes,
        window_size,
        block_table,
        softcap,
        scheduler_metadata,
        fa_version,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        s_aux,
        dynamic_causal=None,
        mask_mod=None,
        aux_tensors=None,
        return_softmax_lse=False,
    ):
        """Causal attention, aligned to the end, over paged keys and values [num_blocks, block_size, Hkv, D].

        In layers with sliding windows a query sees so many tokens before itself; of those before all windows blocks may be
        gone.
        """
        back, ahead = window_size
        assert fa_version == self.version and causal is True and ahead == min(back, 0) and softcap == 0
        unused = (alibi_slopes, dynamic_causal, mask_mod, aux_tensors)
        assert all(each is None for each in unused), "nothing here asks for these"
        requests, (_, block_size, kv_heads, dim) = len(seqused_k), k.shape
        for each in (cu_seqlens_q, seqused_k, block_table):
            assert each.dtype == torch.int32 and each.stride(-1) == 1
        assert all(each.stride(-1) == 1 for each in (q, k, v, out)) and q.dtype == k.dtype == v.dtype == out.dtype
        assert (
            len(cu_seqlens_q) == requests + 1
            and len(block_table) == requests
            and out.shape == (*q.shape[:2], v.shape[3])
        )
        assert all(each is None or each.shape == (requests, kv_heads) for each in (q_descale, k_descale, v_descale))
        starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
        # A graph of more requests than there are: those of padding have as many queries each, which are no one's.
        assert len(q) - starts[-1] in (0, lens.count(0) * max_seqlen_q)
        assert max(lens) <= max_seqlen_k and cu_seqlens_q.diff().max() <= max_seqlen_q
        self.attended += 1
        self.asked += return_softmax_lse
        lse = torch.full((q.shape[1], len(q)), torch.nan)
        if scheduler_metadata is not None:
            self.scheduled += 1
            wanted = _schedule(seqused_k, cu_seqlens_q, q.shape[1], kv_heads, dim)
            assert torch.equal(scheduler_metadata, wanted), "the schedule was made for other lengths or heads"
        for row, (first, last, length) in enumerate(zip(starts, starts[1:], lens)):
            if length == 0:
                continue
            before = 0 if back < 0 else max(length - (last - first) - back, 0) // block_size
            blocks = block_table[row, before : -(-length // block_size)].long()
            assert last == first or graphs.made_up or bool(blocks.all()), "vLLM's null block was attended to"
            keys, values = (each[blocks].flatten(0, 1)[: length - before * block_size].float() for each in (k, v))
            attended, lse[:, first:last] = attention(q[first:last].float(), keys, values, softmax_scale, back, s_aux)
            out[first:last] = attended.to(out.dtype)
        return (out, lse) if return_softmax_lse else out


def attention(queries, keys, values, scale, back=-1, sinks=None):
    """Causal, aligned to the end: output [T, H, Dv] and LSE [H, T] of queries [T, H, D] over keys and values [S, Hkv,
    D].

    `back`: how many tokens before itself a query sees; -1: all. `sinks`: logits [H], or None.
    """
    kv_heads, length = keys.shape[1], len(keys)
    queries = queries.unflatten(1, (kv_heads, queries.shape[1] // kv_heads))
    scores = torch.einsum("thgd,shd->hgts", queries, keys) * scale
    seen = torch.ones(len(queries), length, dtype=torch.bool).tril(length - len(queries))
    if back >= 0:
        seen &= seen.new_ones(seen.shape).triu(length - len(queries) - back)
    scores.masked_fill_(~seen, -torch.inf)
    shown = scores
    if sinks is not None:
        shown = torch.cat([scores, sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, len(queries), 1)], -1)
    output = torch.einsum("hgts,shd->thgd", shown.softmax(-1)[..., :length], values).flatten(1, 2)
    return output, shown.logsumexp(-1).flatten(0, 1)


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, dtype, k_scale, v_scale):
    """Keys and values [T, Hkv, D] to their slots; those of padding are negative."""
    assert dtype in ("auto", "fp8") and len(slot_mapping) <= len(key)
    kept = (slot_mapping >= 0).nonzero().flatten()
    slots, block_size = slot_mapping[kept], key_cache.shape[1]
    for cache, new, scale in ((key_cache, key[kept], k_scale), (value_cache, value[kept], v_scale)):
        if dtype == "fp8":
            cache, new = cache.view(torch.float8_e4m3fn), (new / scale).to(torch.float8_e4m3fn)
        cache[slots // block_size, slots % block_size] = new


def triton_reshape_and_cache_flash_diffkv(key, value, kv_cache, slot_mapping, dtype, k_scale, v_scale):
    """The same of keys and values of unlike dimensions, in one cache."""
    caches = kv_cache[..., : key.shape[2]], kv_cache[..., key.shape[2] :]
    reshape_and_cache_flash(key, value, *caches, slot_mapping, dtype, k_scale, v_scale)


def _schedule(lens, starts, heads, kv_heads, dim):
    """Return the batch that a schedule was made for, in as many numbers as the kernel's has: one, and four for each
    request.
    """
    requests = len(lens)
    schedule = torch.zeros(1 + 4 * (-(-requests // 4) * 4), dtype=torch.int32)
    schedule[0] = dim
    of_requests = torch.stack([lens, starts.diff(), torch.full_like(lens, heads), torch.full_like(lens, kv_heads)], 1)
    schedule[1 : 1 + 4 * requests] = of_requests.flatten()
    return schedule

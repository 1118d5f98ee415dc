"""FlashInfer without a GPU: what vLLM's backend takes from the package, in plain torch, exacting about arguments.

The backend itself, its metadata builder and its layers' code are vLLM's own. Shapes, layouts and what is refused are those
of FlashInfer's Python API; head sizes and dtypes may be others than its kernels have.
"""

import importlib
import sys
from collections import Counter
from types import ModuleType

import graphs
import torch
import vllm.utils.flashinfer as flashinfer_utils
from flash import attention, reshape_and_cache_flash
from vllm import envs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import HAS_TRITON

#: What vLLM's backend imports, by module.
IMPORTED = {
    "flashinfer": (
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "flashinfer.decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
    "flashinfer.prefill": ("trtllm_batch_context_with_kv_cache",),
    "flashinfer.utils": ("FP4Tensor",),
}


def _vllms():
    """vLLM's module, imported beside empty stand-ins for a package that it could not be imported without."""
    stubs = {name: ModuleType(name) for name in IMPORTED}
    for name, stub in stubs.items():
        for each in IMPORTED[name]:
            setattr(stub, each, type(each, (), {}))
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        return importlib.import_module("vllm.v1.attention.backends.flashinfer")
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


backend = _vllms()
#: Which kernels vLLM chooses, by the device: FlashInfer's own (Ampere), XQA for decodes (Hopper), TensorRT-LLM's (Blackwell).
CAPABILITIES = {"native": (8, 0), "xqa": (9, 0), "trtllm": (10, 0)}
_workspace = torch.zeros(16, dtype=torch.uint8)


class FlashInfer:
    """Stands in for the package, on a device of which vLLM takes some kernels.

    Attributes:
        kernels: "native", "xqa" or "trtllm".
        calls: of plans ("plan", "fast_plan") and of kernels ("decode", "prefill", "xqa", "trtllm_decode",
            "trtllm_context").
        mixed: batches with decodes and prefills.
        sizes: batch sizes of decodes that memory is kept for, for graphs.
    """

    def __init__(self, kernels):
        self.kernels, self.calls, self.mixed, self.sizes = kernels, Counter(), 0, []

    def install(self, monkeypatch):
        class Device(type(current_platform)):
            @classmethod
            def get_device_capability(cls, *_, **__):
                return DeviceCapability(*CAPABILITIES[self.kernels])

        for module in (backend, flashinfer_utils):
            monkeypatch.setattr(module, "current_platform", Device())
        monkeypatch.setattr(flashinfer_utils, "has_nvidia_artifactory", lambda: True)
        flashinfer_utils.supports_trtllm_attention.cache_clear()
        monkeypatch.setattr(envs, "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", 1 << 20, raising=False)
        monkeypatch.setattr(backend, "_get_trtllm_workspace_buffer", lambda: _workspace)
        ops = torch.ops._C_cache_ops
        monkeypatch.setattr(ops, "reshape_and_cache_flash", graphs.kernel(reshape_and_cache_flash), raising=False)
        if not HAS_TRITON:
            monkeypatch.setattr(backend, "_copy_page_indices_kernel", _CopyPageIndices())
        functions = {"flashinfer_xqa_batch_decode_with_kv_cache": self.xqa, "get_seq_lens": get_seq_lens}
        functions["fast_decode_plan"] = self.fast_decode_plan
        for name in ("trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"):
            functions[name] = getattr(self, name)
        for name, function in functions.items():
            monkeypatch.setattr(backend, name, function)
        for name, wrapper in (("Decode", Decode), ("Prefill", Prefill)):
            of_this = type(name, (wrapper,), {"calls": self.calls, "sizes": self.sizes})
            monkeypatch.setattr(backend, f"Batch{name}WithPagedKVCacheWrapper", of_this)
        build = backend.FlashInferMetadataBuilder.build

        def checked(builder, common_prefix_len, common_attn_metadata, fast_build=False):
            """Plans are made of lengths on the host, kernels read those on the device."""
            common = common_attn_metadata
            host, device = common.seq_lens_cpu_upper_bound, common.seq_lens
            assert len(host) >= common.num_reqs == len(device) == len(common.block_table_tensor)
            exact = host[: common.num_reqs].tolist() == device.tolist()
            assert exact or graphs.made_up, "lengths on the host are others"
            metadata = build(builder, common_prefix_len, common, fast_build)
            self.mixed += metadata.num_decodes > 0 and metadata.num_prefills > 0
            return metadata

        monkeypatch.setattr(backend.FlashInferMetadataBuilder, "build", checked)

    def fast_decode_plan(self, wrapper, **plan):
        """`Decode.plan` without copies: what it is given has to be in the wrapper's buffers."""
        assert wrapper.is_cuda_graph_enabled and wrapper.planned, "a plan for the first time is a full one"
        assert plan["fixed_split_size"] == -1
        self.calls["fast_plan"] += 1
        wrapper.schedule_for(get_seq_lens(plan["indptr"], plan["last_page_len"], plan["page_size"]), **plan)

    def trtllm_batch_decode_with_kv_cache(
        self, *, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left,
        sinks, o_sf_scale, out, kv_layout, backend, q_len_per_req, max_q_len, cum_seq_lens_q, kv_cache_sf, lse, return_lse,
    ):  # fmt: skip
        assert self.kernels == "trtllm" and backend == "trtllm-gen" and kv_layout == "HND" and window_left >= -1
        unused = sinks, o_sf_scale, max_q_len, cum_seq_lens_q, kv_cache_sf, lse
        assert all(each is None for each in unused) and not return_lse and q_len_per_req == 1
        assert workspace_buffer is _workspace and len(query) == len(block_tables) == len(seq_lens)
        self.calls["trtllm_decode"] += 1
        batch = out, torch.arange(len(query) + 1, dtype=torch.int32), block_tables, seq_lens, max_seq_len, 1
        trtllm_decode(query, *_heads_last(kv_cache, kv_layout), *batch, bmm1_scale, bmm2_scale, window_left)

    def trtllm_batch_context_with_kv_cache(
        self, *, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left, sinks, o_sf_scale, out, kv_cache_sf,
    ):  # fmt: skip
        assert self.kernels == "trtllm" and window_left >= -1
        assert sinks is o_sf_scale is kv_cache_sf is None and workspace_buffer is _workspace
        assert batch_size == len(block_tables) == len(seq_lens) and cum_seq_lens_q[0] == 0 == cum_seq_lens_kv[0]
        keys, values = _heads_last(kv_cache, "HND")
        pages = -(-seq_lens // keys.shape[1])
        assert cum_seq_lens_kv.diff().tolist() == pages.tolist()
        self.calls["trtllm_context"] += 1
        batch = out, cum_seq_lens_q, block_tables, seq_lens, max_kv_len, max_q_len
        trtllm_context(query, keys, values, *batch, bmm1_scale, bmm2_scale, window_left)

    def xqa(
        self, *, query, kv_cache, kv_cache_sf, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
        window_left, out, sinks, kv_layout, q_len_per_req, mask, q_cu_seq_lens,
    ):  # fmt: skip
        assert self.kernels == "xqa" and window_left >= -1 and q_len_per_req == 1
        assert kv_cache_sf is sinks is mask is q_cu_seq_lens is None and workspace_buffer is _workspace
        assert len(query) == len(block_tables) == len(seq_lens)
        self.calls["xqa"] += 1
        batch = out, torch.arange(len(query) + 1, dtype=torch.int32), block_tables, seq_lens, max_seq_len, 1
        xqa_decode(query, *_heads_last(kv_cache, kv_layout), *batch, bmm1_scale, bmm2_scale, window_left)


def get_seq_lens(indptr, last_page_len, page_size):
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last_page_len


class _Paged:
    """Base class of both wrappers: a plan on the host, a schedule and page indices on the device."""

    calls: Counter
    sizes: list[int]

    def __init__(self, float_workspace_buffer, kv_layout, backend, use_cuda_graph=False):
        assert kv_layout in ("NHD", "HND") and backend == "auto" and float_workspace_buffer.dtype == torch.uint8
        self.is_cuda_graph_enabled, self.layout, self.planned = use_cuda_graph, kv_layout, False
        self.schedule = None

    def schedule_for(
        self, lens, *, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, page_size, sm_scale, window_left,
        logits_soft_cap, q_data_type, kv_data_type, fixed_split_size, disable_split_kv, head_dim, o_data_type=None, seq_lens=None,
        block_tables=None, data_type=None, pos_encoding_mode="NONE", rope_scale=None, rope_theta=None, non_blocking=True,
    ):  # fmt: skip
        for each in (indptr, last_page_len, indices):
            assert each.dtype == torch.int32 and each.dim() == 1 and each.is_contiguous()
        assert len(indptr) == len(last_page_len) + 1 and indptr[-1] <= len(indices) and bool((indptr.diff() >= 0).all())
        assert data_type is rope_scale is rope_theta is block_tables is None
        assert not disable_split_kv and pos_encoding_mode == "NONE"
        assert num_qo_heads % num_kv_heads == 0 and window_left >= -1 and not logits_soft_cap
        for pages, last in zip(indptr.diff().tolist(), last_page_len.tolist()):
            assert 1 <= last <= page_size if pages else last == 0
        assert seq_lens is None or seq_lens.tolist() == lens.tolist()
        self.heads, self.page_shape = num_qo_heads, (page_size, num_kv_heads, head_dim)
        self.dtypes = q_data_type, kv_data_type, o_data_type or (self.dtypes[2] if self.planned else None)
        self._window_left, self._logits_soft_cap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale
        schedule = torch.cat([lens.int(), torch.tensor([num_qo_heads, *self.page_shape], dtype=torch.int32)])
        if self.is_cuda_graph_enabled and self.planned:
            assert len(self.schedule) == len(schedule)
            self.schedule.copy_(schedule)
        else:
            self.schedule = schedule
        self.planned = True

    def attend(self, kernel, q, paged_kv_cache, out, q_scale, k_scale, v_scale, kv_cache_sf, starts):
        keys, values = _heads_last(paged_kv_cache, self.layout)
        assert self.planned and (q.dtype, keys.dtype, out.dtype) == self.dtypes
        assert q_scale == 1.0 and kv_cache_sf is None and q.dtype == out.dtype
        assert len(starts) == len(self.last_page_len) + 1
        pages = self.indptr, self.indices, self.last_page_len
        scales = self._sm_scale * k_scale, v_scale
        kernel(q, keys, values, out, starts, *pages, self.schedule, *scales, self._window_left)


class Decode(_Paged):
    """BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self, float_workspace_buffer, kv_layout, *, use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer, use_tensor_cores, backend,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        assert use_tensor_cores
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_page_len = paged_kv_last_page_len_buffer
        if use_cuda_graph:
            assert len(self.indptr) == len(self.last_page_len) + 1
            self.sizes.append(len(self.last_page_len))
            self.starts = torch.arange(len(self.indptr), dtype=torch.int32)

    def plan(self, *, indptr, indices, last_page_len, page_size, seq_lens, **plan):
        if self.is_cuda_graph_enabled:
            assert len(last_page_len) == len(self.last_page_len), "the batch size is fixed"
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.last_page_len, self.indices = indptr.clone(), last_page_len.clone(), indices
            self.starts = torch.arange(len(indptr), dtype=torch.int32)
        self.calls["plan"] += 1
        pages = dict(indptr=indptr, indices=indices, last_page_len=last_page_len, page_size=page_size)
        self.schedule_for(get_seq_lens(indptr, last_page_len, page_size), seq_lens=seq_lens, **pages, **plan)

    def run(self, q, paged_kv_cache, *, q_scale, k_scale, v_scale, out, kv_cache_sf, sinks):
        assert sinks is None
        self.calls["decode"] += 1
        self.attend(decode, q, paged_kv_cache, out, q_scale, k_scale, v_scale, kv_cache_sf, self.starts)


class Prefill(_Paged):
    """BatchPrefillWithPagedKVCacheWrapper. Page offsets may begin anywhere in the indices."""

    def __init__(self, float_workspace_buffer, kv_layout, *, backend):
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, *, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, causal, head_dim_qk, seq_lens,
        **plan,
    ):  # fmt: skip
        assert causal is True and qo_indptr[0] == 0 and len(qo_indptr) == len(paged_kv_indptr)
        self._causal, self.starts = causal, qo_indptr.clone()
        self.indptr, self.indices = paged_kv_indptr.clone(), paged_kv_indices
        self.last_page_len = paged_kv_last_page_len.clone()
        lens = get_seq_lens(self.indptr, self.last_page_len, page_size)
        assert bool((lens >= qo_indptr.diff()).all()), "more queries than keys"
        self.calls["plan"] += 1
        pages = dict(indptr=self.indptr, indices=self.indices, last_page_len=self.last_page_len, page_size=page_size)
        self.schedule_for(lens, head_dim=head_dim_qk, seq_lens=seq_lens, **pages, **plan)

    def run(self, q, paged_kv_cache, *, q_scale, k_scale, v_scale, out, kv_cache_sf):
        self.calls["prefill"] += 1
        self.attend(prefill, q, paged_kv_cache, out, q_scale, k_scale, v_scale, kv_cache_sf, self.starts)


class _CopyPageIndices:
    """vLLM's Triton kernel of that name, where Triton is off."""

    def __getitem__(self, grid):
        def copy(page_indices, block_table, stride, cu_num_blocks, BLOCK_SIZE):
            assert stride == block_table.stride(0) and grid == (len(block_table),)
            for row, (first, last) in enumerate(zip(cu_num_blocks.tolist(), cu_num_blocks[1:].tolist())):
                page_indices[first:last] = block_table[row, : last - first]

        return copy


def _heads_last(kv_cache, layout):
    """Keys and values [num_pages, page_size, Hkv, D] of a pair in the layout that is named."""
    assert isinstance(kv_cache, tuple) and len(kv_cache) == 2 and all(each.stride(-1) == 1 for each in kv_cache)
    return [each.transpose(1, 2) if layout == "HND" else each for each in kv_cache]


def _planned(q, keys, values, out, starts, indptr, indices, last_page_len, schedule, scale, value_scale, back):
    lens = get_seq_lens(indptr, last_page_len, keys.shape[1]).tolist()
    wanted = [*lens, q.shape[1], *keys.shape[1:]]
    assert schedule.tolist() == wanted, "the plan was made for other lengths or heads, or pages are others"
    pages = [indices[first:last] for first, last in zip(indptr.tolist(), indptr[1:].tolist())]
    _attend(q, keys, values, out, starts, pages, lens, scale, value_scale, back)


def _tabled(q, keys, values, out, starts, block_tables, seq_lens, max_seq_len, max_q_len, scale, value_scale, back):
    """A kernel that reads block tables and lengths on the device."""
    for each in (block_tables, seq_lens, starts):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert len(starts) == len(block_tables) + 1 and starts.diff().max() <= max_q_len
    lens = seq_lens.tolist()
    assert max(lens) <= max_seq_len and q.is_contiguous()
    pages = [block_tables[row, : -(-length // keys.shape[1])] for row, length in enumerate(lens)]
    _attend(q, keys, values, out, starts, pages, lens, scale, value_scale, back)


def _attend(q, keys, values, out, starts, pages, lens, scale, value_scale, back):
    """Causal attention, aligned to the end; rows without keys are padding, whose output nobody reads.

    `back` as of `flash.attention`.
    """
    assert q.shape == out.shape and starts[-1] == len(q) and q.stride(-1) == 1 and out.is_contiguous()
    assert q.shape[2] == keys.shape[3] and keys.shape == values.shape and q.shape[1] % keys.shape[2] == 0
    starts = starts.tolist()
    for first, last, its, length in zip(starts, starts[1:], pages, lens):
        if length:
            gone = 0 if back < 0 else max(length - (last - first) - back, 0) // keys.shape[1]
            its, length = its[gone:], length - gone * keys.shape[1]
            assert graphs.made_up or bool(its.all()), "vLLM's null block was attended to"
            both = (each[its.long()].flatten(0, 1)[:length].float() for each in (keys, values))
            attended, _ = attention(q[first:last].float(), *both, scale, back)
            out[first:last] = (attended * value_scale).to(out.dtype)


def _kernel(name, function):
    """One name for each, by which graphs list them."""

    def launch(*args):
        return function(*args)

    launch.__name__ = name
    return graphs.kernel(launch)


decode, prefill = _kernel("flashinfer_decode", _planned), _kernel("flashinfer_prefill", _planned)
trtllm_decode, trtllm_context = _kernel("trtllm_decode", _tabled), _kernel("trtllm_context", _tabled)
xqa_decode = _kernel("xqa", _tabled)

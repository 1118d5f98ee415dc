"""Attention backends of a device."""

from .touch import Touch

TRITON = [
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend",
        ("compat.refusals", "attention.backend"),
        "a backend that is served",
        bases=("AttentionBackend",),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend.get_name",
        ("compat.refusals", "attention.passes"),
        "the name by which backends are refused and shown",
        kind="staticmethod",
        calls=("get_name()",),
        does=("return 'TRITON_ATTN'",),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata",
        ("attention.backend", "attention.device"),
        "what the kernel and our passes read",
        has=(
            "num_actual_tokens: int",
            "max_query_len: int",
            "max_seq_len: int",
            "query_start_loc",
            "seq_lens",
            "block_table",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder",
        ("attention.backend",),
        "subclassed",
        bases=("AttentionMetadataBuilder",),
        has=("supports_update_block_table = False",),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.__init__",
        ("attention.backend",),
        "scratch for the model's heads, which is enough for those of a class",
        first=("kv_cache_spec",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.__init__",),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build",
        ("attention.backend", "worker.runtime"),
        "takes tables and lengths from the common metadata and nowhere else",
        first=("common_prefix_len", "common_attn_metadata", "fast_build"),
        calls=("build(..., ..., ...)",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.build",),
        does=(
            "max_query_len = common_attn_metadata.max_query_len",
            "max_seq_len = common_attn_metadata.max_seq_len",
            "query_start_loc = common_attn_metadata.query_start_loc",
            "seq_lens = common_attn_metadata.seq_lens",
            "block_table_tensor = common_attn_metadata.block_table_tensor",
            "TritonAttentionMetadata(..., seq_lens=seq_lens, block_table=block_table_tensor)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
        ("compat.refusals", "attention.backend", "attention.device"),
        "subclassed; what it has that our passes do not know is refused, or left to its own kernel",
        has=("scale", "alibi_slopes", "logits_soft_cap", "sinks", "head_size", "chunk_lookback"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        ("attention.backend", "attention.device"),
        "queries are [tokens, heads, size]; each token and head of the cache holds K, then V, in any layout",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        replaced_by=("vllm_evict.attention.backend:working_impl.WorkingImpl.forward",),
        does=(
            "num_actual_tokens = attn_metadata.num_actual_tokens",
            "kv_cache = kv_cache.transpose(1, 2)",
            "key_cache, value_cache = kv_cache.split(hs, dim=-1)",
            "key_cache.view(self.fp8_dtype)",
            "k_descale = layer._k_scale.expand(descale_shape)",
            "v_descale = layer._v_scale.expand(descale_shape)",
            "unified_attention(..., q=query[:num_actual_tokens], k=key_cache, v=value_cache, "
            "out=output[:num_actual_tokens], softmax_scale=self.scale, block_table=block_table)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        ("attention.backend", "attention.split", "attention.device"),
        "writes this step's keys and values before `forward`, into pages with any strides",
        does=(
            "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
            "key_cache = key_cache.view(self.fp8_dtype)",
            "triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, self.kv_cache_dtype, "
            "layer._k_scale, layer._v_scale)",
        ),
    ),
]

FLASH = [
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
        ("compat.refusals", "attention.backend", "attention.split"),
        "a backend that is served; keys and values are written before `forward`, and apart from it",
        bases=("AttentionBackend",),
        has=("forward_includes_kv_cache_update = False",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend.get_name",
        ("compat.refusals", "attention.passes"),
        "the name by which backends are refused and shown",
        kind="staticmethod",
        calls=("get_name()",),
        does=("return 'FLASH_ATTN'",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
        ("attention.backend", "attention.device", "attention.split"),
        "what the kernel and our passes read, and where split heads write",
        has=(
            "num_actual_tokens: int",
            "max_query_len: int",
            "max_seq_len: int",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "slot_mapping: torch.Tensor",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
        ("attention.backend",),
        "subclassed; it says that it can change a block table in finished metadata",
        bases=("AttentionMetadataBuilder",),
        has=("supports_update_block_table = True",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.__init__",
        ("attention.backend",),
        "plans for the heads of a layer; on V2 before the mode of CUDA graphs is settled, so that schedules may go to "
        "memory of its own",
        first=("kv_cache_spec",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.__init__",),
        does=(
            "self.num_heads_q = get_num_attention_heads_from_layers(vllm_config, layer_names) or ...",
            "self.num_heads_kv = kv_cache_spec.num_kv_heads",
            "self.aot_schedule = get_flash_attn_version() == 3",
            "self.use_full_cuda_graph = self.compilation_config.cudagraph_mode.has_full_cudagraphs()",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build",
        ("attention.backend", "worker.runtime"),
        "takes tables and lengths from the common metadata and nowhere else, for the schedule too; a fast build has none",
        first=("common_prefix_len", "common_attn_metadata", "fast_build"),
        calls=("build(..., ..., ...)",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.build",),
        does=(
            "max_query_len = common_attn_metadata.max_query_len",
            "max_seq_len = common_attn_metadata.max_seq_len",
            "query_start_loc = common_attn_metadata.query_start_loc",
            "seq_lens = common_attn_metadata.seq_lens",
            "block_table_tensor = common_attn_metadata.block_table_tensor",
            "self.aot_schedule and not fast_build and ...",
            "self._get_scheduler_metadata(..., cu_query_lens=query_start_loc, seqlens=seq_lens, max_seq_len=max_seq_len)",
            "FlashAttentionMetadata(..., seq_lens=seq_lens, block_table=block_table_tensor)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder._get_scheduler_metadata",
        ("attention.backend",),
        "a schedule is for so many heads: none is made where a layer's heads are split",
        does=(
            "not aot_schedule",
            "return None",
            "get_scheduler_metadata(..., num_heads_q=self.num_heads_q * ..., num_heads_kv=self.num_heads_kv, "
            "cache_seqlens=seqlens)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.update_block_table",
        ("attention.backend",),
        "knows nothing of a view: never called for our builder",
        does=("new_metadata.block_table = blk_table",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:_get_sliding_window_configs",
        ("attention.backend", "attention.split"),
        "finds windows of layers by the class of what attends: ours inherit from it",
        does=("isinstance(impl, FlashAttentionImpl)",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
        ("compat.refusals", "attention.backend", "attention.device", "attention.flash"),
        "subclassed; what it has that our passes do not know is refused, or left to its own kernel",
        has=("scale", "alibi_slopes", "logits_soft_cap", "sinks", "head_size", "sliding_window"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.__init__",
        ("attention.flash",),
        "how a layer without a window says so",
        does=("self.sliding_window = (-1, -1)",),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
        ("attention.backend", "attention.device"),
        "queries are [tokens, heads, size]; each token and head of the cache holds K, then V, in any layout; heads are "
        "those of its tensors",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        replaced_by=("vllm_evict.attention.backend:working_impl.WorkingImpl.forward",),
        does=(
            "num_actual_tokens = attn_metadata.num_actual_tokens",
            "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
            "key_cache = key_cache.view(current_platform.fp8_dtype())",
            "cu_seqlens_q = attn_metadata.query_start_loc",
            "seqused_k = attn_metadata.seq_lens",
            "block_table = attn_metadata.block_table",
            "scheduler_metadata = attn_metadata.scheduler_metadata",
            "k_descale = layer._k_scale.expand(descale_shape)",
            "v_descale = layer._v_scale.expand(descale_shape)",
            "_FA4_DENSE_ATTENTION_KERNEL(..., q=query[:num_actual_tokens], k=key_cache, v=value_cache, "
            "out=output[:num_actual_tokens], softmax_scale=self.scale, block_table=block_table)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
        ("attention.backend", "attention.split", "attention.device"),
        "writes this step's keys and values before `forward`, into pages with any strides",
        calls=("do_kv_cache_update(..., ..., ..., ..., ...)",),
        first=("layer", "key", "value", "kv_cache", "slot_mapping"),
        does=(
            "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
            "reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, ...)",
        ),
    ),
]

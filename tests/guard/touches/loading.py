"""Weight loading, where heads are put in order."""

from .touch import Touch

LOADING = [
    Touch("vllm.config.load:LoadConfig", ("integration.reorder",), "named in refusals", has=("load_format",)),
    Touch(
        "vllm.model_executor.model_loader.base_loader:",
        ("integration.reorder",),
        "builds models with the `initialize_model` that it holds",
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:initialize_model",
        ("integration.reorder",),
        "what it builds gets its weight loaders wrapped; it has copied them by then, for weights that are loaded again",
        replaced_by=("vllm_evict.integration.reorder:reordering.initialize_model",),
        does=("record_metadata_for_reloading(model)", "return model"),
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
        ("integration.reorder",),
        "finds it in its module",
        does=("model = initialize_model(..., vllm_config=vllm_config)",),
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        ("integration.reorder",),
        "weights are loaded after the model is built, and packed after that",
        does=(
            "model = self.create_model(...)",
            "self.load_weights(model, model_config)",
            "process_weights_after_loading(model, ...)",
        ),
    ),
    Touch(
        "vllm.model_executor.model_loader.reload:record_metadata_for_reloading",
        ("integration.reorder",),
        "copies a module's parameters with their weight loaders",
        calls=("record_metadata_for_reloading(...)",),
        does=("info.restore_metadata = capture_layer_to_meta(layer)",),
    ),
    Touch(
        "vllm.model_executor.model_loader.reload.sanitize:sanitize_layer_refs",
        ("integration.reorder",),
        "takes the layer out of the loaders in these copies, if they are its methods",
        does=(
            "isinstance(value, MethodType) and value.__self__ is layer",
            "value.__func__.__get__(layer_ref_sentinel)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        ("integration.reorder",),
        "the input projection: q, k and v of all heads, cut for a rank by its loaders",
        bases=("ColumnParallelLinear", "LinearBase"),
        has=("total_num_heads", "total_num_kv_heads", "num_heads", "num_kv_heads", "head_size", "v_head_size"),
    ),
    Touch(
        "vllm.model_executor.layers.linear:ColumnParallelLinear.__init__",
        ("integration.reorder",),
        "its parameters get its loaders",
        does=(
            "self.quant_method.create_weights(..., weight_loader=...)",
            "set_weight_attrs(self.bias, {'output_dim': 0, 'weight_loader': self.weight_loader})",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader",
        ("integration.reorder",),
        "gets a shard, or all three in one tensor, which it cuts itself",
        first=("param", "loaded_weight", "loaded_shard_id"),
        replaced_by=("vllm_evict.integration.reorder:_qkv_loader.permuted",),
        does=(
            "output_dim = getattr(param, 'output_dim', None)",
            "loaded_shard_id is None",
            "self.weight_loader(param, loaded_weight_shard, shard_id)",
            "loaded_weight.narrow(output_dim, start_idx, shard_size)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader_v2",
        ("integration.reorder",),
        "the same, for parameters that cut shards themselves",
        first=("param", "loaded_weight", "loaded_shard_id"),
        replaced_by=("vllm_evict.integration.reorder:_qkv_loader.permuted",),
        does=(
            "loaded_shard_id is None",
            "self._load_fused_module_from_checkpoint(param, loaded_weight)",
            "param.load_qkv_weight(..., loaded_weight=loaded_weight, shard_id=loaded_shard_id)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear._load_fused_module_from_checkpoint",
        ("integration.reorder",),
        "q, k and v lie one after the other, and do not pass the parameter's loader a second time",
        does=(
            "('q', 0, self.total_num_heads * self.head_size)",
            "self.weight_loader_v2(param, loaded_weight_shard, shard_id)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        ("integration.reorder",),
        "the output projection: its inputs lie in the order of the query heads",
        bases=("LinearBase",),
        has=("input_size",),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader",
        ("integration.reorder",),
        "gets a whole tensor",
        first=("param", "loaded_weight"),
        replaced_by=("vllm_evict.integration.reorder:_out_loader.permuted",),
        does=(
            "input_dim = getattr(param, 'input_dim', None)",
            "loaded_weight.narrow(input_dim, start_idx, shard_size)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader_v2",
        ("integration.reorder",),
        "the same, for parameters that cut it themselves",
        first=("param", "loaded_weight"),
        replaced_by=("vllm_evict.integration.reorder:_out_loader.permuted",),
        does=("param.load_row_parallel_weight(loaded_weight=loaded_weight)",),
    ),
    Touch(
        "vllm.model_executor.parameter:BasevLLMParameter.weight_loader",
        ("integration.reorder",),
        "a property that can be set; the last of its three definitions is the one that is looked at",
        kind="weight_loader.deleter",
        does=("self._weight_loader = None",),
    ),
    Touch(
        "vllm.model_executor.parameter:_ColumnvLLMParameter.output_dim",
        ("integration.reorder",),
        "along which heads lie in the input projection",
        kind="property",
        does=("return self._output_dim",),
    ),
    Touch(
        "vllm.model_executor.parameter:_ColumnvLLMParameter.load_qkv_weight",
        ("integration.reorder",),
        "cuts along it",
        does=("loaded_weight.narrow(self.output_dim, shard_id_int * shard_size, shard_size)",),
    ),
    Touch(
        "vllm.model_executor.parameter:RowvLLMParameter.input_dim",
        ("integration.reorder",),
        "along which heads lie in the output projection",
        kind="property",
        does=("return self._input_dim",),
    ),
    Touch(
        "vllm.model_executor.parameter:RowvLLMParameter.load_row_parallel_weight",
        ("integration.reorder",),
        "cuts along it",
        does=("loaded_weight.narrow(self.input_dim, self.tp_rank * shard_size, shard_size)",),
    ),
    Touch(
        "vllm.model_executor.parameter:BlockQuantScaleParameter",
        ("integration.reorder",),
        "a scale for a block of rows and columns, which may span heads",
        bases=("_ColumnvLLMParameter", "RowvLLMParameter"),
    ),
    Touch(
        "vllm.model_executor.layers.quantization.fp8:Fp8LinearMethod.create_weights",
        ("integration.reorder",),
        "the layer knows the size of these blocks",
        does=("layer.weight_block_size = self.weight_block_size",),
    ),
    Touch(
        "vllm.model_executor.models.internlm2:InternLM2Attention",
        ("integration.reorder",),
        "takes q, k and v of each head out of its projection side by side; refused by this name",
        has=("split_qkv()",),
    ),
]

POSITIONS = [
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.get_model",
        ("integration.worker",),
        "the model, for its embeddings",
        calls=("get_model()",),
    ),
    Touch(
        "vllm.model_executor.models.llama:LlamaAttention.__init__",
        ("integration.positions",),
        "a rotary embedding beside each attention layer, under this name in most models; those without one are refused",
        does=("self._init_rotary_emb(config, ...)", "attn_cls(...)"),
    ),
    Touch(
        "vllm.model_executor.models.llama:LlamaAttention.forward",
        ("integration.positions",),
        "keys are turned before they are kept; called alone, up to its attention layer, by these names",
        first=("positions", "hidden_states"),
        does=("q, k = self.rotary_emb(positions, q, k)", "self.attn(q, k, v)"),
    ),
    Touch(
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.__init__",
        ("integration.positions",),
        "what an adapter is put around; called in its place before the first step",
        does=("self.base_layer = base_layer",),
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
        ("integration.positions",),
        "a row of cosines and sines for each position; the angles per position it makes them of",
        has=("cos_sin_cache", "is_neox_style", "_compute_inv_freq()", "_compute_cos_sin_cache()"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase.__init__",
        ("integration.positions",),
        "rows are a buffer that can be a longer one",
        does=(
            "cache = self._compute_cos_sin_cache()",
            "self.register_buffer('cos_sin_cache', cache, persistent=False)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_cos_sin_cache",
        ("integration.positions",),
        "angles grow evenly: position times frequency; embeddings of which that is not so are refused",
        does=("inv_freq = self._compute_inv_freq(self.base)", "torch.cat((cos, sin), dim=-1)"),
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_static",
        ("integration.positions", "compute.kernels.rotate"),
        "a row for each position, cosines first; what is past rotary_dim stays",
        does=(
            "cos_sin = cos_sin_cache.index_select(0, positions)",
            "cos, sin = cos_sin.chunk(2, dim=-1)",
            "query_rot = query[..., :rotary_dim]",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.linear_scaling_rope:LinearScalingRotaryEmbedding._compute_cos_sin_cache",
        ("integration.positions",),
        "positions are divided by the factor",
        does=("inv_freq = self._compute_inv_freq(self.base)", "t = t / scaling_factor"),
    ),
    Touch(
        "vllm.model_executor.layers.rotary_embedding.linear_scaling_rope:LinearScalingRotaryEmbedding",
        ("integration.positions",),
        "the factors",
        has=("scaling_factors",),
    ),
]

"""Functions and classes of vLLM that vllm_evict replaces or calls, by name: each has to be there and to fit, in every
supported release.

Names that the plugin only imports are no entries: `check` finds them in the plugin's sources.
"""

from vllm_evict.integration.start.versions import MOVED
from vllm_evict.tools.check.stand_in import COMPILED

from .seams import replaced

#: Class or module of vLLM -> ours -> the methods and functions that ours takes the place of. `ours` holds one of the
#: same name (a class, or a function that defines it), or is itself what is put in its place.
REPLACED = {
    **replaced(),
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "integration.engine.scheduler:EvictionMixin": "__init__ schedule update_from_output _free_request_blocks "
        "_free_request finish_requests reset_prefix_cache _build_kv_connector_meta _handle_invalid_blocks make_stats "
        "add_request _update_request_as_session _get_local_prefix_cache_hit has_requests set_pause_state",
        "integration.engine.allocation:limit_tokens": "_reserve_prefill_lookahead",
    },
    "vllm.v1.core.block_pool:BlockPool": {
        "integration.engine.reaching:Reaching._watch.evicted": "_maybe_evict_cached_block",
        "integration.engine.reaching:Reaching._watch.found": "get_cached_block",
        "integration.engine.outdated:Outdated.__init__.evicted": "_maybe_evict_cached_block",
        "integration.engine.allocation:note_published": "cache_full_blocks cache_partial_block",
        "integration.engine.host_events:HostEvents.__init__.taken": "take_events",
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "integration.engine.allocation:before_giving_up": "allocate_slots",
        "integration.engine.allocation:Reads.__init__.allocate_slots": "allocate_slots",
        "integration.engine.allocation:count_published": "estimate_cached_tokens",
        "integration.engine.shadows:ShadowRequests.__init__.record_prefix_cache_stats": "record_prefix_cache_stats",
    },
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": {
        "integration.engine.allocation:before_giving_up": "get_num_blocks_to_allocate",
        "integration.engine.allocation:take_from_host": "allocate_new_computed_blocks",
    },
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": {
        "integration.engine.managers:EvictableManager": "__init__ find_longest_cache_hit add_local_computed_blocks "
        "allocate_external_computed_blocks pop_blocks_for_free _cache_partial_tail_block",
        "integration.engine.managers:AdmittingManager": "get_num_blocks_to_allocate",
        "integration.engine.managers:hole_aware.HoleAware": "cache_blocks",
        "integration.engine.poison:Poison._noting.noted": "allocate_new_blocks",
    },
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager": {
        "integration.engine.managers:StateManager": "cache_blocks",
        "integration.engine.poison:Poison._noting.noted": "allocate_new_blocks",
    },
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager": {
        "integration.engine.managers:hole_aware.HoleAware": "cache_blocks",
        "integration.engine.poison:Poison._noting.noted": "allocate_new_blocks",
    },
    "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager": {
        "integration.engine.managers:hole_aware.HoleAware": "cache_blocks",
        "integration.engine.poison:Poison._noting.noted": "allocate_new_blocks",
    },
    "vllm.v1.kv_cache_interface:FullAttentionSpec": {
        "integration.engine.spec:_Evictable": "max_memory_usage_bytes merge is_uniform_with_collection",
    },
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": {"integration.engine.spec:_Evictable": "merge"},
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder": {
        "integration.worker.backend:resident_backend.ResidentBuilder": "__init__ build",
    },
    "vllm.v1.worker.cpu_worker:CPUWorker": {
        "integration.worker.worker:EvictionWorkerMixin": "load_model get_kv_cache_spec determine_available_memory "
        "initialize_from_config execute_model sample_tokens compile_or_warm_up_model",
        "integration.worker.cpu_worker:CPUEvictionWorker": "sample_tokens",
    },
    "vllm.v1.worker.gpu_worker:Worker": {
        "integration.worker.worker:EvictionWorkerMixin": "load_model get_kv_cache_spec determine_available_memory "
        "initialize_from_config execute_model sample_tokens compile_or_warm_up_model",
    },
    "vllm.v1.outputs:AsyncModelRunnerOutput": {"integration.worker.worker:_Reporting": "get_output"},
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
        "integration.worker.reorder:guard_reload.checked": "reload_weights",
        "integration.worker.runners:profiling": "profile_run",
        "integration.worker.runners:_install_v1": "_update_states",
        "features.audit.worker:Scorer._install_v1": "_get_prompt_logprobs_dict",
        "integration.worker.graphs:install_v1": "_warmup_and_capture",
    },
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": {
        "integration.worker.reorder:guard_reload.checked": "reload_weights",
        "integration.worker.runners:profiling": "profile_run",
        "integration.worker.runners:_install_v2": "update_requests prepare_attn",
        "integration.worker.graphs:install_v2": "gather_batch_req_state initialize_kv_cache",
    },
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker": {
        "features.audit.worker:Scorer._install_v2": "compute_prompt_logprobs",
    },
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": {
        "integration.worker.graphs:install_v2": "prepare_attn"
    },
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": {
        "integration.worker.graphs:EvictionDispatcher": "initialize_cudagraph_keys dispatch",
    },
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": {
        "integration.worker.graphs:install_v2.Capturing": "capture",
        "integration.worker.graphs:install_v2.EvictionGraphs": "dispatch",
    },
    "vllm.model_executor.layers.attention:MLAAttention": {
        "integration.worker.latents:working_latent.WorkingLatent": "forward_impl",
    },
    "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention": {
        "integration.worker.latents:working_latent.WorkingKimi": "_attention",
    },
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": {
        "integration.worker.layers:HeadSlots": "get_attn_backend get_kv_cache_spec",
    },
    "vllm.v1.attention.backend:AttentionBackend": {
        "integration.worker.backend:resident_backend.ResidentBackend": "get_builder_cls customize_spec",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder": {
        "integration.worker.backend:resident_backend.ResidentBuilder": "get_cudagraph_support build_for_drafting",
    },
    "vllm.v1.attention.backend:AttentionImpl": {
        "integration.worker.backend:working_impl.WorkingImpl": "fused_output_quant_supported",
        "integration.worker.split:split_impl.SplitImpl": "fused_output_quant_supported",
    },
    **{
        f"vllm.v1.attention.backends.{module}:{name}MetadataBuilder": {
            "integration.worker.backend:resident_backend.ResidentBuilder": "__init__ build",
        }
        for module, name in (
            ("cpu_attn", "CPUAttention"),
            ("flash_attn", "FlashAttention"),
            ("flashinfer", "FlashInfer"),
            ("triton_attn", "TritonAttention"),
        )
    },
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": {
        "integration.worker.backend:working_impl.WorkingImpl": "forward",
        "integration.worker.split:split_impl.SplitImpl": "forward",
    },
    **{
        f"vllm.v1.attention.backends.{module}:{name}": {
            "integration.worker.backend:working_impl.WorkingImpl": "forward"
        }
        for module, name in (
            ("flash_attn", "FlashAttentionImpl"),
            ("flashinfer", "FlashInferImpl"),
            ("triton_attn", "TritonAttentionImpl"),
        )
    },
    "vllm.model_executor.model_loader.base_loader:": {"integration.worker.reorder:reordering": "initialize_model"},
    "vllm.model_executor.layers.linear:QKVParallelLinear": {
        "integration.worker.reorder:_qkv_loader.permuted": "weight_loader weight_loader_v2",
    },
    "vllm.model_executor.layers.linear:RowParallelLinear": {
        "integration.worker.reorder:_out_loader.permuted": "weight_loader weight_loader_v2",
    },
}

#: What the plugin calls, and how: `...` for each positional argument, names for those that have to have that place.
CALLED = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions": "(...)",
    "vllm.config:get_layers_from_vllm_config": "(..., ...)",
    "vllm.config.model:ModelConfig.get_and_verify_max_len": "(...)",
    "vllm.exceptions:VLLMValidationError.__init__": "(..., parameter=...)",
    "vllm.forward_context:get_forward_context": "()",
    "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec": "(...)",
    "vllm.model_executor.model_loader.reload:record_metadata_for_reloading": "(...)",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": "(layer, key, value, kv_cache, "
    "slot_mapping)",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": "(layer, key, value, kv_cache, "
    "slot_mapping)",
    "vllm.multimodal.cache:BaseMultiModalProcessorCache.invalidate": "(...)",
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": "(..., ..., ..., ..., ..., ..., "
    "return_softmax_lse=True)",
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": "(request, blocks, num_cached_blocks, num_full_blocks, "
    "block_size, kv_cache_group_id, block_mask=...)",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "(...)",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "(block_hash, kv_cache_group_ids)",
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit": "(block_hashes, "
    "max_cache_hit_length)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks": "(...)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": "(..., ...)",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "(..., ...)",
    "vllm.v1.core.kv_cache_utils:resolve_block_hashes": "(..., ..., ...)",
    "vllm.v1.core.kv_cache_utils:_get_kv_cache_groups_uniform_page_size": "(...)",
    "vllm.v1.core.kv_cache_utils:unify_kv_cache_spec_page_size": "(...)",
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_request": "(...)",
    "vllm.v1.core.sched.request_queue:RequestQueue.remove_request": "(...)",
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager._contiguous_blocks_for_hit": "(window_size, "
    "block_size, use_eagle)",
    "vllm.v1.kv_cache_interface:replace_as": "(..., ..., backend=...)",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": "(..., ..., uniform_type_base_spec=...)",
    "vllm.v1.request:Request.__init__": "(..., ..., ..., ..., client_index=0, lora_request=None, cache_salt=None, "
    "priority=0, block_hasher=None)",
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write": "(index, start, x)",
    "vllm.v1.worker.gpu_worker:Worker.get_model": "()",
}

#: Objects of vLLM that are given attributes of the plugin's: the plan, reports, usage.
CARRIERS = (
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.outputs:ModelRunnerOutput",
    "vllm.v1.metrics.stats:SchedulerStats",
    "vllm.outputs:RequestOutput",
    "vllm.outputs:CompletionOutput",
)

#: Our classes that have to define all abstract methods of vLLM's.
COMPLETE = {
    "vllm.v1.outputs:AsyncModelRunnerOutput": "integration.worker.worker:_Reporting",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": "integration.worker.layers:HeadSlots",
}

#: Strings in vllm_evict that look like names of vLLM and are none.
NO_NAMES = {"vllm.evict", *COMPILED, *MOVED, *MOVED.values()}

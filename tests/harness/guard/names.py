"""Functions and classes of vLLM that vllm_evict replaces or calls, by name: each has to be there and to fit, in every
supported release.

Names that the plugin only imports are no entries: `check` finds them in the plugin's sources.
"""

from vllm_evict.integration.start.versions import MOVED
from vllm_evict.tools.check.stand_in import COMPILED

from .seams import replaced

#: Class or module of vLLM -> ours -> the methods and functions that ours takes the place of. `ours` holds one of the
#: same name (a class, or a function that defines it), or is itself what is put in its place.
REPLACED = replaced()

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

"""Habits of vLLM's code on which the plugin relies and of which no run would tell: broken, they give wrong answers, not
errors.
"""

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclass(frozen=True)
class Invariant:
    """One promise that vLLM never made.

    Attributes:
        name: what holds. An invariant whose code moved or changed has an entry for each form, with releases of its own.
        why: what would happen if it did not.
        where: "module:name" of the function.
        does: code in it, in this order; `...` stands for anything (see `source`).
        releases: of vLLM in which the code has this form, as a version specifier. The last form is open, so that it is
            what a new release is held to.
    """

    name: str
    why: str
    where: str
    does: tuple[str, ...]
    releases: str = ""

    @property
    def key(self) -> str:
        """The entry's name in facts.json."""
        return f"{self.name} [{self.where}] {self.releases}".rstrip()

    def holds_in(self, version: str) -> bool:
        return Version(version) in SpecifierSet(self.releases)


INVARIANTS = [
    Invariant(
        "the null block is block 0",
        "holes are made of it, and workers know them by that id",
        "vllm.v1.core.block_pool:BlockPool.__init__",
        (
            "self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)",
            "self.null_block = self.free_block_queue.popleft()",
        ),
    ),
    Invariant(
        "freeing passes over null blocks",
        "the holes of a request that ends would go to the pool, and their block to a request",
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
        ("block.is_null",),
    ),
    Invariant(
        "hits pass over null blocks",
        "the hole of a hit would be taken out of a queue that it is not in",
        "vllm.v1.core.block_pool:BlockPool.touch",
        ("block.is_null", "self.free_block_queue.remove(block)", "block.ref_cnt += 1"),
    ),
    Invariant(
        "null blocks are never published",
        "a later prompt would hit a block of zeros",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        ("blk.is_null or (block_mask is not None and not block_mask[i])",),
    ),
    Invariant(
        "workers get a table with its holes",
        "tables of scheduler and worker would have other lengths",
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids",
        ("tuple(([blk.block_id for blk in group] for group in ...))",),
    ),
    Invariant(
        "what a request needs follows from the length of its table",
        "blocks would be handed out again for tokens that holes stand for",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        ("num_required_blocks = cdiv(num_tokens, self.block_size)", "len(self.req_to_blocks.get(request_id, ()))"),
    ),
    Invariant(
        "tables grow before blocks are published",
        "purity is checked when a table has grown: what is no longer pure would be published",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        (
            "return None",
            "self.coordinator.allocate_new_computed_blocks(...)",
            "self.coordinator.allocate_new_blocks(request.request_id, ...)",
            "self.coordinator.cache_blocks(request, num_tokens_to_cache)",
        ),
    ),
    Invariant(
        "a step's output names the requests that got blocks, and only these",
        "a request would grow past its trigger and never be decided on",
        "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
        ("req_to_new_blocks[req_id].get_block_ids(allow_none=True)",),
    ),
    Invariant(
        "tokens count as computed once they are planned",
        "a decision would take blocks that a step in flight writes",
        "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
        (
            "request.num_computed_tokens += num_scheduled_token",
            "request.num_in_flight_tokens += num_scheduled_token",
        ),
    ),
    Invariant(
        "tokens are in flight until their output is taken in, requests end before statistics are made",
        "decisions after a step would see its tokens as in flight, and usage would miss the last output",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        (
            "request.num_in_flight_tokens -= num_tokens_scheduled",
            "self._free_request(request)",
            "EngineCoreOutput(...)",
            "self.make_stats(...)",
        ),
    ),
    Invariant(
        "a preempted request starts over without blocks",
        "holes of its old table would be told of its new one",
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
        (
            "self._free_request_blocks(request)",
            "request.status = RequestStatus.PREEMPTED",
            "request.num_computed_tokens = 0",
        ),
    ),
    Invariant(
        "a request's blocks are freed through pop_blocks_for_free",
        "what a request holds would be counted on after it has ended",
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.free",
        ("self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",),
    ),
    Invariant(
        "steps run in the order in which they were planned",
        "a freed block could be written before the step that still reads it",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        (
            "self.scheduler.schedule(...)",
            "self.model_executor.execute_model(scheduler_output, ...)",
            "batch_queue.appendleft(...)",
            "batch_queue.pop()",
            "self.scheduler.update_from_output(scheduler_output, model_output)",
        ),
    ),
    Invariant(
        "at most so many tokens are in flight",
        "a request's bound of blocks follows from it",
        "vllm.config.vllm:VllmConfig.max_in_flight_tokens",
        ("self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens",),
    ),
    Invariant(
        "all KV groups take their blocks from one pool",
        "an evicted block could not serve another group",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.__init__",
        (
            "self.block_pool = BlockPool(..., num_gpu_blocks=kv_cache_config.num_blocks)",
            "get_manager_for_kv_cache_spec(..., block_pool=self.block_pool, kv_cache_group_id=i)",
        ),
    ),
    Invariant(
        "prefix hits look at full attention first, in the order of its groups",
        "hits of split heads are found last to first: another order would shorten them after streaming heads took theirs",
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
        ("self.attention_groups.sort(key=lambda g: not isinstance(g.spec, FullAttentionSpec))",),
    ),
    *(
        Invariant(
            "KV groups come in the order of their layers, each as long as the rarest spec",
            "the plan's groups and the worker's would be others",
            f"vllm.v1.core.{module}:_get_kv_cache_groups_uniform_page_size",
            (
                "same_type_layers[layer_spec].append(layer_name)",
                "group_size = min_num_layers",
                "grouped_layers.append(layers[i::num_groups])",
                "return create_kv_cache_group_specs(kv_cache_spec, grouped_layers)",
            ),
            releases,
        )
        for module, releases in (("kv_cache_utils", "<0.33"), ("kv_cache_planning", ">=0.33"))
    ),
    Invariant(
        "states are published with the step that computes them, and where a table's block has them",
        "a state would be published that has seen more tokens than its hash, or tokens over holes",
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager.cache_blocks",
        ("super().cache_blocks(...)", "self._cache_partial_tail_block(...)"),
    ),
    Invariant(
        "a layer with states keeps its pages' bytes at the page's begin",
        "poison would miss states, and tests would not see that freed ones are read",
        "vllm.model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache",
        ("pages = kv_cache.squeeze(dim=(1, 2))", "offset = 0"),
    ),
    Invariant(
        "V1: tables go to the device after requests are updated",
        "kernels would read a table without its holes",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        ("self._update_states(scheduler_output)", "self._prepare_inputs(...)"),
    ),
    Invariant(
        "V1: the graph is chosen before metadata is built",
        "views would be made for another graph than the one that is replayed",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        ("self._determine_batch_execution_and_padding(...)", "self._build_attention_metadata(...)"),
    ),
    Invariant(
        "V2: staged writes come after requests are updated and before metadata is built",
        "kernels would read a table without its holes",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        (
            "self.add_requests(scheduler_output)",
            "self.update_requests(scheduler_output)",
            "self.block_tables.apply_staged_writes()",
            "self.prepare_attn(input_batch)",
            "self.model_state.prepare_attn(input_batch, batch_desc.cg_mode, ...)",
        ),
    ),
    *(
        Invariant(
            "V1: each KV group's metadata is built from its own table",
            "a view would be of another group's blocks",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
            (
                "cache_key in cached_attn_metadata and builder.supports_update_block_table",
                build,
                "cm.block_table_tensor = _get_block_table(kv_cache_gid)",
            ),
            releases,
        )
        for build, releases in (
            ("builder.build(..., common_attn_metadata=common_attn_metadata)", "<0.32"),
            ("attn_group.build_metadata(common_attn_metadata, ubid or 0, **extra_attn_metadata_args)", ">=0.32"),
        )
    ),
    *(
        Invariant(
            "V2: each KV group's metadata is built from its own table",
            "a view would be of another group's blocks",
            "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
            (
                "block_table = block_tables[i]",
                "CommonAttentionMetadata(..., block_table_tensor=block_table, slot_mapping=slot_mapping)",
                build,
            ),
            releases,
        )
        for build, releases in (
            ("attn_metadata_builder.build(..., common_attn_metadata=common_attn_metadata)", "<0.32"),
            (
                "attn_group.build_metadata(common_attn_metadata, ubatch_idx, **attn_metadata_extra_kwargs)",
                ">=0.32",
            ),
        )
    ),
    Invariant(
        "a layer's implementation gets the metadata of its name, in sixth place",
        "attention would read tables as if no block were gone",
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        (
            "attn_metadata, self, kv_cache, _ = get_attention_context(layer_name)",
            "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, ..., output=output)",
        ),
    ),
    Invariant(
        "weights are loaded after a model is built, and packed after that",
        "heads would stay in the checkpoint's order, under a plan for another",
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        (
            "model = ...",
            "self.load_weights(model, model_config)",
            "process_weights_after_loading(model, ...)",
        ),
    ),
    Invariant(
        "the front end decodes messages as the type that its module names",
        "usage and counts of eviction would be dropped unseen",
        "vllm.v1.engine.core_client:MPClient.__init__",
        ("self.decoder = MsgpackDecoder(EngineCoreOutputs)",),
    ),
    Invariant(
        "latents are read through the table and lengths that the builder gets",
        "a chunk of a prompt would read a context with holes, or of another length",
        "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder.build",
        (
            "block_table_tensor = common_attn_metadata.block_table_tensor",
            "seq_lens = common_attn_metadata.seq_lens",
            "seq_lens_cpu = common_attn_metadata.seq_lens_cpu_upper_bound",
            "block_table_tensor[...]",
        ),
    ),
    Invariant(
        "kernel block j of block b is n * b + j",
        "latents beside states would be read from blocks of other requests",
        "vllm.v1.worker.utils:AttentionGroup.map_to_kernel_block_table",
        (
            "blocks_per_kv_block = self.kv_cache_spec.block_size // self.kernel_block_size",
            "torch.add(self.kernel_block_offsets, block_table.unsqueeze(-1), "
            "alpha=self.kernel_block_stride or blocks_per_kv_block, out=...)",
        ),
        releases=">=0.32",
    ),
    Invariant(  # the plugin refuses smaller kernel blocks in these (`versions.splits_in_builders`)
        "kernel block j of block b is n * b + j",
        "latents beside states would be read from blocks of other requests",
        "vllm.v1.worker.block_table:BlockTable.map_to_kernel_blocks",
        ("kv_manager_block_ids.reshape(-1, 1) * blocks_per_kv_block + kernel_block_arange",),
        releases="<0.32",
    ),
    Invariant(
        "OffloadingConnector stores no more of a request than its limit",
        "blocks computed over holes would be stored under the hashes of their tokens",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
        "OffloadingConnectorScheduler._calc_num_offloadable_tokens",
        ("max_offload_tokens = req_status.max_offload_tokens", "num = min(num, max_offload_tokens)", "return num"),
    ),
    Invariant(
        "OffloadingConnector passes over block 0",
        "it would store blocks that other requests have by now, under the hash of the block that was evicted",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
        "OffloadingConnectorScheduler._build_store_jobs",
        ("if block_id == 0:\n    continue", "new_offload_keys.append(offload_key)"),
    ),
    *(
        Invariant(
            "OffloadingConnector finishes the stores of fenced blocks that are handed out",
            "a block would be written before it is stored",
            f"vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler.{function}",
            (
                "self._block_id_to_pending_jobs.keys().isdisjoint(self._current_batch_allocated_block_ids)",
                "OffloadingConnectorMetadata(..., jobs_to_flush=self._current_batch_jobs_to_flush)",
                "self._current_batch_allocated_block_ids = set()",
            ),
            releases,
        )
        for function, releases in (
            ("build_connector_meta", "<0.33"),
            ("_build_connector_meta", ">=0.33"),
        )
    ),
    Invariant(
        "SimpleCPUOffloadConnector stores blocks by their own hashes",
        "blocks computed over holes would be stored",
        "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler._process_store_completion",
        ("primary_hash = gpu_block.block_hash",),
    ),
    Invariant(
        "frees that are deferred wait for the steps in flight",
        "a connector would load into blocks that a step still reads",
        "vllm.v1.core.sched.scheduler:Scheduler._drain_deferred_frees",
        ("fence > self.processed_step_seq", "self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))"),
    ),
]

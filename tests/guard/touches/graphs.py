"""Full CUDA graphs, on both model runners."""

from .touch import Touch

GRAPHS = [
    Touch(
        "vllm.config:CUDAGraphMode",
        ("integration.graphs",),
        "whether vLLM has chosen a full graph",
        moved="vllm.config.compilation:CUDAGraphMode",
        has=("FULL = 2",),
    ),
    Touch(
        "vllm.forward_context:BatchDescriptor",
        ("integration.graphs",),
        "V1: key of a graph; one of a subclass is another key",
        has=("num_tokens: int",),
    ),
    Touch(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
        ("integration.graphs",),
        "V1: one a runner; an instance is given our class",
        has=("cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]]",),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.initialize_cudagraph_keys",
        ("integration.graphs",),
        "V1: descriptors of the graphs to capture; those of ours are added after it",
        replaced_by=("vllm_evict.integration.graphs:EvictionDispatcher.initialize_cudagraph_keys",),
        does=("self.add_cudagraph_key(CUDAGraphMode.FULL, ...)",),
    ),
    Touch(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
        ("integration.graphs",),
        "V1: chooses a step's graph; asked again without full ones where none does",
        replaced_by=("vllm_evict.integration.graphs:EvictionDispatcher.dispatch",),
        does=("allowed_modes -= invalid_modes", "return CUDAGraphMode.FULL, batch_desc_to_check"),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._capture_cudagraphs",
        ("integration.graphs",),
        "V1: captures graph after graph through the instance",
        does=("self._warmup_and_capture(batch_desc, ...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
        ("integration.graphs",),
        "V1: wrapped, so that views know the graph; its dummy runs choose it by dispatch",
        first=("desc", "cudagraph_runtime_mode"),
        replaced_by=("vllm_evict.integration.graphs:install_v1._warmup_and_capture",),
        does=("self._dummy_run(...)", "self._dummy_run(...)"),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        ("integration.graphs", "compute.runtime"),
        "V1: chooses the graph of a step after its requests are known, before its metadata is built",
        does=(
            "self.cudagraph_dispatcher.dispatch(...)",
            "cudagraph_mode, batch_descriptor = dispatch_cudagraph(num_tokens, ...)",
            "coordinate_batch_across_dp(..., cudagraph_mode=cudagraph_mode.value)",
            "cudagraph_mode, batch_descriptor = dispatch_cudagraph(num_tokens_padded, "
            "valid_modes={CUDAGraphMode(synced_cudagraph_mode)})",
        ),
    ),
    Touch(
        "vllm.compilation.cuda_graph:CUDAGraphWrapper.__call__",
        ("integration.graphs",),
        "V1: keeps full graphs by their descriptors, ours too",
        does=("batch_descriptor not in self.concrete_cudagraph_entries", "entry.cudagraph.replay()"),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
        ("integration.graphs",),
        "V2: key of a graph; one of a subclass is another key",
        has=("cg_mode: CUDAGraphMode", "num_tokens: int"),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        ("integration.graphs",),
        "V2: keeps graphs by descriptors; an instance is given our class",
        has=(
            "graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]",
            "_capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        ("integration.graphs",),
        "V2: made with the manager; what is added to descriptors to capture is no candidate of its own",
        does=("self._capture_descs[mode] = descs", "self._candidates.setdefault(key, []).extend(matching)"),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.capture",
        ("integration.graphs",),
        "V2: has a graph's inputs made, twice, and its forward called after each time",
        first=("create_forward_fn",),
        replaced_by=("vllm_evict.integration.graphs:install_v2.Capturing.capture",),
        does=(
            "forward_fn = create_forward_fn(desc, warmup=True)",
            "forward_fn(CUDAGraphMode.NONE)",
            "forward_fn = create_forward_fn(desc, warmup=False)",
            "forward_fn(CUDAGraphMode.NONE)",
            "self.graphs[desc] = graph",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
        ("integration.graphs",),
        "V2: one a runner",
        bases=("CudaGraphManager",),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.capture",
        ("integration.graphs",),
        "V2: how inputs are made; calls the class behind it",
        does=("super().capture(create_forward_fn, progress_bar_desc)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
        ("integration.graphs",),
        "V2: chooses a step's graph, and again with what data-parallel ranks have agreed on",
        first=("num_reqs", "num_tokens", "uniform_token_count"),
        replaced_by=("vllm_evict.integration.graphs:install_v2.EvictionGraphs.dispatch",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        ("integration.graphs",),
        "V2: says how many tokens all of a batch's requests have, None if they differ or no full graph will do",
        replaced_by=("vllm_evict.integration.graphs:install_v2.gather_batch_req_state",),
        does=("return (None, get_uniform_decode_token_count(...))",),
    ),
    Touch(
        "vllm.v1.worker.gpu.dp_utils:sync_cudagraph_and_dp_padding",
        ("integration.graphs",),
        "V2: ranks agree on the least mode and on one count of tokens a request; where it is no graph, nothing is "
        "dispatched again",
        does=(
            "tensor[2][dp_rank] = uniform_token_count or 0",
            "synced_uniform_token_count = None",
            "synced_cg_mode = CUDAGraphMode(int(cg_mode_across_dp.min()))",
            "synced_cg_mode == CUDAGraphMode.NONE",
            "synced_desc = cudagraph_manager.dispatch(num_reqs, synced_num_tokens, synced_uniform_token_count, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:_is_compatible",
        ("integration.graphs",),
        "V2: full graphs of decodes want their uniform count of tokens",
        does=("desc.uniform_token_count is None or desc.uniform_token_count == uniform_token_count",),
    ),
    Touch(
        "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture",
        ("integration.graphs", "compute.group"),
        "V2: metadata of a capture comes from the builders, through the view",
        does=("attn_metadata = model_state.prepare_attn(...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        ("integration.graphs",),
        "V2: makes the manager, for profiling and again for good",
        replaced_by=("vllm_evict.integration.graphs:install_v2.initialize_kv_cache",),
        does=("self.cudagraph_manager = ModelCudaGraphManager(...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        ("compute.group", "integration.graphs"),
        "V2: a full graph's metadata has rows of padding, without tokens; wrapped, as it hears of the step's mode",
        first=("input_batch", "cudagraph_mode"),
        replaced_by=("vllm_evict.integration.graphs:install_v2.prepare_attn",),
        does=("cudagraph_mode == CUDAGraphMode.FULL", "num_reqs = input_batch.num_reqs_after_padding"),
    ),
]

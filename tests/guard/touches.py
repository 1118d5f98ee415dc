"""Everything of vLLM that vllm_evict relies on, and why.

Each entry names one thing of vLLM as we would import it. What it asks for has to hold in every release that
vllm_evict.compat.versions lists: tests/test_compat.py checks it in the installed one and in the snapshots of all.
In code that is asked for, `...` stands for anything (see `source`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Touch:
    """One class, function or value of vLLM, and what has to be true of it.

    Attributes:
        where: "module:name"; "module:" for the module itself.
        moved: the same, in releases that have it elsewhere.
        by: modules of vllm_evict that rely on it, without the package's name.
        why: what for.
        bases: classes that it inherits from, directly or not.
        has: attributes of its instances: `x`, `x = value`, `x: type`; methods: `x()`.
        takes_attributes: its instances can be given attributes of ours (no slots, not frozen).
        implemented_by: our subclass, which has to define all its abstract methods.
        kind: decorator that it must have.
        first: names of its first parameters, where ours take or pass them in this order.
        calls: how we call it; `...` for each positional argument.
        replaced_by: our functions in its place, which must take every call that it takes.
        does: code in its body, in this order.
        value: the value.
    """

    where: str
    by: tuple[str, ...]
    why: str
    bases: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    takes_attributes: bool = False
    implemented_by: str = ""
    kind: str = ""
    first: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()
    does: tuple[str, ...] = ()
    value: str | None = None
    moved: str = ""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]


#: Strings in vllm_evict that look like modules of vLLM and are none.
NO_TOUCH = {"vllm.evict": "name of the scheduler's logger"}

ENTRY_POINTS = [
    Touch(
        "vllm.plugins:DEFAULT_PLUGINS_GROUP",
        ("plugin",),
        "pyproject.toml names `register` in this group",
        value="'vllm.general_plugins'",
    ),
    Touch(
        "vllm.plugins:PLATFORM_PLUGINS_GROUP",
        ("plugin",),
        "pyproject.toml names `platform` in this group",
        value="'vllm.platform_plugins'",
    ),
    Touch(
        "vllm.plugins:load_plugins_by_group",
        ("plugin",),
        "VLLM_PLUGINS can leave the plugin out",
        does=("allowed_plugins = envs.VLLM_PLUGINS",),
    ),
    Touch(
        "vllm.plugins:load_general_plugins",
        ("plugin",),
        "calls `register`",
        does=("load_plugins_by_group(group=DEFAULT_PLUGINS_GROUP)", "func()"),
    ),
    Touch(
        "vllm.platforms:resolve_current_platform_cls_qualname",
        ("plugin",),
        "calls `platform` before EngineArgs exists, and takes None for a no",
        does=(
            "load_plugins_by_group(PLATFORM_PLUGINS_GROUP)",
            "platform_cls_qualname = func()",
            "platform_cls_qualname is not None",
        ),
    ),
    Touch(
        "vllm.v1.engine.core:EngineCore.__init__",
        ("plugin",),
        "loads the plugin in the engine core's process",
        does=("load_general_plugins()", "self.scheduler = ..."),
    ),
    Touch(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
        ("plugin", "worker.cpu"),
        "loads the plugin in each worker's process, and makes the worker that `worker_cls` names",
        does=("load_general_plugins()", "resolve_obj_by_qualname(parallel_config.worker_cls)"),
    ),
    Touch("vllm:__version__", ("plugin",), "what is checked against the tested releases"),
]

ARGUMENTS = [
    Touch("vllm.engine.arg_utils:", ("plugin",), "hooked when it is imported"),
    Touch(
        "vllm.engine.arg_utils:EngineArgs",
        ("compat.arguments",),
        "gets `kv_policy`, as a keyword and as an attribute",
        has=("additional_config",),
        takes_attributes=True,
    ),
    Touch(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        ("compat.arguments",),
        "has an __init__ of its own, which needs the keyword too",
        bases=("EngineArgs",),
    ),
    Touch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        ("compat.arguments",),
        "gets --kv-policy",
        kind="staticmethod",
        replaced_by=("vllm_evict.compat.arguments:_with_flag.with_flag",),
        does=("return parser",),
    ),
    Touch(
        "vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args",
        ("compat.arguments",),
        "the server's parser: the plugin is loaded first, then EngineArgs adds its flags and ours",
        kind="staticmethod",
        does=("load_general_plugins()", "EngineArgs.add_cli_args(parser)"),
    ),
    Touch(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        ("compat.arguments",),
        "takes dataclass fields from the namespace; `kv_policy` is none and is added",
        kind="classmethod",
        replaced_by=("vllm_evict.compat.arguments:_with_namespace.with_namespace",),
        does=("dataclasses.fields(cls)", "return engine_args"),
    ),
    Touch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        ("compat.arguments",),
        "carries the policy in `additional_config`, and its result is activated",
        replaced_by=("vllm_evict.compat.arguments:_with_policy.with_policy",),
        does=("VllmConfig(..., additional_config=self.additional_config)", "return config"),
    ),
    Touch(
        "vllm.entrypoints.llm:LLM.__init__",
        ("compat.arguments",),
        "passes keywords that it does not know on to EngineArgs: LLM(kv_policy=...)",
        does=("EngineArgs(..., **kwargs)", "LLMEngine.from_engine_args(..., engine_args=engine_args)"),
    ),
    Touch(
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args",
        ("compat.arguments",),
        "turns --kv-policy.name h2o into a JSON object",
        does=("json.dumps(...)",),
    ),
]

CONFIGURATION = [
    Touch(
        "vllm.config:VllmConfig",
        ("plugin", "compat.layers", "compat.refusals", "compat.reorder", "core.spec", "core.scheduler"),
        "what is activated, refused and read",
        has=(
            "load_config: LoadConfig",
            "lora_config",
            "model_config: ModelConfig",
            "cache_config: CacheConfig",
            "parallel_config: ParallelConfig",
            "scheduler_config: SchedulerConfig",
            "device_config: DeviceConfig",
            "speculative_config",
            "kv_transfer_config",
            "ec_transfer_config",
            "compilation_config: CompilationConfig",
            "additional_config: dict | SupportsHash",
            "max_in_flight_tokens",
            "use_v2_model_runner",
        ),
    ),
    Touch(
        "vllm.config.compilation:CompilationConfig",
        ("compat.layers",),
        "all layers by name, in the order in which they were put in; ours stand among them",
        has=("static_forward_context: dict[str, Any]",),
    ),
    Touch(
        "vllm.config.vllm:VllmConfig.compute_hash",
        ("compat.layers",),
        "compiled graphs are kept by it: those of layers whose heads are split don't write the cache",
        does=("json.dumps(additional_config, ...)", "vllm_factors.append(additional_config_hash)"),
    ),
    Touch(
        "vllm.config.vllm:VllmConfig.max_in_flight_tokens",
        ("core.manager", "core.scheduler", "core.spec"),
        "blocks that a request may hold above its budget while steps are in flight",
        kind="property",
        does=("self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens",),
    ),
    Touch(
        "vllm.config.scheduler:SchedulerConfig",
        ("plugin", "compat.layers", "compat.refusals", "core.scheduler"),
        "the scheduler's class is named here",
        has=("async_scheduling: bool | None", "scheduler_cls", "max_num_seqs"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        ("plugin", "core.scheduler"),
        "None is vLLM's own scheduler, a string is resolved",
        does=(
            "self.scheduler_cls is None",
            "return AsyncScheduler",
            "return Scheduler",
            "return resolve_obj_by_qualname(self.scheduler_cls)",
        ),
    ),
    Touch(
        "vllm.config.parallel:ParallelConfig",
        ("plugin", "compat.layers", "compat.refusals"),
        "the worker's class is named here; what is refused; among how many ranks heads are spread",
        has=(
            "worker_cls: str",
            "tensor_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "pipeline_parallel_size",
            "enable_dbo",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.config.cache:CacheConfig",
        ("plugin", "compat.frontend", "compat.layers", "compat.refusals"),
        "block size, and what is refused",
        has=("block_size: int", "cache_dtype", "kv_sharing_fast_prefill"),
    ),
    Touch(
        "vllm.config.model:ModelConfig",
        ("plugin", "compat.frontend", "compat.layers", "compat.refusals", "core.spec"),
        "lengths and names, and what is refused",
        has=(
            "max_model_len",
            "served_model_name",
            "hf_text_config",
            "runner_type",
            "use_mla",
            "is_hybrid",
            "has_inner_state",
            "is_attention_free",
            "is_encoder_decoder",
            "is_mm_prefix_lm",
            "is_diffusion",
            "get_sliding_window()",
            "get_total_num_kv_heads()",
        ),
    ),
    Touch("vllm.config.device:DeviceConfig", ("compat.refusals",), "which platform", has=("device_type",)),
    Touch(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        ("plugin",),
        "names the worker that ours takes the place of",
        does=("parallel_config.worker_cls = 'vllm.v1.worker.cpu_worker.CPUWorker'",),
    ),
    Touch(
        "vllm.config:get_layers_from_vllm_config",
        ("compat.layers", "compat.reorder"),
        "the attention layers of the loaded model, by name, in their order: KV groups come in that of our pages",
        calls=("get_layers_from_vllm_config(..., ...)",),
        does=(
            "forward_context = vllm_config.compilation_config.static_forward_context",
            "layer_names = forward_context.keys()",
            "return {layer_name: layer for layer_name in layer_names if ...}",
        ),
    ),
    Touch(
        "vllm.logger:init_logger",
        ("core.scheduler", "core.reconstruction"),
        "start-up line and warnings in vLLM's log",
        calls=("init_logger(...)",),
    ),
]

FRONT_END = [
    Touch("vllm.v1.engine.input_processor:", ("plugin",), "hooked when it is imported"),
    Touch(
        "vllm.v1.engine.input_processor:InputProcessor",
        ("compat.frontend",),
        "knows the server's policy",
        has=("vllm_config",),
    ),
    Touch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        ("compat.frontend",),
        "requests are checked where vLLM checks them",
        replaced_by=("vllm_evict.compat.frontend:hook_input_processor.checked",),
        does=("return EngineCoreRequest(...)",),
    ),
    Touch(
        "vllm.v1.engine:EngineCoreRequest",
        ("compat.frontend",),
        "a request's length and extra arguments",
        has=("prompt_token_ids: list[int] | None", "prompt_embeds", "sampling_params: SamplingParams | None"),
    ),
    Touch(
        "vllm.sampling_params:SamplingParams",
        ("compat.frontend", "core.scheduler", "core.reconstruction"),
        "`kv_policy` and `kv_budget` of a request; a shadow has its own",
        has=("extra_args: dict[str, Any] | None",),
    ),
    Touch(
        "vllm.exceptions:VLLMValidationError",
        ("compat.frontend",),
        "is answered with HTTP 400",
        bases=("VLLMClientError",),
    ),
    Touch(
        "vllm.exceptions:VLLMValidationError.__init__",
        ("compat.frontend",),
        "names the field that is wrong",
        calls=("error(..., parameter=...)",),
    ),
    Touch("vllm.v1.engine.async_llm:", ("plugin",), "hooked when it is imported"),
    Touch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        ("compat.frontend",),
        "makes the generator of a request; a bad one is refused before",
        first=("prompt", "sampling_params"),
    ),
    Touch("vllm.v1.engine.output_processor:", ("plugin",), "hooked when it is imported"),
    Touch(
        "vllm.outputs:RequestOutput.add",
        ("compat.frontend",),
        "merges streamed outputs that nobody has read yet; the usage has to survive",
        first=("next_output", "aggregate"),
    ),
    Touch(
        "vllm.outputs:RequestOutput",
        ("compat.frontend",),
        "gets `kv_usage`",
        has=("outputs",),
        takes_attributes=True,
    ),
    Touch("vllm.outputs:CompletionOutput", ("compat.frontend",), "gets `kv_usage`", takes_attributes=True),
    Touch(
        "vllm.v1.engine.output_processor:RequestState",
        ("compat.frontend",),
        "keeps the usage until its output is made",
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.engine.output_processor:RequestState.make_request_output",
        ("compat.frontend",),
        "takes the usage out of the transfer parameters, before outputs are made",
        first=("new_token_ids", "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params"),
        replaced_by=("vllm_evict.compat.frontend:hook_output_processor.with_usage",),
        does=("self._new_completion_output(new_token_ids, finish_reason, stop_reason)",),
    ),
    Touch(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ("compat.frontend",),
        "each completion of a request gets its usage",
        replaced_by=("vllm_evict.compat.frontend:hook_output_processor.completion_with_usage",),
        does=("return CompletionOutput(...)",),
    ),
    Touch(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        ("compat.frontend",),
        "hands on what the scheduler put into the transfer parameters",
        does=(
            "kv_transfer_params = engine_core_output.kv_transfer_params",
            "req_state.make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, "
            "kv_transfer_params, ...)",
        ),
    ),
    Touch(
        "vllm.v1.engine:EngineCoreOutput",
        ("core.scheduler",),
        "carries the usage out of the engine core",
        has=("kv_transfer_params: dict[str, Any] | None",),
    ),
    Touch("vllm.v1.metrics.loggers:", ("plugin",), "hooked when it is imported"),
    Touch(
        "vllm.v1.metrics.loggers:StatLoggerManager",
        ("compat.frontend",),
        "keeps our metrics",
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        ("compat.frontend",),
        "makes our metrics, after vLLM's Prometheus logger has unregistered what was there",
        first=("vllm_config",),
        replaced_by=("vllm_evict.compat.frontend:hook_loggers.with_metrics",),
        does=("PrometheusStatLogger(vllm_config, ...)",),
    ),
    Touch(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        ("compat.frontend",),
        "gets the scheduler's counts, and the engine by keyword",
        first=("scheduler_stats",),
        calls=("record(..., ..., engine_idx=...)",),
        replaced_by=("vllm_evict.compat.frontend:hook_loggers.recorded",),
    ),
    Touch(
        "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",
        ("compat.frontend",),
        "passes the engine's index by keyword: the label of our metrics",
        does=("logger_ref[0].record(..., engine_idx=outputs.engine_index, scheduler_stats=outputs.scheduler_stats)",),
    ),
    Touch(
        "vllm.v1.metrics.prometheus:unregister_vllm_metrics",
        ("metrics",),
        "unregisters ours by their prefix too, so that engines can follow each other",
        does=("collector._name.startswith('vllm:')",),
    ),
    Touch(
        "vllm.v1.metrics.stats:SchedulerStats",
        ("compat.frontend", "core.scheduler"),
        "carries our counts from the scheduler to /metrics; without a KV connector nothing else uses the field",
        has=("kv_connector_stats: dict[str, Any] | None",),
        takes_attributes=True,
    ),
]

SCHEDULER = [
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler",
        ("core.scheduler", "core.reconstruction"),
        "subclassed",
        has=(
            "vllm_config",
            "scheduler_config",
            "kv_cache_config",
            "kv_cache_manager",
            "max_model_len",
            "max_num_running_reqs",
            "waiting",
            "current_step",
            "requests: dict[str, Request]",
            "running: list[Request]",
            "use_v2_model_runner",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        ("core.scheduler",),
        "subclassed; overrides nothing that ours does, so both orders of inheritance are the same",
        bases=("Scheduler",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        ("core.scheduler",),
        "makes the KV cache manager that ours is bound to",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.__init__",),
        does=(
            "self.kv_cache_manager = KVCacheManager(..., max_in_flight_tokens=vllm_config.max_in_flight_tokens)",
            "self.use_v2_model_runner = vllm_config.use_v2_model_runner",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
        ("core.scheduler",),
        "a request's residency begins here; a later chunk of a streaming session comes under the same id",
        calls=("add_request(...)",),
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.add_request",),
        does=(
            "existing = self.requests.get(request.request_id)",
            "self.requests[request.request_id] = request",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        ("core.scheduler", "core.manager"),
        "allocates, makes the output that carries the plan, and only then counts its tokens",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.schedule",),
        does=(
            "self.kv_cache_manager.allocate_slots(request, num_new_tokens, ...)",
            "self._preempt_request(preempted_req, ...)",
            "self.kv_cache_manager.allocate_slots(..., full_sequence_must_fit=...)",
            "self.running.append(request)",
            "scheduler_output = SchedulerOutput(...)",
            "self._update_after_schedule(scheduler_output)",
            "return scheduler_output",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
        ("core.scheduler",),
        "tokens of planned steps are counted as computed, and as in flight until their output is there",
        does=(
            "request.num_computed_tokens += num_scheduled_token",
            "request.num_in_flight_tokens += num_scheduled_token",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("core.scheduler",),
        "we decide after it: its tokens are no longer in flight, requests that ended are gone, stats are made",
        first=("scheduler_output", "model_runner_output"),
        calls=("update_from_output(..., ...)",),
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.update_from_output",),
        does=(
            "request.num_in_flight_tokens -= num_tokens_scheduled",
            "kv_transfer_params, ec_transfer_params = self._free_request(request)",
            "EngineCoreOutput(..., kv_transfer_params=kv_transfer_params)",
            "self.make_stats(...)",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._free_request",
        ("core.scheduler",),
        "each request ends here, once; returns its transfer parameters, in which the usage travels",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin._free_request",),
        does=("self._free_blocks(request)", "return kv_xfer_params, ec_xfer_params"),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
        ("core.scheduler",),
        "a hit is as long as the pool can hold it; its tokens come second",
        first=("request",),
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin._get_local_prefix_cache_hit",),
        does=(
            "self.kv_cache_manager.get_computed_blocks(request, ...)",
            "return blocks, num_local, shared_prefix_boundary, False",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        ("core.scheduler",),
        "looks for a hit that leaves a token to compute; ours looks for a shorter one in the same way",
        does=(
            "request.num_tokens - 1",
            "self.coordinator.find_longest_cache_hit(request.block_hashes, max_cache_hit_length)",
            "self.create_kv_cache_blocks(computed_blocks)",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks",
        ("core.scheduler",),
        "a hit of which streaming heads take less",
        calls=("create_kv_cache_blocks(...)",),
        does=("KVCacheBlocks(blocks)",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
        ("core.scheduler",),
        "the blocks of each KV group",
        has=("blocks: tuple[Sequence[KVCacheBlock], ...]",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids",
        ("worker.runtime",),
        "what workers are told of a table: holes are in it, with their id",
        does=("tuple(([blk.block_id for blk in group] for group in groups))",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks",
        ("core.scheduler",),
        "shortens a hit",
        calls=("truncate_computed_blocks(..., ...)",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks",
        ("core.scheduler",),
        "each request's table goes here, when it ends and when it is preempted",
        first=("request",),
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin._free_request_blocks",),
        does=("self.kv_cache_manager.free(request)",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
        ("core.scheduler",),
        "an aborted request ends in _free_request too; a shadow is aborted with it, between two steps or after one",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.finish_requests",),
        does=(
            "self.running = remove_all(self.running, ...)",
            "self.waiting.remove_requests(waiting_requests_to_remove)",
            "self._free_request(request, ...)",
            "return valid_requests",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.pause_state",
        ("core.reconstruction",),
        "no shadow begins while new requests are held back",
        kind="property",
    ),
    Touch("vllm.v1.core.sched.interface:PauseState", ("core.reconstruction",), "see there", has=("UNPAUSED",)),
    Touch(
        "vllm.v1.core.sched.request_queue:RequestQueue.remove_request",
        ("core.reconstruction",),
        "a shadow is taken from behind those that wait",
        calls=("remove_request(...)",),
    ),
    Touch(
        "vllm.v1.core.sched.request_queue:RequestQueue.prepend_request",
        ("core.reconstruction",),
        "and put before them; a priority queue sorts it in",
        calls=("prepend_request(...)",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
        ("core.scheduler", "core.manager"),
        "frees the blocks, through the manager, and starts the request over",
        does=(
            "self._free_request_blocks(request)",
            "request.status = RequestStatus.PREEMPTED",
            "request.num_computed_tokens = 0",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
        ("core.scheduler",),
        "may preempt requests between two steps; they come back in the very next one, with new tables",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.reset_prefix_cache",),
        does=("self._preempt_request(request, timestamp, drop_stale_output=True)",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session",
        ("core.scheduler", "worker.runtime"),
        "the next chunk of a streaming session is scheduled as a new request, with the blocks and holes that it has",
        does=("session.status = RequestStatus.WAITING",),
    ),
    Touch(
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        ("core.scheduler",),
        "our counts are added to its result, which is None without statistics",
        replaced_by=("vllm_evict.core.scheduler:EvictionMixin.make_stats",),
        does=("return None", "return SchedulerStats(..., kv_connector_stats=...)"),
    ),
    Touch(
        "vllm.v1.engine.core:EngineCore.step",
        ("core.scheduler", "worker.worker"),
        "one step: planned, run by the workers, sampled, taken in",
        does=(
            "self.scheduler.schedule(...)",
            "self.model_executor.execute_model(scheduler_output, ...)",
            "self.model_executor.sample_tokens(...)",
            "self.scheduler.update_from_output(scheduler_output, model_output)",
        ),
    ),
    Touch(
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        ("core.scheduler", "worker.worker"),
        "async scheduling: steps are run in the order in which they were planned",
        does=(
            "self.scheduler.schedule(...)",
            "self.model_executor.execute_model(scheduler_output, ...)",
            "self.model_executor.sample_tokens(...)",
            "batch_queue.appendleft(...)",
            "batch_queue.pop()",
            "self.scheduler.update_from_output(scheduler_output, model_output)",
        ),
    ),
    Touch(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("core.scheduler", "core.plan", "worker.runtime"),
        "carries the plan to the workers",
        has=(
            "scheduled_new_reqs: list[NewRequestData]",
            "scheduled_cached_reqs: CachedRequestData",
            "num_scheduled_tokens: dict[str, int]",
            "finished_req_ids: set[str]",
            "preempted_req_ids: set[str] | None",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.core.sched.output:NewRequestData",
        ("core.scheduler", "worker.runtime"),
        "requests that start with this step",
        has=("req_id: str", "num_computed_tokens: int", "block_ids: tuple[list[int], ...]"),
    ),
    Touch(
        "vllm.v1.core.sched.output:CachedRequestData",
        ("core.scheduler", "worker.runtime"),
        "requests that go on; those that were preempted come with a whole new table",
        has=(
            "req_ids: list[str]",
            "resumed_req_ids: set[str]",
            "new_block_ids: list[tuple[list[int], ...] | None]",
            "num_computed_tokens: list[int]",
        ),
    ),
    Touch(
        "vllm.v1.engine:EngineCoreOutputs",
        ("core.scheduler", "core.reconstruction"),
        "update_from_output's result, one for each client; shadows are taken out of it",
        has=("outputs: list[EngineCoreOutput]", "finished_requests: set[str] | None"),
    ),
    Touch(
        "vllm.v1.request:Request",
        ("core.scheduler", "core.manager", "core.reconstruction"),
        "what is decided about; shadows are made like those that clients send",
        has=(
            "prompt_embeds",
            "mm_features",
            "lora_request",
            "cache_salt",
            "client_index",
            "block_hashes: list[BlockHash]",
            "_block_hasher",
            "request_id",
            "status",
            "sampling_params",
            "max_tokens",
            "resumable",
            "prompt_token_ids",
            "num_prompt_tokens",
            "num_computed_tokens = 0",
            "num_in_flight_tokens = 0",
        ),
    ),
    Touch(
        "vllm.v1.request:Request.__init__",
        ("core.reconstruction",),
        "makes a shadow",
        calls=(
            "Request(..., ..., ..., ..., client_index=0, lora_request=None, cache_salt=None, priority=0, block_hasher=None)",
        ),
        does=("self.update_block_hashes()",),
    ),
    Touch(
        "vllm.v1.request:RequestStatus",
        ("core.scheduler", "core.reconstruction"),
        "only running requests evict",
        has=("RUNNING", "WAITING", "FINISHED_ABORTED"),
    ),
]

BLOCKS = [
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        ("core.scheduler",),
        "holds our manager",
        has=("coordinator", "block_pool", "watermark_blocks"),
    ),
    Touch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        ("core.manager", "core.scheduler"),
        "asks what a request needs, takes prefix hits, allocates, then publishes what the step will have computed; "
        "None, with nothing changed, where the pool has too little",
        first=("request",),
        does=(
            "self.coordinator.get_num_blocks_to_allocate(..., apply_admission_cap=True)",
            "required_blocks = num_blocks_to_allocate + watermark_blocks",
            "required_blocks > self.block_pool.get_num_free_blocks()",
            "request.num_in_flight_tokens",
            "self.coordinator.get_num_blocks_to_allocate(...)",
            "available_blocks = self.block_pool.get_num_free_blocks() - reserved_blocks",
            "required_blocks = num_blocks_to_allocate + watermark_blocks",
            "required_blocks > available_blocks",
            "return None",
            "self.coordinator.allocate_new_computed_blocks(...)",
            "self.coordinator.allocate_new_blocks(request.request_id, ...)",
            "self.coordinator.cache_blocks(request, num_tokens_to_cache)",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        ("core.scheduler",),
        "holds our managers, one a KV group",
        has=("single_type_managers = tuple(...)",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.__init__",
        ("core.scheduler",),
        "all managers take their blocks from one pool, in the order of the KV groups",
        does=(
            "self.block_pool = BlockPool(..., num_gpu_blocks=kv_cache_config.num_blocks)",
            "get_manager_for_kv_cache_spec(..., block_pool=self.block_pool, kv_cache_group_id=i)",
            "enumerate(self.kv_cache_config.kv_cache_groups)",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:get_kv_cache_coordinator",
        ("core.manager", "core.scheduler"),
        "KV groups hit together, none without prefix caching",
        does=(
            "return KVCacheCoordinatorNoPrefixCache(...)",
            "len(kv_cache_config.kv_cache_groups) == 1",
            "return UnitaryKVCacheCoordinator(...)",
            "return HybridKVCacheCoordinator(...)",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache.find_longest_cache_hit",
        ("core.scheduler",),
        "takes any number of KV groups",
        does=("return blocks, 0, 0",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
        ("core.manager", "compat.layers"),
        "groups of one spec are looked up together, so streaming groups share one. All of ours are full attention, whose "
        "order stays: streaming groups come last",
        does=(
            "enumerate(self.kv_cache_config.kv_cache_groups)",
            "group.spec == spec and ...",
            "group.group_ids.append(i)",
            "self.attention_groups.append(SpecGroup(spec, [i], manager_cls, use_eagle))",
            "self.attention_groups.sort(key=lambda g: not isinstance(g.spec, FullAttentionSpec))",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
        ("core.manager", "core.scheduler"),
        "each spec shortens the hit of those before it, and is looked up once. What is cut off at the end must not be "
        "what streaming heads need: theirs is the last to be found, so nothing is cut off",
        first=("block_hashes", "max_cache_hit_length"),
        calls=("find(..., ...)",),
        does=(
            "curr_hit_length = hit_length",
            "isinstance(spec, FullAttentionSpec) and cached_blocks is not None",
            "curr_hit_length = min(curr_hit_length, hit_length_by_group[first_group_id])",
            "_max_length = curr_hit_length",
            "manager_cls.find_longest_cache_hit(block_hashes=block_hashes, max_length=_max_length, "
            "kv_cache_group_ids=group_ids, block_pool=..., kv_cache_spec=spec, drop_eagle_block=drop_eagle_block, "
            "alignment_tokens=..., dcp_world_size=..., pcp_world_size=...)",
            "curr_hit_length = _new_hit_length",
            "curr_hit_length >= hit_length",
            "del blks[num_blocks:]",
            "return cache_hit_blocks, hit_length, num_uncached_common_prefix_tokens",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks",
        ("core.manager",),
        "each group takes its hit before new blocks are handed out",
        does=(
            "manager.add_local_computed_blocks(request_id, new_computed_blocks[i], num_local_computed_tokens, "
            "num_external_computed_tokens)",
        ),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_blocks",
        ("core.manager",),
        "the tables of all groups grow together",
        does=("manager.allocate_new_blocks(request_id, ..., num_tokens_main_model)", "self.single_type_managers"),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
        ("core.manager",),
        "all groups publish the same tokens",
        does=("enumerate(self.single_type_managers)", "manager.cache_blocks(request, ...)"),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.free",
        ("core.manager",),
        "a request starts over in all groups at once",
        does=("self.single_type_managers", "manager.free(request_id)"),
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:BlockHashList",
        ("core.manager",),
        "a prefix, one hash a block",
        value="list[BlockHash] | BlockHashListWithBlockSize",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
        ("core.manager",),
        "one hash a block, where all groups have blocks of one size and prefix_match_unit says nothing else",
        does=("requested if requested is not None else math.gcd(*hashing_sizes)",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate",
        ("core.manager",),
        "passes the admission cap by keyword, as ours reads it",
        does=(
            "manager.get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks[i], total_computed_tokens, "
            "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=apply_admission_cap, "
            "prefill_end=prefill_end)",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        ("core.manager",),
        "subclassed",
        bases=("SingleTypeKVCacheManager",),
        has=(
            "block_size",
            "block_pool",
            "req_to_blocks: defaultdict[str, list[KVCacheBlock]]",
            "num_cached_block: dict[str, int]",
            "_null_block = block_pool.null_block",
            "kv_cache_spec = kv_cache_spec",
            "kv_cache_group_id = kv_cache_group_id",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.__init__",
        ("core.manager",),
        "extended",
        replaced_by=("vllm_evict.core.manager:EvictableManager.__init__",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_blocks_to_allocate",
        ("core.manager",),
        "a long prompt is admitted with what it holds at most, not with all its blocks",
        first=("request_id", "num_tokens", "new_computed_blocks"),
        replaced_by=("vllm_evict.core.manager:EvictableManager.get_num_blocks_to_allocate",),
        does=("num_required_blocks = cdiv(num_tokens, self.block_size)",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        ("core.manager",),
        "a table's length counts holes, those of a hit too; what the hit takes out of the pool does not",
        does=(
            "num_req_blocks = len(self.req_to_blocks.get(request_id, ()))",
            "len(new_computed_blocks) + num_req_blocks",
            "self._get_num_evictable_blocks(...)",
            "return num_new_blocks + num_evictable_blocks",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager._get_num_evictable_blocks",
        ("core.manager",),
        "passes over holes",
        does=("blk.ref_cnt == 0 and not blk.is_null",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit",
        ("core.manager",),
        "streaming heads need sinks and the window of a prefix; retrieval heads all of it, without a gap",
        kind="classmethod",
        first=("block_hashes", "max_length", "kv_cache_group_ids", "block_pool", "kv_cache_spec"),
        replaced_by=("vllm_evict.core.manager:EvictableManager.find_longest_cache_hit",),
        does=(
            "block_pool.get_cached_block(block_hash, kv_cache_group_ids)",
            "computed.append(cached)",
            "break",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.add_local_computed_blocks",
        ("core.manager",),
        "a request starts with a hit, holes included; what was hit is not published again",
        first=("request_id", "new_computed_blocks"),
        replaced_by=("vllm_evict.core.manager:EvictableManager.add_local_computed_blocks",),
        does=(
            "self.block_pool.touch(new_computed_blocks)",
            "req_blocks.extend(new_computed_blocks)",
            "self.num_cached_block[request_id] = len(req_blocks)",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_skipped_tokens",
        ("core.manager",),
        "the head of a hit stays",
        does=("return 0",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.reachable_block_mask",
        ("core.manager",),
        "all blocks are published, whatever prefix other groups have hit",
        does=("return None",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:resolve_block_hashes",
        ("core.manager",),
        "hashes of whole blocks, where prefixes are hashed finer",
        calls=("resolve_block_hashes(..., ..., ...)",),
        does=("block_size == hash_block_size", "return block_hashes"),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks",
        ("core.manager",),
        "a table grows here and nowhere else; its length counts holes, so it stays what positions say",
        first=("request_id", "num_tokens", "num_tokens_main_model"),
        replaced_by=("vllm_evict.core.manager:EvictableManager.allocate_new_blocks",),
        does=(
            "num_required_blocks - len(req_blocks)",
            "new_blocks = self.block_pool.get_new_blocks(num_new_blocks)",
            "req_blocks.extend(new_blocks)",
        ),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks",
        ("core.manager",),
        "publishes blocks up to a number of tokens: what saw a reduced context is left out by lowering it",
        first=("request", "num_tokens"),
        replaced_by=("vllm_evict.core.manager:EvictableManager.cache_blocks",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
        ("core.manager",),
        "publishes nothing if there are fewer full blocks than were published already",
        does=("num_cached_blocks >= num_full_blocks", "self.block_pool.cache_full_blocks(...)"),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.pop_blocks_for_free",
        ("core.manager",),
        "all of a request's blocks go here: it ended or was preempted",
        first=("request_id",),
        replaced_by=("vllm_evict.core.manager:EvictableManager.pop_blocks_for_free",),
        does=("req_blocks = self.req_to_blocks.pop(request_id, [])",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.free",
        ("core.manager",),
        "goes through pop_blocks_for_free",
        does=("self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool.__init__",
        ("core.manager",),
        "the null block, of which holes are made, is the first: id 0",
        does=(
            "self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)",
            "self.null_block = self.free_block_queue.popleft()",
        ),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool",
        ("core.manager", "core.scheduler"),
        "the pool of all KV groups",
        has=("null_block", "num_gpu_blocks = num_gpu_blocks"),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool.get_cached_block",
        ("core.manager",),
        "a block of each group, or None if one lacks it",
        first=("block_hash", "kv_cache_group_ids"),
        calls=("get_cached_block(..., ...)",),
        does=("group_id", "return None", "return cached_blocks"),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool.touch",
        ("core.manager",),
        "passes over the holes of a hit: the null block is in no queue",
        does=("block.is_null", "self.free_block_queue.remove(block)", "block.ref_cnt += 1"),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
        ("core.manager",),
        "takes evicted blocks back; passes over the holes of a request that ends",
        calls=("free_blocks(...)",),
        does=("block.is_null",),
    ),
    Touch(
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        ("core.manager",),
        "publishes no hole",
        does=("blk.is_null",),
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        ("core.manager", "core.scheduler"),
        "whether an evicted block is free, and whether it may still be hit",
        has=("block_id: int", "ref_cnt: int", "block_hash", "is_null: bool"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        ("core.scheduler", "compat.layers"),
        "the KV groups, in order",
        has=("kv_cache_groups: list[KVCacheGroupSpec]",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        ("core.scheduler", "compat.layers"),
        "its layers and spec",
        has=("layer_names: list[str]", "kv_cache_spec: KVCacheSpec"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:KVCacheSpec",
        ("core.spec",),
        "the specs that ours may meet",
        has=("block_size: int", "page_size_bytes", "is_uniform_with_collection()"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:AttentionSpec",
        ("attention.backend",),
        "what a backend customizes and builds for",
        bases=("KVCacheSpec",),
        has=("block_size: int", "num_kv_heads: int", "page_size_bytes"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        ("core.spec", "attention.backend"),
        "subclassed",
        bases=("AttentionSpec",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes",
        ("core.spec",),
        "what vLLM takes a request to need: bounded by the budget",
        first=("vllm_config",),
        replaced_by=("vllm_evict.core.spec:EvictableSpec.max_memory_usage_bytes",),
        does=("cdiv(max_model_len, self.block_size) * self.page_size_bytes",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:FullAttentionSpec.merge",
        ("core.spec",),
        "rebuilds the spec as our class, from vLLM's own fields only",
        kind="classmethod",
        first=("specs",),
        replaced_by=("vllm_evict.core.spec:EvictableSpec.merge",),
        does=("merged_spec = cls(..., block_size=specs[0].block_size)", "return merged_spec"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:FullAttentionSpec.is_uniform_with_collection",
        ("core.spec",),
        "whether layers with pages of different sizes share a block table: not those of different head classes",
        first=("kv_cache_specs",),
        replaced_by=("vllm_evict.core.spec:EvictableSpec.is_uniform_with_collection",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.is_uniform_type",
        ("core.spec",),
        "asks our spec",
        does=("return first_spec.is_uniform_with_collection(kv_cache_specs)",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.from_specs",
        ("core.spec",),
        "None where it says no",
        does=("cls.is_uniform_type(kv_cache_specs)", "return None"),
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:get_kv_cache_groups",
        ("core.spec", "compat.layers"),
        "the order of questions: one spec, one type of specs, pages of several sizes, specs that can be merged",
        does=(
            "is_kv_cache_spec_uniform(kv_cache_spec)",
            "return _get_kv_cache_groups_uniform_spec(kv_cache_spec)",
            "UniformTypeKVCacheSpecs.from_specs(kv_cache_spec)",
            "_get_packed_kv_cache_groups(vllm_config, filtered_spec)",
            "filtered_spec = unify_kv_cache_spec_page_size(filtered_spec)",
            "groups = _get_kv_cache_groups_uniform_page_size(filtered_spec)",
            "return groups",
        ),
        moved="vllm.v1.core.kv_cache_planning:get_kv_cache_groups",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:is_kv_cache_spec_uniform",
        ("core.spec",),
        "asks by merging; an AssertionError is a no",
        does=("kv_cache_spec_values[0].merge(kv_cache_spec_values)", "return False"),
        moved="vllm.v1.core.kv_cache_planning:is_kv_cache_spec_uniform",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:_get_packed_kv_cache_groups",
        ("core.spec",),
        "leaves pages of one size alone",
        does=("len(page_sizes) <= 1", "return None"),
        moved="vllm.v1.core.kv_cache_planning:_get_packed_kv_cache_groups",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:unify_kv_cache_spec_page_size",
        ("core.spec",),
        "so does this: blocks keep their size",
        does=("len(page_sizes) <= 1", "return kv_cache_spec"),
        moved="vllm.v1.core.kv_cache_planning:unify_kv_cache_spec_page_size",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:_get_kv_cache_groups_uniform_page_size",
        ("core.spec", "compat.layers"),
        "groups of as many layers as the rarest spec has: one, as each retrieval group has a spec of its own. They come in "
        "the order of the layers, which is that of the worker's groups; streaming groups, which share a spec, come last",
        does=(
            "kv_cache_spec.items()",
            "same_type_layers[layer_spec].append(layer_name)",
            "same_type_layers.items()",
            "type(specs[0]).merge([*specs, layer_spec])",
            "continue",
            "layer_buckets.append(list(layer_names))",
            "min_num_layers = min([len(layers) for layers in layer_buckets])",
            "group_size = min_num_layers",
            "max_num_layers < min_num_layers * 1.5",
            "num_groups = cdiv(len(layers), group_size)",
            "grouped_layers.append(layers[i::num_groups])",
            "return create_kv_cache_group_specs(kv_cache_spec, grouped_layers)",
        ),
        moved="vllm.v1.core.kv_cache_planning:_get_kv_cache_groups_uniform_page_size",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:create_kv_cache_group_specs",
        ("core.spec",),
        "a group's spec is its layers', merged",
        does=("layer_specs[0].merge(layer_specs)", "KVCacheGroupSpec(layer_names_one_group, merged_layer_spec)"),
        moved="vllm.v1.core.kv_cache_planning:create_kv_cache_group_specs",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:_max_memory_usage_bytes_from_groups",
        ("core.spec",),
        "a request holds what it holds in each group",
        does=("total_blocks += cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)",),
        moved="vllm.v1.core.kv_cache_planning:_max_memory_usage_bytes_from_groups",
    ),
    Touch(
        "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
        ("compat.layers", "compat.runners"),
        "the pages of all groups lie over each other: a block id is one group's at a time",
        does=(
            "kv_cache_groups",
            "byte_offset = 0",
            "KVCacheTensor(size=size, layers=layer_names, layer_stride=layer_stride, block_stride=block_stride, "
            "offset=byte_offset)",
        ),
        moved="vllm.v1.core.kv_cache_planning:get_kv_cache_config_from_groups",
    ),
    Touch(
        "vllm.v1.kv_cache_interface:replace_as",
        ("attention.backend", "compat.layers"),
        "makes our spec of vLLM's",
        calls=("replace_as(..., ..., backend=...)",),
    ),
    Touch("vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry", ("core.spec",), "gives our spec our manager"),
    Touch(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
        ("core.spec",),
        "registers vLLM's own specs if nothing is registered yet: has to run before our first",
        kind="classmethod",
        calls=("_ensure_registered()",),
        does=("if _REGISTRY_KVCACHESPEC_LIST:\n    return",),
    ),
    Touch(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        ("core.spec",),
        "called again in each process that unpickles a spec, with the same classes",
        kind="classmethod",
        calls=("register(..., ..., uniform_type_base_spec=...)",),
    ),
    Touch(
        "vllm.v1.core.single_type_kv_cache_manager:get_manager_for_kv_cache_spec",
        ("core.spec",),
        "looks our manager up",
        does=("KVCacheSpecRegistry.get_manager_class(kv_cache_spec, ...)",),
    ),
]

WORKERS = [
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker",
        ("plugin", "worker.cpu"),
        "subclassed",
        bases=("Worker", "WorkerBase"),
        has=("vllm_config", "model_runner", "use_v2_model_runner"),
    ),
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
        ("worker.worker",),
        "the model is built and loaded in it: heads get their order",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.load_model",),
        does=("self.model_runner.load_model(...)",),
    ),
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker.get_kv_cache_spec",
        ("worker.worker",),
        "layers are put behind the view when the model is there, before specs and builders are made",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.get_kv_cache_spec",),
        does=("return self.model_runner.get_kv_cache_spec()",),
    ),
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config",
        ("worker.worker",),
        "metadata builders exist afterwards, and have said how keys are packed",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.initialize_from_config",),
        does=("self.model_runner.initialize_kv_cache(kv_cache_config, ...)",),
    ),
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker.execute_model",
        ("worker.worker",),
        "runs the step that the plan comes with",
        first=("scheduler_output",),
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.execute_model",),
        does=("self.model_runner.execute_model(scheduler_output, ...)",),
    ),
    Touch(
        "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens",
        ("worker.worker",),
        "gives the step's output, on which reports travel",
        first=("grammar_output",),
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.sample_tokens",),
        does=("return self.model_runner.sample_tokens(grammar_output)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.warmup:warmup_kernels",
        ("worker.runtime",),
        "V2: runs made-up steps through the worker before the first real one; they carry no plan",
        first=("model_runner", "worker_execute_model", "worker_sample_tokens"),
        does=("_warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.warmup:_warmup_kernels",
        ("worker.runtime",),
        "V2: made-up tables have no hole",
        does=("next_block_id = 1", "range(next_block_id, ...)"),
    ),
    Touch(
        "vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor",
        ("compat.layers", "worker.worker"),
        "the model is loaded first; the block size may change after that, as backends prefer",
        does=(
            "self.driver_worker.load_model()",
            "current_platform.update_block_size_for_backend(self.vllm_config)",
        ),
    ),
    Touch(
        "vllm.v1.executor.multiproc_executor:WorkerProc.__init__",
        ("compat.layers", "worker.worker"),
        "the same in a worker's process",
        does=("self.worker.load_model()", "current_platform.update_block_size_for_backend(vllm_config)"),
    ),
    Touch(
        "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
        ("worker.worker", "core.spec"),
        "specs are asked for when the block size is settled; caches are made before the model is warmed up",
        does=(
            "self.model_executor.get_kv_cache_specs()",
            "self.model_executor.initialize_from_config(kv_cache_configs)",
            "self.model_executor.compile_or_warm_up_model()",
        ),
    ),
    Touch(
        "vllm.v1.outputs:ModelRunnerOutput",
        ("worker.worker", "core.scheduler"),
        "carries the reports to the scheduler",
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT",
        ("worker.worker",),
        "one object for all steps, so reports go on a copy",
        value="ModelRunnerOutput(...)",
    ),
    Touch(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        ("worker.worker",),
        "async scheduling: the output comes later, and reports with it",
        implemented_by="vllm_evict.worker.worker:_Reporting",
    ),
    Touch(
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        ("worker.worker",),
        "called once, when the output is there; what it returns gets the reports",
        calls=("get_output()",),
        replaced_by=("vllm_evict.worker.worker:_Reporting.get_output",),
    ),
    Touch(
        "vllm.distributed:get_tp_group",
        ("compat.layers",),
        "reports are reduced over tensor-parallel ranks",
        calls=("get_tp_group()",),
        does=("return _TP",),
    ),
    Touch(
        "vllm.distributed.parallel_state:GroupCoordinator",
        ("compat.layers",),
        "the ranks of a group, and the way between them",
        has=("world_size: int", "rank_in_group: int", "cpu_group: ProcessGroup"),
    ),
]

RUNNERS = [
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        ("compat.runners",),
        "V1: requests, their batch, and the caches of all layers",
        has=(
            "requests: dict[str, CachedRequestState]",
            "input_batch = InputBatch(...)",
            "kv_caches: list[torch.Tensor]",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        ("compat.runners", "worker.runtime"),
        "V1: rows of the batch are brought up to date; holes are put in after it",
        first=("scheduler_output",),
        replaced_by=("vllm_evict.compat.runners:_install_v1._update_states",),
        does=(
            "zip(req_state.block_ids, new_block_ids)",
            "req_state.block_ids = new_block_ids",
            "self.input_batch.block_table.append_row(new_block_ids, req_index)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        ("compat.runners",),
        "V1: updates its states through the instance, and commits tables after that",
        does=("self._update_states(scheduler_output)", "self._prepare_inputs(...)"),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        ("compat.runners",),
        "V1: tables are copied to the device here, with the holes",
        does=("self.input_batch.block_table.commit_block_table(num_reqs)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        ("compat.runners",),
        "V1: rows by request, and their tables",
        has=("req_ids", "req_id_to_index: dict[str, int]", "block_table = MultiGroupBlockTable(...)"),
    ),
    Touch(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        ("compat.runners",),
        "V1: rows are rebuilt from its table",
        has=("block_ids: tuple[list[int], ...]",),
    ),
    Touch(
        "vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__",
        ("compat.runners",),
        "V1: table of a KV group",
        does=("return self.block_tables[idx]",),
    ),
    Touch(
        "vllm.v1.worker.block_table:BlockTable",
        ("compat.runners",),
        "V1: a table, on the host and on the device",
        has=("block_table = self._make_buffer(...)",),
    ),
    Touch(
        "vllm.v1.worker.block_table:BlockTable._make_buffer",
        ("compat.runners",),
        "V1: what a table is made of",
        does=("return CpuGpuBuffer(...)",),
    ),
    Touch(
        "vllm.v1.utils:CpuGpuBuffer",
        ("compat.runners",),
        "V1: host and device side of a table",
        has=("np",),
    ),
    Touch(
        "vllm.v1.utils:CpuGpuBuffer.__init__",
        ("compat.runners",),
        "V1: what is written to `np` is written to the table",
        does=("self.np = self.cpu.numpy()",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        ("compat.runners",),
        "V2: requests, their tables, and the caches of all layers",
        has=(
            "req_states = RequestState(...)",
            "block_tables = BlockTables(...)",
            "kv_caches = [cache for cache in kv_caches_dict.values() if ...]",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests",
        ("compat.runners",),
        "V2: new blocks are staged; holes are staged after them",
        first=("scheduler_output",),
        replaced_by=("vllm_evict.compat.runners:_install_v2.update_requests",),
        does=("self.block_tables.append_block_ids(req_index, req_new_block_ids, overwrite=False)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        ("compat.runners",),
        "V2: the batch's rows have their order here, before metadata is built",
        first=("input_batch",),
        replaced_by=("vllm_evict.compat.runners:_install_v2.prepare_attn",),
        does=("self.block_tables.gather_block_tables(input_batch.idx_mapping, ...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        ("compat.runners",),
        "V2: calls both through the instance, and writes what is staged in between",
        does=(
            "self.add_requests(scheduler_output)",
            "self.update_requests(scheduler_output)",
            "self.block_tables.apply_staged_writes()",
            "self.prepare_attn(input_batch)",
            "self.model_state.prepare_attn(...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
        ("compat.runners",),
        "V2: a request that starts, or comes back after preemption, brings its whole table",
        does=("self.block_tables.append_block_ids(req_index, new_req_data.block_ids, overwrite=True)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.block_table:BlockTables",
        ("compat.runners",),
        "V2: one table a KV group, rows by request",
        has=("block_tables: list[StagedWriteTensor]",),
    ),
    Touch(
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
        ("compat.runners",),
        "V2: overwrites part of a row, with the next write",
        first=("index", "start", "x"),
        calls=("stage_write(..., ..., ...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.states:RequestState",
        ("compat.runners",),
        "V2: rows by request",
        has=("req_id_to_index: dict[str, int]",),
    ),
    Touch(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        ("compat.runners",),
        "V2: requests of the batch, in row order",
        has=("req_ids: list[str]",),
    ),
]

SPLIT_LAYERS = [
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
        ("compat.layers",),
        "V1: layers join the KV group of the pages that they name before builders and caches are made",
        does=(
            "self.maybe_add_kv_sharing_layers_to_kv_cache_groups(kv_cache_config)",
            "self.initialize_attn_backend(kv_cache_config, ...)",
            "self.initialize_metadata_builders(kv_cache_config, kernel_block_sizes)",
            "self.initialize_kv_cache_tensors(kv_cache_config, kernel_block_sizes, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.maybe_add_kv_sharing_layers_to_kv_cache_groups",
        ("compat.layers",),
        "V1: see add_kv_sharing_layers_to_kv_cache_groups",
        does=(
            "add_kv_sharing_layers_to_kv_cache_groups(self.shared_kv_cache_layers, kv_cache_config.kv_cache_groups, ...)",
            "self.cache_config.kv_sharing_fast_prefill",
        ),
    ),
    Touch(
        "vllm.v1.worker.utils:add_kv_sharing_layers_to_kv_cache_groups",
        ("compat.layers",),
        "a layer gets metadata of the KV group of the pages that it names, after them; it needs pages of that name",
        does=(
            "tgt_kv_cache_group = layer_to_kv_cache_group[target_layer_name]",
            "tgt_kv_cache_group.layer_names.append(layer_name)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_attn_backend",
        ("compat.layers", "attention.backend"),
        "V1: layers and pages with one backend name and number of query heads share a metadata builder",
        does=(
            "get_layers_from_vllm_config(self.vllm_config, layer_type, kv_cache_group_spec.layer_names)",
            "attn_backend = layers[layer_name].get_attn_backend()",
            "num_heads_q = getattr(layers[layer_name], 'num_heads', 0)",
            "key = (full_cls_name, layer_kv_cache_spec, num_heads_q)",
            "kv_cache_config.kv_cache_groups",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache_tensors",
        ("compat.layers",),
        "V1: layers are bound to the pages that they name",
        does=(
            "kv_caches = allocate_kv_cache(kv_cache_config, ...)",
            "kv_caches[layer_name] = kv_caches[target_layer_name]",
            "bind_kv_cache(kv_caches, self.compilation_config.static_forward_context, self.kv_caches, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.utils:bind_kv_cache",
        ("compat.layers", "compat.runners"),
        "V1: layers and pages may have one index; the runner's list has all of them",
        does=(
            "extract_layer_index(layer_name, num_attn_module)",
            "current_platform.check_runner_kv_caches_multi_layer()",
            "runner_kv_caches.append(kv_caches[layer_name])",
            "bind_kv_cache_to_layers(...)",
        ),
    ),
    Touch(
        "vllm.platforms.cpu:CpuPlatform.check_runner_kv_caches_multi_layer",
        ("compat.layers",),
        "V1: this platform does not mind",
        does=("pass",),
    ),
    Touch(
        "vllm.model_executor.models.utils:extract_layer_index",
        ("compat.layers",),
        "names of pages have one number in them",
        does=("subnames = layer_name.split('.')", "assert len(int_vals) == 1, ..."),
    ),
    Touch(
        "vllm.v1.worker.utils:bind_kv_cache_to_layers",
        ("compat.layers",),
        "pages get their cache as layers do",
        does=("forward_context[layer_name].bind_kv_cache(kv_cache)",),
    ),
    Touch(
        "vllm.v1.worker.utils:allocate_kv_cache",
        ("compat.layers", "compat.runners"),
        "one allocation for all KV groups: poison for a block is poison for it in all of them",
        does=(
            "assert len(sizes) == 1, ...",
            "buf = torch.zeros(buf_size, ...)",
            "create_kv_cache_views(buf, spec, num_blocks, layout, tensor, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        ("attention.split", "worker.runtime"),
        "V1: each KV group has its table and its slots, each layer name its group's metadata",
        does=(
            "self.input_batch.block_table[kv_cache_gid]",
            "attn_metadata_dict[layer_name] = attn_metadata_i",
            "cm = copy(cm_base)",
            "cm.block_table_tensor = _get_block_table(kv_cache_gid)",
            "cm.slot_mapping = slot_mappings[kv_cache_gid]",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:get_shared_kv_cache_layers",
        ("compat.layers",),
        "V2: layers, and the pages that they name",
        does=(
            "get_layers_from_vllm_config(vllm_config, Attention)",
            "attn_module.kv_sharing_target_layer_name",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:init_attn_backend",
        ("compat.layers", "attention.backend"),
        "V2: layers join the KV group of their pages first; those with one backend name and number of query heads share a "
        "builder",
        does=(
            "add_kv_sharing_layers_to_kv_cache_groups(get_shared_kv_cache_layers(vllm_config), "
            "kv_cache_config.kv_cache_groups)",
            "attn_backend = attn_layers[layer_name].get_attn_backend()",
            "num_heads_q = getattr(attn_layers[layer_name], 'num_heads', 0)",
            "key = (attn_backend.full_cls_name(), layer_kv_cache_spec, num_heads_q)",
            "group.create_metadata_builders(...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:init_kv_cache",
        ("compat.layers",),
        "V2: layers are bound to the pages that they name",
        does=(
            "kv_caches = allocate_kv_cache(kv_cache_config, ...)",
            "kv_caches[layer_name] = kv_caches[target]",
            "bind_kv_cache_to_layers(bindable_caches, forward_context, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
        ("attention.split", "worker.runtime"),
        "V2: each KV group has its table and its slots, each layer name its group's metadata",
        does=(
            "block_table = block_tables[i]",
            "slot_mapping = slot_mappings[i]",
            "CommonAttentionMetadata(..., block_table_tensor=block_table, slot_mapping=slot_mapping)",
            "attn_metadata[layer_name] = metadata",
        ),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionBackend.full_cls_name",
        ("attention.backend", "compat.layers"),
        "our backends differ in it from vLLM's, not from each other: one a KV group",
        kind="classmethod",
        does=("return (cls.__module__, cls.__qualname__)",),
    ),
    Touch(
        "vllm.v1.attention.backends.utils:get_num_attention_heads_from_layers",
        ("compat.layers",),
        "the builder of a group plans for the query heads of its layers; our pages say the same number",
        does=("getattr(layer, 'impl', layer)", "assert len(heads) == 1, ..."),
    ),
    Touch(
        "vllm.forward_context:get_forward_context",
        ("attention.split",),
        "metadata of other KV groups than a layer's own",
        calls=("get_forward_context()",),
        does=("return _forward_context",),
    ),
    Touch(
        "vllm.forward_context:ForwardContext",
        ("attention.split",),
        "metadata by layer name; a list of them only with dual-batch overlap, which is refused",
        has=("attn_metadata: dict[str, AttentionMetadata] | list[dict[str, AttentionMetadata]]",),
    ),
    Touch(
        "vllm.model_executor.layers.attention.attention:get_attention_context",
        ("attention.split",),
        "a layer's own metadata is looked up by its name; None where nothing is set, in a dummy run",
        does=(
            "attn_metadata_raw = forward_context.attn_metadata",
            "attn_metadata = attn_metadata_raw[layer_name]",
            "attn_metadata = attn_metadata_raw",
            "attn_layer = forward_context.no_compile_layers[layer_name]",
            "kv_cache = attn_layer.kv_cache",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.attention:Attention.forward",
        ("attention.split", "compat.layers"),
        "does not write the cache of layers that name other pages, but hands their keys and values on; asked at each call, "
        "or when the model is compiled, which is later than ours",
        does=(
            "query = query.view(-1, self.num_heads, self.head_size)",
            "output = output.view(-1, self.num_heads, self.head_size_v)",
            "key = key.view(-1, self.num_kv_heads, self.head_size)",
            "not self.attn_backend.forward_includes_kv_cache_update and self.kv_sharing_target_layer_name is None and "
            "key is not None and value is not None",
            "unified_attention_with_output(query, key, value, output, ...)",
            "not self.attn_backend.forward_includes_kv_cache_update and self.kv_sharing_target_layer_name is None and "
            "key is not None and value is not None",
            "torch.ops.vllm.unified_attention_with_output(query, key, value, output, ...)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
        ("compat.layers",),
        "pages are like those of a layer, for other heads",
        calls=("get_kv_cache_spec(...)",),
        does=("FullAttentionSpec(..., block_size=block_size, num_kv_heads=self.num_kv_heads)",),
    ),
]

ATTENTION = [
    Touch(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        ("compat.layers", "compat.reorder"),
        "all layers with a KV cache; those that are no plain Attention are refused. Pages of split heads are such layers",
        has=("bind_kv_cache()",),
        takes_attributes=True,
        implemented_by="vllm_evict.compat.layers:HeadSlots",
    ),
    Touch(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.bind_kv_cache",
        ("compat.layers",),
        "pages have their cache as an attribute",
        does=("self.kv_cache = kv_cache",),
    ),
    Touch(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend",
        ("compat.layers",),
        "implemented",
        replaced_by=("vllm_evict.compat.layers:HeadSlots.get_attn_backend",),
    ),
    Touch(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec",
        ("compat.layers",),
        "implemented",
        first=("vllm_config",),
        replaced_by=("vllm_evict.compat.layers:HeadSlots.get_kv_cache_spec",),
    ),
    Touch(
        "vllm.model_executor.layers.attention:Attention",
        ("compat.layers", "compat.refusals", "compat.reorder", "attention.cpu", "attention.split"),
        "the layers that are put behind the view",
        bases=("AttentionLayerBase",),
        has=(
            "attn_backend",
            "impl",
            "has_sink",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "head_size_v",
            "kv_cache_dtype",
            "sliding_window",
            "kv_sharing_target_layer_name",
            "kv_cache = torch.tensor(...)",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.model_executor.layers.attention:Attention.get_attn_backend",
        ("compat.layers",),
        "vLLM asks the layer for its backend",
        does=("return self.attn_backend",),
    ),
    Touch(
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        ("attention.backend", "attention.split"),
        "calls the layer's implementation, metadata in sixth place",
        does=(
            "attn_metadata, self, kv_cache, _ = get_attention_context(layer_name)",
            "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, ..., output=output)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
        ("compat.layers", "attention.backend"),
        "V1: our backend makes the layer's spec ours; a layer that names other pages has none, and pages are no Attention",
        does=(
            "attn_layers.items()",
            "isinstance(attn_module, Attention) and (kv_tgt_layer := attn_module.kv_sharing_target_layer_name)",
            "self.shared_kv_cache_layers[layer_name] = kv_tgt_layer",
            "continue",
            "attn_module.get_kv_cache_spec(self.vllm_config)",
            "customize_attention_spec(attn_module.get_attn_backend(), spec)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
        ("compat.layers", "attention.backend"),
        "V2: our backend makes the layer's spec ours; a layer that names other pages has none, and pages name none",
        does=(
            "attn_layers.items()",
            "getattr(attn_module, 'kv_sharing_target_layer_name', None)",
            "continue",
            "attn_module.get_kv_cache_spec(vllm_config)",
            "customize_attention_spec(attn_module.get_attn_backend(), spec)",
        ),
    ),
    Touch(
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
        ("attention.backend",),
        "our backend gives the builder, which gets the spec first, with the kernel's block size",
        does=(
            "self.kv_cache_spec.copy_with_new_block_size(kernel_block_size)",
            "builder_cls = self.backend.get_builder_cls()",
            "builder_cls(kv_cache_spec_builder, self.layer_names, vllm_config, device, ...)",
        ),
    ),
    Touch(
        "vllm.v1.worker.utils:AttentionGroup.build_metadata",
        ("attention.backend",),
        "each step's metadata is built once a group, by our builder",
        does=("self.get_metadata_builder(ubatch_idx).build(common_prefix_len, ...)",),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionBackend.get_builder_cls",
        ("attention.backend",),
        "overridden",
        kind="staticmethod",
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBackend.get_builder_cls",),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionBackend.customize_spec",
        ("attention.backend",),
        "overridden: a backend may change its layers' specs",
        kind="classmethod",
        first=("spec",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBackend.customize_spec",),
        does=("return spec",),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        ("attention.backend",),
        "builders that only swap the block table between steps would pass the view by; by default they don't",
        has=("supports_update_block_table = False",),
    ),
    Touch(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        ("worker.runtime",),
        "what the view is made of",
        has=(
            "seq_lens: torch.Tensor",
            "query_start_loc: torch.Tensor",
            "block_table_tensor: torch.Tensor",
            "max_seq_len: int",
            "seq_lens_cpu_upper_bound: torch.Tensor | None",
            "_num_computed_tokens_cache: torch.Tensor | None",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        ("compat.refusals", "attention.backend", "attention.split"),
        "the backend that is served; keys and values are written before `forward`, and apart from it",
        bases=("AttentionBackend",),
        has=("forward_includes_kv_cache_update = False",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_name",
        ("compat.refusals", "attention.backend"),
        "the name by which backends are refused and shown",
        kind="staticmethod",
        calls=("get_name()",),
        does=("return 'CPU_ATTN'",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata",
        ("attention.backend", "attention.cpu", "attention.split"),
        "what the kernel and our mass pass read, and where split heads write",
        has=("num_actual_tokens: int", "query_start_loc", "seq_lens", "block_table", "slot_mapping: torch.Tensor"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        ("attention.backend",),
        "subclassed",
        bases=("AttentionMetadataBuilder",),
        has=("supports_update_block_table = False",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__",
        ("attention.backend", "attention.cpu"),
        "tells the layers how their keys are packed; heads are those of a layer, though pages hold those of many",
        first=("kv_cache_spec",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.__init__",),
        does=(
            "self.num_kv_heads = kv_cache_spec.num_kv_heads",
            "self.num_heads = get_num_attention_heads_from_layers(vllm_config, layer_names) or ...",
            "self._set_isa_to_layers(layer_names)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._group_sliding_window",
        ("compat.layers",),
        "no window for a group of pages that no layer names",
        does=("len(windows) != 1", "return -1"),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
        ("compat.layers", "attention.cpu"),
        "`isa` of a layer names the packing",
        does=("layer.isa = self.isa",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        ("attention.backend", "worker.runtime"),
        "takes tables and lengths from the common metadata and nowhere else",
        first=("common_prefix_len", "common_attn_metadata", "fast_build"),
        calls=("build(..., ..., ...)",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.build",),
        does=(
            "max_seq_len = common_attn_metadata.max_seq_len",
            "query_start_loc = common_attn_metadata.query_start_loc",
            "seq_lens = common_attn_metadata.seq_lens",
            "block_table_tensor = common_attn_metadata.block_table_tensor",
            "slot_mapping = common_attn_metadata.slot_mapping",
            "ops.cpu_attn_get_scheduler_metadata(..., num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)",
            "CPUAttentionMetadata(..., seq_lens=seq_lens, block_table=block_table_tensor, slot_mapping=slot_mapping)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        ("compat.refusals", "attention.backend", "attention.split"),
        "subclassed, and copied for some of its heads; what it has that our passes do not know is refused, or left to its "
        "own kernel",
        has=(
            "scale",
            "alibi_slopes",
            "logits_soft_cap",
            "sinks",
            "is_fp8_kv_cache",
            "head_size",
            "num_heads",
            "num_kv_heads",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        ("attention.backend", "attention.cpu", "attention.split"),
        "queries are [tokens, heads, size]; the cache holds first K, then V, in each block and head; heads are those of "
        "its tensors, and keys and values of a decoder are read from the cache alone",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        calls=("forward(..., ..., None, None, ..., ..., ...)",),
        replaced_by=(
            "vllm_evict.attention.backend:working_impl.WorkingImpl.forward",
            "vllm_evict.attention.split:split_impl.SplitImpl.forward",
        ),
        does=(
            "attn_metadata is None",
            "return output",
            "num_actual_tokens = attn_metadata.num_actual_tokens",
            "num_blocks, num_kv_heads, block_size, _ = kv_cache.size()",
            "kv_cache = kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))",
            "key_cache, value_cache = kv_cache.chunk(2, dim=2)",
            "ops.cpu_attention_with_kv_cache(..., query=query[:num_actual_tokens], scale=self.scale, "
            "block_table=attn_metadata.block_table)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
        ("attention.backend", "attention.cpu", "attention.split"),
        "writes this step's keys and values before `forward`, which may therefore be left out; heads are those of its "
        "tensors",
        calls=("do_kv_cache_update(..., ..., ..., ..., ...)",),
        first=("layer", "key", "value", "kv_cache", "slot_mapping"),
        does=("ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, layer.isa, ...)",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        ("attention.cpu",),
        "names of the packings that the mass pass reads",
        does=("return 'vec16'", "return 'amx'", "return 'vec'"),
    ),
]

LOADING = [
    Touch("vllm.config.load:LoadConfig", ("compat.reorder",), "named in refusals", has=("load_format",)),
    Touch(
        "vllm.model_executor.model_loader.base_loader:",
        ("compat.reorder",),
        "builds models with the `initialize_model` that it holds",
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:initialize_model",
        ("compat.reorder",),
        "what it builds gets its weight loaders wrapped; it has copied them by then, for weights that are loaded again",
        replaced_by=("vllm_evict.compat.reorder:reordering.initialize_model",),
        does=("record_metadata_for_reloading(model)", "return model"),
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.create_model",
        ("compat.reorder",),
        "finds it in its module",
        does=("model = initialize_model(..., vllm_config=vllm_config)",),
    ),
    Touch(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        ("compat.reorder",),
        "weights are loaded after the model is built, and packed after that",
        does=(
            "model = self.create_model(...)",
            "self.load_weights(model, model_config)",
            "process_weights_after_loading(model, ...)",
        ),
    ),
    Touch(
        "vllm.model_executor.model_loader.reload:record_metadata_for_reloading",
        ("compat.reorder",),
        "copies a module's parameters with their weight loaders",
        calls=("record_metadata_for_reloading(...)",),
        does=("info.restore_metadata = capture_layer_to_meta(layer)",),
    ),
    Touch(
        "vllm.model_executor.model_loader.reload.sanitize:sanitize_layer_refs",
        ("compat.reorder",),
        "takes the layer out of the loaders in these copies, if they are its methods",
        does=(
            "isinstance(value, MethodType) and value.__self__ is layer",
            "value.__func__.__get__(layer_ref_sentinel)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        ("compat.reorder",),
        "the input projection: q, k and v of all heads, cut for a rank by its loaders",
        bases=("ColumnParallelLinear", "LinearBase"),
        has=("total_num_heads", "total_num_kv_heads", "num_heads", "num_kv_heads", "head_size", "v_head_size"),
    ),
    Touch(
        "vllm.model_executor.layers.linear:ColumnParallelLinear.__init__",
        ("compat.reorder",),
        "its parameters get its loaders",
        does=(
            "self.quant_method.create_weights(..., weight_loader=...)",
            "set_weight_attrs(self.bias, {'output_dim': 0, 'weight_loader': self.weight_loader})",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader",
        ("compat.reorder",),
        "gets a shard, or all three in one tensor, which it cuts itself",
        first=("param", "loaded_weight", "loaded_shard_id"),
        replaced_by=("vllm_evict.compat.reorder:_qkv_loader.permuted",),
        does=(
            "output_dim = getattr(param, 'output_dim', None)",
            "loaded_shard_id is None",
            "self.weight_loader(param, loaded_weight_shard, shard_id)",
            "loaded_weight.narrow(output_dim, start_idx, shard_size)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader_v2",
        ("compat.reorder",),
        "the same, for parameters that cut shards themselves",
        first=("param", "loaded_weight", "loaded_shard_id"),
        replaced_by=("vllm_evict.compat.reorder:_qkv_loader.permuted",),
        does=(
            "loaded_shard_id is None",
            "self._load_fused_module_from_checkpoint(param, loaded_weight)",
            "param.load_qkv_weight(..., loaded_weight=loaded_weight, shard_id=loaded_shard_id)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:QKVParallelLinear._load_fused_module_from_checkpoint",
        ("compat.reorder",),
        "q, k and v lie one after the other, and do not pass the parameter's loader a second time",
        does=(
            "('q', 0, self.total_num_heads * self.head_size)",
            "self.weight_loader_v2(param, loaded_weight_shard, shard_id)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        ("compat.reorder",),
        "the output projection: its inputs lie in the order of the query heads",
        bases=("LinearBase",),
        has=("input_size",),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader",
        ("compat.reorder",),
        "gets a whole tensor",
        first=("param", "loaded_weight"),
        replaced_by=("vllm_evict.compat.reorder:_out_loader.permuted",),
        does=(
            "input_dim = getattr(param, 'input_dim', None)",
            "loaded_weight.narrow(input_dim, start_idx, shard_size)",
        ),
    ),
    Touch(
        "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader_v2",
        ("compat.reorder",),
        "the same, for parameters that cut it themselves",
        first=("param", "loaded_weight"),
        replaced_by=("vllm_evict.compat.reorder:_out_loader.permuted",),
        does=("param.load_row_parallel_weight(loaded_weight=loaded_weight)",),
    ),
    Touch(
        "vllm.model_executor.parameter:BasevLLMParameter.weight_loader",
        ("compat.reorder",),
        "a property that can be set; the last of its three definitions is the one that is looked at",
        kind="weight_loader.deleter",
        does=("self._weight_loader = None",),
    ),
    Touch(
        "vllm.model_executor.parameter:_ColumnvLLMParameter.output_dim",
        ("compat.reorder",),
        "along which heads lie in the input projection",
        kind="property",
        does=("return self._output_dim",),
    ),
    Touch(
        "vllm.model_executor.parameter:_ColumnvLLMParameter.load_qkv_weight",
        ("compat.reorder",),
        "cuts along it",
        does=("loaded_weight.narrow(self.output_dim, shard_id_int * shard_size, shard_size)",),
    ),
    Touch(
        "vllm.model_executor.parameter:RowvLLMParameter.input_dim",
        ("compat.reorder",),
        "along which heads lie in the output projection",
        kind="property",
        does=("return self._input_dim",),
    ),
    Touch(
        "vllm.model_executor.parameter:RowvLLMParameter.load_row_parallel_weight",
        ("compat.reorder",),
        "cuts along it",
        does=("loaded_weight.narrow(self.input_dim, self.tp_rank * shard_size, shard_size)",),
    ),
    Touch(
        "vllm.model_executor.parameter:BlockQuantScaleParameter",
        ("compat.reorder",),
        "a scale for a block of rows and columns, which may span heads",
        bases=("_ColumnvLLMParameter", "RowvLLMParameter"),
    ),
    Touch(
        "vllm.model_executor.layers.quantization.fp8:Fp8LinearMethod.create_weights",
        ("compat.reorder",),
        "the layer knows the size of these blocks",
        does=("layer.weight_block_size = self.weight_block_size",),
    ),
    Touch(
        "vllm.model_executor.models.internlm2:InternLM2Attention",
        ("compat.reorder",),
        "takes q, k and v of each head out of its projection side by side; refused by this name",
        has=("split_qkv()",),
    ),
]

TOUCHES = [
    *ENTRY_POINTS,
    *ARGUMENTS,
    *CONFIGURATION,
    *FRONT_END,
    *SCHEDULER,
    *BLOCKS,
    *WORKERS,
    *RUNNERS,
    *SPLIT_LAYERS,
    *ATTENTION,
    *LOADING,
]

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
            "attention_config: AttentionConfig",
            "speculative_config",
            "kv_transfer_config",
            "ec_transfer_config",
            "additional_config: dict | SupportsHash",
            "max_in_flight_tokens",
            "use_v2_model_runner",
        ),
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
        ("plugin", "compat.refusals"),
        "the worker's class is named here; what is refused",
        has=(
            "worker_cls: str",
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
        ),
    ),
    Touch(
        "vllm.config.device:DeviceConfig",
        ("compat.layers", "compat.refusals"),
        "which platform, and where tensors are",
        has=("device_type",),
    ),
    Touch(
        "vllm.config.attention:AttentionConfig",
        ("compat.refusals",),
        "on a GPU the backend has to be named",
        has=("backend: AttentionBackendEnum | None",),
    ),
    Touch(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.TRITON_ATTN",
        ("compat.refusals",),
        "the backend's name in a configuration",
    ),
    Touch(
        "vllm.platforms.cuda:CudaPlatformBase.check_and_update_config",
        ("plugin",),
        "names the worker that ours takes the place of",
        does=("parallel_config.worker_cls = 'vllm.v1.worker.gpu_worker.Worker'",),
    ),
    Touch(
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        ("plugin",),
        "names the worker that ours takes the place of",
        does=("parallel_config.worker_cls = 'vllm.v1.worker.cpu_worker.CPUWorker'",),
    ),
    Touch(
        "vllm.config:get_layers_from_vllm_config",
        ("compat.layers", "compat.reorder"),
        "the attention layers of the loaded model, by name",
        calls=("get_layers_from_vllm_config(..., ...)",),
        does=("vllm_config.compilation_config.static_forward_context",),
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
        does=("return blocks, num_local, shared_prefix_boundary, False",),
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
        has=("req_ids: list[str]", "resumed_req_ids: set[str]", "num_computed_tokens: list[int]"),
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
        "holds our manager",
        has=("single_type_managers = tuple(...)",),
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
        ("core.scheduler",),
        "the one KV group",
        has=("kv_cache_groups: list[KVCacheGroupSpec]",),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        ("core.scheduler",),
        "its layers and spec",
        has=("layer_names: list[str]", "kv_cache_spec: KVCacheSpec"),
    ),
    Touch(
        "vllm.v1.kv_cache_interface:AttentionSpec",
        ("attention.backend",),
        "what a backend customizes and builds for",
        bases=("KVCacheSpec",),
        has=("block_size: int", "page_size_bytes"),
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
        "vllm.v1.kv_cache_interface:replace_as",
        ("attention.backend",),
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
        "vllm.v1.worker.gpu_worker:Worker",
        ("plugin", "worker.gpu"),
        "subclassed",
        bases=("WorkerBase",),
        has=("vllm_config", "model_runner", "use_v2_model_runner"),
    ),
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.load_model",
        ("worker.worker",),
        "heads are put into another order where the policy wants it",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.load_model",),
        does=("self.model_runner.load_model(...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
        ("worker.worker",),
        "as the CPU's",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.get_kv_cache_spec",),
        does=("return self.model_runner.get_kv_cache_spec()",),
    ),
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        ("worker.worker",),
        "as the CPU's",
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.initialize_from_config",),
        does=("self.model_runner.initialize_kv_cache(kv_cache_config, ...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        ("worker.worker",),
        "as the CPU's",
        first=("scheduler_output",),
        replaced_by=("vllm_evict.worker.worker:EvictionWorkerMixin.execute_model",),
        does=("self.model_runner.execute_model(scheduler_output, ...)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        ("worker.worker",),
        "as the CPU's",
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
        has=("world_size: int", "cpu_group: ProcessGroup", "device_group: ProcessGroup"),
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
        ("compat.runners",),
        "V1: rows of the batch are brought up to date; holes are put in after it",
        first=("scheduler_output",),
        replaced_by=("vllm_evict.compat.runners:_install_v1._update_states",),
        does=(
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
        has=("req_states = RequestState(...)", "block_tables = BlockTables(...)", "kv_caches"),
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

ATTENTION = [
    Touch(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        ("compat.layers", "compat.reorder"),
        "all layers with a KV cache; those that are no plain Attention are refused",
    ),
    Touch(
        "vllm.model_executor.layers.attention:Attention",
        ("compat.layers", "compat.refusals", "compat.reorder", "attention.cpu", "attention.triton"),
        "the layers that are put behind the view",
        bases=("AttentionLayerBase",),
        has=(
            "attn_backend",
            "impl",
            "has_sink",
            "num_heads",
            "num_kv_heads",
            "sliding_window",
            "kv_sharing_target_layer_name",
            "kv_cache = torch.tensor(...)",
            "dtype",
            "kv_cache_torch_dtype = kv_cache_dtype_str_to_dtype(...)",
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
        ("attention.backend",),
        "calls the layer's implementation, metadata in sixth place",
        does=("self.impl.forward(self, query, key, value, kv_cache, attn_metadata, ..., output=output)",),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
        ("compat.layers", "attention.backend"),
        "V1: our backend makes the layer's spec ours",
        does=("customize_attention_spec(attn_module.get_attn_backend(), spec)",),
    ),
    Touch(
        "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
        ("compat.layers", "attention.backend"),
        "V2: our backend makes the layer's spec ours",
        does=("customize_attention_spec(attn_module.get_attn_backend(), spec)",),
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
            "query_start_loc_cpu: torch.Tensor",
            "block_table_tensor: torch.Tensor",
            "max_seq_len: int",
            "seq_lens_cpu_upper_bound: torch.Tensor | None",
            "_num_computed_tokens_cache: torch.Tensor | None",
        ),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        ("compat.refusals", "attention.backend"),
        "the backend that is served",
        bases=("AttentionBackend",),
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
        ("attention.backend", "attention.cpu"),
        "what the kernel and our mass pass read",
        has=("num_actual_tokens: int", "query_start_loc", "seq_lens", "block_table"),
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
        "tells the layers how their keys are packed",
        first=("kv_cache_spec",),
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.__init__",),
        does=("self._set_isa_to_layers(layer_names)",),
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
            "CPUAttentionMetadata(..., seq_lens=seq_lens, block_table=block_table_tensor)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        ("compat.refusals", "attention.backend"),
        "subclassed; what it has that our passes do not know is refused, or left to its own kernel",
        has=("scale", "alibi_slopes", "logits_soft_cap", "sinks", "is_fp8_kv_cache", "head_size"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        ("attention.backend", "attention.cpu"),
        "queries are [tokens, heads, size]; the cache holds first K, then V, in each block and head",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        replaced_by=("vllm_evict.attention.backend:working_impl.WorkingImpl.forward",),
        does=(
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
        ("attention.backend", "attention.cpu"),
        "writes this step's keys and values before `forward`, which may therefore be left out",
        does=("ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, layer.isa, ...)",),
    ),
    Touch(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        ("attention.cpu",),
        "names of the packings that the mass pass reads",
        does=("return 'vec16'", "return 'amx'", "return 'vec'"),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionCGSupport",
        ("attention.backend",),
        "no full CUDA graphs",
        has=("NEVER = 0",),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
        ("attention.backend",),
        "overridden; vLLM then captures what lies between attention layers, or refuses",
        kind="classmethod",
        replaced_by=("vllm_evict.attention.backend:resident_backend.ResidentBuilder.get_cudagraph_support",),
    ),
    Touch(
        "vllm.v1.attention.backend:AttentionImpl.fused_output_quant_supported",
        ("attention.backend", "attention.split"),
        "overridden: our kernels write outputs of the query's dtype",
        replaced_by=(
            "vllm_evict.attention.backend:working_impl.WorkingImpl.fused_output_quant_supported",
            "vllm_evict.attention.split:split_impl.SplitImpl.fused_output_quant_supported",
        ),
    ),
    Touch(
        "vllm.config.compilation:CompilationConfig.resolve_cudagraph_mode_and_sizes",
        ("attention.backend",),
        "with a backend that never supports full graphs it falls back to piecewise ones",
        does=("min_cg_support == AttentionCGSupport.NEVER", "cudagraph_mode = CUDAGraphMode.PIECEWISE"),
    ),
    Touch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        ("worker.runtime",),
        "V1: lengths on the host are exact but for speculative decoding",
        does=(
            "seq_lens_cpu_upper_bound = self.optimistic_seq_lens_cpu[:num_reqs_padded]",
            "CommonAttentionMetadata(..., query_start_loc_cpu=self.query_start_loc.cpu[...], "
            "seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound)",
        ),
    ),
    Touch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
        ("worker.runtime",),
        "V2: lengths on the host are exact but for speculative decoding",
        does=(
            "num_computed_tokens_np = self.req_states.num_computed_tokens_np[idx_mapping_np]",
            "np.add(num_computed_tokens_np, num_scheduled_tokens_upper_bound, ...)",
        ),
    ),
]

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
        ("attention.backend", "attention.triton"),
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
        ("compat.refusals", "attention.backend", "attention.triton"),
        "subclassed; what it has that our passes do not know is refused, or left to its own kernel",
        has=("scale", "alibi_slopes", "logits_soft_cap", "sinks", "head_size", "chunk_lookback"),
        takes_attributes=True,
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        ("attention.backend", "attention.triton"),
        "queries are [tokens, heads, size]; each token and head of the cache holds K, then V, in any layout",
        first=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        replaced_by=("vllm_evict.attention.backend:working_impl.WorkingImpl.forward",),
        does=(
            "num_actual_tokens = attn_metadata.num_actual_tokens",
            "kv_cache = kv_cache.transpose(1, 2)",
            "key_cache, value_cache = kv_cache.split(hs, dim=-1)",
            "unified_attention(..., q=query[:num_actual_tokens], k=key_cache, v=value_cache, "
            "out=output[:num_actual_tokens], softmax_scale=self.scale, block_table=block_table)",
        ),
    ),
    Touch(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        ("attention.backend", "attention.split", "attention.triton"),
        "writes this step's keys and values before `forward`, into pages with any strides",
        does=(
            "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
            "triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, ...)",
        ),
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
    *ATTENTION,
    *TRITON,
    *LOADING,
]

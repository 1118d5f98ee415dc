"""Entry points by which vLLM finds the plugin, and the activation of a policy."""

from typing import Any

from ..config import KVPolicyConfig, KVPolicyError
from . import arguments, fallback, frontend, usage
from .late import when_imported

#: vLLM's modules -> what the plugin adds to them, in every process and idempotently. Without a policy it stays idle.
HOOKS = {
    "vllm.config.vllm": fallback.hook,
    "vllm.engine.arg_utils": arguments.hook,
    "vllm.entrypoints.anthropic.protocol": frontend.hook_anthropic,
    "vllm.entrypoints.anthropic.serving": frontend.hook_messages,
    "vllm.entrypoints.generate.beam_search.online": frontend.hook_beam_search,
    "vllm.entrypoints.openai.chat_completion.protocol": frontend.hook_requests("ChatCompletionRequest"),
    "vllm.entrypoints.openai.completion.protocol": frontend.hook_requests("CompletionRequest"),
    "vllm.entrypoints.openai.responses.protocol": frontend.hook_requests("ResponsesRequest"),
    "vllm.entrypoints.openai.responses.serving": frontend.hook_responses,
    "vllm.entrypoints.scale_out.token_in_token_out.protocol": frontend.hook_tokens,
    "vllm.entrypoints.serve.engine.protocol": usage.hook_usage,
    "vllm.entrypoints.serve.engine.serving": frontend.hook_serving,
    "vllm.v1.engine.async_llm": frontend.hook_async_llm,
    "vllm.v1.engine.input_processor": frontend.hook_input_processor,
    "vllm.v1.engine.core_client": usage.hook_core_client,
    "vllm.v1.engine.output_processor": usage.hook_output_processor,
    "vllm.v1.metrics.loggers": frontend.hook_loggers,
}
_registered = False


def register() -> None:
    """Entry point `vllm.general_plugins`: called in the API process, the engine core and every worker."""
    global _registered
    if not _registered:
        _registered = True
        for module, hook in HOOKS.items():
            when_imported(module, hook)


def platform() -> None:
    """Entry point `vllm.platform_plugins`: vLLM calls it first of all, and it declines to be a platform.

    vLLM loads general plugins inside `EngineArgs.__init__`, too late to add a keyword to it. It calls platform plugins
    while it is being imported.
    """
    register()


def activate(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Give an engine configuration the scheduler and worker that evict.

    Raises:
        KVPolicyError: the plugin cannot serve this vLLM, model or setting.
    """
    from vllm import __version__ as vllm_version

    from . import attending, positions, refusals, versions

    versions.check(vllm_version)
    config = refusals.check_config(vllm_config, config)
    model = vllm_config.model_config
    heads = attending.kv_heads(model)
    config = config.for_model(len(heads), min(heads), vllm_config.parallel_config.tensor_parallel_size)
    config = positions.in_tokens(vllm_config, config)
    config.check(
        vllm_config.cache_config.block_size,
        len(heads),
        min(heads),
        model.max_model_len,
        vllm_config.max_in_flight_tokens,
    )
    config.check_instruction(model.get_vocab_size())
    vllm_config.additional_config["kv_policy"] = config.to_dict()
    asynchronous = vllm_config.scheduler_config.async_scheduling
    vllm_config.scheduler_config.scheduler_cls = (
        f"vllm_evict.integration.scheduler.{'AsyncEvictionScheduler' if asynchronous else 'EvictionScheduler'}"
    )
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise KVPolicyError(f"KV policies can't be used with worker class {worker!r}: leave --worker-cls out")
    vllm_config.parallel_config.worker_cls = WORKERS[worker]


#: vLLM's workers -> the plugin's.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_evict.integration.cpu_worker.CPUEvictionWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_evict.integration.gpu_worker.GPUEvictionWorker",
}

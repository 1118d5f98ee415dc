"""Entry points by which vLLM finds the plugin."""

from types import ModuleType

from .frontend import entrypoints, usage
from .start import arguments, ending, fallback, reloads
from .start.late import when_imported


def _hook_core(module: ModuleType) -> None:
    reloads.hook(module)
    ending.hook(module)


#: vLLM's modules -> what the plugin adds to them, in every process and idempotently. Without a policy it stays idle.
HOOKS = {
    "vllm.config.vllm": fallback.hook,
    "vllm.engine.arg_utils": arguments.hook,
    "vllm.entrypoints.anthropic.protocol": entrypoints.hook_anthropic,
    "vllm.entrypoints.anthropic.serving": entrypoints.hook_messages,
    "vllm.entrypoints.generate.beam_search.offline": entrypoints.hook_offline_beam_search,
    "vllm.entrypoints.generate.beam_search.online": entrypoints.hook_beam_search,
    "vllm.entrypoints.openai.chat_completion.protocol": entrypoints.hook_requests("ChatCompletionRequest"),
    "vllm.entrypoints.openai.completion.protocol": entrypoints.hook_requests("CompletionRequest"),
    "vllm.entrypoints.openai.responses.protocol": entrypoints.hook_requests("ResponsesRequest"),
    "vllm.entrypoints.openai.responses.serving": entrypoints.hook_responses,
    "vllm.entrypoints.scale_out.token_in_token_out.protocol": entrypoints.hook_tokens,
    "vllm.entrypoints.serve.engine.protocol": usage.hook_usage,
    "vllm.entrypoints.serve.engine.serving": entrypoints.hook_serving,
    "vllm.v1.engine.async_llm": entrypoints.hook_async_llm,
    "vllm.v1.engine.core": _hook_core,
    "vllm.v1.engine.input_processor": entrypoints.hook_input_processor,
    "vllm.v1.engine.core_client": usage.hook_core_client,
    "vllm.v1.engine.output_processor": usage.hook_output_processor,
    "vllm.v1.metrics.loggers": entrypoints.hook_loggers,
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

"""Carries the cache use of a request from the engine core to users: outputs, metrics, answers of a server."""

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ...core.usage import KVUsage
from ..start.late import once


class AnswerUsage:
    """Usage of the requests that one answer of a server is made of."""

    def __init__(self) -> None:
        self._usages: list[dict[int, KVUsage]] = []
        self._running = 0

    @property
    def done(self) -> bool:
        return not self._running

    def shown(self) -> Any:
        """Return a dict, or a list in the order of the answer's choices; None while a request runs."""
        usages = [usages[index].as_dict() for usages in self._usages for index in sorted(usages)]
        return None if self._running or not usages else usages if len(usages) > 1 else usages[0]

    def watch(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield the outputs of one of its requests, as they are."""
        usages: dict[int, KVUsage] = {}
        self._usages.append(usages)
        self._running += 1

        async def watched() -> AsyncGenerator[Any, None]:
            _answer.set(self)  # the task that sends a stream is another one
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        usages.update((one.index, one.kv_usage) for one in output.outputs if one.kv_usage is not None)
                        yield output
            finally:
                self._running -= 1

        return watched()


#: The answer that a task makes, once it has asked the engine for one of its requests.
_answer: ContextVar[AnswerUsage | None] = ContextVar("kv_evict_answer", default=None)


def watch(outputs: AsyncGenerator[Any, None], params: Any) -> AsyncGenerator[Any, None]:
    """Yield a request's outputs. If it asks for its usage, this task's answer has it: a server makes each in its own
    task.
    """
    answer = _answer.get()
    if answer is not None and answer.done:  # of a caller that makes several in one task
        _answer.set(answer := None)
    if not (params.extra_args or {}).get("kv_usage"):
        return outputs
    if answer is None:
        _answer.set(answer := AnswerUsage())
    return answer.watch(outputs)


def hook_core_client(module: ModuleType) -> None:
    """Read the plugin's fields of what engine cores send."""
    from ..engine.carriers import EvictionOutputs

    vars(module)["EngineCoreOutputs"] = EvictionOutputs


def hook_output_processor(module: ModuleType) -> None:
    """Hand a finished request's `KVUsage` to its output: `RequestOutput.kv_usage`, and on each completion (n > 1).

    It is in the output's metrics too, as Ray Data shows those.
    """
    from vllm.outputs import CompletionOutput, RequestOutput

    from ..engine.carriers import RequestStats

    processor, state = module.OutputProcessor, module.RequestState
    if not once(state):
        return
    state.kv_usage = RequestOutput.kv_usage = CompletionOutput.kv_usage = None
    process_outputs, make_request_output = processor.process_outputs, state.make_request_output
    new_completion_output, add = state._new_completion_output, RequestOutput.add

    @functools.wraps(process_outputs)
    def processed(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            usage = getattr(output, "kv_usage", None)
            if usage is not None and (request := self.request_states.get(output.request_id)) is not None:
                request.kv_usage = usage
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    @functools.wraps(make_request_output)
    def with_usage(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_request_output(self, *args, **kwargs)
        if isinstance(output, RequestOutput):
            first = output.outputs[0]
            output.kv_usage = first.kv_usage
            if first.kv_usage is not None and first.finish_reason is not None and output.metrics is not None:
                usages = [completion.kv_usage and completion.kv_usage.as_dict() for completion in output.outputs]
                shown = usages if len(usages) > 1 else usages[0]
                output.metrics = RequestStats(**vars(output.metrics), kv_usage=shown)
        return output

    @functools.wraps(new_completion_output)
    def completion_with_usage(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = new_completion_output(self, *args, **kwargs)
        completion.kv_usage = self.kv_usage
        return completion

    @functools.wraps(add)
    def merged(self: Any, next_output: Any, aggregate: bool) -> None:
        """Streamed outputs are merged when a reader is slow; the usage comes with the last one."""
        add(self, next_output, aggregate)
        self.kv_usage, self.metrics = next_output.kv_usage or self.kv_usage, next_output.metrics
        usages = {completion.index: completion.kv_usage for completion in next_output.outputs}
        for completion in self.outputs:
            completion.kv_usage = usages.get(completion.index) or completion.kv_usage

    processor.process_outputs, state.make_request_output = processed, with_usage
    state._new_completion_output, RequestOutput.add = completion_with_usage, merged


def show_usage(cls: Any) -> None:
    """Let a model of what an answer of the server cost (`usage`) have `kv_usage` too."""
    init = cls.__init__
    if not once(cls):
        return

    @functools.wraps(init)
    def with_usage(self: Any, **fields: Any) -> None:
        init(self, **fields)
        if (answer := _answer.get()) is not None and (shown := answer.shown()) is not None:
            self.kv_usage = shown

    cls.__init__ = with_usage


def hook_usage(module: ModuleType) -> None:
    """Chats, completions, tokens."""
    show_usage(module.UsageInfo)


def take_more(cls: Any, *users: Any) -> None:
    """Let a model of vLLM's server keep fields that it does not know; `users` are models with fields of its type."""
    cls.model_config["extra"] = "allow"
    for each in (cls, *users):
        each.model_rebuild(force=True)


def show_messages_usage(module: ModuleType) -> None:
    """Let the usage of messages take further fields, and their requests keep fields that vLLM does not know."""
    take_more(module.AnthropicUsage, module.AnthropicMessagesResponse, module.AnthropicStreamEvent)
    take_more(module.AnthropicMessagesRequest)
    show_usage(module.AnthropicUsage)

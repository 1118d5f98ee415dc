"""Carries the cache use of a request from the engine core to users: outputs, metrics, answers of a server."""

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from ...core.usage import KVUsage
from ..seams import extends, replaces


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


@replaces(
    "vllm.v1.engine.core_client:EngineCoreOutputs",
    at_import=True,
    why="front ends read the plugin's fields of what engine cores send",
    remove_when="outputs and statistics of vLLM carry fields of plugins",
)
def read_own_fields(stock: type) -> type:
    from ..engine.carriers import EvictionOutputs

    return EvictionOutputs


@extends(
    "vllm.outputs:CompletionOutput",
    "vllm.outputs:RequestOutput",
    "vllm.v1.engine.output_processor:RequestState",
    at_import=True,
    why="a finished request's `KVUsage` is `kv_usage` of its output, and of each completion (n > 1)",
    remove_when="outputs of vLLM carry fields of plugins",
)
def have_usage(cls: Any) -> None:
    cls.kv_usage = None


@replaces(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    at_import=True,
    why="takes usage from what the engine core sent",
    remove_when="outputs of vLLM carry fields of plugins",
)
def take_usage(process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    def processed(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            usage = getattr(output, "kv_usage", None)
            if usage is not None and (request := self.request_states.get(output.request_id)) is not None:
                request.kv_usage = usage
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    return processed


@replaces(
    "vllm.v1.engine.output_processor:RequestState.make_request_output",
    at_import=True,
    why="gives usage to outputs, and to their metrics, as Ray Data shows those",
    remove_when="outputs of vLLM carry fields of plugins",
)
def give_usage(make_request_output: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.outputs import RequestOutput

    from ..engine.carriers import RequestStats

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

    return with_usage


@replaces(
    "vllm.v1.engine.output_processor:RequestState._new_completion_output",
    at_import=True,
    why="gives usage to each completion",
    remove_when="outputs of vLLM carry fields of plugins",
)
def give_completion_usage(new_completion_output: Callable[..., Any]) -> Callable[..., Any]:
    def completion_with_usage(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = new_completion_output(self, *args, **kwargs)
        completion.kv_usage = self.kv_usage
        return completion

    return completion_with_usage


@replaces(
    "vllm.outputs:RequestOutput.add",
    at_import=True,
    why="streamed outputs are merged when a reader is slow, and usage comes with the last one",
    remove_when="outputs of vLLM carry fields of plugins",
)
def merge_usage(add: Callable[..., None]) -> Callable[..., None]:
    def merged(self: Any, next_output: Any, aggregate: bool) -> None:
        add(self, next_output, aggregate)
        self.kv_usage, self.metrics = next_output.kv_usage or self.kv_usage, next_output.metrics
        usages = {completion.index: completion.kv_usage for completion in next_output.outputs}
        for completion in self.outputs:
            completion.kv_usage = usages.get(completion.index) or completion.kv_usage

    return merged


def take_more(cls: Any, *users: Any) -> None:
    """Let a model of vLLM's server keep fields that it does not know; `users` are models with fields of its type."""
    cls.model_config["extra"] = "allow"
    for each in (cls, *users):
        each.model_rebuild(force=True)


@extends(
    "vllm.entrypoints.anthropic.protocol",
    at_import=True,
    why="the usage of messages takes further fields, and requests keep fields that vLLM does not know, to be refused",
    remove_when="these models allow further fields, as those of chats do",
)
def take_more_of_messages(module: Any) -> None:
    take_more(module.AnthropicUsage, module.AnthropicMessagesResponse, module.AnthropicStreamEvent)
    take_more(module.AnthropicMessagesRequest)


@extends(
    "vllm.entrypoints.serve.engine.protocol:UsageInfo",
    "vllm.entrypoints.anthropic.protocol:AnthropicUsage",
    "vllm.entrypoints.openai.responses.serving:ResponseUsage",
    at_import=True,
    why="what an answer of a server cost (`usage`) has `kv_usage` too, where its request asks for it",
    remove_when="usage of vLLM carries fields of plugins",
)
def show_usage(cls: Any) -> None:
    init = cls.__init__

    @functools.wraps(init)
    def with_usage(self: Any, **fields: Any) -> None:
        init(self, **fields)
        if (answer := _answer.get()) is not None and (shown := answer.shown()) is not None:
            self.kv_usage = shown

    cls.__init__ = with_usage

"""vLLM's front end: requests that ask for what they may not have, and metrics."""

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ..config import REQUEST_FIELDS, REQUEST_SIZES, KVPolicyConfig, KVPolicyError
from .connectors import hands_on
from .late import once
from .metrics import PrometheusMetrics
from .usage import show_usage, watch

# Below vLLM's own, which says where lines go; its module can't be imported yet.
logger = logging.getLogger("vllm.evict")

#: Policy of the streaming session whose turns are being taken in, once its first turn has one: [name]. None outside.
_session: ContextVar[list[str] | None] = ContextVar("kv_evict_session", default=None)
#: What a client's beam search asks for, in the task that answers it; vLLM hands it to none of the requests it makes.
_beam_xargs: ContextVar[dict[str, Any] | None] = ContextVar("kv_evict_beam_xargs", default=None)
#: Where the request that a task answers has what belongs into its `vllm_xargs`; None: nowhere.
_misplaced: ContextVar[str | None] = ContextVar("kv_evict_misplaced", default=None)


def _server_policy(vllm_config: Any) -> KVPolicyConfig | None:
    additional = vllm_config.additional_config
    value = additional.get("kv_policy") if isinstance(additional, dict) else None
    return None if value is None else KVPolicyConfig.parse(value)


def _check_request(vllm_config: Any, params: Any, prompt_len: int) -> None:
    """Refuse a request that asks for what it may not have: HTTP 400 on a server, `VLLMValidationError` offline."""
    from vllm.exceptions import VLLMValidationError

    extra_args = getattr(params, "extra_args", None)
    if not extra_args:
        return
    config = _server_policy(vllm_config)
    if config is None:
        if not set(extra_args).isdisjoint(REQUEST_FIELDS):
            _warn_without_policy()
        return
    if vllm_config.kv_transfer_config is not None and hands_on(extra_args):
        raise VLLMValidationError(
            "kv_transfer_params: do_remote_decode asks for all blocks of the prompt, and this server evicts some; send "
            "prefills to a server without --kv-policy",
            parameter="kv_transfer_params",
        )
    cache, most = vllm_config.cache_config, vllm_config.model_config.max_model_len
    try:
        granted = config.for_request(extra_args, prompt_len, cache.block_size)
        if cache.num_gpu_blocks:  # of all KV groups and engines, so the scheduler checks it once more
            longest = min(prompt_len + (params.max_tokens or most), most)
            config.check_room(granted, longest, most, cache.block_size, cache.num_gpu_blocks - 1)
    except KVPolicyError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _misplaced_in(request: Any) -> str | None:
    """Where a client put one of `REQUEST_FIELDS` that vLLM drops unseen: beside `vllm_xargs`, or in another dict."""
    for key, value in (request.model_extra or {}).items():
        inside = value.get("vllm_xargs", value) if isinstance(value, dict) else None
        for field in REQUEST_FIELDS:
            if key == field:
                return field
            if isinstance(inside, dict) and field in inside:
                return f"{field} in {key}"
    return None


def _check_prompt(vllm_config: Any, prompt: Any, params: Any) -> None:
    """The same for a prompt that is rendered; others are checked when they are."""
    from vllm.exceptions import VLLMValidationError

    if (where := _misplaced.get()) and _server_policy(vllm_config) is not None:
        raise VLLMValidationError(
            f'{where} would be ignored: a request sets it as {{"vllm_xargs": {{"{where.split()[0]}": ...}}}}',
            parameter=where.split()[-1],
        )
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids"):
        _check_request(vllm_config, params, len(prompt["prompt_token_ids"]))


def _of_beam(vllm_config: Any, prompt: Any, params: Any) -> Any:
    """Parameters of a request that a beam search makes, with what its client asks of the policy; others as they are."""
    xargs = _beam_xargs.get()
    if not xargs or _server_policy(vllm_config) is None:
        return params
    params = params.clone()
    params.extra_args = xargs
    _check_prompt(vllm_config, prompt, params)
    # What else there is goes where vLLM lets it go: nowhere. An answer has no usage of each of its search's requests.
    params.extra_args = {field: xargs[field] for field in REQUEST_FIELDS if field in xargs and field != "kv_usage"}
    return params


def _check_turn(vllm_config: Any, params: Any) -> None:
    """Refuse a turn of a streaming session that asks for another policy than its first one."""
    from vllm.exceptions import VLLMValidationError

    config, known = _server_policy(vllm_config), _session.get()
    if config is None or known is None:
        return
    asked = (params.extra_args or {}).get("kv_policy")
    if not known:
        known.append(asked or config.name)
    elif asked not in (None, *known):
        raise VLLMValidationError(
            f"kv_policy {asked!r}: a session keeps the policy of its first turn, {known[0]!r}; later turns may set "
            f"another {' or '.join(REQUEST_SIZES)}",
            parameter="vllm_xargs",
        )


@functools.cache
def _warn_without_policy() -> None:
    """Once. Stock vLLM takes any xargs, and without a policy the plugin changes nothing: so it is no HTTP 400."""
    logger.warning(
        "a request has %s in its extra_args, and this engine has no KV policy: nothing is evicted, and there is no "
        "usage. Start it with --kv-policy (full lets requests pick one)",
        " or ".join(REQUEST_FIELDS),
    )


def hook_async_llm(module: ModuleType) -> None:
    """Validate streamed requests when they are made: the generator starts only after the response has."""
    cls = module.AsyncLLM
    generate, add_session = cls.generate, cls._add_streaming_input_request
    if not once(cls):
        return

    @functools.wraps(add_session)
    async def add_known_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The task that takes its turns in is made there, with a copy of this context.
        before = _session.set([])
        try:
            return await add_session(self, *args, **kwargs)
        finally:
            _session.reset(before)

    @functools.wraps(generate)
    def checked(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        sampling_params = _of_beam(self.vllm_config, prompt, sampling_params)
        _check_prompt(self.vllm_config, prompt, sampling_params)
        return watch(generate(self, prompt, sampling_params, *args, **kwargs), sampling_params)

    cls.generate, cls._add_streaming_input_request = checked, add_known_session


def hook_protocol(name: str) -> Callable[[ModuleType], None]:
    """Of the module of the OpenAI request `name`: what it asks in the wrong place is noted, to be refused, and what its
    beam search asks of the engine gets its `vllm_xargs`.
    """

    def noting(convert: Any, beams: bool) -> Any:
        @functools.wraps(convert)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            _beam_xargs.set(self.vllm_xargs if beams else None)
            _misplaced.set(_misplaced_in(self))
            return convert(self, *args, **kwargs)

        return noted

    def hook(module: ModuleType) -> None:
        cls = getattr(module, name)
        if not once(cls):
            return
        for method in ("to_beam_search_params", "to_sampling_params"):
            if convert := getattr(cls, method, None):  # responses have no beams
                setattr(cls, method, noting(convert, beams=method == "to_beam_search_params"))

    return hook


def hook_responses(module: ModuleType) -> None:
    """The same for /v1/responses, which asks the engine from within the stream. And its answers have their usage."""
    cls = module.OpenAIServingResponses
    generate = cls._generate_with_builtin_tools
    if not once(cls):
        return

    @functools.wraps(generate)
    def checked(self: Any, request_id: str, engine_input: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_prompt(self.engine_client.vllm_config, engine_input, sampling_params)
        return generate(self, request_id, engine_input, sampling_params, *args, **kwargs)

    cls._generate_with_builtin_tools = checked
    show_usage(module.ResponseUsage)


def hook_input_processor(module: ModuleType) -> None:
    """Validate what every request asks for (`REQUEST_FIELDS`) where vLLM validates the rest."""
    cls = module.InputProcessor
    process_inputs = cls.process_inputs
    if not once(cls):
        return

    @functools.wraps(process_inputs)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        if request.sampling_params is not None:
            length = len(request.prompt_token_ids) if request.prompt_token_ids else len(request.prompt_embeds)
            if request.resumable or _session.get() is not None:
                length = self.model_config.max_model_len  # its prompt grows; the scheduler knows how long it is
            if request.resumable:
                _check_turn(self.vllm_config, request.sampling_params)
            _check_request(self.vllm_config, request.sampling_params, length)
        return request

    cls.process_inputs = checked


def hook_loggers(module: ModuleType) -> None:
    """Show the scheduler's counts on /metrics, beside vLLM's own."""
    cls = module.StatLoggerManager
    init, record = cls.__init__, cls.record
    if not once(cls):
        return

    @functools.wraps(init)
    def with_metrics(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        self.kv_evict_metrics = None
        if (policy := _server_policy(vllm_config)) is not None:
            # After vLLM's Prometheus logger, which unregisters every metric called vllm:*.
            name = vllm_config.model_config.served_model_name
            # There is one: vLLM's, or the one that was given in its place (Ray's).
            beside = next(each for each in self.stat_loggers if isinstance(each, module.PrometheusStatLogger))
            self.kv_evict_metrics = PrometheusMetrics(
                name,
                self.engine_indexes,
                sorted(policy.allowed),
                beside._counter_cls,
                beside._gauge_cls,
                on_host=policy.evict == "host",
            )

    @functools.wraps(record)
    def recorded(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        counts = getattr(scheduler_stats, "kv_evict", None)
        if counts is not None and self.kv_evict_metrics is not None:
            self.kv_evict_metrics.record(counts, kwargs.get("engine_idx") or 0)
        record(self, scheduler_stats, *args, **kwargs)

    cls.__init__, cls.record = with_metrics, recorded

"""vLLM's front end: requests that ask for what they may not have, and metrics."""

import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pydantic import BeforeValidator, WrapValidator

from ...config import BEAM, REQUEST_FIELDS, TURN_FIELDS, KVPolicyConfig, KVPolicyError
from ...config.errors import shown
from ..seams import extends, replaces
from ..start.connectors import asks_to_hand_on, hands_on, prefills_alone
from ..start.room import told
from .metrics import server_policy
from .usage import take_more, watch

# Below vLLM's own, which says where lines go; its module can't be imported yet.
logger = logging.getLogger("vllm.evict")

#: Attribute of a client's `SamplingParams`: the fields of it that vLLM does not know, and drops.
UNKNOWN = "kv_evict_unknown"
#: Policy of the streaming session whose turns are being taken in, once its first turn has one: [name]. None outside.
_session: ContextVar[list[str] | None] = ContextVar("kv_evict_session", default=None)
#: The client's request that a task answers.
_answered: ContextVar[Any] = ContextVar("kv_evict_answered", default=None)
#: What a client's beam search asks of the policy, where the search runs; vLLM hands it to none of its requests. None:
#: no search runs.
_beam_fields: ContextVar[dict[str, Any] | None] = ContextVar("kv_evict_beam_fields", default=None)


def _check_request(vllm_config: Any, extra_args: Any, prompt_len: int, max_tokens: int | None) -> KVPolicyConfig | None:
    """Refuse a request that asks for what it may not have: HTTP 400 on a server, `VLLMValidationError` offline.

    Returns:
        The server's policy; None if there is none, or the request asks for nothing.
    """
    from vllm.exceptions import VLLMValidationError

    if extra_args is None or extra_args == {}:
        return None
    config, is_object = server_policy(vllm_config), isinstance(extra_args, Mapping)
    if config is None:
        if is_object and not extra_args.keys().isdisjoint(REQUEST_FIELDS):
            _warn_without_policy()
        return None
    if not is_object:
        raise VLLMValidationError(f"vllm_xargs must be an object, not {shown(extra_args)}", parameter="vllm_xargs")
    transfer = extra_args.get("kv_transfer_params")
    _check_transfer(vllm_config, transfer)
    most, keeps = vllm_config.model_config.max_model_len, "do_remote_decode" if hands_on(vllm_config, transfer) else ""
    try:
        if not (rooms := told(vllm_config)):
            config.for_request(extra_args, prompt_len, _block_size(vllm_config))
        for room in rooms:
            granted = config.for_request(extra_args, prompt_len, room.block_size)
            granted = KVPolicyConfig(name="full") if keeps else granted
            config.check_room(granted, prompt_len, min(prompt_len + (max_tokens or most), most), most, room, keeps)
    except KVPolicyError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
    return config


def _check_transfer(vllm_config: Any, params: Any) -> None:
    """Refuse `kv_transfer_params` of wrong types, and those that ask for what the server's connector cannot do."""
    from vllm.exceptions import VLLMValidationError

    message, connector = None, getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    if params is not None and not isinstance(params, Mapping):
        message = f"kv_transfer_params must be an object, not {shown(params)}"
    elif params and (asked := params.get("do_remote_decode")) not in (None, True, False):
        message = f"do_remote_decode in kv_transfer_params must be true or false, not {shown(asked)}"
    elif (
        connector and asks_to_hand_on(params) and not hands_on(vllm_config, params) and not prefills_alone(vllm_config)
    ):
        message = (
            f"kv_transfer_params: do_remote_decode got a server whose {connector} hands no blocks on; expected a "
            "connector that does, in the role kv_producer or kv_both; send the request to a server that has one, or "
            "leave do_remote_decode out"
        )
    if message is not None:
        raise VLLMValidationError(message, parameter="kv_transfer_params")


def _block_size(vllm_config: Any) -> int:
    """Return the tokens of a block in the KV groups that may have holes; where no engine told, of vLLM's smallest."""
    rooms = told(vllm_config)
    return rooms[0].block_size if rooms else int(vllm_config.cache_config.block_size)


def _tokens_of(prompt: Any) -> int | None:
    """Return the tokens of a prompt of ids or embeddings; None for other forms, which vLLM makes into one of these
    first.
    """
    if not isinstance(prompt, dict):
        return None
    ids, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
    if ids is not None:
        return len(ids)
    return None if embeds is None else int(embeds.shape[-2])


def _check_prompt(engine: Any, prompt: Any, params: Any) -> None:
    """Refuse what a request asks for once its prompt is known; `hook_input_processor` refuses it for the others."""
    if (length := _tokens_of(prompt)) is not None:
        with _sent_again(engine, prompt.get("mm_hashes") or {}):
            _check_request(engine.vllm_config, params.extra_args, length, params.max_tokens)


@contextmanager
def _sent_again(owner: Any, hashes: Mapping[str, Iterable[str]]) -> Iterator[None]:
    """Have images of a request that is refused inside sent with the next request that shows them.

    vLLM has noted that the engine core has them, and would fail that request.

    Args:
        owner: of the `renderer` that made the prompt.
        hashes: of images and other inputs, by modality.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VLLMValidationError:
        if (cache := owner.renderer.mm_processor_cache) is not None:
            for each in itertools.chain.from_iterable(hashes.values()):
                cache.invalidate(each)
        raise


def _check_places(vllm_config: Any, request: Any) -> None:
    """Refuse a client's request with one of `REQUEST_FIELDS` that vLLM drops unseen: it stands in the wrong place."""
    from vllm.exceptions import VLLMValidationError

    if server_policy(vllm_config) is None:
        return
    if (to_chat := getattr(request, "to_chat_completion_request", None)) is not None:
        request = to_chat(request.messages[0])  # a batch of chats hands all fields on to each of them
    where = _misplaced_in(request)
    if where is None:
        return
    field = where.split()[0]
    if "vllm_xargs" in type(request).model_fields:
        instead = f'a request sets it as {{"vllm_xargs": {{"{field}": ...}}}}'
    elif "sampling_params" in type(request).model_fields:
        instead = f'a request sets it as {{"sampling_params": {{"extra_args": {{"{field}": ...}}}}}}'
    else:
        instead = "requests to this endpoint run under the server's policy; leave it out"
    raise VLLMValidationError(f"{where} would be ignored: {instead}", parameter=where.split()[-1])


def _misplaced_in(request: Any) -> str | None:
    """Return where a client put one of `REQUEST_FIELDS` that vLLM drops unseen: beside `vllm_xargs`, or in a part of
    the request.
    """
    for place, unknown in _unknown_in(request):
        for key, value in unknown.items():
            inside = value.get("vllm_xargs", value) if isinstance(value, dict) else None
            for field in REQUEST_FIELDS:
                if key == field and value is not None:
                    return f"{field} in {place}" if place else field
                if isinstance(inside, dict) and inside.get(field) is not None:
                    return f"{field} in {place or key}"
    return None


def _unknown_in(request: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields that vLLM does not know, of a request and of each of its parts: the part's name, "" for the
    request, and {field: value}.
    """
    yield "", request.model_extra or {}
    for name in request.model_fields_set & type(request).model_fields.keys():
        part = vars(request).get(name)  # a property may warn that it is deprecated
        yield name, getattr(part, "model_extra", None) or getattr(part, UNKNOWN, {})


def _with_unknown(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Make vLLM's `SamplingParams` of a client's, with the fields that vLLM drops (`UNKNOWN`)."""
    params = handler(value)
    if isinstance(value, dict):
        vars(params)[UNKNOWN] = {key: each for key, each in value.items() if key not in type(params).__struct_fields__}
    return params


def _without_nulls(xargs: Any) -> Any:
    """Drop those of `REQUEST_FIELDS` that are null, which count as not given. vLLM refuses a null in `vllm_xargs`."""
    if not isinstance(xargs, dict):
        return xargs
    return {field: value for field, value in xargs.items() if value is not None or field not in REQUEST_FIELDS}


@extends(
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
    "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest",
    at_import=True,
    why="`vllm_xargs` of a request may have null for some of `REQUEST_FIELDS`, as if they were left out",
    remove_when="vLLM's `vllm_xargs` take null",
)
def take_nulls(cls: Any) -> None:
    cls.model_fields["vllm_xargs"].metadata.append(BeforeValidator(_without_nulls))
    cls.model_rebuild(force=True)


def _of_beam(params: Any) -> Any:
    """Return the parameters of a request that a beam search makes, with what its client asks of the policy; others as
    they are.
    """
    fields = _beam_fields.get()
    if not fields:
        return params
    params = params.clone()
    params.extra_args = fields
    return params


def _check_turn(vllm_config: Any, params: Any) -> None:
    """Refuse a turn of a streaming session that asks for another policy than its first one."""
    from vllm.exceptions import VLLMValidationError

    config, known = server_policy(vllm_config), _session.get()
    if config is None or known is None:
        return
    asked = (params.extra_args or {}).get("kv_policy")
    if not known:
        known.append(asked or config.name)
    elif asked not in (None, *known):
        raise VLLMValidationError(
            f"kv_policy {asked!r}: a session keeps the policy of its first turn, {known[0]!r}; later turns may set "
            f"another {' or '.join(TURN_FIELDS)}",
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


@replaces(
    "vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request",
    at_import=True,
    why="later turns of a streaming session are checked against its first one, in a context of the session's own",
    remove_when="vLLM checks the turns of a session, or lets plugins",
)
def add_session(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def add_known_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The task that takes its turns in is made there, with a copy of this context.
        before = _session.set([])
        try:
            return await stock(self, *args, **kwargs)
        finally:
            _session.reset(before)

    return add_known_session


@replaces(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    at_import=True,
    why="requests are checked when they are made: vLLM's generator starts only after the response has",
    remove_when="vLLM validates streamed requests before it answers",
)
def check_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        sampling_params = _of_beam(sampling_params)
        _check_prompt(self, prompt, sampling_params)
        return watch(generate(self, prompt, sampling_params, *args, **kwargs), sampling_params)

    return checked


@replaces(
    "vllm.entrypoints.serve.engine.serving:BaseServing._check_model",
    at_import=True,
    why="notes each client's request before it is answered, and refuses fields that vLLM would drop unseen",
    remove_when="vLLM refuses unknown fields, and hands requests to plugins",
)
def note_request(check_model: Callable[..., Any]) -> Callable[..., Any]:
    # Every endpoint asks `_check_model` first. Those that generate have a client of the engine.
    async def noted(self: Any, request: Any) -> Any:
        error = await check_model(self, request)
        if error is None and (engine_client := _engine_client(self)) is not None:
            _check_places(engine_client.vllm_config, request)
            _answered.set(request)
        return error

    return noted


def _engine_client(serving: Any) -> Any:
    """Return the engine's client of an endpoint that generates (structured decisions keep it in their strategy); else
    None.
    """
    context = getattr(getattr(serving, "strategy", None), "context", None)
    return getattr(serving, "engine_client", None) or getattr(context, "engine_client", None)


@replaces(
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
    at_import=True,
    why="refuses such fields of /v1/messages, whose requests vLLM makes into chats that lack what it drops",
    remove_when="vLLM refuses unknown fields",
)
def check_messages(create_messages: Callable[..., Any]) -> Callable[..., Any]:
    async def checked(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _check_places(self.engine_client.vllm_config, request)
        return await create_messages(self, request, *args, **kwargs)

    return checked


@extends(
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest",
    at_import=True,
    why="requests of tokens keep fields that vLLM does not know, to be refused by `note_request`",
    remove_when="vLLM refuses unknown fields",
)
def keep_unknown(cls: Any) -> None:
    cls.model_fields["sampling_params"].metadata.append(WrapValidator(_with_unknown))
    take_more(cls)


@replaces(
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
    at_import=True,
    why="gives the requests of a beam search what its client asks of the policy, checked before an answer begins",
    remove_when="vLLM hands `vllm_xargs` to the requests of a beam search",
)
def check_beam_search(beam_search: Callable[..., Any]) -> Callable[..., Any]:
    async def searching(outputs: AsyncGenerator[Any, None], fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        _beam_fields.set(fields)  # the tasks that ask the engine have a copy
        async for output in outputs:
            yield output

    def checked(
        self: Any, prompt: Any, request_id: Any, params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        vllm_config, fields = self.engine_client.vllm_config, {}
        xargs, length, most = getattr(_answered.get(), "vllm_xargs", None), _tokens_of(prompt), params.max_tokens
        if length is not None:
            with _sent_again(self.engine_client, prompt.get("mm_hashes") or {}):
                config = _check_request(vllm_config, xargs, length, most)
            if config is not None:
                # Its requests have longer and longer prompts. An answer has no usage of each of them.
                fields = config.lasting(xargs or {}, length, _block_size(vllm_config))
                fields.pop("kv_usage", None)
        return searching(beam_search(self, prompt, request_id, params, *args, **kwargs), fields)

    return checked


@replaces(
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
    at_import=True,
    why="marks the requests of a beam search of `LLM` as such",
    remove_when="requests of vLLM say that a beam search made them",
)
def mark_beam_search(beam_search: Callable[..., Any]) -> Callable[..., Any]:
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _beam_fields.set({})
        try:
            return beam_search(self, *args, **kwargs)
        finally:
            _beam_fields.reset(before)

    return marked


@replaces(
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
    at_import=True,
    why="checks requests of /v1/responses, which vLLM makes from within the stream",
    remove_when="vLLM validates streamed requests before it answers",
)
def check_responses(generate: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, request_id: str, engine_input: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_prompt(self.engine_client, engine_input, sampling_params)
        return generate(self, request_id, engine_input, sampling_params, *args, **kwargs)

    return checked


@replaces(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    at_import=True,
    why="validates what every request asks for (`REQUEST_FIELDS`) where vLLM validates the rest",
    remove_when="vLLM lets plugins validate requests",
)
def check_inputs(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        if request.sampling_params is None:
            return request
        length = len(request.prompt_token_ids or request.prompt_embeds)
        if request.resumable or _session.get() is not None:
            length = self.model_config.max_model_len  # its prompt grows; the scheduler knows how long it is
        params = request.sampling_params
        images = [each.mm_hash or each.identifier for each in request.mm_features or ()]
        with _sent_again(self, {"": images}):
            if request.resumable:
                _check_turn(self.vllm_config, params)
            _check_request(self.vllm_config, params.extra_args, length, params.max_tokens)
        if _beam_fields.get() is not None:
            params.extra_args = {**(params.extra_args or {}), BEAM: True}
        return request

    return checked

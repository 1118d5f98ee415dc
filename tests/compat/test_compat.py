"""Additions of the plugin to vLLM stay out of the way: hooks, an engine without a policy and with one.

The hooks are run; no engine is started. What the plugin relies on in vLLM is tests/compat/test_guard.py; its releases are tests/compat/test_versions.py.
"""

import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import json
import logging
import types

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import MPClient
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.config import REQUEST_FIELDS, Beside, Room
from vllm_evict.core.usage import KVUsage
from vllm_evict.integration import plugin, seams
from vllm_evict.integration.engine.carriers import EvictionOutput, EvictionOutputs, EvictionStats
from vllm_evict.integration.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_evict.integration.engine.tally import METRICS
from vllm_evict.integration.frontend import entrypoints
from vllm_evict.integration.frontend.usage import watch
from vllm_evict.integration.start import activation
from vllm_evict.integration.start.connectors import hands_on
from vllm_evict.integration.start.room import ROOMS, tell
from vllm_evict.integration.worker.cpu_worker import CPUEvictionWorker


@pytest.fixture
def warned(monkeypatch):
    """Return the plugin's warnings; what is said once can be said again."""
    entrypoints._warn_without_policy.cache_clear()
    lines = []
    # No handler: vLLM sets its loggers up anew when it configures an engine.
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "warning", lambda text, *args: lines.append(text % args))
    return lambda: lines


def hooked_functions(module):
    """Functions of ours in the classes of a module of vLLM, by class and name."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    functions = {(cls, name): function for cls in classes for name, function in vars(cls).items()}
    is_ours = lambda f: getattr(f, "__globals__", {}).get("__name__", "").startswith("vllm_evict.")  # noqa: E731
    return {
        place: function
        for place, function in functions.items()
        if is_ours(getattr(function, "__func__", function))  # of a staticmethod or classmethod
    }


#: Modules of vLLM -> what applies the plugin's seams to them.
HOOKS = seams.hooks()
#: Hooked modules in which no function is replaced: one class, and what models of requests take.
WITHOUT_FUNCTIONS = (
    *("vllm.v1.engine.core_client", "vllm.entrypoints.scale_out.token_in_token_out.protocol"),
    *(f"vllm.entrypoints.openai.{requests}.protocol" for requests in ("chat_completion", "completion", "responses")),
)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_applied_once(name):
    module = importlib.import_module(name)
    before = hooked_functions(module)
    assert before or name in WITHOUT_FUNCTIONS
    HOOKS[name](module)
    plugin.register()
    assert hooked_functions(module) == before


#: Of each hooked module: its classes, and their methods that are replaced.
HOOKED = {
    "vllm.entrypoints.anthropic.protocol": {"AnthropicUsage": ["__init__"]},
    "vllm.entrypoints.anthropic.serving": {"AnthropicServingMessages": ["create_messages"]},
    "vllm.entrypoints.generate.beam_search.online": {"BeamSearchOnlineMixin": ["beam_search"]},
    "vllm.entrypoints.openai.responses.serving": {
        "OpenAIServingResponses": ["_generate_with_builtin_tools"],
        "ResponseUsage": ["__init__"],
    },
    "vllm.entrypoints.serve.engine.protocol": {"UsageInfo": ["__init__"]},
    "vllm.entrypoints.serve.engine.serving": {"BaseServing": ["_check_model"]},
    "vllm.v1.engine.async_llm": {"AsyncLLM": ["generate", "_add_streaming_input_request"]},
    "vllm.v1.engine.input_processor": {"InputProcessor": ["process_inputs"]},
    "vllm.v1.engine.output_processor": {
        "OutputProcessor": ["process_outputs"],
        "RequestState": ["make_request_output", "_new_completion_output"],
    },
    "vllm.v1.metrics.loggers": {"StatLoggerManager": ["__init__", "record"]},
}


@pytest.fixture(params=HOOKED)
def traced(request, monkeypatch):
    """(module's name, module) as it is where a tracer has wrapped vLLM's own methods before the plugin hooks them."""
    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)  # hooked too; to be taken back
    module, classes = importlib.import_module(request.param), dict(vars(importlib.import_module(request.param)))
    for name, methods in HOOKED[request.param].items():
        wrapped = {}
        for method in methods:
            own = inspect.unwrap(getattr(getattr(module, name), method))
            wrapped[method] = functools.wraps(own)(lambda *args, own=own, **kwargs: own(*args, **kwargs))
        classes[name] = type(name, (getattr(module, name),), wrapped)
    return request.param, types.SimpleNamespace(**{name: classes[name] for name in classes if name[0] != "_"})


def test_a_tracer_that_came_first_switches_nothing_off(traced):
    name, module = traced
    places = [(getattr(module, cls), method) for cls, methods in HOOKED[name].items() for method in methods]
    theirs = [vars(cls)[method] for cls, method in places]
    HOOKS[name](module)
    hooked = [vars(cls)[method] for cls, method in places]
    assert [function.__wrapped__ for function in hooked] == theirs
    # Nor does one that came later make it hook again.
    cls, method = places[-1]
    later = functools.wraps(hooked[-1])(lambda *args, **kwargs: hooked[-1](*args, **kwargs))
    setattr(cls, method, later)
    HOOKS[name](module)
    assert vars(cls)[method] is later


def test_usage_and_counts_travel_beside_vllms_own_fields():
    """The front end reads messages of an engine core with the plugin's fields, and as ever by vLLM's own types."""
    usage = KVUsage("h2o", 192, 7, 224, 3, 96)
    plain = EngineCoreOutput("b", [7], kv_transfer_params={"theirs": 1})
    outputs = [EvictionOutput.of(EngineCoreOutput("a", [5, 6], finish_reason=FinishReason.STOP), usage), plain]
    stats = EvictionStats(num_running_reqs=2, kv_connector_stats={"theirs": 2}, kv_evict={"h2o": {"": {"evicted": 3}}})
    sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=1.0))
    ours, theirs = MsgpackDecoder(EvictionOutputs).decode(sent), MsgpackDecoder(EngineCoreOutputs).decode(sent)
    assert [output.kv_usage for output in ours.outputs] == [usage, None] and ours.scheduler_stats == stats
    for read in (ours, theirs):
        assert [output.finish_reason for output in read.outputs] == [FinishReason.STOP, None]
        assert read.outputs[1].kv_transfer_params == {"theirs": 1} and read.timestamp == 1.0
        assert read.scheduler_stats.num_running_reqs == 2 and read.scheduler_stats.kv_connector_stats == {"theirs": 2}
    assert type(theirs.outputs[0]) is EngineCoreOutput and type(theirs.scheduler_stats) is SchedulerStats


def test_an_answer_has_the_usage_of_its_own_requests():
    """Also where one task makes several answers, as in a program that calls the server's handlers."""
    one, other = KVUsage("h2o", 192, 7, 224, 3, 96), KVUsage("full", None, 4, 128, 0, 0)

    async def outputs(*usages):
        for usage in (None, *usages):
            yield types.SimpleNamespace(outputs=[types.SimpleNamespace(index=0, kv_usage=usage)])

    async def answer(*requests):
        shown = []
        for stream in [watch(outputs(usage), SamplingParams(extra_args=asks)) for usage, asks in requests]:
            shown += [getattr(UsageInfo(), "kv_usage", None) async for _ in stream]
        return shown, getattr(UsageInfo(), "kv_usage", None)

    async def answers():
        asks = {"kv_usage": True}
        assert await answer((one, asks)) == ([None, None], one.as_dict())
        assert await answer((other, {})) == ([None, None], None)
        assert await answer((one, asks), (other, asks)) == ([None] * 4, [one.as_dict(), other.as_dict()])
        assert await answer((other, asks)) == ([None, None], other.as_dict())

    asyncio.run(answers())


# Without a policy, and with one


@pytest.fixture(scope="module")
def configured(tiny):
    """`configured(**engine_args)`: the engine configuration that they make."""
    return lambda **kwargs: EngineArgs(model=str(tiny), max_model_len=2048, **kwargs).create_engine_config()


def test_without_a_policy_everything_is_vllms_own(configured):
    config = configured()
    assert config.scheduler_config.scheduler_cls is None
    assert config.scheduler_config.get_scheduler_cls().__module__.startswith("vllm.")
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.additional_config == {}


@pytest.mark.parametrize("extra_args", [{"kv_policy": "h2o"}, {"kv_budget": 64}, {"kv_usage": 1}, {"kv_policy": "x"}])
def test_a_request_for_a_policy_where_there_is_none_is_said_once_and_served(configured, warned, extra_args):
    for _ in range(2):
        entrypoints._check_request(configured(), extra_args, 100, None)
    (line,) = warned()
    assert " or ".join(REQUEST_FIELDS) in line and "no KV policy" in line and "--kv-policy" in line


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"kv_buget": 1}])
def test_what_is_nothing_of_ours_is_not_said(configured, warned, extra_args):
    entrypoints._check_request(configured(), extra_args, 100, None)
    assert not warned()


def test_a_request_for_a_policy_where_there_is_one_is_not_said(configured, warned):
    entrypoints._check_request(configured(kv_policy="full"), {"kv_policy": "h2o"}, 5000, None)
    assert not warned()


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
OFFLOADS = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
#: Arguments of a request, the server's connector -> what the refusal says.
MALFORMED = [
    ("kv_budget", NIXL, "vllm_xargs must be an object, not"),
    (["kv_budget"], None, "vllm_xargs must be an object, not"),
    ([], None, "vllm_xargs must be an object, not"),
    ({"kv_transfer_params": "all"}, NIXL, "kv_transfer_params must be an object, not"),
    ({"kv_transfer_params": [1]}, None, "kv_transfer_params must be an object, not"),
    ({"kv_transfer_params": {"do_remote_decode": "false"}}, NIXL, "must be true or false, not"),
    ({"kv_transfer_params": {"do_remote_decode": [True]}}, NIXL, "must be true or false, not"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, {**NIXL, "kv_role": "kv_consumer"}, "hands no blocks on"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, OFFLOADS, "hands no blocks on; .*leave do_remote_decode out"),
]


@pytest.mark.parametrize("extra_args, transfer, message", MALFORMED, ids=str)
def test_arguments_of_wrong_types_and_blocks_that_go_nowhere_are_refused(configured, extra_args, transfer, message):
    config = configured(kv_policy="h2o", **({} if transfer is None else {"kv_transfer_config": transfer}))
    with pytest.raises(VLLMValidationError, match=message):
        entrypoints._check_request(config, extra_args, 100, None)


def test_which_servers_hand_blocks_on(configured):
    """A server that hands no blocks on must not let a request keep all of its own under any policy."""
    asked = {"do_remote_decode": True}
    parts = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OFFLOADS, NIXL]}}
    for transfer, does in (
        (NIXL, True),
        ({**NIXL, **parts}, True),
        ({**NIXL, "kv_role": "kv_consumer"}, False),
        (OFFLOADS, False),
        (None, False),
    ):
        config = configured(kv_policy="h2o", kv_transfer_config=transfer)
        assert hands_on(config, asked) == does and not hands_on(config, {}) and not hands_on(config, None)
        if does:
            entrypoints._check_request(config, {"kv_transfer_params": asked}, 100, None)


def heard(config, *rooms):
    """Tell a front end the rooms of its engines by vLLM's own ready responses, each packed as an engine packs it."""
    client = types.SimpleNamespace(vllm_config=config, _effective_attention_block_sizes=set(), _kv_event_sources={})
    client.stats_update_address = None
    for room in rooms:
        of_engine = copy.deepcopy(config)
        vars(of_engine).pop(ROOMS, None)
        of_engine.cache_config.num_gpu_blocks = 1000
        if room is not None:
            tell(of_engine, room)
        scheduler = types.SimpleNamespace(get_kv_event_publisher_config=lambda: None)
        engine = types.SimpleNamespace(
            vllm_config=of_engine, frontend_stats_publish_address=None, engine_index=0, scheduler=scheduler
        )
        payload = msgspec.msgpack.encode(EngineCoreProc._make_ready_response(engine))
        assert msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse).num_gpu_blocks == 1000
        MPClient._apply_ready_response(client, payload)
    return config


@pytest.mark.parametrize("pools, fits", [([100], True), ([99], False), ([200, 100], True), ([100, 200, 99], False)])
def test_a_request_that_keeps_everything_has_to_fit_into_each_engines_pool(configured, pools, fits):
    """vLLM may give it to any engine. What an engine holds beside it, the front end hears from the engine."""
    config = configured(kv_policy={"name": "h2o", "budget": 256}, block_size=32)
    config.model_config.max_model_len = 8192
    heard(config, *(Room(32, pool + 8, 1, 9, others=(Beside(32, most=8),)) for pool in pools))
    with (
        contextlib.nullcontext() if fits else pytest.raises(VLLMValidationError, match="8 blocks of windows or states")
    ):
        entrypoints._check_request(config, {"kv_policy": "full"}, 3000, 200)


def test_requests_are_checked_by_the_blocks_of_full_attention(configured):
    """Its blocks may be larger than those of other layers, and vLLM tells the front end the smallest ones."""
    policy = {"name": "sink-window", "budget": 160, "buffer": 32}
    config = configured(kv_policy=policy, block_size=32)
    entrypoints._check_request(config, {"kv_budget": 100}, 2000, 100)  # no engine told
    heard(config, None, Room(64, 1000, 1, 9))
    for asked in ({"kv_budget": 100}, {"kv_sink": 130}):
        with pytest.raises(VLLMValidationError, match="above the server's 192"):
            entrypoints._check_request(config, asked, 2000, 100)


@pytest.mark.parametrize("blocks, fits", [(70, False), (71, True)])
def test_a_larger_budget_under_pressure_has_to_fit_into_the_pool(configured, blocks, fits):
    policy = {"name": "h2o", "when": "pressure", "budget": 256, "sink": 32, "recent": 64}
    config = heard(configured(kv_policy=policy, block_size=32), Room(32, blocks, 1, 9, others=(Beside(32, most=7),)))
    with contextlib.nullcontext() if fits else pytest.raises(VLLMValidationError, match="ask for a smaller kv_budget"):
        entrypoints._check_request(config, {"kv_budget": 2000}, 2000, 48)
    entrypoints._check_request(config, {"kv_budget": 512}, 2000, 48)


def searched(vllm_config, prompt, xargs, max_tokens=8):
    """Arguments of the requests that a beam search makes of a client's `xargs`: of the first one, and after it."""
    given, params = [], BeamSearchParams(beam_width=2, max_tokens=max_tokens)

    class Search:
        engine_client = types.SimpleNamespace(
            vllm_config=vllm_config, renderer=types.SimpleNamespace(mm_processor_cache=None)
        )

        async def beam_search(self, prompt, request_id, params):
            given.append(entrypoints._of_beam(SamplingParams(extra_args={"of": "vLLM"})).extra_args)
            yield prompt

    entrypoints.check_beam_search.on(Search)

    async def answer():
        entrypoints._answered.set(CompletionRequest(prompt="t1", vllm_xargs=xargs))
        searches = [
            Search().beam_search(prompt=prompt, request_id="0", params=params),
            Search().beam_search(prompt, "1", params),
        ]
        return [output for search in searches async for output in search]

    assert asyncio.run(answer()) == [prompt, prompt]
    assert entrypoints._of_beam(SamplingParams()).extra_args is None
    return given


def test_beams_get_what_their_search_asks_of_the_policy_and_nothing_else(configured):
    prompt, served = {"prompt_token_ids": [1] * 1000}, configured(kv_policy={"name": "h2o", "budget": 1024})
    assert searched(served, prompt, {"kv_budget": 512, "kv_usage": 1, "other": 1}) == [{"kv_budget": 512}] * 2
    assert searched(configured(), prompt, {"kv_budget": 512}) == [{"of": "vLLM"}] * 2
    assert searched(served, prompt, None) == [{"of": "vLLM"}] * 2
    with pytest.raises(VLLMValidationError, match="'kv_buget'"):
        searched(served, prompt, {"kv_buget": 512})
    with pytest.raises(VLLMValidationError, match="'kv_buget'"):
        searched(served, {"prompt_embeds": torch.zeros(100, 8)}, {"kv_buget": 512})


def test_a_search_that_keeps_everything_grows_by_its_own_tokens(configured):
    """Chats have no `max_tokens` where they have `max_completion_tokens`."""
    served = configured(kv_policy={"name": "h2o", "budget": 256}, block_size=32)
    tell(served, Room(32, 40, 1, 9))
    prompt = {"prompt_token_ids": [1] * 1000}
    assert searched(served, prompt, {"kv_policy": "full"}, 200) == [{"kv_policy": "full"}] * 2
    with pytest.raises(VLLMValidationError, match="may grow to 1300 tokens; expected at most 1280"):
        searched(served, prompt, {"kv_policy": "full"}, 300)


def test_a_share_of_the_prompt_is_one_budget_for_all_beams_of_a_search(configured):
    """Their prompts grow: half of a longer one would exceed what the server grants, in the middle of a search."""
    served = configured(kv_policy={"name": "h2o", "budget": 512})
    size = served.cache_config.block_size
    first, _ = searched(served, {"prompt_token_ids": [1] * 1000}, {"kv_budget": 0.5})
    assert first == {"kv_budget": -(-500 // size) * size}
    policy = KVPolicyConfig.parse(served.additional_config["kv_policy"])
    with pytest.raises(KVPolicyError, match="above the server's"):
        policy.for_request({"kv_budget": 0.5}, 1100, size)
    assert policy.for_request(first, 1100, size).budget == first["kv_budget"]


def test_a_policy_travels_in_the_configuration_and_names_the_worker(configured):
    config = configured(kv_policy={"name": "h2o", "budget": 1024})
    policy = KVPolicyConfig.parse(config.additional_config["kv_policy"])
    assert policy == KVPolicyConfig(name="h2o", budget=1024)
    assert json.loads(json.dumps(config.additional_config)) == config.additional_config
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert worker is CPUEvictionWorker and issubclass(worker, CPUWorker)


@pytest.mark.parametrize("asynchronous, expected", [(False, EvictionScheduler), (True, AsyncEvictionScheduler)])
def test_a_policy_names_the_scheduler(configured, asynchronous, expected):
    config = configured()
    own = AsyncScheduler if asynchronous else Scheduler
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform turns it off
    assert config.scheduler_config.get_scheduler_cls() is own
    activation.activate(config, KVPolicyConfig(name="h2o"))
    scheduler = config.scheduler_config.get_scheduler_cls()
    assert scheduler is expected and issubclass(scheduler, own)


def test_additional_config_is_the_same_as_the_keyword(configured):
    policy = {"name": "h2o", "budget": 1024}
    keyword = configured(kv_policy=policy)
    for carried in (
        configured(additional_config={"kv_policy": policy, "other": 1}),
        configured(additional_config={"kv_policy": policy, "other": 1}, kv_policy=KVPolicyConfig.parse(policy)),
    ):
        assert carried.additional_config == {**keyword.additional_config, "other": 1}
        assert carried.scheduler_config.scheduler_cls == keyword.scheduler_config.scheduler_cls
        assert carried.parallel_config.worker_cls == keyword.parallel_config.worker_cls


def test_two_different_policies_are_refused(configured):
    with pytest.raises(KVPolicyError, match="two different KV policies"):
        configured(kv_policy="h2o", additional_config={"kv_policy": {"name": "sink-window"}})


def test_a_wrong_policy_is_refused_when_the_engine_is_configured(configured):
    with pytest.raises(KVPolicyError, match="unknown KV policy 'h3o'"):
        configured(kv_policy="h3o")


def test_metrics_are_of_the_classes_that_vllms_own_have(tiny):
    """Under Ray they are Ray's, with its logger in the place of vLLM's Prometheus logger."""
    made = {}

    class Noted:
        def __init__(self, name, *args, **kwargs):
            made[name] = type(self)
            super().__init__(name, *args, **kwargs)

    class OwnCounter(Noted, Counter):
        pass

    class OwnGauge(Noted, Gauge):
        pass

    class Own(PrometheusStatLogger):
        _counter_cls, _gauge_cls = OwnCounter, OwnGauge

    config = EngineArgs(model=str(tiny), kv_policy="h2o").create_engine_config()
    config.cache_config.num_gpu_blocks = 8
    manager = StatLoggerManager(config, custom_stat_loggers=[Own])
    assert made["vllm:generation_tokens"] is OwnCounter and made["vllm:num_requests_running"] is OwnGauge
    ours = {name: cls for name, cls in made.items() if name.startswith("vllm:kv_evict")}
    classes = {"counter": OwnCounter, "gauge": OwnGauge}
    assert ours == {f"vllm:kv_evict_{metric.name}": classes[metric.kind] for metric in METRICS.values()}
    manager.kv_evict_metrics.record({"h2o": {"": {"evicted": 3, "resident": 2}}}, 0)
    labels = {"model_name": config.model_config.served_model_name, "engine": "0", "policy": "h2o"}
    assert REGISTRY.get_sample_value("vllm:kv_evict_blocks_evicted_total", labels) == 3

"""`kv_policy` among vLLM's engine arguments: a field, a flag, and a keyword in processes that know nothing of the
plugin.
"""

import argparse
import copy
import dataclasses
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs, get_kwargs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.config import presets
from vllm_evict.integration.start import arguments, versions

try:
    from vllm.entrypoints.common.startup import get_non_default_args
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.serve.utils.api_utils import get_non_default_args


@pytest.fixture(scope="module")
def configured(tiny):
    """`configured(**engine_args)`: the engine configuration that they make."""
    return lambda **kwargs: EngineArgs(model=str(tiny), max_model_len=2048, **kwargs).create_engine_config()


# The model runner

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    "policy, options, v2",
    [
        (None, {}, True),
        pytest.param(
            None, {"speculative_config": NGRAM}, True, marks=pytest.mark.since("0.32", "V2 had no drafters by default")
        ),
        ("h2o", {}, True),
        pytest.param(
            "h2o",
            {"speculative_config": NGRAM},
            True,
            marks=pytest.mark.since("0.32", "V2 has no drafters under a policy"),
        ),
        pytest.param(
            "sink-window",
            {"pipeline_parallel_size": 2},
            True,
            marks=pytest.mark.since("0.32", "V2 has no stages under a policy"),
        ),
        ("sink-window", {"pipeline_parallel_size": 2}, False),
    ],
)
def test_vllm_chooses_the_runner_that_serves_the_policy(configured, monkeypatch, policy, options, v2):
    """Where Triton works, as on a GPU, vLLM's own choice is V2."""
    config = configured(kv_policy=policy, **options)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    if not v2:  # as before vLLM 0.32
        monkeypatch.setattr(versions, "serves_on_v2", lambda: False)
    assert config.use_v2_model_runner is pickle.loads(pickle.dumps(config)).use_v2_model_runner is v2
    # What vLLM's warning lists.
    lacking = [each for each in config._get_v2_model_runner_unsupported_features() if "under a KV policy" in each]
    assert len(lacking) == (not v2) and all("speculative decoding" in each or "pipeline" in each for each in lacking)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert config.use_v2_model_runner


def test_vllm_keeps_its_runner_for_a_drafter_that_the_plugin_refuses(configured, monkeypatch):
    """On V1 vLLM's own error about it could come before the plugin's, which names those that are served."""
    config = configured(kv_policy="h2o", speculative_config=NGRAM)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    config.speculative_config.method = "dflash"
    assert config.use_v2_model_runner


# The field


@dataclasses.dataclass
class LaterArgs(AsyncEngineArgs):
    """Made after the plugin has extended vLLM's classes, as others make theirs."""

    seats: int = 3


@pytest.fixture(params=[EngineArgs, AsyncEngineArgs, LaterArgs])
def arguments_class(request):
    return request.param


COPIES = {
    "replace": lambda args: dataclasses.replace(args, seed=7),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda args: pickle.loads(pickle.dumps(args)),
    # Nested configurations become dicts too, which vLLM does not take back.
    "asdict": lambda args: type(args)(args.model, kv_policy=dataclasses.asdict(args)["kv_policy"]),
    "vars": lambda args: type(args).from_cli_args(argparse.Namespace(**vars(args))),
    "fields": lambda args: type(args)(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)}),
}


@pytest.mark.parametrize("policy", ["sink-window", {"name": "h2o", "budget": 1024}, KVPolicyConfig(name="h2o")])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_engine_arguments_keeps_the_policy(tiny, arguments_class, way, policy):
    copied = COPIES[way](arguments_class(model=str(tiny), kv_policy=policy))
    assert type(copied) is arguments_class and copied.kv_policy == policy


def test_the_policy_is_a_field_like_any_other(tiny, arguments_class):
    model = str(tiny)
    (field,) = [field for field in dataclasses.fields(arguments_class) if field.name == "kv_policy"]
    assert field.default is None and arguments_class.kv_policy is None and arguments_class(model).kv_policy is None
    parameter = inspect.signature(arguments_class).parameters["kv_policy"]
    assert parameter.kind == parameter.KEYWORD_ONLY and parameter.default is None
    without, given = arguments_class(model), arguments_class(model, kv_policy="h2o")
    assert given != without and given == arguments_class(model, kv_policy="h2o")
    assert "kv_policy='h2o'" in repr(given) and "kv_policy=None" in repr(without)
    if arguments_class is EngineArgs:  # what vLLM logs at start; its function takes no other class
        assert get_non_default_args(given)["kv_policy"] == "h2o" and "kv_policy" not in get_non_default_args(without)


def test_fields_of_vllms_own_come_where_they_came(tiny, arguments_class):
    """Positional arguments still mean what they meant."""
    own = [parameter for parameter in inspect.signature(arguments_class).parameters if parameter != "kv_policy"]
    assert own == [field.name for field in dataclasses.fields(arguments_class) if field.name != "kv_policy"]
    made = arguments_class(str(tiny), "a second value")
    assert (made.model, getattr(made, own[1]), made.kv_policy) == (str(tiny), "a second value", None)


def test_vllm_could_make_a_flag_of_the_fields_type():
    kwargs = get_kwargs(type("One", (), {"__dataclass_fields__": {"kv_policy": arguments._FIELD}}))["kv_policy"]
    assert kwargs["default"] is None
    assert kwargs["type"]("h2o") == "h2o" and kwargs["type"]('{"name": "h2o"}') == {"name": "h2o"}


def test_ray_serve_llm_takes_it_among_its_engine_kwargs(tiny):
    """Do as ray.llm's vllm_models.py and vllm_engine.py, without Ray: sort keywords by field, make arguments and
    configuration in one process, send both to another, and read the arguments' `__dict__` there."""
    engine_kwargs = {"kv_policy": {"name": "adakv", "budget": 1024}, "max_model_len": 2048}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert engine_kwargs.keys() <= known, "Unknown engine argument"
    made = AsyncEngineArgs(model=str(tiny), **engine_kwargs)
    args, config = pickle.loads(pickle.dumps((made, made.create_engine_config())))
    assert vars(args)["kv_policy"] == engine_kwargs["kv_policy"]
    assert config.additional_config["kv_policy"]["name"] == "adakv"
    assert config.parallel_config.worker_cls.startswith("vllm_evict.")
    again = dataclasses.replace(args).create_engine_config()
    assert again.additional_config == config.additional_config


@pytest.mark.parametrize(
    "policy",
    [
        # A context of "endless" is larger, and filter layers of others lie beyond the model's two.
        *(preset for preset in presets() if preset not in ("endless", "omnikv", "quest", "lserve")),
        {"name": "sink-window", "budget": 512, "context": "model"},
        {"name": "adakv", "bands": 2},
        {"name": "duo", "pattern": ["10", "01"]},
    ],
)
def test_arguments_may_be_made_a_configuration_of_twice(tiny, policy):
    """Ray Data does, to look at it before the engine makes its own."""
    made = AsyncEngineArgs(model=str(tiny), kv_policy=policy, max_num_batched_tokens=256)
    first, second = made.create_engine_config(), made.create_engine_config()
    assert first.additional_config == second.additional_config
    assert first.scheduler_config.scheduler_cls == second.scheduler_config.scheduler_cls


# The flag


@pytest.fixture(scope="module")
def parser():
    """The server's parser of engine arguments."""
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))


H2O = KVPolicyConfig(name="h2o", budget=2048)
PRESSURE = KVPolicyConfig.parse("h2o-pressure").replace(budget=4096)


@pytest.mark.parametrize(
    "arguments, policy",
    [
        ([], None),
        (["--kv-policy", "sink-window"], KVPolicyConfig(name="sink-window")),
        (["--kv_policy=h2o"], KVPolicyConfig(name="h2o")),
        (["--kv-policy", '{"name": "h2o", "budget": 2048}'], H2O),
        (["--kv-policy.name", "h2o", "--kv-policy.budget", "2048"], H2O),
        (["--kv-policy.name=h2o", "--kv-policy.budget=0.25"], KVPolicyConfig(name="h2o", budget=0.25)),
        (
            ["--kv-policy.name=tova", "--kv-policy.protect=false", "--kv-policy.min_prompt=99"],
            KVPolicyConfig(name="tova", protect=False, min_prompt=99),
        ),
        (["--kv-policy", "h2o.yaml"], H2O),
        # Fields beside a policy change it, wherever they stand.
        (["--kv-policy", "h2o", "--kv-policy.budget", "2048"], H2O),
        (["--kv-policy.budget=2048", "--kv-policy=h2o"], H2O),
        (["--kv-policy", "h2o.yaml", "--kv-policy.budget", "512"], KVPolicyConfig(name="h2o", budget=512)),
        (["--kv-policy", '{"name": "h2o", "budget": 1}', "--kv-policy.budget", "2048"], H2O),
        (["--kv-policy", "h2o-pressure", "--kv-policy.budget", "4096"], PRESSURE),
        (["--kv-policy.name", "h2o-pressure", "--kv-policy.budget", "4096"], PRESSURE),
        (["--kv-policy", '{"name": "h2o-pressure", "budget": 4096}'], PRESSURE),
        (["--kv-policy", "tova", "--kv-policy.name", "h2o", "--kv-policy.budget", "2048"], H2O),
    ],
)
def test_the_flag_takes_what_users_write(parser, tmp_path, monkeypatch, arguments, policy):
    monkeypatch.chdir(tmp_path)
    Path("h2o.yaml").write_text("name: h2o\nbudget: 2048\n")
    namespace = parser.parse_args(["--model", str(tmp_path), *arguments])
    assert namespace.kv_policy == policy
    for cls in (EngineArgs, AsyncEngineArgs):
        assert cls.from_cli_args(namespace).kv_policy == policy


@pytest.mark.parametrize("key", ["kv-policy", "kv_policy"])
@pytest.mark.parametrize("written", ["h2o.yaml", '{"name": "h2o", "budget": 2048}', {"name": "h2o", "budget": 2048}])
def test_vllms_config_file_may_hold_it(parser, tmp_path, monkeypatch, key, written):
    monkeypatch.chdir(tmp_path)
    Path("h2o.yaml").write_text("name: h2o\nbudget: 2048\n")
    Path("serve.yaml").write_text(json.dumps({"model": str(tmp_path), key: written}))
    assert parser.parse_args(["--config", "serve.yaml"]).kv_policy == H2O
    # The command line comes after the file.
    assert parser.parse_args(["--config", "serve.yaml", "--kv-policy", "tova"]).kv_policy.name == "tova"
    assert parser.parse_args(["--config", "serve.yaml", "--kv-policy.budget", "512"]).kv_policy.budget == 512


@pytest.mark.parametrize("none", [None, "", "None"])
def test_none_is_no_policy_as_of_vllms_flags(parser, tmp_path, none):
    """Templates of deployments leave a flag empty, or have null in a file."""
    (tmp_path / "serve.yaml").write_text(json.dumps({"kv-policy": none, "quantization": none}))
    for words in (["--config", str(tmp_path / "serve.yaml")], ["--kv-policy", none or "", "--quantization", ""]):
        namespace = parser.parse_args(words)
        assert namespace.kv_policy is None is namespace.quantization
        assert parser.parse_args([*words, "--kv-policy", "tova"]).kv_policy.name == "tova"


@pytest.mark.parametrize("key", ["kv-policy", "KV_POLICY", "kvPolicy"])
def test_a_policy_under_another_key_of_additional_config_is_refused(configured, key):
    """Otherwise the server would run without a policy, and without an error."""
    with pytest.raises(KVPolicyError, match=f"additional_config got the key '{key}'; expected 'kv_policy'"):
        configured(additional_config={key: "h2o"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kv-policy", "h3o"], "unknown KV policy 'h3o': did you mean 'h2o'? Expected one of: "),
        (
            ["--kv-policy", '{"name": "h2o", "budgt": 1}'],
            "policy 'h2o' has no field 'budgt': did you mean 'budget'? Expected one of: ",
        ),
        (["--kv-policy.name", "h2o", "--kv-policy.budget", "-1"], "budget: must be a whole number of tokens above 0"),
        (["--kv-policy", '{"name": h2o}'], "not a JSON object"),
        (["--kv-policy.budget", "512"], "a KV policy needs a name: one of "),
        (["--kv-policy", "h2o", "--kv-policy.kernel", "3"], "policy 'h2o' has no field 'kernel'"),
        (["--kv-policy", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_answered_in_one_line(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(arguments)
    assert stopped.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith(f"vllm serve: error: argument --kv-policy: {message}")


def subcommands(parser, path=()):
    """(words of the command, its parser) for each command of a parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield " ".join(path), parser
    for action in nested:
        for name, subparser in action.choices.items():
            yield from subcommands(subparser, (*path, name))


def test_the_flag_is_on_every_command_that_takes_engine_arguments(monkeypatch):
    cli = importlib.import_module("vllm.entrypoints.cli.main")
    parsers = {}

    def stop_here(parser):
        parsers.update(subcommands(parser))
        sys.exit()

    monkeypatch.setattr(FlexibleArgumentParser, "parse_args", stop_here)
    # vLLM builds the parsers of `vllm bench` only if that is what was asked for.
    for command in ("serve", "bench"):
        monkeypatch.setattr(sys, "argv", ["vllm", command])
        with mock.patch.dict(os.environ), pytest.raises(SystemExit):
            cli.main()
    flags = {name: parser._option_string_actions for name, parser in parsers.items()}
    takes_engine_arguments = {name for name, known in flags.items() if "--max-model-len" in known}
    assert {"serve", "run-batch", "bench latency", "bench throughput"} <= takes_engine_arguments
    assert {name for name, known in flags.items() if "--kv-policy" in known} == takes_engine_arguments


# Forks of a fresh process that has imported vLLM's package, none of its modules, and nothing of the plugin

FRESH = """
import json, os, sys
import vllm
ours = [name for name in sys.modules if name.split(".")[0] == "vllm_evict" or name.startswith("vllm.engine")]
assert not ours or vllm.__version__ < "0.32", "vLLM imports plugins when it is configured; before 0.32, with itself"
model, policy = sys.argv[1], {"name": "h2o", "budget": 1024}
for case, code in json.loads(sys.argv[2]).items():
    sys.stdout.flush()
    if not os.fork():
        def tell(value):
            print("RESULT", json.dumps([case, value]), flush=True)
            os._exit(0)
        exec(code, globals())
    assert os.wait()[1] == 0, case
"""

CASES = {
    "EngineArgs": """
from dataclasses import dataclass, replace
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
@dataclass
class Later(EngineArgs):
    pass
tell([replace(args(model=model, kv_policy=policy)).kv_policy for args in (AsyncEngineArgs, EngineArgs, Later)])
""",
    "LLM": """
from vllm import LLM
from vllm.v1.engine.llm_engine import LLMEngine
def stop_here(engine_args, **kwargs):
    tell([engine_args.kv_policy])
LLMEngine.from_engine_args = stop_here
LLM(model, kv_policy=policy)
""",
    "left out": """
from vllm import LLM, AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    LLM(model, kv_policy=policy)
except TypeError as error:
    keyword = str(error)
_, unknown = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(["--kv-policy", "h2o"])
tell([keyword, unknown, [name for name in sys.modules if name.startswith("vllm_evict")]])
""",
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Return the answer to each of CASES."""
    model = tmp_path_factory.mktemp("model")
    told = {}
    # vLLM before 0.32 imports plugins with itself, so what is left out is left out from the start.
    for plugins, cases in ({}, ("EngineArgs", "LLM")), ({"VLLM_PLUGINS": ""}, ("left out",)):
        env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | plugins
        code = json.dumps({case: CASES[case] for case in cases})
        command = [sys.executable, "-c", FRESH, str(model), code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0 and len(lines) == len(cases), done.stderr[-3000:]
        told |= dict(map(json.loads, lines))
    return told


@pytest.mark.parametrize("case, times", [("EngineArgs", 3), ("LLM", 1)])
def test_the_keyword_works_in_a_fresh_process(fresh, case, times):
    assert fresh[case] == [{"name": "h2o", "budget": 1024}] * times


def test_vllm_plugins_can_leave_it_out(fresh):
    keyword, unknown, imported = fresh["left out"]
    assert "unexpected keyword argument 'kv_policy'" in keyword
    assert unknown == ["--kv-policy", "h2o"]
    assert imported == []

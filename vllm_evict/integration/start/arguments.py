"""Adds `--kv-policy` and `LLM(kv_policy=...)` to vLLM's engine arguments.

The policy travels as `VllmConfig.additional_config["kv_policy"]`, the channel that vLLM keeps for plugins.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ...config import REGISTRY, KVPolicyConfig, KVPolicyError, presets
from ...config.errors import shown
from ...config.fields import SERVER
from ...config.sources import read
from ..seams import extends, replaces

#: Fields that users may give.
FIELDS = ("name", *REGISTRY.fields(), *(option.name for option in SERVER))
#: Columns of argparse's help that its text leaves free at the left.
INDENT = 26
#: Columns of a field's name.
NAMES = 16


def _help(width: int) -> str:
    """Return the text of `--help=kv-policy` for lines of this width: what the flag takes, and a row for each field.

    vLLM joins lines that one line break separates, and drops empty ones; so rows end with two.
    """
    lines = [
        f"KV eviction policy: a name, a preset, a JSON object such as '{EXAMPLE}' (or --kv-policy.name h2o "
        "--kv-policy.budget 2048), or the path of a YAML file. Further flags change fields: --kv-policy h2o-pressure "
        "--kv-policy.budget 4096. Blocks above the budget go back to the pool while a "
        "request runs. Sizes are tokens. `vllm-evict policies NAME` prints the fields of one policy.",
        f"Policies: {', '.join(sorted(REGISTRY))}.",
        f"Presets: {', '.join(presets())}.",
    ]
    for field, _, default, meaning in [("field", "", "default", "meaning"), *REGISTRY.rows()]:
        said = f"{meaning} [{default}]" if default else meaning
        left, *others = textwrap.wrap(said.replace("`", ""), max(width - NAMES, 20))
        lines += [f"{field.strip('`'):<{NAMES}}{left}", *(" " * NAMES + line for line in others)]
    head, *rows = (line.replace("%", "%%") for line in lines)
    # argparse appends a default that the text does not name, which would break the last row.
    return "\n\n".join([f"{head} Default: %(default)s.", *rows])


EXAMPLE = '{"name": "h2o", "budget": 2048, "sink": 64, "recent": 256}'
HELP = _help(shutil.get_terminal_size().columns - INDENT)


@dataclass(kw_only=True)
class _Added:
    kv_policy: KVPolicyConfig | dict[str, Any] | str | None = None


(_FIELD,) = dataclasses.fields(_Added)


@extends(
    "vllm.engine.arg_utils:EngineArgs",
    "vllm.engine.arg_utils:AsyncEngineArgs",
    at_import=True,
    why="`LLM(kv_policy=...)`: engine arguments have a field of that name",
    remove_when="vLLM lets plugins add engine arguments",
)
def add_field(cls: Any) -> None:
    """Make `kv_policy` a dataclass field of the class.

    Code that lists or copies the fields of engine arguments (`dataclasses.replace`, `from_cli_args`, vLLM's log of
    non-default arguments, Ray Serve LLM) then includes it, and subclasses inherit it.
    """
    cls.__dataclass_fields__[_FIELD.name] = _FIELD
    cls.__annotations__[_FIELD.name] = _FIELD.type
    cls.kv_policy = None
    cls.__init__ = _with_keyword(cls.__init__)
    # The generated code of these methods names each field.
    made = dataclasses.make_dataclass(cls.__name__, [(f.name, f.type, f) for f in dataclasses.fields(cls)], init=False)
    cls.__repr__, cls.__eq__ = made.__repr__, made.__eq__


def _with_keyword(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, kv_policy: Any = None, **kwargs: Any) -> None:
        self.kv_policy = kv_policy
        init(self, *args, **kwargs)

    signature = inspect.signature(init)
    keyword = inspect.Parameter(_FIELD.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_FIELD.type)
    vars(__init__)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), keyword])
    return __init__


@replaces(
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    at_import=True,
    why="`--kv-policy` is one of vLLM's flags",
    remove_when="vLLM lets plugins add engine arguments",
)
def add_flag(add_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    def with_flag(parser: Any) -> Any:
        parser = add_cli_args(parser)
        group = parser.add_argument_group("KV policy", "Eviction of KV cache blocks while serving (vllm_evict).")
        group.add_argument("--kv-policy", action=_Policy, default=None, metavar="POLICY", help=HELP)
        return parser

    return with_flag


class _Policy(argparse.Action):
    """Parses the flag. Fields without a name change the policy that an earlier flag gave.

    vLLM's parser gathers all `--kv-policy.FIELD` in one JSON object, and puts it behind all other flags.
    """

    #: The last policy, and its fields as they were written.
    _last: tuple[KVPolicyConfig | None, Mapping[str, Any]] = (None, {})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values in ("", "None"):  # vLLM's flags take both for none; null in its --config file arrives as "None"
            setattr(namespace, self.dest, None)
            return
        source = ""
        try:
            fields, source = read(values.strip())
            before, written = self._last
            if isinstance(fields, Mapping) and "name" not in fields and before is not None:
                # A parser may parse several command lines.
                fields = {**written, **fields} if getattr(namespace, self.dest) is before else fields
            config = KVPolicyConfig.parse(fields)
        except KVPolicyError as error:
            raise argparse.ArgumentError(self, f"{source}{error}") from None
        self._last = (config, fields)
        setattr(namespace, self.dest, config)


@replaces(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    at_import=True,
    why="a policy is checked and put into the engine's configuration, with the scheduler and worker that evict",
    remove_when="vLLM lets plugins add engine arguments, and change the configuration made of them",
)
def configure(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    def with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _requested(self)
        if config is None:
            return create_engine_config(self, *args, **kwargs)
        if not isinstance(self.additional_config, dict):
            given = shown(self.additional_config)
            raise KVPolicyError(f"additional_config got {given}; expected a dict, which carries the KV policy")
        self.additional_config = {**self.additional_config, "kv_policy": config.to_dict()}
        from .of_features import checked

        with checked(config), _own_errors():
            vllm_config = create_engine_config(self, *args, **kwargs)
        # Imported here: the module needs a vLLM whose platform is known.
        from .activation import activate

        activate(vllm_config, config)
        return vllm_config

    return with_policy


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise a `KVPolicyError` as it is, which vLLM's configuration wraps into a `ValidationError`."""
    try:
        yield
    except ValidationError as error:
        for each in error.errors():
            if isinstance(own := each.get("ctx", {}).get("error"), KVPolicyError):
                raise own from None
        raise


def _requested(engine_args: Any) -> KVPolicyConfig | None:
    """Return the policy given as argument or in additional_config."""
    additional = engine_args.additional_config
    carried = additional.get("kv_policy") if isinstance(additional, dict) else None
    for key in additional if isinstance(additional, dict) else ():
        if key != "kv_policy" and re.sub("[^a-z]", "", str(key).lower()) == "kvpolicy":
            raise KVPolicyError(f"additional_config got the key {shown(key)}; expected 'kv_policy'; rename it")
    given = engine_args.kv_policy
    if given is None:
        return None if carried is None else KVPolicyConfig.parse(carried)
    config = KVPolicyConfig.parse(given)
    if carried is not None and KVPolicyConfig.parse(carried) != config:
        raise KVPolicyError("two different KV policies: one as kv_policy, one in additional_config; give one of them")
    return config

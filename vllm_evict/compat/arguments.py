"""`--kv-policy` and `LLM(kv_policy=...)`: vLLM's engine arguments with one more.

The policy travels as `VllmConfig.additional_config["kv_policy"]`, the channel that vLLM keeps for plugins.
"""

import argparse
import functools
from types import ModuleType
from typing import Any

from ..config import KVPolicyConfig, KVPolicyError, shown
from ..policies import POLICIES

#: What users may give; other fields of a config are its own.
_OPTIONS = frozenset({"name", "allow"}).union(*(policy.options for policy in POLICIES.values()))
FIELDS = tuple(field for field in KVPolicyConfig.model_fields if field in _OPTIONS)
HELP = f"""KV eviction policy: a name ({", ".join(sorted(POLICIES))}), a JSON object such as
'{{"name": "h2o", "budget": 2048, "sink": 64, "recent": 256}}' (or --kv-policy.name h2o --kv-policy.budget 2048), or the
path of a YAML file. Blocks above the budget go back to the pool while a request runs. Sizes are tokens; the budget may
be a ratio of the prompt below 1. Fields: {", ".join(FIELDS)}."""


def hook(module: ModuleType) -> None:
    """Extend `vllm.engine.arg_utils`; once."""
    base = module.EngineArgs
    if hasattr(base, "kv_policy"):
        return
    base.kv_policy = None
    for cls in (base, module.AsyncEngineArgs):
        cls.__init__ = _with_keyword(cls.__init__)
    base.add_cli_args = staticmethod(_with_flag(base.add_cli_args))
    base.from_cli_args = classmethod(_with_namespace(base.from_cli_args.__func__))
    base.create_engine_config = _with_policy(base.create_engine_config)


def _with_keyword(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, kv_policy: Any = None, **kwargs: Any) -> None:
        self.kv_policy = kv_policy
        init(self, *args, **kwargs)

    return __init__


def _with_flag(add_cli_args: Any) -> Any:
    @functools.wraps(add_cli_args)
    def with_flag(parser: Any) -> Any:
        parser = add_cli_args(parser)
        group = parser.add_argument_group("KV policy", "Eviction of KV cache blocks while serving (vllm_evict).")
        group.add_argument("--kv-policy", type=_argument, default=None, metavar="POLICY", help=HELP)
        return parser

    return with_flag


def _argument(text: str) -> KVPolicyConfig:
    try:
        return KVPolicyConfig.parse(text)
    except KVPolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_namespace(from_cli_args: Any) -> Any:
    @functools.wraps(from_cli_args)
    def with_namespace(cls: type, args: argparse.Namespace) -> Any:
        engine_args = from_cli_args(cls, args)
        engine_args.kv_policy = getattr(args, "kv_policy", None)
        return engine_args

    return with_namespace


def _with_policy(create_engine_config: Any) -> Any:
    @functools.wraps(create_engine_config)
    def with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _requested(self)
        if config is None:
            return create_engine_config(self, *args, **kwargs)
        if not isinstance(self.additional_config, dict):
            given = shown(self.additional_config)
            raise KVPolicyError(f"beside a KV policy additional_config must be a dict, as it carries it, not {given}")
        self.additional_config = {**self.additional_config, "kv_policy": config.to_dict()}
        vllm_config = create_engine_config(self, *args, **kwargs)
        # Here, not above: what it imports needs a vLLM whose platform is known.
        from ..plugin import activate

        activate(vllm_config, config)
        return vllm_config

    return with_policy


def _requested(engine_args: Any) -> KVPolicyConfig | None:
    """The policy that was asked for, by argument or by additional_config."""
    additional = engine_args.additional_config
    carried = additional.get("kv_policy") if isinstance(additional, dict) else None
    given = engine_args.kv_policy
    if given is None:
        return None if carried is None else KVPolicyConfig.parse(carried)
    config = KVPolicyConfig.parse(given)
    if carried is not None and KVPolicyConfig.parse(carried) != config:
        raise KVPolicyError("two different KV policies: one as kv_policy, one in additional_config; give one of them")
    return config

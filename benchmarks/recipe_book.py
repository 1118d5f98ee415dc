"""The commands that vLLM's recipe book recommends, taken from a checkout of it into a file that `recipes.py` counts.

    python benchmarks/recipe_book.py BOOK

BOOK is a checkout of https://github.com/vllm-project/recipes (Apache-2.0). For each language model it recommends one
command on a device: the default variant on one node, with the features that are not opt-in (`single`). Some models may
prefill and decode on separate servers (`prefill`, `decode`), most may keep blocks of the prefix cache in host memory
(`simple`, `lmcache`), some may have a drafter (`drafts`), by the book's own flags. Its texts print further commands,
for devices of all kinds (`printed`). Flags of front ends, images and experts are left out.
"""

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from reports import to_json

#: Classes of models, each with patterns of the models' names and one model that stands for them.
CLASSES = json.loads(Path(__file__).with_suffix(".json").read_text())
#: What was taken from the book: its commit and licence, and a line for each command.
LIST = Path(__file__).parent / "data/recipes.json"
#: Devices of the book that are listed.
DEVICES = ("h200", "b200")
#: Feature of recipes that drafts.
DRAFTS = "spec_decoding"
#: Flags of front ends, files, images and experts, which the models of `CLASSES` lack.
LEFT_OUT = {
    *("--enable-auto-tool-choice", "--tool-call-parser", "--tool-call-parser-plugin", "--tool-parser-plugin"),
    *("--chat-template", "--reasoning-parser", "--reasoning-parser-plugin", "--generation-config"),
    *("--served-model-name", "--tokenizer_mode", "--tokenizer-mode", "--config_format", "--config-format"),
    *("--load_format", "--load-format", "--tokenizer", "--host", "--port", "--quantization", "--hf-overrides"),
    *("--mm-encoder-tp-mode", "--mm-processor-cache-gb", "--limit-mm-per-prompt", "--enable-expert-parallel"),
}
#: What a recipe's server may be, beside the recommended one.
SERVERS = ("single", "prefill", "decode", "simple", "lmcache", "drafts", "printed")
#: What follows `vllm serve` in a text: a line of a shell, with those that a backslash joins to it.
PRINTED = re.compile(r"vllm serve ((?:[^\n`\\]|\\[\s\S])+)")


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


def commands(book: Path, device: str, server: str = "single") -> Iterator[Command]:
    """Yield what the book recommends on a device: for each model that may have it, one of `SERVERS`."""
    if server == "printed":
        yield from {(each.of["class"], each.recipe, each.flags): each for each in printed(book)}.values()
        return
    taxonomy = yaml.safe_load((book / "taxonomy.yaml").read_text())
    profile = taxonomy["hardware_profiles"][device]
    for file in sorted(book.glob("models/*/*.yaml")):
        name = f"{file.parent.name}/{file.stem}"
        recipe = yaml.safe_load(file.read_text())
        if server == "drafts" and DRAFTS not in (recipe.get("features") or {}):
            continue
        of = class_of(name)
        if of is None or recipe["meta"].get("hardware", {}).get(device) == "unsupported":
            continue
        strategy, flags = recipe.get("default_strategy", "single_node_tp"), []
        if server in ("prefill", "decode"):
            strategy = "pd_cluster"
            if strategy not in recipe.get("compatible_strategies", ()):
                continue
            flags = yaml.safe_load((book / "strategies" / "pd_cluster.yaml").read_text())[server]["vllm_args"]
        elif server in ("simple", "lmcache"):
            offload = taxonomy["kv_offload"][server]
            barred = (recipe.get("kv_offload_support") or {}).get(server) == "unsupported"
            if barred or strategy not in offload.get("strategies", (strategy,)):
                continue
            flags = offload["args"]
        yield Command(name, of, tuple(_kept(recommended(recipe, device, profile, strategy, server, flags))))


def printed(book: Path) -> Iterator[Command]:
    """Yield the commands of the book's texts, without variables in front of them, and without placeholders."""
    for file in sorted((*book.glob("models/*/*.yaml"), *book.glob("*/*.md"))):
        for line in PRINTED.findall(file.read_text()):
            try:
                words = shlex.split(line.replace("\\\n", " "))
            except ValueError:  # a value that goes on in the next line
                continue
            model, *flags = takewhile(lambda word: word not in ("#", "|", "&", "&&", ">"), words)
            of = class_of(model) or class_of(f"{file.parent.name}/{file.stem}")
            if of is not None and not re.search(r"[<$]|\.\.\.|--omni", line):
                dashed = (re.sub("^--[a-z_-]+", lambda flag: flag[0].replace("_", "-"), word) for word in flags)
                split = (word.split("=", 1) if word.startswith("--") else [word] for word in dashed)
                yield Command(model, of, tuple(_kept(sum(split, []))))


def class_of(name: str) -> dict[str, Any] | None:
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
        wanted = name not in (recipe.get("opt_in_features") or ()) or (server == "drafts" and name == DRAFTS)
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


def listed(book: Path) -> dict[str, Any]:
    """Return what `LIST` has of a checkout: a row for each command, with the servers and devices that it is for."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for server in SERVERS:
        for device in DEVICES if server != "printed" else ("",):
            for each in commands(book, device, server):
                row = each.recipe, each.of["class"], shlex.join(each.flags)
                found.setdefault(row, []).append(f"{server} {device}".strip())
    at = ["git", "-C", book, "log", "-1", "--format=%h of %cs"]
    return {
        "source": "https://github.com/vllm-project/recipes",
        "commit": subprocess.run(at, capture_output=True, text=True, check=True).stdout.strip(),
        "licence": "Apache-2.0",
        "changed": "flags that stand for the model alone; those of front ends, images and experts are left out",
        "commands": [
            {"recipe": recipe, "class": of, "for": servers, "flags": flags}
            for (recipe, of, flags), servers in found.items()
        ],
    }


def known(server: str, device: str) -> list[Command]:
    """Return the commands of `LIST` for a server on a device; printed ones are for all devices."""
    classes = {each["class"]: each for each in CLASSES}
    wanted = {server, f"{server} {device}"}
    return [
        Command(row["recipe"], classes[row["class"]], tuple(shlex.split(row["flags"])))
        for row in json.loads(LIST.read_text())["commands"]
        if wanted & {*row["for"]}
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    taken = listed(parser.parse_args(argv).book)
    LIST.parent.mkdir(exist_ok=True)
    LIST.write_text(to_json(taken) + "\n")
    print(f"{len(taken['commands'])} commands written to {LIST}")


if __name__ == "__main__":
    main()

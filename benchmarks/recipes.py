"""Which commands of vLLM's recipe book start under a KV policy, by device: asks the plugin's own configuration.

    python benchmarks/recipes.py [--devices h200 b200] [--servers single ...] [--policies h2o ...] [--out FILE.json]
    python benchmarks/recipes.py --table        prints the tables of docs/models.md

`recipe_book.py` took the commands from the book. The book lacks the configurations of its models. So one model stands
for each class of recipe_book.json, in sizes of published models, and gets the flags of the commands; so do drafters.
Commands as recommended (`single`) are asked under each policy and preset, others under `OTHERS`. Nothing is loaded and
no device is needed, as for `vllm-evict check`. Each command is asked in a process of its own, so that none sees what
another changed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from recipe_book import CLASSES, DEVICES, LIST, SERVERS, Command, known
from reports import RESULTS, hardware, to_json

OUT = RESULTS / "recipes.json"
#: Policies with fields that documents name.
FURTHER = (
    '{"name":"full","evict":"host","host":"16GiB"}',
    '{"name":"full","read":4096}',
    '{"name":"snapkv","granularity":"token"}',
    '{"name":"tova","prompt":"whole"}',
)
#: What is asked of commands that are not the recommended ones.
OTHERS = ("h2o-pressure", "h2o", "sink-window")
#: Method -> configuration of a drafter that is a model of its own.
DRAFTERS = {method: each["config"] for each in CLASSES for method in each.get("drafts", ())}
#: Packages on which answers depend; a host that serves the models has all of them.
PACKAGES = ("vllm", "transformers", "torch", "triton", "torchvision", "flashinfer-python", "mistral_common", "ray")
#: Server -> its words in the table.
WORDS = {
    "single": "as recommended",
    "prefill": "prefill and decode apart, the side of prefills",
    "decode": "the side of decodes",
    "simple": "with `SimpleCPUOffloadConnector`",
    "lmcache": "with LMCache",
    "drafts": "with a drafter",
    "printed": "all that texts of the book print",
}
SERVED, UNKNOWN = "starts", "unknown: "


def policies() -> list[str]:
    """Return the values of --kv-policy that are counted: all names that need no file of gates, and `FURTHER`."""
    from vllm_evict.config import KVPolicyConfig, KVPolicyError
    from vllm_evict.config.sources import presets
    from vllm_evict.policies import POLICIES

    def complete(name: str) -> bool:
        try:
            return bool(KVPolicyConfig.parse(name))
        except KVPolicyError:
            return False

    return sorted(filter(complete, {*POLICIES, *presets(), *FURTHER}))


def answer(flags: Sequence[str], policy: str) -> str:
    """Return what `vllm-evict check` says of a server, in one line: that it starts, why not, or what is unknown."""
    from vllm_evict.tools.check import cli as check

    try:
        return SERVED if check.accepted([*flags, "--kv-policy", policy]) else ""
    except check.CheckError as error:
        return f"{UNKNOWN}{error}"
    except check.KVPolicyError as error:
        return "; ".join(check.refusals_of(error))


def answer_all(device: str) -> None:
    """Print the answers to each server that stdin has, a process for each. This process imports what they import."""
    from vllm_evict.tools.check import cli as check

    check.become(device)
    for flags, names in json.load(sys.stdin):
        here = set(sys.modules)
        reader, writer = os.pipe()
        if not os.fork():
            said = [answer(flags, name) for name in names]
            with os.fdopen(writer, "w") as file:
                json.dump([said, [name for name in sys.modules if name not in here]], file)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            said, imported = json.load(file)
        os.wait()
        for name in imported:
            try:
                import_module(name)
            except Exception:  # a module that another one made
                continue
        print(json.dumps(said), flush=True)


def ask(device: str, servers: list[tuple[list[str], Sequence[str]]]) -> Iterator[list[str]]:
    """Yield what the plugin says of each server on a device, by policy.

    Args:
        servers: flags of `vllm serve`, and policies.
    """
    with tempfile.TemporaryFile("w+") as asked:
        json.dump(servers, asked)
        asked.seek(0)
        command = [sys.executable, __file__, "--answer", device]
        with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, text=True) as process:
            for number, line in enumerate(process.stdout, 1):
                yield json.loads(line)
                if number % 50 == 0:
                    print(f"{device}: {number} of {len(servers)} servers", file=sys.stderr)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}")


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


def rows(device: str, wanted: dict[str, Sequence[str]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what is said of each command on a device: a row, with an answer for each policy.

    Args:
        wanted: server -> its policies.
        folder: gets the models' configurations.
    """
    given: list[tuple[str, Command]] = []
    servers: dict[tuple[Any, ...], list[str]] = {}
    for server, names in wanted.items():
        for command in known(server, device):
            if server == "prefill" and "config" not in command.of:
                # No policy runs there: a plain model stands for those without a configuration.
                command = command._replace(of=CLASSES[0])
            given.append((server, command))
            if "config" in command.of:
                config, flags = with_drafter(command, folder)
                servers[command.of["class"], command.flags, tuple(names)] = [_written(config, folder), *flags]
    asked = [(flags, key[-1]) for key, flags in servers.items()]
    said = dict(zip(servers, ask(device, asked)))
    for server, command in given:
        refused, names = command.of.get("refused"), wanted[server]
        answers = [refused] * len(names) if refused else said[command.of["class"], command.flags, tuple(names)]
        yield {"server": server, "device": device, "recipe": command.recipe, "said": list(map(_cause, answers))}


def _cause(said: str) -> str:
    """Return an answer without what to do; what is unknown without the folder of the model."""
    return said.split(" [type=")[0][:150] if said.startswith(UNKNOWN) else said.split(": ", 1)[0][:150]


def environment() -> dict[str, str]:
    """Return what the answers depend on beside the list: versions of packages here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def measured(devices: Sequence[str], wanted: dict[str, Sequence[str]], before: dict[str, Any]) -> dict[str, Any]:
    """Ask all, and return the results: answers are numbered, since few of them are unlike.

    Args:
        before: results of before. Rows of other devices stay, if they were asked the same in the same environment.
    """
    at = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=LIST.parent)
    book = json.loads(LIST.read_text())
    about = {
        "command": "python benchmarks/recipes.py",
        "hardware": hardware(),
        "commit": at.stdout.strip(),
        "environment": environment(),
        "book": {name: book[name] for name in ("source", "commit")},
        "policies": {server: list(names) for server, names in wanted.items()},
    }
    found = []
    if about == {name: before.get(name) for name in about}:
        kept = [row for row in before["rows"] if row["device"] not in devices]
        found = [row | {"said": [before["answers"][said] for said in row["said"]]} for row in kept]
    with tempfile.TemporaryDirectory() as folder:
        found += [row for device in devices for row in rows(device, wanted, Path(folder))]
    answers = list(dict.fromkeys([SERVED, *(said for row in found for said in row["said"])]))
    numbered = [row | {"said": [answers.index(said) for said in row["said"]]} for row in found]
    return about | {"answers": answers, "rows": numbered}


class Count(NamedTuple):
    """Of the commands for one server and device, under one policy: how many start, of how many, and are unknown."""

    starts: int
    of: int
    unknown: int

    def __str__(self) -> str:
        return f"{self.starts} of {self.of}" + f" ({self.unknown} unknown)" * bool(self.unknown)


def counts(results: dict[str, Any]) -> dict[tuple[str, str, str], Count]:
    """Return (server, device, policy) -> how many commands start."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in results["rows"]:
        for policy, said in zip(results["policies"][row["server"]], row["said"]):
            found.setdefault((row["server"], row["device"], policy), []).append(results["answers"][said])
    return {
        key: Count(said.count(SERVED), len(said), sum(each.startswith(UNKNOWN) for each in said))
        for key, said in found.items()
    }


def table(results: dict[str, Any]) -> str:
    """Return what docs/models.md shows: policies that start, those with equal counts in one row, then the others."""
    found = counts(results)
    devices = list(dict.fromkeys(device for _, device, _ in found))
    lines = [f"| servers | policies | {' | '.join(map(str.upper, devices))} |", f"|---|---|{'---:|' * len(devices)}"]
    nowhere: list[str] = []
    for server, names in results["policies"].items():
        alike: dict[tuple[Count, ...], list[str]] = {}
        for name in names:
            alike.setdefault(tuple(found[server, device, name] for device in devices), []).append(f"`{name}`")
        for counted, its in sorted(alike.items(), reverse=True):
            if server == "single" and not any(each.starts for each in counted):
                nowhere += its
            else:
                lines.append(f"| {WORDS[server]} | {', '.join(its)} | {' | '.join(map(str, counted))} |")
    if nowhere:
        lines += ["", "Policies that start on none of these GPUs:", ""]
        at = {name: index for index, name in enumerate(results["policies"]["single"])}
        for name in nowhere:
            said = Counter(row["said"][at[name[1:-1]]] for row in results["rows"] if row["server"] == "single")
            cause, _ = said.most_common(1)[0]
            lines.append(f"- {name}: {results['answers'][cause]}")
    return "\n".join([*lines, "", about(results)])


def about(results: dict[str, Any]) -> str:
    """Return what the counts depend on, and what is unknown of commands as recommended, and with blocks on the host."""
    of = {name: version for name, version in results["environment"].items() if name != "vllm-evict"}
    here = ", ".join(f"{name} {version}" for name, version in of.items() if version != "missing")
    missing = ", ".join(name for name, version in of.items() if version == "missing")
    unknown: dict[str, set[str]] = {}
    for row in results["rows"]:
        for said in (results["answers"][number] for number in row["said"]):
            if said.startswith(UNKNOWN) and row["server"] in ("single", "simple", "lmcache"):
                unknown.setdefault(said.removeprefix(UNKNOWN), set()).add(row["recipe"])
    lines = [
        f"The book is {results['book']['commit']}; counted at commit {results['commit']}. Environment: {here}; without "
        f"{missing or 'nothing'}."
    ]
    for cause, recipes in unknown.items():
        whose = ", ".join(sorted(recipes)) if len(recipes) < 10 else f"{len(recipes)} recipes"
        lines.append(f"Unknown there: {whose}: {cause}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--servers", nargs="+", default=SERVERS, choices=SERVERS)
    parser.add_argument("--policies", nargs="+", help="all servers are asked under these alone")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="prints the tables of --out, and asks nothing")
    args = parser.parse_args(argv)
    if not args.table:
        of = {server: policies() if server == "single" else OTHERS for server in args.servers}
        wanted = {server: args.policies or names for server, names in of.items()}
        before = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(to_json(measured(args.devices, wanted, before)) + "\n")
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer_all(sys.argv[2])
    else:
        main()

"""Wrong inputs for every field of a policy and of a request, from a grammar of types, sizes, nestings, encodings and
lengths.

`fits` says by itself which values a field may have, so that a case that ought to be refused is one by this file's word
and not by the plugin's. By hand, for the figures of docs/results.md:

    PYTHONPATH=. python tests/harness/loads/inputs.py [CASES] [SEED]
"""

import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

NAMES = [
    *("full", "sink-window", "strided", "h2o", "scissorhands", "tova", "snapkv", "kvzip", "rkv", "knorm", "keydiff"),
    *("pagedeviction", "keybound", "random", "duo", "pyramidkv", "adakv", "fastgen"),
]
WHOLE = 1 << 31
LONGEST = 10_000_000
CHOICES = {
    "when": ("budget", "pressure"),
    "granularity": ("block", "token"),
    "sets": ("head", "layer", "all"),
    "merge": ("d2o", "ems", None),
    "accumulate": ("sum", "mean", "ema", "last"),
    "heads": ("sum", "mean", "max"),
    "layers": ("sum", "mean", "max"),
    "protect": (True, False),
    "admit": (True, False),
    "exact": (True, False),
    "prompt": ("chunks", "whole"),
    "evict": ("drop", "host"),
    "allocate": ("uniform", "pyramid", "ada"),
    "index": ("bits", "box", "signs"),
}
#: Field -> least and most of a whole number.
SIZES = {
    **dict.fromkeys(("buffer", "sink", "recent", "min_prompt"), (0, WHOLE - 1)),
    **dict.fromkeys(("window", "every", "chunk", "kernel", "bands", "hold", "unit"), (1, WHOLE - 1)),
    **dict.fromkeys(("read", "read_prompts", "fetch", "dense_layers"), (0, WHOLE - 1)),
    "again_rounds": (1, 9),
    "seed": (0, (1 << 63) - 1),
}
#: Field -> least and most of any number.
NUMBERS = {
    **dict.fromkeys(("decay", "mix", "floor", "recovery", "merge_decay", "threshold", "sparsity"), (0, 1)),
    "merge_threshold": (-1, 1),
    "beta": (1, WHOLE - 1),
}
NULLABLE = {
    "gates",
    "budget",
    "context",
    "exact",
    "host",
    "bands",
    "merge",
    "threshold",
    "sparsity",
    "retrieval",
    "allow",
    "pattern",
}
REQUEST_FIELDS = ("kv_policy", "kv_budget", "kv_sink", "kv_recent", "kv_prompt", "kv_usage")


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool | np.bool_)
    return value if is_number and (isinstance(value, int | np.integer) or math.isfinite(value)) else None


def fits(field: str, value: Any) -> bool:
    """Whether a field of a policy may have a value. False is certain; True still has to go with the other fields."""
    number = _number(value)
    whole = number is not None and number == int(number)
    if value is None:
        return field in NULLABLE
    if field in CHOICES:
        return isinstance(value, str | bool) and any(value == choice for choice in CHOICES[field])
    if field == "hold" and number is not None and 0 < number < 1:
        return True
    if field in SIZES:
        return whole and SIZES[field][0] <= number <= SIZES[field][1] and not (field == "kernel" and number % 2 == 0)
    if field in NUMBERS:
        return number is not None and NUMBERS[field][0] <= number <= NUMBERS[field][1]
    if field == "budget":
        return number is not None and (0 < number < 1 or (isinstance(value, int | np.integer) and 0 < number < WHOLE))
    if field == "context":
        return value == "model" if isinstance(value, str) else isinstance(value, int) and whole and 0 < number < WHOLE
    if field == "host":
        size = re.fullmatch(r" *([0-9]+\.?[0-9]*|\.[0-9]+) *[KMGT]iB", value) if isinstance(value, str) else None
        return size is not None or (number is not None and 0 < number < 1 << 50)
    if field == "gates":  # of text, right ones are files; `_gates` tries others
        return isinstance(value, str)
    if field in ("name", "retrieval"):
        return (isinstance(value, str) and value in NAMES) or (field == "retrieval" and isinstance(value, dict))
    if field == "leaders" and number is not None:
        return fits("every", value)
    entry = {
        "allow": lambda each: isinstance(each, str) and each in NAMES,
        "instruction": lambda each: fits("sink", each),
        "leaders": lambda each: fits("sink", each),
        "pattern": lambda each: isinstance(each, str) and each != "" and set(each) <= {"0", "1"},
    }[field]
    return isinstance(value, list | tuple | set | range | memoryview | np.ndarray) and all(map(entry, value))


class Hostile:
    """An object that no message can show."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


def nested(depth: int, make: Callable[[Any], Any], inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = make(inside)
    return inside


def recursive() -> list[Any]:
    itself: list[Any] = []
    itself.append(itself)
    return itself


class Grammar:
    """Values of all kinds; `json_only` leaves out those that JSON cannot carry."""

    def __init__(self, seed: int = 0, json_only: bool = False, longest: int = LONGEST):
        self.random, self.longest, self.json_only = random.Random(seed), longest, json_only
        kinds = [self.text, self.number, self.container, self.constant]
        self.kinds = kinds if json_only else [*kinds, self.thing]

    def value(self) -> Any:
        return self.random.choice(self.kinds)()

    def length(self) -> int:
        """Mostly short; one in fifty is long, up to `longest`, evenly in orders of magnitude."""
        if self.random.random() < 0.98:
            return self.random.randrange(40)
        return int(10 ** self.random.uniform(2, math.log10(self.longest)))

    def text(self) -> str:
        numerals = ["64", "-1", "0x40", "1_000", "1e3", "٦٤", "NaN", "Infinity", "-0", "+5", "6 4", "0b1", "1e400", "½"]
        words = [
            "sum",
            "SUM",
            "h2o ",
            "H2O",
            "h20",
            "none",
            "null",
            "true",
            "model",
            "{}",
            "[]",
            "name: h2o",
            "%s",
            "{0}",
        ]
        signs = [
            "",
            " ",
            "\0",
            "\n",
            "\t",
            "\r\n",
            "\x1b[31m",
            "‮",
            "​",
            "é",
            "🦆",
            "\ud800",
            "\udcff",
            "﷽",
            "/",
            "\\",
            "~",
            "$HOME",
        ]
        paths = [
            "/etc/passwd",
            "../../x.yaml",
            "/dev/zero.yaml",
            "~nobody/x.yaml",
            "\0.yaml",
            "a\nb.yaml",
            "x" * 300 + ".yaml",
        ]
        encoded = ["h2o".encode("utf-16").decode("latin-1"), "ü".encode().decode("latin-1"), "﻿h2o"]
        pick = self.random.choice
        unit = pick([*numerals, *words, *signs, *paths, *encoded])
        return unit if self.random.random() < 0.6 else (unit or "a") * (1 + self.length() // max(len(unit), 1))

    def number(self) -> Any:
        edges = [0, -0.0, 1, -1, 0.5, 1.0, 1.5, -0.5, 2**31, 2**31 - 1, -(2**31), 2**63, 2**64, 10**400, 1e-320, 1e300]
        edges += [math.nan, math.inf, -math.inf, 9007199254740993, 64.0, 65, 4096, True]
        return self.random.choice(edges)

    def constant(self) -> Any:
        return self.random.choice([None, True, False])

    def container(self) -> Any:
        depth, width = self.random.choice([1, 2, 5, 50, 90]), self.length()
        inside = self.random.choice([self.number, self.text, self.constant])()
        makes = [lambda each: [each], lambda each: {"name": each}]
        # Shared twice at each depth: 2^depth values once it is written as JSON.
        make = self.random.choice(makes if self.json_only else [*makes, lambda each: {"a": each, "b": each}])
        width = min(width, 300_000, 2 * self.longest // (len(inside) + 1 if isinstance(inside, str) else 1))
        return self.random.choice(
            [lambda: [], lambda: {}, lambda: [inside] * width, lambda: {f"k{i}": 1 for i in range(width)}]
            + [lambda: nested(depth, make, inside)] * 2
        )()

    def thing(self) -> Any:
        """Return a value that only Python has."""
        return self.random.choice(
            [
                *(object, int, Hostile, Decimal, Fraction, recursive),
                *(
                    lambda: b"64",
                    lambda: b"\xff" * self.length(),
                    lambda: 3 + 4j,
                    lambda: Decimal("NaN"),
                    lambda: {1, 2},
                ),
                *(lambda: np.float64("nan"), lambda: np.array([1, 2]), lambda: np.int64(-1), lambda: np.bool_(True)),
                *(lambda: (x for x in "ab"), lambda: range(5), lambda: lambda: 1, lambda: Path("x"), lambda: 10**5000),
                *(
                    lambda: nested(5000, lambda each: [each]),
                    lambda: bytearray(3),
                    lambda: memoryview(b"x"),
                    lambda: ...,
                ),
            ]
        )()


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        where: field, or part of the whole, that is wrong.
        value: for `KVPolicyConfig.parse`, `for_request` or the body of an HTTP request.
    """

    where: str
    value: Any


def policies_with(field: str, options: dict[str, frozenset[str]]) -> list[dict[str, Any]]:
    """Right policies that have a field."""
    found = []
    for name, has in options.items():
        own = {"pattern": ["10", "01"], "gates": "gates.tsv"} if name == "duo" else {}
        if field in has | {"name", "allow"}:
            found.append({"name": name, **own})
    return found


def at_start(seed: int, options: dict[str, frozenset[str]], folder: Path, longest: int = LONGEST) -> Iterator[Case]:
    """Wrong policies, endlessly; each has one thing wrong.

    Args:
        options: fields of each policy by its name.
        folder: for files.
    """
    grammar, choice = Grammar(seed, longest=longest), random.Random(seed)
    fields = sorted({"name", "allow"}.union(*options.values()))
    while True:
        for field in fields:
            policies = policies_with(field, options)
            value = grammar.value()
            if not fits(field, value):
                yield Case(field, {**choice.choice(policies), field: value})
        for make in (_unknown_field, _whole, _text, _file, _gates):
            case = make(grammar, folder)
            if case is not None:
                yield case


def _unknown_field(grammar: Grammar, folder: Path) -> Case:
    name, field = grammar.random.choice(NAMES), grammar.text()
    many = {f"{field[:100]}{i}": 1 for i in range(grammar.length())}
    key = grammar.random.choice(
        [field or "x", f"{field}x", 3, None, ("a",), "depth", "share", "kv_budget", "given", "self", "_share"]
    )
    return Case("unknown field", {"name": name, **many, key: grammar.value()})


def _whole(grammar: Grammar, folder: Path) -> Case | None:
    value = grammar.value()
    right = (isinstance(value, str) and value.strip() in NAMES) or (isinstance(value, dict) and "name" in value)
    return None if right or isinstance(value, Path) else Case("whole", value)


def _text(grammar: Grammar, folder: Path) -> Case:
    right = json.dumps({"name": "h2o", "budget": 512})
    depth = grammar.random.choice([10, 900, 3000, 100_000])
    return Case(
        "text",
        grammar.random.choice(
            [
                right[: grammar.random.randrange(1, len(right))],
                right.replace("512", "9" * 5000),
                right.replace("512", "1e999"),
                right + "x",
                right.replace("512", '"' + "9" * grammar.length() + '"'),
                '{"a":' * depth,
                '{"name": "h2o", "a": ' + "[" * depth + "]" * depth + "}",
                '{"name": "duo", "retrieval": ' * min(depth, 900) + "1" + "}" * min(depth, 900),
                "{" + '"a": 1,' * (grammar.length() + 1) + '"name": "h2o"}',
                '{"name": "' + "h2o" * (grammar.longest // 3) + '"}',
                '{"name": "h2o", "sink": NaN}',
                "{'name': 'h2o'}",
                '{"name": "h2o", "name": "h3o"}',
                '{"name"\0: "h2o"}',
                '{"name": "\\ud800"}',
            ]
        ),
    )


def _file(grammar: Grammar, folder: Path) -> Case:
    """A policy file with something wrong in it, or no file."""
    depth = grammar.random.choice([10, 500])
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    content = grammar.random.choice(
        [
            grammar.text().encode("utf-8", "surrogatepass"),
            grammar.text().encode("utf-16", "surrogatepass"),
            b"\xff\xfe" + bytes(grammar.random.randrange(256) for _ in range(50)),
            *(
                f"name: h2o\nsink: {tag}\n".encode()
                for tag in ("!!timestamp x", "!!bool x", "!!int x", "2020-99-99", "!!float x")
            ),
            b"name: h2o\nsink: " + b"9" * 5000,
            b"name: h2o\nsink: &a [*a]",
            b"name: h2o\nsink: !!python/object/apply:os.system [ls]",
            (bomb + "name: *u").encode(),
            b"name: h2o\nsink: " + b"[" * depth + b"]" * depth,
            b"name: h2o\n? [a]\n: 1",
            b"name: h2o\n<<: 3",
            b"name: h2o\n--- \nname: tova",
            b"\tname: h2o",
            b"name: h2o\nallow: !!set {h3o}",
            b"# " + b"x" * grammar.longest,
        ]
    )
    path = folder / f"wrong{grammar.random.choice(['.yaml', '.yml', '.json', '.YAML'])}"
    path.write_bytes(content)
    missing = [
        folder / "none.yaml",
        folder,
        "x" * 5000 + ".yaml",
        "\0.yaml",
        "\ud800.yaml",
        "a\nb.yaml",
        "/dev/null/x.yaml",
    ]
    missing += ["/dev/full", "~nobody-of-this-name/x.yaml", f"{folder}/", "https://example.org/x.yaml"]
    return Case("file", grammar.random.choice([path, str(path), *missing]))


def _gates(grammar: Grammar, folder: Path) -> Case:
    """duo, whose `gates` is no file of gates."""
    file = _file(grammar, folder).value
    return Case("gates", {"name": "duo", "gates": grammar.random.choice([file, grammar.value()])})


def in_request(seed: int, longest: int = LONGEST, json_only: bool = False) -> Iterator[Case]:
    """Wrong arguments of a request to a server of `h2o`, endlessly; each has one thing wrong."""
    grammar = Grammar(seed, json_only, longest)
    while True:
        for field in REQUEST_FIELDS:
            value = grammar.value()
            if value is not None and not request_fits(field, value):
                yield Case(field, {field: value})
        for key in ("kv_buget", "kv_window", "kv_granularity", "KV_SINK", "kv-policy", "kv_budgets", "kvusage"):
            many = {f"other{i}": i for i in range(min(grammar.length(), 300_000))}
            yield Case("unknown field", {key: grammar.text(), **many})


def request_fits(field: str, value: Any) -> bool:
    """Whether a request's field may have a value; also as text, and as a float of a whole number."""
    if field == "kv_prompt":  # the server computes prompts in chunks
        return isinstance(value, str) and value == "chunks"
    if isinstance(value, str) and field not in ("kv_policy", "kv_usage"):
        try:
            value = json.loads(value) if len(value) < 200 else None
        except ValueError:
            return False
    number = _number(value)
    if field == "kv_policy":
        return isinstance(value, str) and value in NAMES
    if field == "kv_usage":
        return isinstance(value, bool) or number in (0, 1)
    if number is None or number >= WHOLE:
        return False
    if field == "kv_budget" and ((number == 1 and not isinstance(value, int)) or number <= 0):
        return False
    return number >= 0 and (number == int(number) or (field == "kv_budget" and number < 1))


def complaint(message: str) -> str | None:
    """Return the flaw of a message that refuses; None if it has none."""
    if not message.isprintable():
        return "has characters that can't be printed, or more than one line"
    if len(message) > 1500:
        return f"has {len(message)} characters"
    return None if len(message) > 10 else "says nothing"


@dataclass
class Tried:
    """One case that was tried: CPU seconds, and the refusal or None where it was accepted."""

    case: Case
    seconds: float
    message: str | None


def attempt(case: Case, call: Callable[[Any], Any], refused: type[Exception]) -> Tried:
    """Call with a case's value. Raises what is no `refused`."""
    before = time.process_time()
    try:
        call(case.value)
        message = None
    except refused as error:
        message = str(error)
    return Tried(case, time.process_time() - before, message)


def summary(tried: list[Tried]) -> str:
    seconds = sorted(each.seconds for each in tried)
    slowest = max(tried, key=lambda each: each.seconds)
    return (
        f"{len(tried)} cases, {sum(each.message is None for each in tried)} accepted; CPU time median "
        f"{1e3 * statistics.median(seconds):.2f} ms, p99 {1e3 * seconds[int(0.99 * len(seconds))]:.1f} ms, most "
        f"{1e3 * seconds[-1]:.0f} ms ({slowest.case.where}), {sum(s > 0.05 for s in seconds)} above 50 ms"
    )


def main(count: int = 100_000, seed: int = 0) -> None:
    import itertools
    import tempfile

    from vllm_evict.config import KVPolicyConfig, KVPolicyError
    from vllm_evict.policies import POLICIES

    options = {name: policy.options for name, policy in POLICIES.items()}
    server = KVPolicyConfig.parse({"name": "h2o", "budget": 256, "sink": 32, "recent": 64})
    with tempfile.TemporaryDirectory() as folder:
        for title, cases, call in (
            ("at start", at_start(seed, options, Path(folder)), KVPolicyConfig.parse),
            ("in a request", in_request(seed), partial(server.for_request, prompt_len=1000, block_size=32)),
        ):
            tried = [attempt(case, call, KVPolicyError) for case in itertools.islice(cases, count // 2)]
            print(f"{title}: {summary(tried)}")
            for each in tried:
                if each.message is None or complaint(each.message):
                    print("   ", each.case.where, repr(each.case.value)[:200], each.message and complaint(each.message))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

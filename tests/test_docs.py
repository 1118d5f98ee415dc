"""What README and docs say of commands and policies: that they exist, and that their defaults are these."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from vllm_evict.compat.arguments import FIELDS, HELP
from vllm_evict.config import KVPolicyConfig
from vllm_evict.eval import cli
from vllm_evict.policies import BUDGET_OPTIONS, POLICIES, REDUCTIONS, TOKEN_OPTIONS

pytestmark = pytest.mark.v1_only
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    """Of all blocks of commands: (page, words). A quoted argument may go on in the next line."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            block = re.sub(r"\\\n\s*", "", block)
            for command in re.findall(r"(?:'[^']*'|#[^\n]*|[^'\n])+", block):
                yield page.name, shlex.split(command, comments=True)


def cells(page, heading):
    """Rows of the first table that begins so, without its head; each a list of its cells."""
    text = (ROOT / page).read_text()
    table = text[text.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[2:]]


def names(cell):
    """In code, without a value after a colon."""
    return [name.split(":")[0] for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped(page):
    """Tables and commands are not."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    assert not [line for line in prose if len(line) > 120 and not line.startswith("|")]


def test_commands_of_vllm_evict_have_these_options():
    root, seen = get_command(cli.app), 0
    for page, words in commands():
        if words[:1] != ["vllm-evict"]:
            continue
        command, words = root, words[1:]
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
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


def test_policies_have_every_field_and_no_other():
    rows = cells("docs/policies.md", "| field | meaning |")
    assert {name for first, _ in rows for name in names(first)} <= set(FIELDS)
    assert set(FIELDS) <= {name for row in rows for cell in row for name in names(cell)}
    assert HELP.endswith(f"Fields: {', '.join(FIELDS)}.") and "share" not in FIELDS


def test_the_readme_and_policies_have_every_policy():
    for page in ("README.md", "docs/policies.md"):
        assert sorted(names(row[0])[0] for row in cells(page, "| policy | paper |")) == sorted(POLICIES)


def test_options_belong_to_the_policies_that_are_said_to_have_them():
    """Every option that is not of all, with its default; those of KV groups in a table of their own."""
    told = {}
    for heading in ("| field | of | default |\n", "| field | of | default | meaning |"):
        field = None
        for first, whose, default, *_ in cells("docs/policies.md", heading):
            field = names(first)[0] if first else field
            groups = [name for name, policy in POLICIES.items() if "bands" in policy.options]
            for policy in groups if whose == "all" else names(whose):
                told[policy, field] = default.strip("`")
    left_out = BUDGET_OPTIONS | TOKEN_OPTIONS | REDUCTIONS
    have = {(name, field) for name, policy in POLICIES.items() for field in policy.options - left_out if name != "duo"}
    assert set(told) == have
    for (name, field), default in told.items():
        value = getattr(KVPolicyConfig.parse(name), field)
        assert default == {None: "4, or as many as there are", (): "none"}.get(value, str(value).removesuffix(".0"))


def test_pressure_and_tokens_are_for_these():
    text = (ROOT / "docs/policies.md").read_text()
    (without,) = re.findall(r"for policies whose scores add up or need none: all but(.*?)\(where", text, re.DOTALL)
    assert set(names(without)) == {name for name, policy in POLICIES.items() if "pressure" not in policy.triggers}
    (those,) = re.findall(r"\n\n([^\n]*\n?[^\n]*) have both\. The budget", text)
    assert set(names(those)) == {name for name, policy in POLICIES.items() if "granularity" in policy.options}

"""The command `vllm-evict` and the policy files that come with it, from a checkout and from a wheel."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import yaml

from vllm_evict import KVPolicyConfig, KVPolicyError, __version__, cli
from vllm_evict.config import presets
from vllm_evict.policies import POLICIES
from vllm_evict.tools import cli as command
from vllm_evict.tools.eval.policies import contenders
from vllm_evict.tools.eval.tasks import TASKS
from vllm_evict.tools.eval.words import HAYSTACKS

ROOT = Path(__file__).parents[2]
PRESETS = {
    "endless",
    "h2o-20",
    "h2o-last",
    "h2o-mean",
    "h2o-pressure",
    "infllm",
    "lserve",
    "omnikv",
    "quest",
    "reach",
    "recycled",
    "snapkv-whole",
}
PRESETS |= {"streaming-llm"}


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*words)`: exit status, standard output and standard error of the command."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["vllm-evict", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    return run


def fields(output):
    """Rows of a table of two columns, without its head."""
    return dict(line.split(None, 1) for line in output.rstrip().splitlines()[1:])


def test_version(run):
    assert run("--version") == (0, f"vllm-evict {__version__}\n", "")


def test_policies_and_presets_are_listed(run):
    status, output, _ = run("policies")
    firsts = [line.split()[0] for line in output.splitlines() if not line.startswith(" ")]
    assert status == 0 and firsts == ["policy", *sorted(POLICIES), "preset", *sorted(PRESETS)]
    (line,) = (line for line in output.splitlines() if line.startswith("h2o-pressure"))
    assert line.split(None, 1)[1].split() == ["h2o", "when=pressure,", "accumulate=ema"]
    for name, policy in POLICIES.items():
        (line,) = (line for line in output.splitlines() if line.split()[0] == name)
        assert policy.paper[:40] in line and all(statistic in line for statistic in policy.measures)
        triggers = () if name == "full" else policy.triggers
        assert ("budget" in line) == bool(triggers) and ("pressure" in line) == ("pressure" in triggers)


def test_one_policy_is_shown_with_what_was_left_out(run, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: snapkv\nbudget: 0.3\n")
    for policy in (file, '{"name": "snapkv", "budget": 0.3}', "snapkv", "h2o-pressure", "full"):
        status, output, _ = run("policies", policy)
        assert status == 0
        shown = {field: value.strip() for field, value in fields(output).items()}
        assert shown == {field: str(value) for field, value in KVPolicyConfig.parse(policy).effective().items()}
    assert fields(run("policies", file)[1])["kernel"].strip() == "3"


def test_sizes_that_follow_the_budget_are_shown_as_they_came_out(run):
    shown = fields(run("policies", '{"name": "h2o", "budget": 288}')[1])
    assert shown["sink"].strip() == "32 (at most 1/8 of the budget, in whole blocks)"
    assert shown["recent"].strip() == "64 (at most 1/4 of the budget, in whole blocks)"
    shown = fields(run("policies", '{"name": "h2o", "budget": 288, "sink": 20}')[1])
    assert shown["sink"].strip() == "20" and shown["recent"].startswith("64 (")


@pytest.mark.parametrize("policy", ["h3o", '{"name": "h2o", "buget": 1}', "nowhere.yaml", '{"name": h2o}'])
def test_a_wrong_policy_is_one_line_and_status_2(run, policy):
    with pytest.raises(KVPolicyError) as error:
        KVPolicyConfig.parse(policy)
    assert run("policies", policy) == (2, "", f"vllm-evict: {error.value}\n")


@pytest.mark.parametrize(
    "words, package",
    [
        (["--version"], "typer"),
        (["eval", "--help"], "rich"),
        (["heads", "show", ROOT / "configs/heads/needle", "--png", os.devnull], "matplotlib"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(run, monkeypatch, words, package):
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name.startswith("vllm_evict.tools"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, errors = run(*words)
    (line,) = errors.splitlines()
    assert status == 2
    assert line.startswith(f"vllm-evict: needs the package {package}") and "'.[eval]'" in line


def test_what_else_is_missing_is_not_hidden(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'vllm_evict.lost'", name="vllm_evict.lost")

    monkeypatch.setattr(command, "main", broken)
    with pytest.raises(ModuleNotFoundError, match="lost"):
        cli.main()


@pytest.mark.parametrize(
    "file",
    [path for folder in ("", "served") for path in sorted((ROOT / "configs/eval" / folder).glob("*.yaml"))],
    ids=lambda file: file.stem,
)
def test_evaluations_of_the_docs_are_files_of_options(run, monkeypatch, tmp_path, file):
    """Each is an evaluation whose policies, tasks and settings exist; the command line wins over the file."""
    plans = []
    for module, name, double in (
        ("run", "run", lambda plan, say: plans.append(plan) or []),
        ("report", "write", lambda *arguments: []),
    ):
        monkeypatch.setattr(importlib.import_module(f"vllm_evict.tools.eval.{module}"), name, double)
    monkeypatch.chdir(ROOT)
    told = ("eval", "--config", file, "--model", "some-model", "--out", tmp_path, "--samples", 3)
    assert run(*told)[0] == 0
    (plan,) = plans
    written = yaml.safe_load(file.read_text())
    assert (plan.model, plan.samples, plan.out) == ("some-model", 3, tmp_path)
    settings = written["settings"]
    assert list(plan.settings) == ([settings] if isinstance(settings, str) else settings)
    assert list(plan.tasks) == written["tasks"] and set(plan.tasks) <= set(TASKS)
    assert list(plan.haystacks) == written.get("haystacks", ["grammar"]) and set(plan.haystacks) <= set(HAYSTACKS)
    assert list(plan.lengths) == written.get("lengths") and plan.seed == written.get("seed", 0)
    assert (plan.sink, plan.recent, plan.buffer, plan.block_size) == (32, 32, 0, 32), "those of the published figures"
    found = contenders(plan.policies, plan.budgets, sink=plan.sink, recent=plan.recent, buffer=plan.buffer)
    assert {each.config.name for each in found} == {KVPolicyConfig.parse(policy).name for policy in written["policies"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tasks: [niah]\nbudget: [0.1]\n", "got budget; expected some of: batch, "),
        ("- niah\n", "got list; expected options such as 'tasks: [niah]'"),
        ("tasks: [", "eval.yaml: while parsing"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_of_options_is_one_line_and_status_2(run, tmp_path, text, words):
    file = tmp_path / "eval.yaml"
    if text is not None:
        file.write_text(text)
    status, output, error = run("eval", "--config", file, "--model", "some-model", "--out", tmp_path)
    assert (status, output) == (2, "") and words in error and len(error.splitlines()) == 1


def test_the_packages_are_those_of_the_extra():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]["eval"]) == cli.PACKAGES


def test_presets_are_the_files_of_configs_that_no_policy_is_called_after():
    files = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
    assert set(presets()) == PRESETS == files.keys() - POLICIES.keys() - {"duo-needle"}
    for name in PRESETS - {"lserve"}:
        assert KVPolicyConfig.parse(name) == KVPolicyConfig.parse(files[name]) != KVPolicyConfig.parse("h2o")


def test_lserve_takes_gates_of_the_model():
    config = KVPolicyConfig.parse({"name": "lserve", "gates": str(ROOT / "configs/heads/needle")})
    assert (config.name, config.sparsity, config.sink, config.recent) == ("duo", 0.5, 128, 256)
    assert (config.retrieval.read, config.retrieval.index, config.retrieval.hold) == (4096, "box", 4)
    with pytest.raises(KVPolicyError, match="lserve.yaml: policy 'duo' needs gates: the path of a file"):
        KVPolicyConfig.parse("lserve")


def test_a_policys_name_is_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_evict.config.sources.PRESETS", tmp_path)
    for name in ("h2o", "mine"):
        (tmp_path / f"{name}.yaml").write_text("name: tova")
    assert [KVPolicyConfig.parse(name).name for name in ("h2o", "mine")] == ["h2o", "tova"]


def test_an_unknown_name_is_answered_with_policies_and_presets():
    with pytest.raises(KVPolicyError) as error:
        KVPolicyConfig.parse("h2o-presure")
    named, _, preset = str(error.value).partition("; or a preset: ")
    assert (
        named
        == f"unknown KV policy 'h2o-presure': did you mean 'h2o-pressure'? Expected one of: {', '.join(sorted(POLICIES))}"
    )
    assert preset == ", ".join(sorted(PRESETS))


@pytest.mark.parametrize("word, meant", [("streamingllm", "streaming-llm"), ("h2o_last", "h2o-last"), ("h20", "h2o")])
def test_policies_and_presets_are_ranked_together(word, meant):
    with pytest.raises(
        KVPolicyError, match=rf"^unknown KV policy '{word}': did you mean '{meant}'\? Expected one of: "
    ):
        KVPolicyConfig.parse(word)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--budget", "nan"], "budget: must be a whole number of tokens"),
        (["--budget", "300.5"], "budget: must be a whole number of tokens"),
        (["--out", "/dev/null/kept.html"], "--out got /dev/null/kept.html; expected a file that can be written: "),
        (["--out", "/"], "--out got /; expected a file that can be written: "),
        (["--model", "/no/such"], "no model at /no/such"),
    ],
)
def test_what_cannot_be_shown_is_said_before_an_engine_starts(run, tmp_path, options, said):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("x")
    given = {"--model": ROOT / "examples/needle/model", "--out": tmp_path / "kept.html"}
    given |= dict(zip(options[::2], options[1::2]))
    status, _, line = run("show", prompt, *(word for option in given.items() for word in option))
    assert status == 2 and line.startswith(f"vllm-evict: {said}") and line.count("\n") == 1
    assert not (tmp_path / "kept.html").exists()


def test_a_page_is_named_by_model_policy_and_its_options_and_begun_with_a_word(run, tmp_path, monkeypatch):
    from vllm_evict.tools.show import record as show

    def shown(model, config, text, max_tokens, options, say, chat):
        say(f"starting vLLM on {model}")
        return show.Shown(["x"], ["y"], ["y"], [], 16)

    monkeypatch.setattr(show, "run", shown)
    (tmp_path / "prompt.txt").write_text("x")
    policies = {
        '{"name": "tova", "prompt": "whole"}': "model, tova prompt=whole, budget 10%",
        "duo": "model, duo pattern",
        "h2o-pressure": "model, h2o when=pressure",
    }
    for policy, title in policies.items():
        words = ["--model", ROOT / "examples/needle/model", "--policy", policy, "--out", tmp_path / "kept.html"]
        if policy == "duo":
            words[3] = '{"name": "duo", "pattern": ["10", "01"], "sink": 32, "recent": 64}'
        elif policy[0] == "{":
            words += ["--budget", "0.1"]
        status, said, _ = run("show", tmp_path / "prompt.txt", *words)
        assert status == 0 and said.startswith("starting vLLM on ")
        assert f"<title>{title}" in (tmp_path / "kept.html").read_text()

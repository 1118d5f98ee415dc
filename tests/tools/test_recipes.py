"""`benchmarks/recipes.py`: the commands of a recipe book, and the count of those that start."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

PROFILES = {"hardware_profiles": {"b200": dict(brand="NVIDIA", generation="blackwell", gpu_count=8, vram_gb=1440)}}


@pytest.fixture
def book(script):
    return script("recipe_book")


@pytest.fixture
def recipes(book, script):
    return script("recipes")


def write(folder, name, **changes):
    recipe = {
        "meta": {},
        "model": {"base_args": ["--max-num-seqs 64", "--trust-remote-code"]},
        "features": {
            "tools": {"args": ["--tool-call-parser", "x"]},
            "drafts": {"args": ["--speculative-config", "{}"]},
        },
        "opt_in_features": ["drafts"],
        "variants": {"default": {"vram_minimum_gb": 100}},
        **changes,
    }
    file = folder / "models" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(recipe))


def test_commands_and_counts(book, recipes, tmp_path, monkeypatch, capsys):
    (tmp_path / "taxonomy.yaml").write_text(yaml.safe_dump(PROFILES))
    write(tmp_path, "Qwen/Qwen3-8B")
    overrides = {"blackwell": {"extra_args": ["--max-num-seqs", "8"]}, "h200": {"extra_args": ["--enforce-eager"]}}
    write(tmp_path, "Qwen/Qwen3-32B", hardware_overrides=overrides, variants={"default": {"vram_minimum_gb": 400}})
    write(tmp_path, "Qwen/Qwen3-4B", meta={"hardware": {"b200": "unsupported"}})
    write(tmp_path, "zai-org/GLM-5", variants={"default": {"tp": {"default": 2, "blackwell": 4}}})
    write(tmp_path, "Qwen/Qwen-Image")  # none of the classes
    flags = {command.recipe: " ".join(command.flags) for command in book.commands(tmp_path, "b200")}
    assert flags == {
        "Qwen/Qwen3-8B": "--max-num-seqs 64 --trust-remote-code --tensor-parallel-size 1",
        "Qwen/Qwen3-32B": "--trust-remote-code --max-num-seqs 8 --tensor-parallel-size 8",
        "zai-org/GLM-5": "--max-num-seqs 64 --trust-remote-code --tensor-parallel-size 4",
    }
    commands = [
        {"recipe": each.recipe, "class": each.of["class"], "for": ["single b200"], "flags": " ".join(each.flags)}
        for each in book.commands(tmp_path, "b200")
    ]
    monkeypatch.setattr(book, "LIST", tmp_path / "list.json")
    monkeypatch.setattr(recipes, "LIST", book.LIST)
    book.LIST.write_text(json.dumps({"source": "SOURCE", "commit": "COMMIT", "commands": commands}))

    def ask(device, servers):
        said = {"h2o": "starts", "adakv": "why: do this", "tova": "unknown: no file"}
        for (model, *_), names in servers:
            with open(f"{model}/config.json") as file:
                assert json.load(file)["architectures"] == ["Qwen3ForCausalLM"]
            yield [said[name] for name in names]

    monkeypatch.setattr(recipes, "ask", ask)
    out = tmp_path / "recipes.json"
    asked = ["--devices", "b200", "--servers", "single", "--policies", "h2o", "adakv", "tova", "--out", str(out)]
    recipes.main(asked)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line]
    assert lines[:6] == [
        "| servers | policies | B200 |",
        "|---|---|---:|",
        "| as recommended | `h2o` | 2 of 3 |",
        "Policies that start on none of these GPUs:",
        "- `tova`: unknown: no file",
        "- `adakv`: why",
    ]
    assert (
        lines[6].startswith("The book is COMMIT; counted at commit ")
        and "Environment: python 3." in lines[6]
        and "vllm 0." in lines[6]
    )
    assert lines[7:] == ["Unknown there: Qwen/Qwen3-32B, Qwen/Qwen3-8B: no file."]
    recipes.main(["--table", "--out", str(out)])
    assert capsys.readouterr().out == said


def test_commands_that_texts_print(book, tmp_path):
    """Lines that a backslash joins, in fences and between backticks, each once; no placeholders."""
    guide = """
    VLLM_USE_X=1 vllm serve qwen/Qwen3-8B \\
        --tensor_parallel_size=2 -cc.mode=3 \\
        --speculative_config '{"method": "mtp", "num_speculative_tokens": 1}'  # or more
    `vllm serve Qwen/Qwen3-8B-FP8 --max-model-len 4096 --host 0.0.0.0` and again
    vllm serve Qwen/Qwen3-8B-FP8 --max-model-len 4096 --port 1 | tee log
    vllm serve nvidia/Renamed-FP4 -tp 8
    vllm serve Qwen/Qwen3-8B --max-model-len $LENGTH
    vllm serve Qwen/Qwen3-8B --speculative-config '{
    """
    file = tmp_path / "models/Qwen/Qwen3-32B.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(guide)
    given = {command.recipe: command.flags for command in book.commands(tmp_path, "b200", "printed")}
    drafts = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
    assert given == {
        "qwen/Qwen3-8B": ("--tensor-parallel-size", "2", "-cc.mode=3", *drafts),
        "Qwen/Qwen3-8B-FP8": ("--max-model-len", "4096"),
        "nvidia/Renamed-FP4": ("-tp", "8"),
    }
    assert len(list(book.commands(tmp_path, "b200", "printed"))) == 3


def test_drafters_have_stand_ins(book, recipes, tmp_path):
    (tmp_path / "taxonomy.yaml").write_text(yaml.safe_dump(PROFILES))
    write(tmp_path, "Qwen/Qwen3-8B")
    dotted = ["--speculative-config.method mtp", "--speculative-config.num_speculative_tokens 1"]
    head = ["--speculative-config", '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}']
    for name, args in {"zai-org/GLM-4.7": dotted, "Qwen/Qwen3-32B": head}.items():
        features = {"spec_decoding": {"args": args}}
        write(tmp_path, name, features=features, opt_in_features=["spec_decoding"])
    given = {command.recipe: command for command in book.commands(tmp_path, "b200", "drafts")}
    assert given.keys() == {"zai-org/GLM-4.7", "Qwen/Qwen3-32B"}
    config, flags = recipes.with_drafter(given["zai-org/GLM-4.7"], tmp_path)
    assert config["num_nextn_predict_layers"] == 1
    assert json.loads(flags[-1]) == {"method": "mtp", "num_speculative_tokens": 1} and len(flags) == 7
    config, flags = recipes.with_drafter(given["Qwen/Qwen3-32B"], tmp_path)
    drafts = json.loads(flags[-1])
    assert config["architectures"] == ["Qwen3ForCausalLM"] and drafts["num_speculative_tokens"] == 3
    assert json.loads((tmp_path / drafts["model"] / "config.json").read_text())["num_hidden_layers"] == 1


def test_figures_of_documents_are_those_of_the_results(book, recipes):
    """The results count all commands of the list, and README has the figure of the policy that it leads with."""
    results, listed = json.loads(recipes.OUT.read_text()), json.loads(book.LIST.read_text())
    assert results["book"]["commit"] == listed["commit"]
    devices = {row["device"] for row in results["rows"]}
    for server in book.SERVERS:
        for device in devices:
            its = [row["recipe"] for row in results["rows"] if (row["server"], row["device"]) == (server, device)]
            assert sorted(its) == sorted(command.recipe for command in book.known(server, device)) != []
    counts, names = recipes.counts(results), results["policies"]["single"]
    assert devices == {*book.DEVICES} and recipes.policies() == names
    page, readme = (ROOT / "docs/models.md").read_text(), " ".join((ROOT / "README.md").read_text().split())
    assert f"<!-- python benchmarks/recipes.py --table -->\n{recipes.table(results)}\n<!-- end -->\n" in page
    h200, b200 = (counts["single", device, "h2o-pressure"] for device in book.DEVICES)
    assert f"{h200} language models of [vLLM's recipes]" in readme
    assert f"start on an H200 under `h2o-pressure` with the book's own flags, and {b200} on a B200" in readme
    nowhere = {name for name in names if not any(counts["single", device, name].starts for device in devices)}
    first, _, second = (ROOT / "docs/policies.md").read_text().partition("The same on CPUs alone")
    alone = set(re.findall(r"^\| `([^`]+)`", second.split("\n\n")[1], re.MULTILINE))
    assert nowhere and nowhere <= alone and not alone & set(re.findall(r"^\| `([^`]+)`", first, re.MULTILINE))

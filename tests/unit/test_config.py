"""Policies that users may write, and the messages for those that are wrong."""

import copy
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from configuration import H2O, WHOLE, parse, refusal, request_refusal

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.config.allocators import ALLOCATION
from vllm_evict.config.errors import instead
from vllm_evict.config.fields import FETCH, READ, SERVER, TIER
from vllm_evict.config.options import names_of
from vllm_evict.config.retired import _warn_of_old_name
from vllm_evict.policies import BUDGET_OPTIONS, POLICIES

ROOT = Path(__file__).parents[2]


# --- forms -----------------------------------------------------------------------------------------------------------


def test_all_forms_mean_the_same(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("name: h2o\nbudget: 1024\nsink: 32\nrecent: 256\nbuffer: 64\n")
    as_json = tmp_path / "policy.json"
    as_json.write_text(json.dumps(H2O))
    config = KVPolicyConfig(**H2O)
    assert config.budget == 1024 and config.sink == 32 and config.recent == 256 and config.buffer == 64
    for form in (H2O, json.dumps(H2O), f"  {json.dumps(H2O)} ", path, str(path), as_json, config):
        assert parse(form) == config
    assert parse("h2o") == parse({"name": "h2o"}) == KVPolicyConfig(name="h2o") != config


@pytest.mark.parametrize("name", WHOLE)
def test_a_policy_alone_has_its_own_defaults(name):
    config = parse(name)
    assert {field: getattr(config, field) for field in POLICIES[name].defaults} == dict(POLICIES[name].defaults)
    assert config.limits(32, 4096) is None if name == "full" else config.limits(32, 4096).budget > 0


def test_sink_windows_recent_window_is_what_the_budget_leaves():
    assert parse("sink-window").recent == 1024
    assert parse({"name": "sink-window", "budget": 300}).recent == 0
    assert parse({"name": "sink-window", "recent": 500}).limits(32, 10**4).budget == 2 + 16 + 1
    assert parse({"name": "h2o", "budget": 1000}).recent == 240


def test_configs_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        parse("h2o").budget = 3


@pytest.mark.parametrize("name", WHOLE)
def test_to_dict_is_what_parse_takes_and_json_carries(name):
    policy = POLICIES[name]
    values = {"budget": 0.25, "buffer": 96, "sink": 48, "recent": 100, "accumulate": "ema", "decay": 0.5}
    values |= {"window": 7, "every": 3, "heads": "max", "layers": "mean", "protect": False, "min_prompt": 300}
    values |= {"kernel": 5, "mix": 0.25, "seed": 11, "chunk": 500, "instruction": [3, 4], "when": policy.triggers[-1]}
    values |= {
        "sets": "all",
        "unit": 4,
        "merge": "d2o",
        "merge_decay": 0.3,
        "merge_threshold": 0.1,
        "granularity": "token",
    }
    values |= {"context": None, "prompt": "whole", "exact": True}
    reading = {"read": 700, "hold": 3, "leaders": 2, "index": "box"}
    waiting = {"evict": "host", "host": 1 << 30, "fetch": 5, **reading}
    sparse = {**reading, "leaders": [1, 3], "dense_layers": 0}
    prompts = {**reading, "read_prompts": 800}
    pyramid = {"allocate": "pyramid", "bands": 2, "beta": 4.0}
    ada = {"allocate": "ada", "bands": 3, "floor": 0.5}
    if "prompt" in policy.options:
        values["when"] = "budget"
    values["admit"] = values["when"] == "pressure"
    assert {*values, *waiting, *sparse, *prompts, *pyramid, *ada} == frozenset().union(
        *(POLICIES[other].options for other in WHOLE)
    )
    values = {field: value for field, value in values.items() if field in policy.options}
    waiting = waiting if name == "full" else {}  # other policies are served as `full`
    values |= waiting  # sizes are of what it keeps on the device
    sparse, prompts = (
        {} if field not in policy.options else of for field, of in (("read", sparse), ("read_prompts", prompts))
    )
    context = {"context": 4096} if "context" in policy.options else {}
    pyramid, ada = (pyramid, ada) if "allocate" in policy.options else ({}, {})
    audits = {"audit": 0.5, "target": 0.9}
    for extra in ({}, values, {"allow": ["h2o"]}, audits, context, waiting, sparse, prompts, pyramid, ada):
        config = parse({"name": name, **extra})
        carried = json.loads(json.dumps(config.to_dict()))
        assert parse(carried) == config and parse(carried).unsaid == config.unsaid
        left_out = set() if "evict" in extra else names_of((*TIER, FETCH))
        left_out |= {"buffer", "when", "exact"} if config.keeps_all else set()
        left_out |= set() if config.when == "pressure" and not config.keeps_all else {"admit"}
        left_out |= set() if "read" in extra else names_of(READ)
        left_out |= set() if config.sparse else {"read_prompts"}
        left_out |= names_of(ALLOCATION) - extra.keys()
        left_out |= {"untried"} | (set() if "audit" in extra else {"audit", "target", "tuned"})
        assert set(carried) == (policy.options | {"name"} | names_of(SERVER)) - config.unsaid - left_out
        assert set(config.effective()) == policy.options | {"name"} | names_of(SERVER)
        assert config.unsaid == (set() if extra == values else policy.options & {"budget", "sink", "recent"})


def test_every_config_of_the_repository_parses(monkeypatch):
    monkeypatch.chdir(ROOT)  # where the paths in them are taken from
    paths = sorted(path for path in Path("configs").glob("*.y*ml") if path.stem != "lserve")  # which needs gates
    assert paths
    for path in paths:
        config = parse(path)
        for part in config.classes.values():
            assert part.name == "full" or part.limits(128, 32768).budget > 0
        # Bands are as many as a model with few heads allows.
        config.for_model(4, 2, 1)
    assert {parse(path).name for path in paths} == set(POLICIES)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, first",
    [
        ("h20", "h2o"),
        ("H2O", "h2o"),
        ("sink_window", "sink-window"),
        ("fulll", "full"),
        ("sinks-window", "sink-window"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_nearest_first(name, first):
    for form in (name, {"name": name}, json.dumps({"name": name})):
        message = refusal(form)
        assert message.startswith(f"unknown KV policy {name!r}: did you mean {first!r}? Expected one of: ")
        assert f"Expected one of: {', '.join(sorted(POLICIES))}" in message


@pytest.mark.parametrize("field, first", [("buget", "budget"), ("sinks", "sink"), ("head", "heads"), ("evry", "every")])
def test_an_unknown_field_is_refused_with_the_nearest_first(field, first):
    message = refusal({**H2O, field: 1})
    has = ", ".join(sorted(POLICIES["h2o"].options | {"name"} | names_of(SERVER)))
    assert message == f"policy 'h2o' has no field {field!r}: did you mean {first!r}? Expected one of: {has}"


def test_a_field_of_another_policy_is_refused():
    assert "'sink-window' has no field 'heads'" in refusal({"name": "sink-window", "heads": "max"})
    assert "'full' has no field 'window': expected one of: admit, allow, audit, budget, " in refusal(
        {"name": "full", "window": 100}
    )
    assert "budget: 'full' keeps everything on the device: it needs evict: host" in refusal(
        {"name": "full", "budget": 100}
    )


def test_a_message_has_all_options_in_alphabetical_order_after_the_one_that_was_meant():
    every = ", ".join(sorted(BUDGET_OPTIONS))
    assert instead("buffr", BUDGET_OPTIONS) == f"did you mean 'buffer'? Expected one of: {every}"
    assert instead("x", BUDGET_OPTIONS) == instead(["x"], BUDGET_OPTIONS) == f"expected one of: {every}"
    assert instead("x", []) == "expected one of: "


@pytest.mark.parametrize(
    "budget", [0, -1, -0.5, 0.0, 1.0, 1.5, 2048.0, 1 << 31, math.nan, math.inf, True, False, "1024", "many", [1], {}]
)
def test_budgets_that_make_no_sense_are_refused(budget):
    message = refusal({**H2O, "budget": budget})
    assert message.startswith("budget: ") and repr(budget) in message and "between 0 and 1" in message


@pytest.mark.parametrize("budget", [100, 287, 288])
def test_a_budget_without_room_to_choose_is_refused(budget):
    message = refusal({**H2O, "budget": budget})
    assert f"budget {budget} " in message and "sink + recent + one block" in message and "32 + 256" in message


@pytest.mark.parametrize("budget, fits", [(289, True), (304, True), (320, True), (321, True)])
def test_a_budget_is_rounded_up_before_it_is_measured(budget, fits):
    """One block beyond sink and recent is enough, however little of it the budget names."""
    assert parse({**H2O, "budget": budget}).limits(32, 1000).budget == math.ceil(budget / 32)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("buffer", -1, "greater than or equal to 0"),
        ("sink", "32", "must be a number, not '32'"),
        ("recent", True, "must be a number, not True"),
        ("sink", 1.5, "integer"),
        ("recent", math.nan, "nan"),
        ("decay", 1.0, "less than 1"),
        ("decay", 0, "greater than 0"),
        ("window", 0, "greater than or equal to 1"),
        ("every", 0, "greater than or equal to 1"),
        ("every", None, "None"),
        ("accumulate", "average", "'sum', 'mean', 'ema' or 'last', not 'average'"),
        ("heads", "min", "'sum', 'mean' or 'max', not 'min'"),
        ("layers", 3, "'sum', 'mean' or 'max', not 3"),
        ("allow", ["h2o", "h3o"], "unknown KV policy 'h3o'"),
        ("allow", "h2o", "should be a list, not 'h2o'"),
        ("budget", 1 << 31, "below 2147483648, or a ratio"),
    ],
)
def test_wrong_types_and_values_are_refused_by_field(field, value, words):
    message = refusal({**H2O, field: value})
    assert field in message and words in message
    assert "\n" not in message and "pydantic" not in message


def test_several_mistakes_come_in_one_message():
    message = refusal({**H2O, "buffer": -1, "heads": "min"})
    assert "buffer: " in message and "heads: " in message


@pytest.mark.parametrize("value", [3, None, ["h2o"], 1.5, True])
def test_what_is_no_policy_at_all_is_refused(value):
    assert "a name, a dict of its fields or a path" in refusal(value)


def test_field_names_must_be_strings():
    assert "strings" in refusal({"name": "h2o", 3: 4}) or "no field 3" in refusal({"name": "h2o", 3: 4})


def test_a_policy_without_a_name_is_refused():
    assert f"needs a name: one of {', '.join(sorted(POLICIES))}" in refusal({"budget": 512})


def test_broken_json_is_refused():
    assert "not a JSON object" in refusal('{"name": "h2o"')
    message = refusal('{"a":' * 10_000)
    assert "not a JSON object" in message and len(message) < 400
    assert refusal('{"a":' * 100_000) == "got a JSON object of 500000 characters; expected at most 65536"
    assert (
        refusal({"name": "h2o"} | {f"sink{i}": 1 for i in range(200)})
        == "got a KV policy of 201 fields; expected at most 100"
    )


def test_a_preset_may_have_other_fields(tmp_path):
    """In a dict, JSON and a file. Sinks and recent tokens, which the preset leaves out, follow the other budget."""
    asked = {"name": "h2o-pressure", "budget": 4096}
    (tmp_path / "mine.yaml").write_text("name: h2o-pressure\nbudget: 4096\n")
    for form in (asked, json.dumps(asked), tmp_path / "mine.yaml"):
        config = parse(form)
        assert config == parse("h2o-pressure").replace(budget=4096) and config.given >= {"when", "accumulate", "budget"}
    assert parse({**asked, "budget": 96}).limits(16, 5000).budget == 6
    assert parse({"name": "streaming-llm", "sink": 8}).to_dict() == parse("streaming-llm").to_dict() | {"sink": 8}
    retrieval = parse({"name": "duo", "pattern": ["10"], "retrieval": {"name": "h2o-20", "budget": 0.3}}).retrieval
    assert (retrieval.name, retrieval.budget) == ("h2o", 0.3)
    assert "budget: must be a whole number of tokens" in refusal({"name": "h2o-pressure", "budget": -1})
    assert "policy 'h2o' has no field 'kernel'" in refusal({"name": "h2o-pressure", "kernel": 3})


@pytest.mark.parametrize("name", ["h2o-pressure", "streaming-llm"])
def test_a_preset_is_no_name_of_a_requests_policy(name):
    """Nor of one that `allow` lists: a preset has fields that only a server sets."""
    words = f"'{name}' is a preset, which stands for a whole policy (--kv-policy {name})"
    assert words in refusal({**H2O, "allow": [name]})
    assert words in request_refusal(H2O, {"kv_policy": name})


def test_numbers_may_be_numpys():
    numbers = {"budget": np.int64(512), "sink": np.int32(4), "recent": np.int64(64), "decay": np.float32(0.5)}
    config = parse({**H2O, **numbers})
    assert json.loads(json.dumps(config.to_dict()))["budget"] == 512
    assert parse({**H2O, "budget": np.float64(0.5)}).budget == 0.5
    assert refusal({**H2O, "budget": np.bool_(True)}).endswith("not np.True_")


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """Shells leave ~ alone after "=", and nobody else expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("name: tova")
    (tmp_path / "gates").symlink_to(ROOT / "configs/heads/needle")
    assert parse("~/mine.yaml").name == "tova"
    assert parse({"name": "duo", "gates": "~/gates"}).head_pattern.retrieval.any()


def test_a_file_of_another_kind_is_refused_by_its_ending(tmp_path, monkeypatch):
    (tmp_path / "policy.txt").write_text("name: h2o")
    monkeypatch.chdir(tmp_path)
    for path in ("policy.txt", str(tmp_path / "policy.txt"), "configs/h2o", str(tmp_path)):
        assert refusal(path) == f"{path!r} is no file of a policy: its name has to end in .yaml or .yml or .json"


def test_files_are_known_by_their_ending_in_capitals_too(tmp_path):
    (tmp_path / "MINE.YAML").write_text("name: h2o")
    assert parse(tmp_path / "MINE.YAML") == parse("h2o")


def test_a_pattern_has_as_many_heads_in_each_layer():
    duo = {"name": "duo", "gates": str(ROOT / "configs/heads/needle")}
    assert parse({**duo, "pattern": ["01", "10"]}).head_pattern.retrieval.shape == (2, 2)
    assert refusal({**duo, "pattern": ["01", "0"]}).startswith("pattern: must have the same number of digits")
    # None is none given.
    assert parse({**duo, "pattern": []}) == parse(duo) and len(parse(duo).pattern) == 4


@pytest.mark.parametrize(
    "text, words",
    [
        ("name: [h2o\n", "is not YAML"),
        ("- h2o\n", "must hold the fields of one KV policy (name: ...), not list"),
        ("h2o\n", "not str"),
        ("", "not NoneType"),
        ("name: h2o\nbudgt: 3\n", "did you mean 'budget'?"),
        ("name: h2o\nbudget: lots\n", "'lots'"),
        ("name: h2o\nsink: [1]\n", "sink"),
        ("name: 3\n", "unknown KV policy 3"),
        ("1: 2\nname: h2o\n", "1"),
        ("[" * 5000, "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_path(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refusal(str(path))
    assert str(path) in message and words in message and "\n" not in message


def test_a_missing_or_binary_file_is_refused_by_path(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00name")
    assert "is not YAML" in refusal(binary)
    (tmp_path / "folder.yaml").mkdir()
    assert str(tmp_path / "folder.yaml") in refusal(tmp_path / "folder.yaml")


def test_classes_are_made_once_and_follow_from_the_fields():
    config = KVPolicyConfig.parse({"name": "adakv", "bands": 2})
    assert config.classes["band-0"] is config.classes["band-0"]
    wider = config.replace(bands=3)
    assert list(wider.classes) == ["band-0", "band-1", "band-2"] and len(config.classes) == 2
    assert (
        config == KVPolicyConfig.parse({"name": "adakv", "bands": 2}) and pickle.loads(pickle.dumps(config)) == config
    )


def test_the_old_name_of_gates_works_with_one_warning(caplog):
    """`heads` of duo was the file; it is a reduction, as in all other policies."""
    _warn_of_old_name.cache_clear()
    gates = str(ROOT / "configs/heads/needle")
    with caplog.at_level("WARNING", logger="vllm.evict"):
        old = [parse({"name": "duo", "heads": gates, "sparsity": 0.5}) for _ in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "KV policy duo: in place of heads write gates; the old name goes with the next release"
    ]
    assert old[0] == parse({"name": "duo", "gates": gates, "sparsity": 0.5}) and old[0].heads == "sum"
    assert "heads" not in old[0].to_dict() and old[0].to_dict()["gates"] == gates
    assert (
        refusal({"name": "duo", "heads": gates, "gates": gates}) == "heads is the old name of gates: give gates alone"
    )


def test_what_is_internal_is_no_field():
    for field in ("depth", "share", "_depth", "_share", "given"):
        assert "has no field" in refusal({**H2O, field: 1})
    assert parse("h2o").pattern == () and parse("full").floor == 0.2, "other policies' fields read as their defaults"
    with pytest.raises(AttributeError, match="has no field 'nothing'"):
        _ = parse("h2o").nothing


def test_configurations_can_be_copied_carried_and_compared():
    config = parse({**H2O, "every": 3})
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), parse(config.to_dict())):
        assert same == config and hash(same) == hash(config) and same.unsaid == config.unsaid
    assert config.replace(budget=512) != config and config.replace(budget=512).every == 3
    assert repr(config).startswith("KVPolicyConfig(")


def test_audits_are_the_servers_own():
    assert parse({**H2O, "audit": 1, "target": 0.9}).audit == 1
    assert parse({**H2O, "audit": 1, "target": 0.9, "tuned": [100, 200]}).tuned == (100, 200)
    assert refusal({**H2O, "audit": 1, "tuned": [1, 2]}).startswith("tuned: other prompts could miss no target")
    assert refusal({**H2O, "target": 0.9}) == "target: no answer is audited: it needs audit, such as audit: 0.01"
    for field, value in (
        ("audit", 1.5),
        ("audit", -1),
        ("audit", True),
        ("audit", "some"),
        ("target", 0),
        ("target", 2),
        ("tuned", [1]),
        ("tuned", [5, 2]),
        ("tuned", "some"),
    ):
        assert refusal({**H2O, "audit": 0.5, "target": 0.9, field: value}).startswith(f"{field}: ")
    with pytest.raises(KVPolicyError, match="unknown request field 'kv_audit'"):
        parse({**H2O, "audit": 0.5}).for_request({"kv_audit": 1}, 100, 16)
    assert not parse({**H2O, "audit": 0.5}).for_request({"kv_policy": "snapkv"}, 5000, 16).audit

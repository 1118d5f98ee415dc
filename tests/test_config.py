"""What users may write, what it means in blocks, and what they are told when it is wrong."""

import copy
import difflib
import itertools
import json
import math
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_evict.config import MOST_COMPARED, KVPolicyConfig, KVPolicyError, Limits
from vllm_evict.config.errors import instead
from vllm_evict.config.schema import _warn_of_old_name
from vllm_evict.policies import BUDGET_OPTIONS, CACHED, MASS_OPTIONS, POLICIES, REDUCTIONS, RUNNING

ROOT = Path(__file__).parents[1]
H2O = {"name": "h2o", "budget": 1024, "sink": 32, "recent": 256, "buffer": 64}
parse = KVPolicyConfig.parse
#: Policies of all heads alike.
WHOLE = sorted(name for name, policy in POLICIES.items() if not policy.splits)


def refusal(value):
    """The message with which a value is refused."""
    with pytest.raises(KVPolicyError) as error:
        parse(value)
    return str(error.value)


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
    assert parse({"name": "h2o", "budget": 1000}).recent == 256


def test_configs_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        parse("h2o").budget = 3


@pytest.mark.parametrize("name", WHOLE)
def test_to_dict_is_what_parse_takes_and_json_carries(name):
    policy = POLICIES[name]
    values = {"budget": 0.25, "buffer": 96, "sink": 48, "recent": 100, "accumulate": "ema", "decay": 0.5}
    values |= {"window": 7, "every": 3, "heads": "max", "layers": "mean", "protect": False, "min_prompt": 300}
    values |= {"kernel": 5, "mix": 0.25, "seed": 11, "chunk": 500, "instruction": [3, 4], "when": policy.triggers[-1]}
    values |= {"sets": "all", "merge": "d2o", "merge_decay": 0.3, "merge_threshold": 0.1, "granularity": "token"}
    values |= {"context": None}
    if "granularity" in policy.options:
        values["when"] = "budget"
    assert set(values) == frozenset().union(*(POLICIES[other].options for other in WHOLE))
    values = {field: value for field, value in values.items() if field in policy.options}
    for extra in ({}, values, {"allow": ["h2o"]}, {"context": 4096} if "context" in policy.options else {}):
        config = parse({"name": name, **extra})
        carried = json.loads(json.dumps(config.to_dict()))
        assert parse(carried) == config and parse(carried).unsaid == config.unsaid
        assert set(carried) == (policy.options | {"name", "allow"}) - config.unsaid
        assert set(config.effective()) == policy.options | {"name", "allow"}
        assert config.unsaid == (set() if extra == values else policy.options & {"sink", "recent"})


def test_every_config_of_the_repository_parses(monkeypatch):
    monkeypatch.chdir(ROOT)  # where the paths in them are taken from
    paths = sorted(Path("configs").glob("*.y*ml"))
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
    has = ", ".join(sorted(POLICIES["h2o"].options | {"name", "allow"}))
    assert message == f"policy 'h2o' has no field {field!r}: did you mean {first!r}? Expected one of: {has}"


def test_a_field_of_another_policy_is_refused():
    assert "'sink-window' has no field 'heads'" in refusal({"name": "sink-window", "heads": "max"})
    assert "'full' has no field 'budget': expected one of: allow, name" in refusal({"name": "full", "budget": 100})


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


def test_blocks_too_large_for_a_budget_are_refused_by_size():
    config = parse({**H2O, "budget": 320})
    assert config.limits(32, 1000).budget == 10
    with pytest.raises(KVPolicyError, match=r"budget 320 .*blocks of 128 .*at least 512"):
        config.limits(128, 1000)


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


@pytest.mark.parametrize("field", ["budget", "buffer", "sink", "recent", "min_prompt", "window", "every"])
def test_sizes_beyond_any_context_are_refused_in_a_line(field):
    """Not by an overflow where they are divided into blocks."""
    message = refusal({**H2O, field: 10**400})
    assert message.startswith(f"{field}: ") and len(message) < 400 and "000..." in message


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


@pytest.mark.parametrize("name", ["h2o-pressure", "streaming-llm"])
def test_a_preset_is_no_name_of_a_policy(name):
    """Not in a file or a request either: it has fields of its own."""
    words = f"'{name}' is a preset, which stands for a whole policy (--kv-policy {name})"
    assert words in refusal({"name": name, "budget": 512})
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


# --- in blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, block, prompt, expected",
    [
        # Whole blocks: 1024 / 32, 1088 / 32.
        ({}, 32, 5000, Limits(32, 34, 1, 256)),
        # Rounded up: 200 -> 7 blocks; 240 -> 8 blocks; a sink of 20 is one block.
        (dict(budget=200, buffer=40, sink=20, recent=50), 32, 5000, Limits(7, 8, 1, 50)),
        # budget + buffer is rounded once, not each: 200 + 20 = 220 -> 7 blocks.
        (dict(budget=200, buffer=20, sink=20, recent=50), 32, 5000, Limits(7, 7, 1, 50)),
        (dict(budget=200, buffer=20, sink=20, recent=50), 128, 5000, None),
        (dict(budget=512, buffer=1, sink=0, recent=0), 128, 5000, Limits(4, 5, 0, 0)),
        # A quarter of 5000 = 1250 -> 40 blocks, and the buffer from there.
        (dict(budget=0.25), 32, 5000, Limits(40, 42, 1, 256)),
        # Never below sink + recent + one block: 1 + 8 + 1.
        (dict(budget=0.25), 32, 100, Limits(10, 12, 1, 256)),
        (dict(budget=0.001, sink=0, recent=0, buffer=0), 32, 3, Limits(1, 1, 0, 0)),
        (dict(budget=None), 32, 100, Limits(10, 12, 1, 256)),
    ],
)
def test_limits(options, block, prompt, expected):
    config = parse({**H2O, **options})
    if expected is None:
        with pytest.raises(KVPolicyError, match="blocks of 128"):
            config.limits(block, prompt)
    else:
        assert config.limits(block, prompt) == expected


def test_bound_is_the_largest_trigger_or_none():
    assert parse(H2O).bound(32, 4096) == 34
    assert parse({**H2O, "budget": 0.5}).bound(32, 4096) == 2048 // 32 + 2
    assert parse("full").bound(32, 4096) is None
    assert parse({**H2O, "allow": ["full"]}).bound(32, 4096) is None
    assert parse({**H2O, "allow": ["sink-window"]}).bound(32, 4096) == 34


def test_allowed():
    assert parse("full").allowed == set(WHOLE) - {"kvzip"}
    assert parse("h2o").allowed == set(WHOLE) - {"full", "kvzip"}
    assert parse({"name": "h2o", "allow": []}).allowed == {"h2o"}
    assert parse({"name": "sink-window", "allow": ["full"]}).allowed == {"sink-window", "full"}


PRESSED = "full, h2o, random, scissorhands, sink-window, snapkv, strided, tova"


@pytest.mark.parametrize("name", ["rkv", "knorm", "keydiff", "pagedeviction", "kvzip"])
def test_under_pressure_only_what_has_that_trigger_can_be_allowed(name):
    message = refusal({**H2O, "when": "pressure", "allow": ["tova", name]})
    assert f"allow: {name!r} does not support the server's when: pressure" in message
    assert message.endswith(f"requests may pick: {PRESSED}")
    assert asked({**H2O, "allow": [name]}, {"kv_policy": name}).name == name


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"duo"}))
def test_what_a_server_starts_with_requests_can_pick(name):
    """An entry of `allow` that every request for it would be refused with is refused itself."""
    picked = 0
    varied = {"when": ["budget", "pressure"], "granularity": ["block", "token"], "protect": [True, False]}
    varied |= {"budget": [200, 0.3], "heads": ["sum", "max"], "merge": [None, "ems"]}
    varied = {field: values for field, values in varied.items() if field in POLICIES[name].options}
    for values in itertools.product(*varied.values()):
        sizes = {field: 40 for field in ("sink", "recent") if field in POLICIES[name].options}
        for allow in [None, *([other] for other in POLICIES)]:
            try:
                server = parse({"name": name, **sizes, **dict(zip(varied, values)), "allow": allow})
            except KVPolicyError:
                continue
            for other in server.allowed:
                assert server.for_request({"kv_policy": other}, 4000, 16).name == other
                picked += 1
    assert picked > 1


def test_workers_can_measure_what_any_request_may_need_and_no_more():
    assert parse("h2o").statistics == parse("sink-window").statistics == parse("full").statistics == RUNNING | CACHED
    assert not parse({"name": "sink-window", "allow": ["full", "random", "strided"]}).statistics
    assert parse({"name": "knorm", "allow": ["full", "tova"]}).statistics == {"key_norm", "mass"}
    assert parse({"name": "rkv", "allow": []}).statistics == {"mass", "redundancy"}


def test_policies_measure_what_workers_know():
    for policy in POLICIES.values():
        assert policy.measures <= RUNNING | CACHED and len(policy.measures & RUNNING) <= 1
        assert bool(policy.measures) == (policy.options >= REDUCTIONS), "who measures says how heads are reduced"
        assert (policy.options >= MASS_OPTIONS) <= (policy.measures == {"mass"})


# --- protection, short prompts, options of single policies -----------------------------------------------------------


def test_without_protection_all_but_the_newest_block_may_go():
    config = parse({**H2O, "protect": False})
    assert config.limits(32, 5000) == Limits(32, 34, 0, 0)
    assert (config.minimum(32), parse(H2O).minimum(32)) == (1, 10)
    for budget, blocks in ((1, 1), (32, 1), (33, 2), (288, 9)):
        assert parse({**H2O, "budget": budget, "protect": False}).limits(32, 5000).budget == blocks
        assert "leaves nothing to choose" in refusal({**H2O, "budget": budget})
    assert parse({**H2O, "budget": 0.001, "protect": False}).limits(32, 100).budget == 1
    # Without a budget of its own it keeps as much as with protection: ablations compare equal budgets.
    window = {"name": "sink-window", "sink": 32, "recent": 100}
    assert parse({**window, "protect": False}).limits(32, 100) == Limits(6, 6, 0, 0)
    assert parse(window).limits(32, 100) == Limits(6, 6, 1, 100)


@pytest.mark.parametrize("value", [1, 0, "false", "no", None])
def test_protection_is_true_or_false(value):
    assert f"protect: must be true or false, not {value!r}" in refusal({**H2O, "protect": value})


def test_short_prompts_have_no_limits():
    config = parse({**H2O, "min_prompt": 300})
    assert config.limits(32, 299) is None
    assert config.limits(32, 300) == config.limits(32, 5000) == parse(H2O).limits(32, 300)
    # They may decode up to the model's length, and the pool has to hold that.
    assert config.bound(32, 4096) is None
    assert parse({**H2O, "min_prompt": 1}).bound(32, 4096) == 34
    with pytest.raises(KVPolicyError, match="at least 512"):  # seen at start, whatever the prompt
        parse({**H2O, "budget": 320, "min_prompt": 300}).limits(128, 1)
    assert "greater than or equal to 0" in refusal({**H2O, "min_prompt": -1})


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"name": "snapkv", "kernel": 4}, "kernel: must be odd, not 4"),
        ({"name": "snapkv", "kernel": 0}, "kernel: input should be greater than or equal to 1"),
        ({"name": "rkv", "mix": 1.5}, "mix: input should be less than or equal to 1"),
        ({"name": "rkv", "mix": "half"}, "mix: must be a number, not 'half'"),
        ({"name": "random", "seed": -1}, "seed: input should be greater than or equal to 0"),
        ({"name": "tova", "window": 3}, "policy 'tova' has no field 'window': "),
        ({"name": "scissorhands", "accumulate": "sum"}, "policy 'scissorhands' has no field 'accumulate': "),
        ({"name": "knorm", "every": 2}, "policy 'knorm' has no field 'every': "),
        ({"name": "strided", "heads": "max"}, "policy 'strided' has no field 'heads': "),
        ({"name": "h2o", "kernel": 3}, "policy 'h2o' has no field 'kernel': "),
        ({"name": "full", "protect": False}, "policy 'full' has no field 'protect': "),
        ({"name": "full", "min_prompt": 10}, "policy 'full' has no field 'min_prompt': "),
    ],
)
def test_options_of_single_policies(policy, message):
    assert message in refusal(policy)


@pytest.mark.parametrize("name, window", [("tova", 1), ("snapkv", 32), ("scissorhands", 256), ("rkv", 8)])
def test_policies_of_the_last_queries_fix_how_mass_adds_up(name, window):
    config = parse(name)
    assert (config.accumulate, config.window) == ("last", window)
    assert parse(config.to_dict()) == config


# --- sizes that nobody gave --------------------------------------------------------------------------------------------

SIZED = sorted(name for name, policy in POLICIES.items() if "budget" in policy.options)


def test_defaults_fit_a_budget_of_288():
    """It was refused, as sinks of 64 and a window of 256 do not fit."""
    config = parse({"name": "h2o", "budget": 288})
    assert (config.sink, config.recent) == (32, 144)
    assert config.limits(32, 5000) == Limits(9, 13, 1, 128) and config.limits(16, 5000) == Limits(18, 26, 2, 144)
    assert config.limits(128, 5000) == Limits(3, 4, 0, 128)
    large = parse({"name": "h2o", "budget": 2048}).limits(128, 5000)
    assert large == parse({"name": "h2o", "budget": 2048, "sink": 64, "recent": 256}).limits(128, 5000)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("name", SIZED)
def test_any_budget_of_three_blocks_works_with_nothing_else_said(name, block):
    server = parse({"name": name, "allow": ["full"]}) if POLICIES[name].splits else parse(name)
    default = POLICIES[name].defaults
    for blocks in (*range(3, 40), 100):
        for budget in (blocks * block, (blocks - 1) * block + 1):
            config = parse({"name": name, "budget": budget})
            for each in (config, server.for_request({"kv_budget": budget}, 10**5, block) if budget < 1000 else config):
                limits, window = each.limits(block, 10**5), each.policy.window_is_the_budget
                assert limits.budget == blocks
                assert limits.sink <= blocks / 8 and limits.sink * block <= default["sink"] + block
                assert limits.recent <= blocks * block / 2 and limits.recent <= default["recent"] * (not window)
                assert limits.sink + math.ceil(limits.recent / block) < blocks
                if blocks == 100:
                    assert limits.sink == math.ceil(default["sink"] / block)
                    assert window or limits.recent == default["recent"]


def test_sizes_that_were_given_are_never_changed():
    config = parse({"name": "h2o", "budget": 320, "sink": 128})
    # 10 blocks: 4 of sinks, at most 5 for the window, one that can go.
    assert config.sink == 128 and config.limits(32, 5000) == Limits(10, 14, 4, 160)
    config = parse({"name": "h2o", "budget": 320, "sink": 224})
    assert config.limits(32, 5000) == Limits(10, 14, 7, 64)
    config = parse({"name": "h2o", "budget": 320, "recent": 288})
    assert config.limits(32, 5000) == Limits(10, 14, 0, 288)
    assert "32 + 256" in refusal({**H2O, "budget": 280})
    with pytest.raises(KVPolicyError, match="need at least 512"):
        parse({"name": "h2o", "budget": 321, "sink": 320}).limits(128, 5000)
    # A ratio has a floor, which is sinks, recent window and one block.
    assert parse({"name": "h2o", "budget": 0.1}).limits(32, 100) == Limits(11, 15, 2, 256)


def test_a_policy_chosen_for_a_group_of_heads_has_its_sizes():
    config = parse({"name": "fastgen", "budget": 384})
    assert config.limits(128, 5000) == Limits(3, 4, 0, 128)
    assert config.profiled("h2o", 128).limits(128, 5000) == Limits(3, 4, 0, 128)
    assert config.profiled("sink-window", 128).limits(128, 5000) == Limits(2, 3, 0, 128)


@pytest.mark.parametrize(
    "server",
    [
        *("h2o", "sink-window", "pagedeviction", "h2o-pressure", "full"),
        *({"name": "h2o", "budget": 300}, {"name": "h2o", "budget": 0.3}, {"name": "sink-window", "budget": 400}),
    ],
)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_what_a_servers_user_did_not_give_follows_a_requests_budget(server, block):
    server = parse(server)
    granted, picked = server.limits(block, 2000), 0
    for name in server.allowed - {"full"}:
        for budget in (3 * block, 5 * block, 200, 288, 0.1, 0.01):
            if isinstance(budget, int) and (budget < 3 * block or (granted and budget > granted.budget * block)):
                continue
            if server.unsaid != {"sink", "recent"} and budget in (3 * block, 5 * block, 200, 288):
                continue  # what was given may be too large
            limits = server.for_request({"kv_policy": name, "kv_budget": budget}, 2000, block).limits(block, 2000)
            assert not granted or (limits.budget <= granted.budget and limits.trigger <= granted.trigger)
            picked += 1
    assert picked > 5


# --- requests --------------------------------------------------------------------------------------------------------


def asked(server, extra_args, prompt=5000, block=32):
    return parse(server).for_request(extra_args, prompt, block)


def request_refusal(server, extra_args, prompt=5000, block=32):
    with pytest.raises(KVPolicyError) as error:
        asked(server, extra_args, prompt, block)
    return str(error.value)


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"kv_policy": "h2o"}, {"something": "else"}, {"kv_transfer_params": {}}]
)
def test_requests_that_ask_for_nothing_get_the_servers_policy(extra_args):
    assert asked(H2O, extra_args) == parse(H2O)


@pytest.mark.parametrize("budget, meant", [(512, 512), ("512", 512), (1024, 1024), (0.1, 0.1), ("0.1", 0.1)])
def test_a_request_may_ask_for_a_budget_up_to_the_servers(budget, meant):
    """Numbers may come as text: HTTP clients send both."""
    config = asked(H2O, {"kv_budget": budget})
    assert config == parse({**H2O, "budget": meant})


def test_what_a_row_of_a_table_leaves_out_is_null_and_its_numbers_are_floats():
    """Ray Data's rows, and those of all that is made of Arrow's or pandas' tables."""
    empty = dict.fromkeys(("kv_policy", "kv_budget", "kv_sink", "kv_recent", "kv_usage"))
    assert asked(H2O, empty) == parse(H2O)
    whole = asked(H2O, {**empty, "kv_policy": "sink-window", "kv_budget": 512, "kv_sink": 64, "kv_usage": True})
    for row in ({"kv_budget": 512.0, "kv_sink": 64.0}, {"kv_budget": "512.0", "kv_sink": "64"}):
        assert asked(H2O, {**empty, "kv_policy": "sink-window", **row, "kv_usage": 1.0}) == whole
    assert isinstance(whole.budget, int) and asked(H2O, {**empty, "kv_budget": 0.1}).budget == 0.1
    assert request_refusal(H2O, {"kv_budget": 1.0}).endswith("a ratio of the prompt between 0 and 1, not 1.0")
    numpys = {"kv_budget": np.int64(512), "kv_sink": np.float32(64)}
    assert asked(H2O, {**empty, "kv_policy": "sink-window", **numpys}) == whole


@pytest.mark.parametrize("budget", [1025, 2048, "4096", 0.21, 0.9])
def test_a_budget_above_the_servers_is_refused(budget):
    if budget == 1025:
        assert asked(H2O, {"kv_budget": 1024})
    message = request_refusal(H2O, {"kv_budget": budget})
    assert "above the server's 1024" in message and str(budget) in message


@pytest.mark.parametrize(
    "budget",
    [0, -3, 1.0, 2.5, math.nan, "NaN", "Infinity", True, "true", "lots", "", [512], {"a": 1}, "null", 288],
)
def test_budgets_that_make_no_sense_are_refused_in_requests_too(budget):
    message = request_refusal(H2O, {"kv_budget": budget})
    assert "budget" in message and "\n" not in message


BUDGET = "must be a whole number of tokens above 0 and below 2147483648, or a ratio of the prompt between 0 and 1, not "


@pytest.mark.parametrize(
    "number", [math.inf, -math.inf, math.nan, "Infinity", "-Infinity", "NaN", "1e400", 1e300, "9" * 99]
)
@pytest.mark.parametrize("name", [None, *sorted(set(WHOLE) - {"full"})])
@pytest.mark.parametrize("context", [{}, {"context": 2048}])
def test_infinity_and_nan_are_refused_by_field_whatever_the_policy(name, context, number):
    """Where a float reaches math.ceil, Python's own message says nothing of the field."""
    for server in ("sink-window", "h2o", "full"):
        if context and (name == "kvzip" or server == "full"):
            continue
        sizes = {} if server == "full" else {"budget": 512, "sink": 32}
        server = {"name": server, **sizes, **context, **({"allow": [name]} if name and not context else {})}
        picked = {"kv_policy": name} if name else {}
        assert request_refusal(server, {**picked, "kv_budget": number}, 1000) == f"kv_budget {BUDGET}{number!r}"
        for field in ("kv_sink", "kv_recent"):
            message = request_refusal(server, {**picked, field: number}, 1000)
            assert message == f"{field} must be a whole number of tokens, 0 or more, not {number!r}"


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e300, 10**400, 10**5000], ids=range(6))
def test_infinity_and_nan_are_refused_by_field_at_start(number):
    """In every field of every policy that is a number."""
    seen = 0
    for name, policy in POLICIES.items():
        own = {"pattern": ["10", "01"]} if policy.splits == "classes" else {}
        for field in policy.options:
            if isinstance(POLICIES[name].defaults[field], bool | str):
                continue
            assert refusal({"name": name, **own, field: number}).startswith(f"{field}: "), (name, field)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("text", ["[" * 100_000, "1" + "0" * 400, "1" + "0" * 5000, "9" * 119 + " " * 10_000])
def test_long_texts_for_budgets_are_refused_in_a_line(text):
    """Not by an error of JSON, whose nesting and whose digits Python limits, and not repeated."""
    message = request_refusal(H2O, {"kv_budget": text})
    assert "budget" in message and "number of tokens" in message and len(message) < 400


def test_what_a_refusal_repeats_is_short():
    message = request_refusal(H2O, {"kv_policy": "h2o" * 100_000})
    assert (
        message.startswith("unknown KV policy 'h2oh2o") and "...: expected one of: " in message and len(message) < 500
    )
    with pytest.raises(KVPolicyError, match=r"^unknown KV policy 'h2oh2o.*\.\.\.: expected"):
        parse("h2o" * 100_000)


@pytest.mark.parametrize("extra_args", ["kv_policy", [1], 5])
def test_extra_args_that_are_no_dict_are_refused(extra_args):
    assert f"must be a dict of a request's own arguments, not {extra_args!r}" in request_refusal(H2O, extra_args)


def test_names_of_others_arguments_may_be_anything():
    assert asked(H2O, {1: 2, None: 3, "x" * 100_000: 4}) == parse(H2O)


@pytest.mark.parametrize("typo", ["kv_buget", "kv_budge", "kv_polcy", "kvpolicy", "kv-budget", "KV_budget"])
def test_a_typo_is_not_silently_ignored(typo):
    message = request_refusal(H2O, {typo: 512})
    assert repr(typo) in message and "kv_budget" in message and "kv_policy" in message


def test_fifty_thousand_unknown_names_cost_no_more_than_a_look_up_each(monkeypatch):
    """Permutations of kv_budget that are no typo of it: comparing all of them takes seconds of the API's event loop."""
    compared, close = [], difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda *args, **kwargs: compared.append(args[0]) or close(*args, **kwargs)
    )
    orders = ("".join(letters) for letters in itertools.permutations("tegdub_vk"))
    names = [name + end for name, end in zip(itertools.islice(orders, 0, None, 7), itertools.cycle(["xy", "zz", "qr"]))]
    config, many = parse(H2O), dict.fromkeys(names[:49_900], 1)
    assert len(many) == 49_900
    before = time.process_time()
    assert config.for_request(many, 100, 32) is config
    took = time.process_time() - before
    assert len(compared) == MOST_COMPARED
    assert took < 0.5, "ten times what it takes on two cores of a slow machine; it was 1.5 s"
    # An option and one of the first names are found among as many others.
    assert "'kv_window'" in request_refusal(H2O, {**many, "kv_window": 1})
    for wrong in ("kv_buget", "KV_Window"):
        assert repr(wrong) in request_refusal(H2O, {wrong: 1, **many})
    assert asked(H2O, {**many, "kv_budget": 512}).budget == 512


@pytest.mark.parametrize("policy", ["h20", "none", 3, ["h2o"]])
def test_an_unknown_policy_is_refused_in_requests(policy):
    assert "unknown KV policy" in request_refusal(H2O, {"kv_policy": policy})


@pytest.mark.parametrize("value", [True, False, 1, 0, 1.0])
def test_a_request_may_ask_for_its_usage(value):
    assert asked(H2O, {"kv_usage": value}) == parse(H2O)
    assert asked(H2O, {"kv_usage": value, "kv_budget": 512}) == asked(H2O, {"kv_budget": 512})


@pytest.mark.parametrize("value", [2, 0.5, "true", "1", [1]])
def test_it_does_so_with_yes_or_no(value):
    for server in (H2O, "full"):
        message = request_refusal(server, {"kv_usage": value})
        assert message == f"kv_usage must be true or false (1 or 0), not {value!r}"


def test_a_policy_that_is_not_enabled_is_refused_with_those_that_are():
    assert "'full' is not enabled here: expected one of: " in request_refusal(H2O, {"kv_policy": "full"})
    message = request_refusal({**H2O, "allow": []}, {"kv_policy": "sink-window"})
    assert "'sink-window' is not enabled here: expected one of: h2o" in message


def test_full_takes_no_budget():
    server = {**H2O, "allow": ["full"]}
    assert asked(server, {"kv_policy": "full"}) == parse("full")
    assert "no kv_budget" in request_refusal(server, {"kv_policy": "full", "kv_budget": 512})
    assert "no kv_budget" in request_refusal("full", {"kv_budget": 512})


def test_another_policy_keeps_the_servers_budget_sinks_and_buffer():
    config = asked(H2O, {"kv_policy": "sink-window"})
    assert (config.name, config.budget, config.buffer, config.sink, config.recent) == ("sink-window", 1024, 64, 32, 0)
    assert asked(H2O, {"kv_policy": "sink-window", "kv_budget": 128}).limits(32, 5000) == Limits(4, 6, 1, 0)


SAME = ("budget", "buffer", "sink", "recent", "protect", "min_prompt")


@pytest.mark.parametrize("name", sorted(set(WHOLE) - {"full", "sink-window", "h2o"}))
def test_another_scoring_policy_keeps_what_is_kept_and_protected(name):
    server = {**H2O, "protect": False, "min_prompt": 77, "allow": [name]}
    config, own = asked(server, {"kv_policy": name}), parse(name)
    assert [getattr(config, field) for field in SAME] == [1024, 64, 32, 256, False, 77]
    for field in POLICIES[name].options - set(SAME):
        assert getattr(config, field) == getattr(own, field)


def test_another_scoring_policy_takes_over_what_was_changed():
    server = {**H2O, "heads": "max", "layers": "mean", "window": 50, "every": 3, "accumulate": "ema"}
    config = asked(server, {"kv_policy": "snapkv"})
    assert (config.heads, config.layers, config.window, config.kernel) == ("max", "mean", 50, 3)
    assert (config.accumulate, config.every) == ("last", 1), "what a policy has no field for is its own"
    assert asked({**H2O, "window": 32}, {"kv_policy": "scissorhands"}).window == 256, "a default says nothing"
    back = asked({"name": "tova", "budget": 1024, "heads": "mean"}, {"kv_policy": "h2o"})
    assert (back.heads, back.accumulate, back.window) == ("mean", "sum", 32)


def test_a_window_that_is_the_budget_is_no_recent_window():
    assert asked({"name": "sink-window", "sink": 64, "recent": 1024}, {"kv_policy": "h2o"}).recent == 256
    # A smaller budget leaves half of it, beside sinks and one block.
    for budget, recent in ((320, 160), (128, 32), (96, 0), (97, 32)):
        config = asked({"name": "sink-window", "sink": 64, "budget": budget}, {"kv_policy": "h2o"})
        assert config.limits(32, 5000) == Limits(math.ceil(budget / 32), math.ceil(budget / 32), 2, recent)
    config = asked({"name": "sink-window", "recent": 1024}, {"kv_policy": "tova", "kv_budget": 128})
    assert config.limits(32, 5000) == Limits(4, 4, 0, 64)
    assert asked({"name": "sink-window"}, {"kv_policy": "pagedeviction"}).recent == 0


def test_requests_exempt_by_their_prompt_may_pick_any_policy():
    server = {**H2O, "min_prompt": 300}
    assert asked(server, {"kv_policy": "tova"}, prompt=299).limits(32, 299) is None
    assert asked(server, {"kv_policy": "tova", "kv_budget": 4096}, prompt=299).limits(32, 299) is None
    assert "above the server's 1024" in request_refusal(server, {"kv_policy": "tova", "kv_budget": 4096}, prompt=300)


def test_on_a_full_server_a_request_gets_the_policys_defaults():
    assert asked("full", {"kv_policy": "h2o"}) == parse("h2o")
    assert asked("full", {"kv_policy": "sink-window", "kv_budget": 100_000}).budget == 100_000


def test_a_ratio_is_of_the_requests_own_prompt():
    server = {**H2O, "budget": 0.5}
    assert asked(server, {"kv_budget": 0.4}, prompt=2000).limits(32, 2000).budget == 25
    assert "above the server's 1024" in request_refusal(server, {"kv_budget": 1500}, prompt=2000)
    assert asked(server, {"kv_budget": 1500}, prompt=4000).budget == 1500


def test_a_request_may_set_its_sinks_and_recent_window():
    config = asked(H2O, {"kv_sink": 500, "kv_recent": "100"})
    assert (config.budget, config.sink, config.recent) == (parse(H2O).budget, 500, 100)
    limits = config.limits(32, 5000)
    assert (limits.sink, limits.recent, limits.budget) == (16, 100, parse(H2O).limits(32, 5000).budget)
    assert asked(H2O, {"kv_policy": "tova", "kv_sink": 0}).sink == 0
    # Beside a smaller budget, and not without room for a block that can go.
    assert asked(H2O, {"kv_budget": 512, "kv_sink": 200, "kv_recent": 256}).sink == 200
    assert "budget 512 leaves nothing to choose" in request_refusal(H2O, {"kv_budget": 512, "kv_sink": 500})
    above = request_refusal({**H2O, "budget": 0.25}, {"kv_sink": 1000, "kv_recent": 64}, prompt=2000)
    assert above == "kv_sink 1000, kv_recent 64 comes to 1120 tokens of this request's cache, above the server's 512"


def test_sinks_take_from_a_window_that_is_the_budget():
    server = {"name": "sink-window", "sink": 64, "recent": 1024}
    granted = parse(server).limits(32, 5000)
    config = asked(server, {"kv_sink": 640})
    assert config.limits(32, 5000) == Limits(granted.budget, granted.trigger, 20, 0)
    assert asked(server, {"kv_sink": 640, "kv_recent": 256}).limits(32, 5000).budget == 20 + 8 + 1
    assert "above the server's 1120" in request_refusal(server, {"kv_recent": 1100})
    picked = asked(server, {"kv_policy": "h2o", "kv_sink": 640, "kv_recent": 96})
    assert (picked.sink, picked.recent, picked.limits(32, 5000).budget) == (640, 96, granted.budget)
    assert asked(H2O, {"kv_policy": "sink-window", "kv_recent": 96}).limits(32, 5000).budget == 1 + 3 + 1


@pytest.mark.parametrize(
    ("server", "extra_args", "reason"),
    [
        (H2O, {"kv_sink": -1}, "kv_sink must be a whole number of tokens, 0 or more, not -1"),
        (H2O, {"kv_recent": 0.5}, "kv_recent must be a whole number of tokens, 0 or more, not 0.5"),
        (H2O, {"kv_sink": "64.5"}, "kv_sink must be a whole number of tokens, 0 or more, not '64.5'"),
        (H2O, {"kv_sink": "null"}, "kv_sink must be a whole number of tokens, 0 or more, not 'null'"),
        (H2O, {"kv_sinks": 64}, "unknown request field 'kv_sinks': did you mean 'kv_sink'? Expected one of: "),
        # Options of a policy that are the server's.
        (H2O, {"kv_window": 64}, "unknown request field 'kv_window': expected one of: "),
        (H2O, {"kv_granularity": "token"}, "unknown request field 'kv_granularity': expected one of: "),
        ({**H2O, "protect": False}, {"kv_sink": 64}, "kv_sink can't be set here: the server protects no tokens"),
        ("full", {"kv_recent": 64}, "kv_policy 'full' keeps everything: it takes no kv_recent"),
        (
            {"name": "duo", "pattern": ["10", "01"], "retrieval": "h2o"},
            {"kv_sink": 64},
            "kv_policy 'duo' takes no kv_sink: the server sets what streaming heads keep",
        ),
    ],
)
def test_sinks_and_windows_that_a_request_may_not_have(server, extra_args, reason):
    assert request_refusal(server, extra_args).startswith(reason)


servers = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(set(WHOLE) - {"full", "kvzip"})),
        "protect": st.booleans(),
        "budget": st.one_of(st.integers(150, 500), st.floats(0.01, 0.99)),
        "buffer": st.integers(0, 100),
        "sink": st.integers(0, 64),
        "recent": st.integers(0, 80),
    }
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "kv_policy": st.sampled_from(sorted(set(POLICIES) - {"full"})),
        "kv_budget": st.one_of(st.integers(100, 500), st.floats(0.01, 0.99)),
        "kv_sink": st.integers(0, 300),
        "kv_recent": st.integers(0, 300),
    },
)


@settings(max_examples=1000, deadline=None)  # a busy machine is no failure
@given(servers, requests, st.sampled_from([16, 32, 64]), st.integers(1, 2000))
def test_no_request_is_granted_more_than_the_pool_was_planned_for(server, extra_args, block, prompt):
    try:
        config = parse(server)
        bound = config.bound(block, 2048)
        granted = config.for_request(extra_args, prompt, block).limits(block, prompt)
    except KVPolicyError:
        return
    assert granted.trigger <= bound
    assert granted.budget <= config.limits(block, prompt).budget
    assert granted.budget >= config.for_request(extra_args, prompt, block).minimum(block)
    assert granted.trigger >= granted.budget


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
        "KV policy duo: the field heads is called gates now; the old name goes with the next release"
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

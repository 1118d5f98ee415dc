"""What a policy means in blocks, for servers, and sizes that are not given."""

import itertools
import math

import pytest
from configuration import H2O, WHOLE, asked, parse, refusal

from vllm_evict.config import KVPolicyError, Limits
from vllm_evict.policies import CACHED, MASS_OPTIONS, POLICIES, QUERIED, REDUCTIONS, RUNNING

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
    every = RUNNING | CACHED | QUERIED
    assert parse("h2o").statistics == parse("sink-window").statistics == parse("full").statistics == every
    assert parse({"name": "full", "select": 1024}).statistics == (CACHED | QUERIED) - {"redundancy"}
    assert not parse({"name": "sink-window", "allow": ["full", "random", "strided"]}).statistics
    assert parse({"name": "knorm", "allow": ["full", "tova"]}).statistics == {"key_norm", "mass"}
    assert parse({"name": "rkv", "allow": []}).statistics == {"mass", "redundancy"}


def test_policies_measure_what_workers_know():
    for policy in POLICIES.values():
        assert policy.measures <= RUNNING | CACHED | QUERIED and len(policy.measures & RUNNING) <= 1
        reduces = bool(policy.measures - QUERIED)
        assert reduces == (policy.options >= REDUCTIONS), "a policy that measures has options of reduction"
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


# --- sizes that are not given --------------------------------------------------------------------------------------------

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

"""Sizes of a policy in blocks, for servers, and sizes that are not given."""

import itertools
import math
from fractions import Fraction

import pytest
from configuration import H2O, WHOLE, asked, parse, refusal

from vllm_evict.config import KVPolicyError, Limits, presets
from vllm_evict.config.sizes import LEAST_BUDGET, LEAST_CHOICE, share_of
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
        # At least sinks, recent tokens and one block, whatever the size of blocks: 1 + 1 + 1.
        (dict(budget=200, buffer=20, sink=20, recent=50), 128, 5000, Limits(3, 4, 1, 50)),
        ({}, 2096, 5000, Limits(3, 4, 1, 256)),
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
    assert parse({**H2O, **options}).limits(block, prompt) == expected


def test_shares_are_exact():
    """Shares are decimal fractions: in floating point 0.07 of 100 is more than 7."""
    for hundredth in range(1, 100):
        config = parse({"name": "h2o", "budget": hundredth / 100, "sink": 16, "recent": 16, "buffer": 0})
        for count in (100, 700, 1000, 19_936):
            assert share_of(hundredth / 100, count) == math.ceil(Fraction(hundredth, 100) * count)
            exact = math.ceil(math.ceil(Fraction(hundredth, 100) * count) / 16)
            assert config.limits(16, count).budget == max(exact, 3)


def test_bound_is_the_largest_trigger_or_none():
    assert parse(H2O).bound(32, 4096) == 34
    assert parse({**H2O, "budget": 0.5}).bound(32, 4096) == 2048 // 32 + 2
    assert parse("full").bound(32, 4096) is None
    # What `full` beside it takes is not planned for.
    assert parse({**H2O, "allow": ["full"]}).bound(32, 4096) == 34
    assert parse({**H2O, "allow": ["sink-window"]}).bound(32, 4096) == 34


def test_allowed():
    assert parse("full").allowed == set(WHOLE) - {"kvzip", "random"}
    assert parse("h2o").allowed == set(WHOLE) - {"kvzip", "random"}
    assert parse("random").allowed == set(WHOLE) - {"kvzip"}
    assert parse({"name": "h2o", "context": 4096}).allowed == set(WHOLE) - {"full", "kvzip", "random"}
    assert parse({"name": "adakv"}).allowed == {"adakv", "full"}
    assert parse({"name": "adakv", "allow": []}).allowed == {"adakv"}
    assert parse({"name": "h2o", "allow": []}).allowed == {"h2o"}
    assert parse({"name": "sink-window", "allow": ["full"]}).allowed == {"sink-window", "full"}


@pytest.mark.parametrize("name", [n for n in POLICIES if "pressure" in POLICIES[n].triggers and n != "full"])
def test_under_pressure_half_of_a_prompt_stays_if_no_budget_is_given(name):
    config = parse({"name": name, "when": "pressure"})
    if POLICIES[name].window_is_the_budget:
        assert config.budget is None
        return
    for block in (16, 128):
        kept = [config.limits(block, prompt).bound * block for prompt in (100, 2048, 3000, 8192)]
        assert kept == [1024, 1024, -(-1500 // block) * block, 4096]
    assert config.bound(128, 8192) == 32 and parse(config.to_dict()) == config
    assert config.limits(528, 100).bound >= 8  # of large blocks as many as under `when: budget`
    assert parse({"name": name, "when": "pressure", "budget": 0.5}).limits(16, 100).bound < 8
    others = [{"kv_policy": "strided"}] if "strided" in config.allowed else []
    for same in ({"kv_sink": 32}, {"kv_policy": "full"}, *others):
        picked = config.for_request(same, 8192, 128).limits(128, 8192)
        assert picked is None or picked.bound == 32


@pytest.mark.parametrize("policy", [H2O, {"name": "keydiff"}, {"name": "full", "evict": "host", "host": "1GiB"}])
def test_admit_is_of_pressure(policy):
    assert refusal({**policy, "admit": True}).startswith("admit: ") and not parse({**policy, "admit": False}).admit
    server = parse({**H2O, "when": "pressure", "admit": True})
    assert server.for_request({"kv_policy": "tova"}, 4000, 32).admit
    assert "admit" not in parse(policy).to_dict()


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
    named = POLICIES[name].options if name != "full" else {}  # it has sizes with evict: host alone, and no allow
    varied = {field: values for field, values in varied.items() if field in named}
    for values in itertools.product(*varied.values()):
        sizes = {field: 40 for field in ("sink", "recent") if field in named}
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
    every = {"-key_norm", "key_diff", "value_key_ratio", "-redundancy"} | RUNNING | QUERIED
    assert parse("h2o").statistics == parse("sink-window").statistics == parse("full").statistics == every
    server = parse({"name": "full", "read": 1024, "allow": ["keydiff", "knorm", "keybound", "pagedeviction"]})
    assert server.statistics == {"key_diff", "-key_norm", "value_key_ratio"} | QUERIED
    assert not parse({"name": "sink-window", "allow": ["full", "random", "strided"]}).statistics
    assert parse({"name": "knorm", "allow": ["full", "tova"]}).statistics == {"-key_norm", "mass"}
    assert parse({"name": "rkv", "allow": []}).statistics == {"mass", "-redundancy"}


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


def test_short_prompts_have_no_limits():
    config = parse({**H2O, "min_prompt": 300})
    assert config.limits(32, 299) is None
    assert config.limits(32, 300) == config.limits(32, 5000) == parse(H2O).limits(32, 300)
    # They may decode up to the model's length, and the pool has to hold that.
    assert config.bound(32, 4096) is None
    assert parse({**H2O, "min_prompt": 1}).bound(32, 4096) == 34
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

SIZED = sorted(name for name, policy in POLICIES.items() if "protect" in policy.options)


#: Tokens of blocks: of vLLM's, and of hybrids, whose blocks are as large as a state.
BLOCKS = (16, 32, 64, 128, 256, 528, 1056, 2096, 4176)
PROMPT = 20_000


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_nobody_gave_follow_the_budget_at_any_size_of_blocks(name, block):
    """They leave sinks, recent tokens and several blocks to choose, for servers and for requests' own budgets."""
    own, window = POLICIES[name].defaults, POLICIES[name].window_is_the_budget
    splits = POLICIES[name].allocator.splits or POLICIES[name].reconstructs
    server = parse({"name": name, "allow": ["full"]} if splits else {"name": "full", "allow": [name]})
    budgets = [None, 0.01, 0.1, 0.25, 0.5, 0.9, 1, 100, 288, 1024, 2048, 8192]
    for budget in [*budgets, *(count * block for count in (1, 2, 3, 4, 5, 8, 9, 16, 100))]:
        given = {} if budget is None else {"budget": budget}
        configs = [parse({"name": name, **given})]
        if not splits:
            asked = {} if budget is None else {"kv_budget": budget}
            configs.append(server.for_request({"kv_policy": name, **asked}, PROMPT, block))
        for config in configs:
            limits = config.limits(block, PROMPT)
            tokens = 0 if budget is None else math.ceil(budget * (PROMPT if isinstance(budget, float) else 1))
            recent = math.ceil(limits.recent / block)
            # What was given becomes no more than it has to.
            if budget is not None:
                least = bool(own["sink"]) + bool(own["recent"] and not window) + LEAST_CHOICE
                assert limits.budget == max(math.ceil(tokens / block), least)
            # An eighth and a quarter at most, and one block at least, if the policy has any.
            assert limits.sink == min(math.ceil(own["sink"] / block), max(limits.budget // 8, 1)) or budget is None
            assert bool(limits.sink) == bool(own["sink"])
            assert limits.recent <= own["recent"] and bool(limits.recent) == bool(
                own["recent"] and not (window and given)
            )
            if not (window and budget is None):
                assert recent <= max(limits.budget // 4, 1)
                assert limits.budget - limits.sink - recent >= LEAST_CHOICE
            if budget is None and not window:
                assert limits.budget == max(math.ceil(2048 / block), LEAST_BUDGET)
                assert 8 * limits.sink <= limits.budget and 4 * recent <= limits.budget


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("preset", sorted(presets().keys() - {"lserve"}))
def test_presets_keep_sinks_and_leave_a_choice_at_any_size_of_blocks(preset, block):
    config = parse(preset)
    if config.name == "full":
        return
    limits = config.limits(block, PROMPT)
    assert limits.sink >= 1
    assert limits.budget - limits.sink - math.ceil(limits.recent / block) >= 1
    assert limits.recent >= 1 or config.policy.window_is_the_budget


def test_a_tenth_of_a_prompt_keeps_a_tenth():
    """Sinks of 64 and recent tokens of 256 made 352 tokens of it, with one block to choose."""
    config = parse({"name": "h2o", "budget": 0.1})
    assert config.limits(32, 2048) == Limits(7, 11, 1, 32)
    assert config.limits(16, 2048) == Limits(13, 21, 1, 48)


def test_small_blocks_leave_the_policys_own_sizes():
    for block in (16, 32, 64, 128):
        own = parse("h2o").limits(block, 5000)
        assert own == parse({"name": "h2o", "budget": 2048, "sink": 64, "recent": 256}).limits(block, 5000)
    config = parse({"name": "h2o", "budget": 288})
    assert (config.sink, config.recent) == (32, 64)


def test_sizes_that_were_given_are_never_changed():
    config = parse({"name": "h2o", "budget": 320, "sink": 128})
    # 10 blocks: 4 of sinks, 2 for the window, 4 that can go.
    assert config.sink == 128 and config.limits(32, 5000) == Limits(10, 14, 4, 64)
    config = parse({"name": "h2o", "budget": 320, "sink": 224})
    assert config.limits(32, 5000) == Limits(10, 14, 7, 64)
    # 9 blocks of recent tokens, sinks, and one that can go.
    config = parse({"name": "h2o", "budget": 320, "recent": 288})
    assert config.limits(32, 5000) == Limits(11, 15, 1, 288)
    assert "sink + recent + one block = 32 + 256" in refusal({**H2O, "budget": 280})
    assert "at least recent + one block = 256" in refusal({"name": "h2o", "budget": 256, "recent": 256})
    # A ratio has the same floor.
    assert parse({"name": "h2o", "budget": 0.1, "recent": 288}).limits(32, 100) == Limits(11, 15, 1, 288)
    # A budget that was given grows to whole blocks beside them.
    assert parse({"name": "h2o", "budget": 321, "sink": 320}).limits(128, 5000) == Limits(6, 7, 3, 128)


def test_a_policy_chosen_for_a_group_of_heads_has_its_sizes():
    config = parse({"name": "fastgen", "budget": 384})
    assert config.limits(128, 5000) == Limits(4, 5, 1, 128)
    assert config.profiled("h2o", 128, 5000).limits(128, 5000) == Limits(4, 5, 1, 128)
    assert config.profiled("sink-window", 128, 5000).limits(128, 5000) == Limits(3, 4, 1, 128)
    for block in BLOCKS:
        for given in ({}, {"budget": 0.1}, {"budget": 100}):
            config = parse({"name": "fastgen", **given})
            assert config.profiled("h2o", block, 5000).limits(block, 5000) == config.limits(block, 5000)


def test_a_read_that_grows_is_said():
    read = {"name": "full", "read": 64}
    assert parse(read).became(16) == ""
    grown = "a read of 64 tokens becomes 512 tokens, 4 blocks of 128: 1 of sinks, 1 of recent tokens, 2 to choose"
    assert parse(read).became(128) == grown
    both = parse({**read, "name": "knorm", "budget": 100}).became(128)
    assert both.startswith("a budget of 100 tokens becomes ") and both.endswith(f"; {grown}")


@pytest.mark.parametrize(
    "server",
    [
        *("h2o", "sink-window", "pagedeviction", "h2o-pressure", "full"),
        *({"name": "h2o", "budget": 300}, {"name": "h2o", "budget": 0.3}, {"name": "sink-window", "budget": 400}),
    ],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_servers_user_did_not_give_follows_a_requests_budget(server, block):
    server = parse(server)
    granted, picked = server.limits(block, 2000), 0
    for name in server.allowed - {"full"}:
        for budget in (3 * block, 5 * block, 200, 288, 0.1, 0.01):
            if granted and isinstance(budget, int) and budget > granted.budget * block:
                continue
            limits = server.for_request({"kv_policy": name, "kv_budget": budget}, 2000, block).limits(block, 2000)
            assert not granted or (limits.budget <= granted.budget and limits.trigger <= granted.trigger)
            picked += 1
            assert limits.sink or not POLICIES[name].defaults["sink"]
    assert picked > 5


@pytest.mark.parametrize("recent", [1, 33, 128, 150, 256])
def test_a_request_that_reaches_the_host_has_a_room_beside_its_recent_blocks(recent):
    """Recent tokens lie in one block more than they fill; a hole among them would be read."""
    sizes = {"budget": 512, "sink": 128, "recent": recent, "buffer": 0}
    config = parse({"name": "full", "evict": "host", "host": "1GiB", **sizes})
    for block_size in (16, 32, 128, 512):
        limits = config.limits(block_size, 5000)
        room, blocks = limits.room, limits.recent_blocks
        spans = [{(first + token) // block_size for token in range(recent)} for first in range(block_size)]
        assert blocks == max(map(len, spans))
        assert room >= 1 and limits.sink + room + blocks == limits.budget

"""Fields of a request, the sizes that it is granted, and the messages of refusals."""

import difflib
import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from configuration import H2O, WHOLE, asked, parse, refusal, request_refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_evict.config import MOST_COMPARED, REGISTRY, REQUEST_FIELDS, Beside, KVPolicyError, Limits, Room
from vllm_evict.policies import POLICIES


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
    empty = dict.fromkeys(REQUEST_FIELDS)
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
        server = {"name": server, **sizes, **context, **({"allow": [name]} if name else {})}
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
        own = {"pattern": ["10", "01"]} if policy.allocator.splits == "classes" else {}
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
    message = request_refusal({**H2O, "allow": []}, {"kv_policy": "sink-window"})
    assert (
        "'sink-window' is not enabled here: expected one of: h2o; the server's field allow may name others" in message
    )
    for server in (H2O, "h2o", "h2o-pressure", {"name": "pyramidkv"}, {"name": "sink-window", "read": 512}):
        assert asked(server, {"kv_policy": "full"}).name == "full"
    for server in ({"name": "h2o", "context": 4096}, {**H2O, "allow": ["tova"]}):
        assert "'full' is not enabled here" in request_refusal(server, {"kv_policy": "full"})


POOL = Room(block_size=32, pool=100, groups=1, in_flight=9)


def test_a_request_that_keeps_everything_has_to_fit_into_the_pool():
    """The pool of a server that evicts is not planned for it: it would wait for ever."""
    for server in (parse(H2O), parse("h2o-pressure")):
        full = server.for_request({"kv_policy": "full"}, 2000, 32)
        server.check_room(full, 2000, 3200, 8192, POOL)
        with pytest.raises(
            KVPolicyError, match="grow to 3201 tokens; expected at most 3200, .* holds; ask for fewer m"
        ):
            server.check_room(full, 2000, 3201, 8192, POOL)
        with pytest.raises(KVPolicyError, match="^do_remote got a request that .* or leave do_remote out$"):
            server.check_room(full, 2000, 3201, 8192, POOL, "do_remote")
        server.check_room(server.for_request({"kv_policy": "tova"}, 2000, 32), 2000, 8192, 8192, POOL)
    for server in (parse("full"), parse({**H2O, "prompt": "whole"})):
        server.check_room(server.for_request({"kv_policy": "full"}, 2000, 32), 2000, 8192, 8192, POOL)


#: KV groups of a pool of 100 blocks, and tokens of drafts -> the longest request that keeps everything.
BESIDE = [
    ((1, 0, []), 3200),
    ((2, 0, []), 1600),
    ((1, 6, []), 3194),
    ((1, 0, [Beside(32, most=20)]), 2560),
    ((2, 0, [Beside(32, most=20), Beside(16, 1, 10, copied=1)]), 1120),
    ((1, 0, [Beside(64, 2)]), 2080),  # states of all blocks: 65 and 33 + 2
]


@pytest.mark.parametrize("server, longest", BESIDE, ids=str)
def test_windows_states_and_drafts_take_room_from_a_request_that_keeps_everything(server, longest):
    groups, ahead, others = server
    room, config = Room(32, 100, groups, 9, ahead, tuple(others)), parse(H2O)
    full = config.for_request({"kv_policy": "full"}, 1000, 32)
    config.check_room(full, 1000, longest, 8192, room)
    with pytest.raises(KVPolicyError, match="windows or states" if others else "holds; ask"):
        config.check_room(full, 1000, longest + 1, 8192, room)
    assert room.left(3200, hit=True) == room.left(3200) - sum(other.copied for other in others)


PRESSED = {"name": "h2o", "when": "pressure", "budget": 512, "sink": 32, "recent": 64}


@pytest.mark.parametrize("budget, blocks", [(513, 17), (4096, 128), (0.9, 57), ("0.5", 32), (256, 8)])
def test_under_pressure_a_request_may_keep_more_than_the_server_says(budget, blocks):
    """The budget is what it keeps at least: a larger one is the safer wish, as `full` is."""
    for name in ("h2o", "tova"):
        config = asked(PRESSED, {"kv_policy": name, "kv_budget": budget}, prompt=2000)
        assert config.limits(32, 2000).budget == blocks and config.when == "pressure"
    assert "above the server's" in request_refusal({**PRESSED, "when": "budget"}, {"kv_budget": 4096})


def test_what_it_keeps_has_to_fit_into_the_pool_beside_what_is_in_flight():
    """Admission waits for so many blocks: in a smaller pool for ever."""
    retrieval = {"name": "duo", "pattern": ["10", "01"], "retrieval": PRESSED}
    for server in (parse(PRESSED), parse({**PRESSED, "name": "adakv", "bands": 2}), parse(retrieval)):
        config = server.for_request({"kv_budget": 2900}, 3000, 32)
        server.check_room(config, 3000, 8000, 8192, POOL)
        crowded, refused = (
            replace(POOL, in_flight=10),
            "keeps 2912 tokens, beside 320 in flight; .* most 3200, .* smaller",
        )
        with pytest.raises(KVPolicyError, match=refused):
            server.check_room(config, 3000, 8000, 8192, crowded)
        server.check_room(config, 3000, 3200, 8192, crowded)  # it never grows to that
        for safe in ({"kv_budget": 512}, {}):  # the server's start-up has seen to these
            server.check_room(server.for_request(safe, 3000, 32), 3000, 8000, 8192, replace(crowded, pool=20))


@pytest.mark.parametrize("server", [{**H2O, "prompt": "whole"}, {"name": "tova", "prompt": "whole"}, "full"])
def test_one_server_computes_prompts_whole_or_in_chunks(server):
    for how in ("chunks", "whole"):
        for fields in ({}, {"kv_policy": "snapkv"}, {"kv_policy": "h2o", "kv_budget": 512}):
            name = fields.get("kv_policy", parse(server).name)
            if name == "full":
                continue
            config = asked(server, {"kv_prompt": how, **fields})
            assert (config.prompt, config.name) == (how, name)
            assert config.replace(prompt="chunks") == asked(server, fields).replace(prompt="chunks")


@pytest.mark.parametrize(
    "server, fields, message",
    [
        (H2O, {"kv_prompt": "whole"}, "on a server with prompt: chunks, which has room for budgets; expected 'chunks'"),
        (PRESSED, {"kv_prompt": "whole"}, "on a server with prompt: chunks"),
        ({"name": "full", "read": 512, "allow": ["keydiff"]}, {"kv_policy": "keydiff", "kv_prompt": "whole"}, "on a s"),
        ("full", {"kv_prompt": "whole"}, "kv_policy 'full' takes no kv_prompt"),
        ("kvzip", {"kv_prompt": "chunks"}, "kv_policy 'kvzip' takes no kv_prompt"),
        ({"name": "duo", "pattern": ["10", "01"]}, {"kv_prompt": "chunks"}, "kv_policy 'duo' takes no kv_prompt"),
        (H2O, {"kv_prompt": "Whole"}, "kv_prompt must be chunks or whole, not 'Whole'"),
        (H2O, {"kv_prompt": ["whole"]}, "kv_prompt must be chunks or whole"),
        (H2O, {"kv_prompt": 1}, "kv_prompt must be chunks or whole, not 1"),
    ],
)
def test_kv_prompt_is_refused(server, fields, message):
    assert message in request_refusal(server, fields)


@pytest.mark.parametrize("server", [H2O, "full", PRESSED])
@pytest.mark.parametrize("field", sorted({"name", "Window", *REGISTRY.fields(), "allow", "audit", "target", "recall"}))
def test_a_field_of_a_policy_beside_those_of_requests_is_refused(server, field):
    """It would have no effect."""
    for beside in ({"kv_policy": "tova"}, {"kv_usage": 1}, {"kv_budget": 256}):
        message = request_refusal(server, {**beside, field: "whole"})
        assert (repr(field) in message and "kv_policy, kv_budget, kv_sink" in message) or "did you mean" in message
    assert asked(server, {"kv_usage": 1, field: None}) == parse(server)


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
    # A smaller budget leaves a quarter of it, and one block at least, within what the server grants.
    for budget, blocks, recent in ((320, 10, 64), (128, 4, 32), (96, 4, 32), (97, 4, 32)):
        config = asked({"name": "sink-window", "sink": 64, "budget": budget}, {"kv_policy": "h2o"})
        assert config.limits(32, 5000) == Limits(blocks, blocks, 2, recent)
    config = asked({"name": "sink-window", "recent": 1024}, {"kv_policy": "tova", "kv_budget": 128})
    assert config.limits(32, 5000) == Limits(4, 4, 1, 32)
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

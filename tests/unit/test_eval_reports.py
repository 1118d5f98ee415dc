"""The evaluation harness: which engines serve which policies, reports, results on disk, bad input."""

import base64
import csv
import json
import math
import re
import sys

import pytest
from evaluation import (
    DATA,
    ENGINE,
    SIZES,
    SPLIT,
    SWAPPED,
    collected_once,  # noqa: F401
    own,
    row_of,
)

from vllm_evict.config import KVPolicyConfig
from vllm_evict.tools import cli
from vllm_evict.tools.eval import EvalError, report, rows, summary
from vllm_evict.tools.eval.pictures import draw_all
from vllm_evict.tools.eval.policies import contenders, parse_budgets, servers, split_list

# --- policies and engines --------------------------------------------------------------------------------------------


def test_the_whole_matrix_needs_one_engine():
    wanted = contenders("full,h2o,sink-window", parse_budgets("128,256,512,0.25"), **SIZES)
    assert [str(c) for c in wanted[:3]] == ["full", "h2o at 128", "h2o at 256"] and len(wanted) == 9
    ((server, served),) = servers(wanted, 4096, 32)
    assert served == wanted
    for contender in wanted:
        granted = server.for_request(contender.xargs, 2048, 32)
        assert granted.limits(32, 2048) == contender.config.limits(32, 2048)


def test_other_options_need_another_engine(tmp_path):
    (tmp_path / "h2o-mean.yaml").write_text("{name: h2o, budget: 2048, sink: 64, recent: 256, accumulate: mean}")
    text = f'full,h2o,{tmp_path}/h2o-mean.yaml,{{"name": "h2o", "sink": 32, "recent": 32, "accumulate": "last"}}'
    wanted = contenders(text, [512], **SIZES)
    assert [c.label for c in wanted] == ["full", "h2o", "h2o-mean", "h2o accumulate=last"]
    plan = servers(wanted, 4096, 32)
    assert [[c.label for c in served] for _, served in plan] == [["full", "h2o"], ["h2o-mean"], ["h2o accumulate=last"]]
    assert contenders(f"{tmp_path}/h2o-mean.yaml", [], **SIZES)[0].budget == 2048


def test_full_alone_is_stock():
    ((server, _),) = servers(contenders("full", [128], **SIZES), 4096, 32)
    assert server.to_dict() == {"name": "full", "allow": None}


def test_policies_that_split_heads_have_an_engine_each_and_a_share_for_a_budget():
    wanted = contenders(",".join(["full", "h2o", *SPLIT[:3], SWAPPED]), [0.25, 0.5], **SIZES)
    assert [(c.label, c.budget) for c in wanted] == [
        ("full", None),
        ("h2o", 0.25),
        ("h2o", 0.5),
        ("duo sparsity=0.5", None),
        ("duo threshold=0.5", None),
        ("duo sparsity=0.5 retrieval=h2o accumulate=last", None),
        ("duo pattern=3.3.0.0", None),
    ]
    plan = servers(wanted, 4096, 32)
    assert [served for _, served in plan] == [wanted[:3], *([c] for c in wanted[3:])]
    for server, served in plan:
        for contender in served:
            granted = server.for_request(contender.xargs, 2048, 32)
            assert {name: part.limits(32, 2048) for name, part in granted.classes.items()} == {
                name: part.limits(32, 2048) for name, part in contender.config.classes.items()
            }
    # 64 blocks; streaming heads keep one of sinks, two of the window and one that is begun. The threshold makes two
    # groups of three retrieval heads out of five.
    shares = [None] * 3 + [(64 + 4) / 128, 3 * (64 + 64 + 4) / (8 * 64), (32 + 4) / 128, (64 + 4) / 128]
    assert [c.share(2048, 32) for c in wanted] == shares
    assert wanted[3].share(2048, 32, ranks=4) == shares[3] and wanted[3].share(100, 32) == 1
    assert wanted[3].options["pattern"] == "0.0.3.3"
    # Over HTTP a name is enough.
    (served,) = contenders("duo", [128], **SIZES, pattern=("1",))
    assert (served.label, served.xargs) == ("duo", {"kv_policy": "duo"})


def test_policies_of_one_granularity_share_an_engine_and_each_number_of_bands_has_its_own():
    by_token = [own(name, granularity="token") for name in ("tova", "knorm", "keydiff", "rkv")]
    by_token.append(own("snapkv", granularity="token", kernel=7))
    shared = own("tova", granularity="token", sets="all")
    bands = [own("pyramidkv", bands=2), own("pyramidkv", bands=4, beta=4.0), own("adakv", bands=2)]
    wanted = contenders(",".join(["full", "snapkv", "tova", *by_token, shared, *bands]), [0.25, 256], **SIZES)
    plan = servers(wanted, 4096, 32)
    assert [sorted({c.label for c in served}) for _, served in plan] == [
        ["full", *sorted({c.label for c in wanted if c.label.endswith(("=token", "kernel=7"))})],
        ["snapkv", "tova"],
        ["tova granularity=token sets=all"],
        ["pyramidkv bands=2"],
        ["pyramidkv bands=4 beta=4.0"],
        ["adakv bands=2"],
    ]
    assert sum(len(served) for _, served in plan) == len(wanted) == 1 + 2 * 11
    for server, served in plan:
        for contender in served:
            granted = server.for_request(contender.xargs, 2048, 32)
            assert granted.to_dict() | {"allow": None} == contender.config.to_dict() | {"allow": None}
            assert contender.share(2048, 32) is None
    # Groups are made when a server starts: other policies are not for its requests, all of its budgets are.
    assert {name: server.allowed for name, server in ((s.name, s) for s, _ in plan) if server.allocator.splits} == {
        name: {name, "full"} for name in ("pyramidkv", "adakv")
    }
    assert contenders("pyramidkv", [128], **SIZES)[0].xargs == {"kv_policy": "pyramidkv", "kv_budget": 128}


def test_lists():
    assert split_list('a, {"x": [1, {"y": 2}], "z": 3},b,') == ["a", '{"x": [1, {"y": 2}], "z": 3}', "b"]
    assert parse_budgets("128,0.25") == [128, 0.25]


# --- reports ---------------------------------------------------------------------------------------------------------


def test_a_difference_within_noise_is_shown_as_such():
    full = [row_of(index=i) for i in range(12)]
    noisy = [row_of("h2o", 128, index=i, score=float(i > 2)) for i in range(12)]
    worse = [row_of("sink-window", 128, index=i, score=float(i > 8)) for i in range(12)]
    lines = {line.policy: line for line in summary.summarise(full + noisy + worse)}
    assert (lines["full"].verdict, lines["full"].quality) == ("", "100% [76, 100]")
    assert (lines["h2o"].verdict, lines["h2o"].delta) == ("too few prompts (12) to tell", "-25")
    assert lines["h2o"].p == pytest.approx(0.25)
    assert lines["sink-window"].verdict == "worse" and lines["sink-window"].score == 0.25
    (alone,) = summary.summarise(noisy)
    assert alone.verdict == "no full to compare" and alone.difference is None


@pytest.mark.parametrize(
    ("prompts", "lost", "won", "verdict"),
    [
        (10, 5, 0, "too few prompts (10) to tell"),
        (59, 0, 0, "too few prompts (59) to tell"),
        (60, 0, 0, "within noise"),
        (60, 5, 0, "within noise"),
        (60, 6, 0, "worse"),
        (60, 16, 9, "too few prompts (60) to tell"),
    ],
)
def test_few_prompts_show_no_absence_of_a_difference(prompts, lost, won, verdict):
    """A loss of 50 points in 10 prompts was shown as within noise."""
    full = [row_of(index=i, score=float(i >= won)) for i in range(prompts)]
    own = [row_of("h2o", 128, index=i, score=float(i < prompts - lost)) for i in range(prompts)]
    (line,) = [line for line in summary.summarise(full + own) if line.policy == "h2o"]
    assert line.verdict == verdict and line.difference == pytest.approx((won - lost) / prompts)


def test_tables_show_how_many_tokens_were_kept():
    """0.25 of a prompt is what it says, or the table says that it is more."""
    sizes = {"prompt_tokens": 1040, "block_size": 32}
    found = [row_of(**sizes), row_of("h2o", 0.25, **sizes | {"budget_tokens": 288})]
    found += [row_of("tova", 0.25, **sizes | {"budget_tokens": 384}), row_of("knorm", 512, **sizes)]
    kept = {line.policy: summary.words(line)["tokens kept"] for line in summary.summarise(found)}
    assert kept == {"full": "all", "h2o": "288 (28%)", "tova": "384 (37%, raised)", "knorm": "512"}


def test_a_name_means_the_same_as_in_the_flag():
    """Sizes that are not given are the policy's; those that were given are said in the label where policies differ."""
    by_name, by_fields = contenders('h2o,{"name": "h2o"}', [0.25])[:1], contenders('{"name": "h2o"}', [0.25])
    flag = KVPolicyConfig.parse({"name": "h2o", "budget": 0.25})
    assert by_name[0].config == by_fields[0].config == flag and by_name[0].config.given == flag.given
    given = contenders("h2o", [0.25], sink=32, recent=32, buffer=0)[0].config
    assert (given.sink, given.recent, given.buffer) == (32, 32, 0) and given.given >= {"sink", "recent", "buffer"}
    (own,) = contenders("h2o", [])
    assert own.xargs == {"kv_policy": "h2o"}, "a budget that is not given is the server's"


def test_perplexity_is_worse_when_it_is_more():
    full = [row_of(task="ppl", metric="nll", index=i, score=1.0 + 0.01 * i, depth=None) for i in range(8)]
    more = [row_of("h2o", 128, task="ppl", metric="nll", index=i, score=1.5 + 0.01 * i, depth=None) for i in range(8)]
    line = summary.summarise(full + more)[1]
    assert line.verdict == "worse" and line.score == pytest.approx(math.exp(1.535))
    assert line.low < line.score < line.high


def test_settings_and_options_are_never_mixed():
    mixed = [row_of(), row_of(setting="aware", chunk=None), row_of(chunk=512), row_of(haystack="shuffled")]
    assert len(summary.summarise(mixed)) == 4
    assert summary.settings_of(mixed[3:]) == ["agnostic, chunks of 256, haystack shuffled"]
    with pytest.raises(EvalError, match="different settings are not put together: agnostic, chunks of 256; agnostic,"):
        summary.one_setting(mixed)
    other = {"name": "h2o", "sink": 64}
    variants = [row_of("h2o", 128, policy_config={"name": "h2o", "sink": 32}), row_of("h2o", 128, policy_config=other)]
    assert {line.policy for line in summary.summarise(variants)} == {"h2o sink=32", "h2o sink=64"}
    engines = [row_of(engine_args={"dtype": dtype}) for dtype in ("float32", "bfloat16")]
    engines.append(row_of("h2o", 128, score=0.0, engine_args={"dtype": "float32"}))
    lines = summary.summarise(engines)
    assert [line.policy for line in lines] == ["full dtype=bfloat16", "full dtype=float32", "h2o"]
    assert [line.is_full for line in lines] == [True, True, False] and lines[2].difference == -1.0


def test_turns_have_lines_of_their_own_and_pictures_together(tmp_path):
    found = [row_of(task="vt", setting="turns", turn=1 + i % 2, index=i // 2, score=float(i % 2)) for i in range(8)]
    lines = summary.summarise(found)
    assert [(line.task, line.n, line.score) for line in lines] == [("vt turn 1", 4, 0.0), ("vt turn 2", 4, 1.0)]
    assert [said[:10] for said in report.headlines(lines)] == ["vt turn 1 ", "vt turn 2 "]
    assert sorted(path.name for path in draw_all(found, tmp_path).values()) == [
        "turns-needles-vt.png",
        "turns-pareto.png",
    ]


def test_keys_of_rows_without_turns_are_what_they_were():
    """Or finished rows would be computed again."""
    fields = {"model": "m", "backend": "offline", "chat": True, "task": "niah", "length": 512, "depth": 0.5, "index": 0}
    fields |= {"seed": 0, "setting": "agnostic", "chunk": 256, "budget": 0.25, "engine_args": {"block_size": 32}}
    row = fields | {"policy_config": {"name": "h2o", "sink": 32}}
    assert rows.key_of(row) == "ebe38e098044f6898df75417974f8a2cb577a05a953252372bbf9b99a11edca3"
    turns = [row | {"turn": turn, "depths": depths} for turn in (1, 2) for depths in ([0.5], [0.5, 0.7])]
    assert len({rows.key_of(each) for each in (row, row | {"haystack": "shuffled"}, *turns)}) == 6


def test_a_share_stands_where_a_budget_would():
    def rows_of(entry, budgets=(), **fields):
        (contender,) = contenders(entry, budgets, **SIZES)
        config, share = contender.options, contender.share(1024, 32)
        return [row_of(contender.label, contender.budget, policy_config=config, share=share, **fields)]

    found = rows_of(SPLIT[0], evicted_tokens=448) + rows_of(SPLIT[2]) + rows_of("h2o", [0.25], score=0.0) + [row_of()]
    lines = {line.policy: line for line in summary.summarise(found)}
    assert {name: line.memory for name, line in lines.items()} == {
        "full": "all",
        "h2o": "25%",
        "duo sparsity=0.5": "56%",
        "duo sparsity=0.5 retrieval=h2o accumulate=last": "31%",
    }
    assert not lines["duo sparsity=0.5"].is_full and lines["duo sparsity=0.5"].verdict == "too few prompts (1) to tell"
    assert summary.columns(lines["duo sparsity=0.5"])["budget"] == "56%"
    said = report.headlines(list(lines.values()))
    assert "duo sparsity=0.5 100% [21, 100] at a budget of 56%, which 1 prompts do not tell from full" in said[0]
    # Over HTTP nobody says how much that is.
    (line,) = summary.summarise([row_of("duo")])
    assert line.memory == "" and not line.is_full
    # What differs tells variants apart, and only what is needed of it.
    same = [row_of("a", policy_config=contenders(entry, [], **SIZES)[0].options) for entry in SPLIT[:2]]
    assert {line.policy for line in summary.summarise(same)} == {
        "a sparsity=0.5 threshold=None",
        "a sparsity=None threshold=0.5",
    }
    policies = [row_of("a", policy_config=contenders(entry, [], **SIZES)[0].options) for entry in SPLIT[2:]]
    assert all("retrieval.name=" in line.policy for line in summary.summarise(policies))


def results():
    """Rows of two settings with every kind of task."""
    found = []
    for setting, chunk in (("agnostic", 256), ("aware", None)):
        policies = [("full", [None]), ("h2o", [128, 0.25]), ("sink-window", [128, 0.25]), ("duo", [None])]
        for policy, budgets in policies:
            for budget in budgets:
                for i in range(4):
                    fields = {"setting": setting, "chunk": chunk, "depth": i / 3}
                    fields |= {"share": 0.5} if policy == "duo" else {}
                    found.append(row_of(policy, budget, index=i, score=float(policy == "full" or i == 0), **fields))
                    if chunk:
                        fields["depth"] = None
                        found.append(row_of(policy, budget, "ppl", i, 1.0 + i / 9, metric="nll", **fields))
    return found


def test_reports_are_written_and_self_contained(tmp_path, capsys):
    (tmp_path / rows.FILE).write_text("".join(json.dumps(row) + "\n" for row in results()))
    cli.app(["plot", str(tmp_path)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "Quality, agnostic, chunks of 256" in said and "Quality, aware" in said and "sink-window" in said
    with (tmp_path / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 18 and table[0]["policy"] == "full" and float(table[0]["score"]) == 1.0
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page and "@import" not in page
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 6  # quality and Pareto of each setting, niah's depths
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    said = [f"{policy} 25% [5, 70] at a budget of {held}" for policy, held in (("duo", "50%"), ("h2o", "25%"))]
    chance = ", which 4 prompts do not tell from full"
    assert "; ".join(["full attention 100% [51, 100]", *(part + chance for part in said)]) in page
    text = (tmp_path / "summary.md").read_text()
    for name in re.findall(r"\]\(([^)]+\.png)\)", text):
        assert (tmp_path / name).exists()


def test_a_frontier_has_what_nothing_else_beats():
    def line(name, speed, quality):
        return summary.summarise([row_of(name, 128, tokens_per_s=speed, score=quality)])[0]

    from vllm_evict.tools.eval.pictures import frontier

    slow, fast, beaten = line("slow", 10.0, 1.0), line("fast", 30.0, 0.0), line("beaten", 5.0, 0.0)
    assert frontier([beaten, fast, slow], lambda line: line.tokens_per_s) == [slow, fast]


def test_rankings_compare_haystacks_over_the_tasks_that_all_of_them_have():
    right = {"full": (4, 4, 4), "h2o": (3, 3, 1), "tova": (2, 2, 2), "snapkv": (1, 1, 3)}
    found = []
    for policy, counts in right.items():
        for haystack, count in zip(({}, {"haystack": "shuffled"}, {"haystack": "pairs"}), counts):
            budget = None if policy == "full" else 128
            found += [row_of(policy, budget, "vt", i, float(i < count), **haystack) for i in range(4)]
        found.append(row_of(policy, budget, "niah", score=0.0))
    # At another budget the order is the same in all of them.
    for haystack in ({}, {"haystack": "shuffled"}, {"haystack": "pairs"}):
        counts = {"h2o": 4, "tova": 3, "snapkv": 2}.items()
        found += [row_of(name, 256, "vt", i, float(i < count), **haystack) for name, count in counts for i in range(4)]
    table = summary.rankings(summary.summarise(found))
    shown = [(row["policy"], row["grammar"], row["shuffled"], row["pairs"]) for row in table]
    assert {row for row in shown if "100%" in row or "25%" in row} >= {
        ("full", "100%", "100%", "100%"),
        ("h2o", "75%", "75%", "25%"),
        ("snapkv", "25%", "25%", "75%"),
    }
    assert shown[-2:] == [("Kendall's tau", "1.00", "1.00", "-1.00"), ("Kendall's tau", "1.00", "1.00", "1.00")]
    assert summary.rankings(summary.summarise(found[:4])) == []


def test_throughput_is_compared_with_full_in_the_same_pool():
    pool = {"tokens": 900, "tokens_per_s": 300.0, "full_tokens_per_s": 100.0}
    found = [row_of(tokens_per_s=900.0, seconds=0.5), row_of("h2o", 128, tokens_per_s=600.0, pool=pool, seconds=0.25)]
    found += [row_of("h2o", 128, task="vt"), row_of("h2o", 128, length=2048), row_of("h2o", 256)]
    lines = {(line.task, line.policy, line.budget, line.length): line for line in summary.summarise(found)}
    assert {key for key, line in lines.items() if line.speed} == {
        ("niah", "full", None, 1024),
        ("niah", "h2o", 128, 1024),
        ("vt", "h2o", 128, 1024),
    }
    line = lines["niah", "h2o", 128, 1024]
    assert (lines["niah", "full", None, 1024].speed, line.speed, line.tokens_per_s) == (1.0, 3.0, 600.0)
    said = summary.words(line)
    assert (said["tokens/s"], said["× full"]) == ("600", "3.00")
    assert "time: 2 answers took 1 s, engine starts excluded" in summary.conditions(found)


# --- results on disk -------------------------------------------------------------------------------------------------


def test_a_half_written_line_is_dropped_and_nothing_else(tmp_path):
    path = tmp_path / rows.FILE
    whole = [json.dumps(row_of(index=i)) + "\n" for i in range(3)]
    path.write_text("".join(whole) + whole[0][:50])
    store = rows.ResultRows(tmp_path, "m")
    assert store.mended and len(store.rows) == 3 and path.read_text() == "".join(whole)
    store.append([row_of(index=3)])
    assert not rows.ResultRows(tmp_path, "m").mended and len(rows.ResultRows(tmp_path, "m").rows) == 4


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    (tmp_path / rows.FILE).write_text(json.dumps(row_of()))
    store = rows.ResultRows(tmp_path, "m")
    store.append([row_of(index=1)])
    assert not store.mended and len(rows.ResultRows(tmp_path, "m").rows) == 2


def test_damage_elsewhere_is_left_to_the_user(tmp_path):
    (tmp_path / rows.FILE).write_text("{half\n" + json.dumps(row_of()) + "\n")
    with pytest.raises(EvalError, match=r"rows.jsonl, line 1 is no row of results"):
        rows.ResultRows(tmp_path, "m")
    assert (tmp_path / rows.FILE).read_text().startswith("{half\n")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/no/such/model"], "no model at /no/such/model"),
        (["--tasks", "niah,nope"], "unknown task 'nope'; there are: niah, multikey, kv"),
        (["--tasks", "ruler"], "benchmark 'ruler' needs its data: ruler=FILE"),
        (["--tasks", "nope=x"], "unknown benchmark 'nope'; there are: ruler, longbench"),
        (["--tasks", f"ruler={DATA}/ruler"], "so no chunk ends before the question): --settings aware, served"),
        (["--tasks", "ppl", "--settings", "aware"], "ppl cannot be aware (it has no question"),
        (["--settings", "turns"], "niah cannot be turns (only documents of multikey, twostage, vt have"),
        (
            ["--settings", "turns", "--tasks", f"ruler={DATA}/ruler"],
            "vt have a fact for each question): --settings aware, served",
        ),
        (
            ["--settings", "turns", "--tasks", "vt", "--policies", "kvzip"],
            "turns got kvzip at 128, which does not score",
        ),
        (["--settings", "turns", "--tasks", "vt", "--turns", "17"], "--turns got 17; expected 1 to 16"),
        (["--settings", "turns", "--tasks", "vt", "--chunk", "500"], "length 512 is no multiple of the prefill chunk"),
        (["--settings", "turns", "--tasks", "vt", "--url", "http://127.0.0.1:9/v1"], "turns needs sessions"),
        (["--tasks", "ruler=/no/file", "--settings", "served"], "/no/file: no such file"),
        (["--policies", "full,h20"], "unknown KV policy 'h20': did you mean 'h2o'?"),
        (["--policies", "h2o", "--budgets", "64", "--recent", "64"], "budget 64 leaves nothing to choose"),
        (["--policies", "full,duo"], "--policies duo: policy 'duo' needs gates: the path of a file of gates"),
        (["--policies", SPLIT[0], "--block-size", "16"], "configs/heads/needle has 4 layers x 2 KV heads, the model"),
        (["--budgets", "much"], "budget 'much' is no number"),
        (["--budgets", "1.5"], "budget: must be a whole number"),
        (["--lengths", "1000"], "length 1000 is no multiple of the prefill chunk of 256"),
        (["--lengths", "long"], "--lengths must be numbers"),
        (["--lengths", "-512"], "--lengths must be at least 1"),
        (["--chunk", "0"], "--chunk must be at least 1"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--depths", "2"], "depths are shares"),
        (["--haystacks", "straw"], "--haystacks got 'straw'; expected some of: grammar, shuffled, uniform, pairs"),
        (["--haystacks", ""], "--haystacks got none; expected some of: grammar, shuffled, uniform, pairs"),
        (["--haystacks", "pairs"], "haystack 'pairs' got niah; expected tasks of several facts"),
        (["--settings", "blind"], "unknown setting 'blind'; choose from: agnostic, aware, turns, served"),
        (["--engine-args", "{"], "--engine-args is not JSON"),
        (["--lengths", "4096", "--engine-args", json.dumps(ENGINE)], "prompt and answer are .* take a shorter length"),
        (["--engine-args", '{"no_such": 1}'], "vLLM does not start on"),
        (["--url", "http://127.0.0.1:9/v1"], "nothing answers at http://127.0.0.1:9/v1"),
        (
            ["--url", "http://127.0.0.1:9/v1", "--policies", '{"name": "h2o"}'],
            "over HTTP a request picks a policy by name",
        ),
        (["--url", "http://127.0.0.1:9/v1", "--settings", "agnostic"], "agnostic over HTTP has to count exactly"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(tiny, tmp_path, monkeypatch, capsys, arguments, message):
    base = ["--model", str(tiny), "--out", str(tmp_path), "--tasks", "niah", "--lengths", "512", "--budgets", "128"]
    monkeypatch.setattr(sys, "argv", ["vllm-evict", "eval", *base, *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        exit.value.code == 2
        and last.startswith("vllm-evict: ")
        and re.search(re.escape(message).replace(r"\.\*", ".*"), last)
    )


def test_nothing_to_plot(tmp_path, monkeypatch, capsys):
    for prepare, message in ((lambda: None, "is not there"), ((tmp_path / rows.FILE).touch, "has no whole row")):
        prepare()
        monkeypatch.setattr(sys, "argv", ["vllm-evict", "plot", str(tmp_path)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 2 and message in capsys.readouterr().err

"""Decodes that read the best resident blocks in each layer: against a dense model that chooses for itself."""

import math
import re

import numpy as np
import pytest
import torch
from engine import after, exactly, logprobs_of, random_prompt, random_requests
from loads.pages import Published
from oracle.model import DenseLlama
from oracle.selection import BLOCK, Chooser
from parts import part_of, stored_codes
from streaming import Sessions, talk

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.config.retired import _warn_of_old_name, _warn_of_preset
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.features.read import own_blocks
from vllm_evict.features.read.worker import Read
from vllm_evict.tools.eval.policies import contenders, servers

#: 8 blocks: 1 of sinks, 2 with recent tokens, 5 that a layer chooses.
READ = {"read": 256, "sink": 32, "recent": 32}
SIZES = {"sink": 32, "recent": 32, "buffer": 0}
EVICTING = {"budget": 384, "buffer": 64, "sink": 32, "recent": 64}


def assert_reads_like_dense(model, prompt, output, trace, *, dense=None, atol=2e-3, **read):
    """Log-probabilities of a traced request are those of a dense model that chooses for itself. Returns its choices."""
    dense = dense or DenseLlama(model)
    chooser, tokens = Chooser(dense, **read), [*prompt, *output.outputs[0].token_ids]
    cache, n, gone, logits = dense.new_cache(), 0, set(), []
    if trace.start:
        dense.forward(tokens[: trace.start], cache, torch.ones(trace.start, trace.start).tril().bool())
        n = trace.start
    size = chooser.size
    for count, settled, drafts, evicted in zip(trace.steps, trace.settled, trace.drafts, trace.evicted):
        first, n = n, n + count
        computed = [*tokens[first : first + settled], *drafts]
        end = first + len(computed)
        resident = [block for block in range(math.ceil(end / size)) if block not in gone]
        base = torch.arange(end) <= torch.arange(first, end)[:, None]
        base &= torch.isin(torch.arange(end) // size, torch.tensor(resident))
        decodes = first >= len(prompt)
        later = [block for block in resident if decodes and block > first // size]  # drafts begin them
        mask = chooser.mask(base, resident[: len(resident) - len(later)], decodes, later)
        logits.append(dense.forward(computed, cache, mask)[0][:count])
        if end > n:  # drafts were rejected
            dense.crop(cache, n)
        gone |= set(evicted)
    return chooser.assert_answered(torch.cat(logits), len(prompt) - trace.start, output, atol)


CASES = {
    "full": {"hold": 5},
    "moved": {"hold": 0.6},
    "moved-in-place": {"hold": 0.6, "leaders": 2},
    "box": {"index": "box", "hold": 1},
    "leaders": {"leaders": 2, "dense_layers": 1, "hold": 3},
    "listed": {"leaders": [1, 3]},
    "wide": {"read": 320, "sink": 40, "recent": 100},
    "sink-window": {"name": "sink-window", "budget": 448, "buffer": 96, "sink": 32},
    "keybound": {"name": "keybound", **EVICTING, "hold": 3, "dense_layers": 1},
    "keydiff": {"name": "keydiff", **EVICTING, "leaders": [0, 2]},
    "in-place": {"hold": 3, "leaders": 2},
    "prompts": {"read_prompts": 288, "leaders": 2, "hold": 3},
    "prompts-box": {"read_prompts": 320, "index": "box"},
    "in-place-evicting": {"name": "sink-window", "budget": 448, "buffer": 96, "sink": 32, "allow": []},
}


@pytest.mark.nightly(
    push=("full", "moved", "leaders", "listed", "keybound", "in-place", "in-place-evicting", "prompts")
)
@pytest.mark.both_runners("full", "keybound", "in-place", "prompts")
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_a_dense_model_that_chooses_for_itself(engine, deep, poisoned, monkeypatch, name):
    """Three requests in one batch; one is shorter than what is read at first. vLLM's kernel reads what is chosen, too."""
    if "in-place" in name:
        monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    if name == "prompts":
        monkeypatch.setattr(own_blocks, "SCRATCH", 1)  # has room for one tile at a time
    policy = {"name": "full", **READ, **CASES[name]}
    if policy["name"] != "full":  # it reads as many of its sinks and recent tokens, whatever it protects
        policy = {"read": 256, **CASES[name]}
    server = engine(policy, model=deep, max_num_batched_tokens=192)
    given = {
        field: policy[field]
        for field in policy.keys() & {*READ, "hold", "index", "leaders", "dense_layers", "read_prompts"}
    }
    given |= READ if policy["name"] != "full" else {}
    chosen = 0
    for answered in server.answered(random_requests((700, 50), (230, 80), (500, 40))):
        chosen += assert_reads_like_dense(deep, *answered, **given)
    assert chosen > 100 / (given.get("hold", 1) if name != "moved" else 5)
    assert_nothing_left(server)


@pytest.mark.both_runners("decodes")
@pytest.mark.parametrize("read_prompts", [pytest.param(0, id="decodes"), pytest.param(288, id="prompts")])
def test_a_token_of_a_prompt_is_no_decode(engine, deep, read_prompts):
    """The last token of a prompt is computed alone: after a chunk, after a prefix, and as the next turn of a session."""
    policy = {**READ, "read_prompts": read_prompts}
    server = engine({"name": "full", **policy}, model=deep, max_num_batched_tokens=192, enable_prefix_caching=True)
    prompt = random_prompt(3 * 192 + 1)
    for steps in ([192, 192, 192, 1], [1]) if not read_prompts else ([192, 192, 192, 1],):
        (answered,) = server.answered([(prompt, {"max_tokens": 4, "logprobs": 1})])
        assert answered[2].steps[: len(steps)] == steps
        assert_reads_like_dense(deep, *answered, **policy)
    assert_nothing_left(server)


#: What reads less, and `read_prompts`.
OF_PROMPTS = {"decodes": 0, "prompts": 256}


def check_classes(engine, dense, size=BLOCK, atol=2e-3, read_prompts=0, tables=True, seed=0, beside=None, **options):
    """Layers of a class of models choose like dense ones, beside a request that is shorter.

    `size`: tokens of a block; `read_prompts`: of the policy; `tables`: see `Chooser`; `seed`: of the first prompt;
    `beside`: of the second one, None: it is that of `random_requests`; `options`: of the engine.
    """
    policy = {**READ, "read": 160, "hold": 3, "leaders": 2, "read_prompts": read_prompts}
    options = {"max_num_batched_tokens": 192, **options}
    server = engine({"name": "full", **policy}, block_size=size, **options)
    chosen, (first, second) = 0, random_requests((420, 30), (140, 40))
    shorter = second[0] if beside is None else random_prompt(140, beside)
    for answered in server.answered([(random_prompt(420, seed), first[1]), (shorter, second[1])]):
        chosen += assert_reads_like_dense(None, *answered, dense=dense, atol=atol, size=size, tables=tables, **policy)
    assert chosen > 15
    assert_nothing_left(server)


def assert_nothing_left(server):
    server.assert_nothing_left()
    reads = [part_of(group, Read) for group in server.worker.kv_evict.groups]
    assert not any(list(read.requests) for read in reads if read)


def test_under_async_scheduling_with_prefixes_that_are_cached(async_engine, deep):
    """The second request hits the blocks of the first, and with them their index."""
    server = async_engine({"name": "full", **READ, "hold": 1}, model=deep)
    prefix = random_prompt(400)
    server.generate([prefix], max_tokens=1)
    prompts = [prefix + random_prompt(90, seed) for seed in (1, 2)]
    for prompt, output, trace in server.answered([(prompt, {"max_tokens": 40, "logprobs": 1}) for prompt in prompts]):
        assert trace.start >= 384
        # A step that is planned before the request is known to have ended computes nothing of it.
        trace.steps = trace.steps[: len(trace.evicted)]
        assert assert_reads_like_dense(deep, prompt, output, trace, **READ, hold=1) > 100
    assert_nothing_left(server)


@pytest.mark.both_runners("in-place", "prompts")
@pytest.mark.parametrize("kernel", ["own", "in-place", "prompts"])
def test_a_request_that_is_shorter_changes_no_bit(engine, monkeypatch, kernel):
    if kernel == "in-place":
        monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    check_shorter(engine, read_prompts=448 if kernel == "prompts" else 0)


def check_shorter(engine, read_prompts=448, **options):
    """Requests with no more blocks than are read are vLLM's; the step of the first block more reads less.

    `options`: of the engine.
    """
    prompts = [random_prompt(440), random_prompt(300, 1), random_prompt(20, 2)]
    policy = {"name": "full", **READ, "read": 512, "read_prompts": read_prompts}
    subject, stock = engine(policy, **options), engine(**options)
    ours, theirs = (exactly(server.generate(prompts, max_tokens=72, logprobs=0)) for server in (subject, stock))
    assert ours == theirs
    counted = []
    after(part_of(subject.runtime, Read), "kernel_rows", lambda *_: counted.append(1))
    subject.generate([prompts[0]], max_tokens=74)
    assert len(counted) == 1
    if read_prompts:
        subject.generate([random_prompt(470, 3)], max_tokens=1)
        assert len(counted) == 2


def check_choices(monkeypatch):
    """Compare indexes with keys at each choice of engines to come; they then have `checked`, places of layers."""
    read = Read.read

    def compared(self, call, rows, table):
        for row in range(len(rows.queries)):
            blocks = rows.written[rows.out_rows[row], : rows.full[row]].long()
            keys = [keys for keys, _ in self._store.read(blocks, False)][call.place]
            assert torch.equal(self.index.of_layers[call.place][blocks], stored_codes(keys))
        read(self, call, rows, table)
        self.__dict__.setdefault("checked", []).append(call.place)

    monkeypatch.setattr(Read, "read", compared)


@pytest.mark.parametrize("name", ["full", "keybound"])
def test_indexes_are_those_of_the_blocks_as_they_stand(engine, deep, monkeypatch, poisoned, name):
    """Requests come and are preempted, prefixes are hit; freed blocks are NaN."""
    policy = {"name": "keybound", "budget": 224, "buffer": 32, "sink": 32, "recent": 32} if name == "keybound" else READ
    policy = {"name": name, **policy, "read": 160, "dense_layers": 1, "hold": 2}
    server = engine(policy, model=deep, blocks=26, max_model_len=704, max_num_batched_tokens=128)
    check_choices(monkeypatch)
    preempted = []
    after(server.scheduler, "_preempt_request", lambda *_: preempted.append(True))
    rng, ids, outputs, prefix, steps = np.random.default_rng(0), [], {}, random_prompt(200, 9), 0
    while len(ids) < 12 or server.llm.llm_engine.has_unfinished_requests():
        if len(ids) < 12 and rng.random() < 0.4:
            prompt = prefix[: int(rng.choice([0, 96, 200]))] + random_prompt(int(rng.integers(5, 400)), len(ids))
            extra = {"kv_policy": str(rng.choice(["keybound", "sink-window", "keydiff"]))} if name == "keybound" else {}
            if extra.get("kv_policy") == "sink-window":
                extra["kv_budget"] = 224
            ids.append(server.add(prompt, max_tokens=int(rng.integers(1, 40)), logprobs=1, extra_args=extra))
        steps += 1
        if steps % 30 == 0:
            server.core.reset_prefix_cache(reset_running_requests=True)
        for output in server.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
    checked = part_of(server.runtime, Read).checked
    assert len(checked) > 200 and set(checked) == {1, 2, 3, 4} and preempted
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs.values())
    assert any(output.num_cached_tokens for output in outputs.values())
    assert_nothing_left(server)


# --- what is published ------------------------------------------------------------------------------------------------

#: Streaming heads whose windows are longer than all requests.
SPLIT = {"name": "duo", "gates": "made up", "pattern": ["01", "11", "00", "10", "01"], "sink": 32, "recent": 600}
PUBLISHING = {
    "full": {"name": "full", **READ, "hold": 5},
    "listed": {"name": "full", **READ, "leaders": [0, 2]},
    "split": SPLIT | {"retrieval": {"name": "full", **READ, "dense_layers": 1}},
    "evicting": {"name": "sink-window", "budget": 448, "sink": 32, "read": 256},
    "prompts": {"name": "full", **READ, "read_prompts": 256},
}


@pytest.mark.both_runners("full-engine", "split-engine")
@pytest.mark.parametrize("make", ["engine", "async_engine"])
@pytest.mark.parametrize("name", PUBLISHING)
def test_what_steps_compute_that_read_less_is_never_published(request, deep, stock, name, make):
    """A later request hits the tokens up to the first step that read less, and each published block is stock vLLM's."""
    server = request.getfixturevalue(make)(PUBLISHING[name], model=deep, max_num_batched_tokens=192)
    published, prompts = Published(server, stock), [random_prompt(350), random_prompt(200, 1)]
    outputs = server.generate(prompts, max_tokens=130)
    later = [[*prompt, *output.outputs[0].token_ids, 1] for prompt, output in zip(prompts, outputs)]
    # The second chunk of the first prompt is the first step that reads less.
    hits = [192, 256] if name == "prompts" else [320, 256]
    assert [output.num_cached_tokens for output in server.generate(later, max_tokens=1)] == hits
    published.compare(1e-4)
    assert published.counts["pages"] > 20
    server.assert_nothing_left()


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_turns_after_one_that_read_less_publish_nothing(request, deep, stock, make):
    server = request.getfixturevalue(make)(PUBLISHING["full"], model=deep, max_num_batched_tokens=192)
    published, sessions = Published(server, stock), Sessions(server)
    talk(sessions, [(250, 90), (100, 40)])
    tokens = sessions.tokens("s")
    sessions.end("s")
    (output,) = server.generate([tokens], max_tokens=1)
    assert len(tokens) > 470 and output.num_cached_tokens == 256
    published.compare(1e-4)


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "snapkv", "rkv", "tova", "scissorhands", "kvzip", "pyramidkv", "duo"])
def test_policies_of_attention_read_everything(name):
    with pytest.raises(KVPolicyError, match=f"read: '{name}' sees only what a decode attends to"):
        KVPolicyConfig.parse({"name": name, "read": 1024})


HOST = {"name": "full", "evict": "host", "host": "1GiB"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hold": 2}, "hold: decodes attend to all resident tokens: it needs read"),
        ({"read": 1024, "granularity": "token"}, "read: each head has tokens of its own"),
        ({"read": 1024, "context": 8192}, "read: the index is of keys as they were computed: leave context out"),
        ({"name": "full", "read_prompts": 512}, "read_prompts: decodes attend to all resident tokens: it needs read"),
        ({"read": 1024, "read_prompts": 512}, "policy 'keydiff' has no field 'read_prompts'"),
        (
            {"name": "full", "read": 1024, "read_prompts": 512, "dense_layers": 2},
            "read_prompts: all layers of a prompt read as many blocks: leave dense_layers out",
        ),
        ({"name": "full", "read": 1024, "read_prompts": 512, "allow": ["keydiff"]}, "leave keydiff out"),
        ({**HOST, "read_prompts": 512}, "read_prompts: prompts read the blocks of the host, too"),
        (
            {
                "name": "duo",
                "pattern": ["10"],
                "retrieval": {"name": "full", "read": 1024, "read_prompts": 512},
            },
            "read_prompts: heads of one prompt read as many blocks: leave it out of retrieval",
        ),
        ({"read": 1024, "leaders": [3, 1]}, "leaders: must be ascending layers, not (3, 1)"),
        ({"read": 1024, "leaders": [1], "dense_layers": 1}, "leave dense_layers out"),
        ({"read": 1024, "allow": ["h2o"]}, "allow: 'h2o' measures attention"),
        ({"name": "full", "sink": 32}, "sink: 'full' keeps everything on the device: it needs evict: host or read"),
        ({"name": "full", "read": 64, "sink": 32, "recent": 32}, "read: got 64; expected room for a choice beside"),
        ({"name": "full", "read": 1024, "fetch": 1}, "fetch: blocks come from the host: it needs evict: host"),
        ({**HOST, "dense_layers": 1}, "evict: host: all layers read as many blocks: leave dense_layers out"),
        ({**HOST, "leaders": [0, 2]}, "set leaders to a number"),
        (
            {"select": 1024, "select_bounds": "mean"},
            "select_bounds: got 'mean'; expected a kind of index; use index: box",
        ),
        ({"select": 1024, "read": 512}, "select is the old name of read: give read alone"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "keydiff", **fields})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"leaders": [1, 7]}, "leaders of a model with 5 layers, from 0 on, got (1, 7)"),
        ({"leaders": [4]}, "leaders of a model with 5 layers, from 0 on, got (4,)"),
        ({"dense_layers": 5}, "dense_layers of a model with 5 layers, from 0 on, got 5"),
    ],
)
def test_layers_that_read_everything_are_those_of_the_model(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "full", "read": 1024, **fields}).check(BLOCK, 5, 2, 4096)


def test_old_names_mean_the_new_fields_and_say_so(caplog):
    """Blocks that a policy protects from eviction stay: `select_sink` goes without a field. Old defaults stay too."""
    _warn_of_old_name.cache_clear()
    old = {"select": 1024, "select_every": 4, "select_sink": 32, "filter_layers": [1, 3], "select_bounds": "box"}
    with caplog.at_level("WARNING", logger="vllm.evict"):
        config = KVPolicyConfig.parse({"name": "full", **old})
        other = KVPolicyConfig.parse({"name": "strided", "sink": 128, "select": 1024, "select_sink": 32})
    assert (
        config.to_dict()
        == KVPolicyConfig.parse(
            {"name": "full", "read": 1024, "hold": 4, "sink": 32, "leaders": [1, 3], "index": "box"}
        ).to_dict()
    )
    assert (other.sink, other.read) == (128, 1024)
    said = [record.getMessage() for record in caplog.records]
    assert "KV policy full: in place of select_every write hold; the old name goes with the next release" in said
    assert any("in place of select_sink write nothing: sinks and recent blocks follow read" in each for each in said)
    dense = KVPolicyConfig.parse({"name": "full", "read": 1024, "hold": 1, "index": "box", "dense_layers": 2})
    for given in ({}, {"dense_layers": None}, {"select_every": 1}):
        assert KVPolicyConfig.parse({"name": "full", "select": 1024, **given}) == dense


@pytest.mark.parametrize(
    "old, new",
    [
        ({"name": "omnikv", "filter_layers": [3]}, {"name": "omnikv", "leaders": [3]}),
        ({"name": "quest-select", "select": 128}, {"name": "quest", "read": 128}),
        ("quest-select", "quest"),
        ("quest-read", "quest"),
        ({"name": "recycled", "select_every": 3}, {"name": "recycled", "hold": 3}),
    ],
)
def test_presets_take_old_names(old, new):
    assert KVPolicyConfig.parse(old) == KVPolicyConfig.parse(new)


@pytest.mark.parametrize(
    "given, name",
    [
        ("quest", "full"),
        ({"name": "quest"}, "full"),
        ({"name": "quest", "read": 1024, "sink": 64}, "full"),
        ({"name": "quest", "budget": 512}, "keybound"),
        ({"name": "quest", "buffer": 64, "read": 1024}, "keybound"),
        ({"name": "duo", "pattern": ["10"], "retrieval": {"name": "quest", "budget": 512}}, "duo"),
    ],
)
def test_quest_is_the_preset_but_beside_fields_of_eviction(caplog, given, name):
    """A policy had its name: either way one line of the log says what means what."""
    for each in (_warn_of_old_name, _warn_of_preset):
        each.cache_clear()
    with caplog.at_level("WARNING", logger="vllm.evict"):
        config = KVPolicyConfig.parse(given)
    assert config.name == name and (name != "duo" or config.retrieval.name == "keybound")
    (said,) = [record.getMessage() for record in caplog.records]
    if name == "full":
        assert config.index == "box" and "nothing is evicted; the policy that had this name is keybound" in said
    else:
        assert "in place of quest write keybound; the old name goes with the next release" in said


def test_requests_and_allow_take_the_old_name_of_a_policy():
    server = KVPolicyConfig.parse({"name": "h2o", "budget": 512, "allow": ["quest"]})
    assert server.allow == ("keybound",)
    for name in ("quest", "keybound"):
        assert server.for_request({"kv_policy": name}, 5000, BLOCK).name == "keybound"
    own = KVPolicyConfig.parse({"name": "keybound", "budget": 512})
    assert own.for_request({"kv_policy": "quest"}, 5000, BLOCK) is own


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "full", "read": 64, "select": 64}, "select is the old name of read: give read alone"),
        ({"name": "omnikv", "leaders": [3], "filter_layers": [3]}, "filter_layers is the old name of leaders"),
        ({"name": "full", "select": 512, "select_bounds": "mean"}, "use index: box or signs"),
        ({"name": "strided", "select": 512, "select_sink": "x"}, "select_sink: must be a number"),
    ],
)
def test_old_names_that_mean_nothing_new_are_refused(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse(fields)


@pytest.mark.parametrize("size", [16, 32, 128, 528, 2096])
@pytest.mark.parametrize("read", [100, 512, 2048])
def test_sizes_that_nobody_gave_follow_what_is_read(size, read):
    """Sizes follow `read` as they follow a budget: a choice is left, and what was given stays."""
    config = KVPolicyConfig.parse({"name": "full", "read": read})
    blocks, sinks, recent = config.read_blocks(size)
    assert blocks == max(-(-read // size), 4) and blocks - sinks - recent >= 2
    assert sinks == min(-(-64 // size), max(blocks // 8, 1)) and recent == min(-(-255 // size) + 1, max(blocks // 4, 1))
    carried = KVPolicyConfig.parse(config.to_dict())
    assert carried.read_blocks(size) == (blocks, sinks, recent) == carried.for_request({}, 100, size).read_blocks(size)
    if read > 192:
        given = KVPolicyConfig.parse({"name": "full", "read": read, "sink": 96, "recent": 96})
        assert given.read_blocks(size)[1:] == (-(-96 // size), -(-95 // size) + 1)
        assert given.read_blocks(size)[0] == max(-(-read // size), sum(given.read_blocks(size)[1:]) + 1)
    evicting = KVPolicyConfig.parse({"name": "sink-window", "sink": 512, "recent": 4096, "read": read})
    assert evicting.read_blocks(size)[0] == blocks


def test_requests_of_a_server_that_reads_less_measure_no_attention():
    config = KVPolicyConfig.parse({"name": "sink-window", "read": 1024})
    assert config.allowed >= {
        "full",
        "sink-window",
        "knorm",
        "keydiff",
        "pagedeviction",
        "keybound",
        "strided",
    }
    assert not config.allowed & {"h2o", "tova", "snapkv", "rkv", "scissorhands", "random"}
    with pytest.raises(KVPolicyError, match="kv_policy 'h2o' is not enabled here"):
        config.for_request({"kv_policy": "h2o"}, 100, BLOCK)
    assert KVPolicyConfig.parse({"name": "full", "read": 1024}).allowed == {"full"}


@pytest.mark.parametrize("name", ["full", "keybound", "sink-window"])
def test_a_request_of_another_policy_reads_as_its_server_does(name):
    """A block that it fills is pure as long as layers read all of it, and they follow the server."""
    allow = ["full", "keybound", "sink-window"]
    sizes = {"sink": 0, "recent": 64, **({} if name == "full" else {"budget": 2048})}
    server = KVPolicyConfig.parse({"name": name, "allow": allow, "read": 512, **sizes})
    for other in allow:
        asked = {"kv_policy": other, **({} if other == "full" else {"kv_sink": 256})}
        own = server.for_request(asked, 5000, BLOCK)
        blocks = RequestBlocks(own, None, BLOCK, reads_by=server)
        assert own.name == other and not server.reads_less(True, 1, BLOCK) and server.reads_less(True, 1000, BLOCK)
        for held in range(1, 1000):
            blocks.note_step(held - 1, 1, decodes=True)
            assert (blocks.pure_tokens is not None) == server.reads_less(True, held, BLOCK)


def test_the_harness_compares_what_reads_less_on_servers_of_their_own():
    wanted = contenders('full,sink-window,{"name": "full", "read": 512}', [], **SIZES)
    assert [[each.config.read for each in served] for _, served in servers(wanted, 4096, BLOCK)] == [[0, 0], [512]]


def test_layers_and_heads_do_not_differ_without_the_plugins_decode_kernel(engine, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    with pytest.raises(Exception, match="read: the plugin's decode kernel does not run here"):
        engine({"name": "full", **READ, "dense_layers": 1})

"""The books after many requests of all kinds, with aborts, preemption and resets: nothing is remembered of any request
that ended, and what vLLM tells of its prefix cache is so."""

import gc
import logging
import random
import types
from collections import Counter

import pytest
from engine import greedy, random_prompt
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

SIZES = {"budget": 128, "sink": 32, "recent": 32}
POLICIES = {
    "blocks": {"name": "h2o", **SIZES, "allow": ["sink-window", "keydiff", "scissorhands", "kvzip", "full"]},
    "tokens": {"name": "snapkv", "granularity": "token", **SIZES, "allow": ["sink-window", "keydiff", "kvzip", "full"]},
    "groups": {"name": "adakv", **SIZES, "budget": 160, "bands": 2, "allow": ["full"]},
    "pressure": {"name": "h2o", "when": "pressure", "admit": True, **SIZES, "allow": ["sink-window", "full"]},
}
#: Until each of them has preempted some.
REQUESTS = 120
#: What leads out of an engine.
OUTSIDE = (
    types.ModuleType,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    logging.Logger,
)


class Mirror:
    """A reader of vLLM's KV events, such as a router: what it takes the prefix cache for, (group, hash) -> blocks."""

    def __init__(self, server):
        self.server, self.blocks = server, Counter()
        server.scheduler.kv_event_publisher.publish = self.read

    def read(self, batch):
        self.blocks = after(self.blocks, batch.events)

    def assert_right(self):
        """With what is published with the next step: blocks that a decision after this one took."""
        cached = self.server.pool.cached_block_hash_to_block._cache
        assert after(self.blocks, self.server.pool.kv_event_queue) == {
            (get_group_id(key), maybe_convert_block_hash(get_block_hash(key))): len(found) if type(found) is dict else 1
            for key, found in cached.items()
        }


def after(blocks, events):
    """`Mirror.blocks` with more events."""
    blocks = blocks.copy()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            blocks.clear()
            continue
        known = [(event.group_idx, block_hash) for block_hash in event.block_hashes]
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(known) * event.block_size
            blocks.update(known)
        else:
            assert isinstance(event, BlockRemoved) and all(blocks[each] for each in known)
            blocks.subtract(known)
    return +blocks


def remembered(*roots, prefix):
    """Strings that begin with `prefix` in anything that can be reached from `roots`, and a way to each."""
    seen, found, todo = set(), {}, [(root, "") for root in roots]
    while todo:
        holder, path = todo.pop()
        for each in gc.get_referents(holder):
            if isinstance(each, str) and each.startswith(prefix):
                found[each] = path
            elif not isinstance(each, (str, bytes, int, float, *OUTSIDE)) and id(each) not in seen:
                seen.add(id(each))
                todo.append((each, f"{path} > {type(each).__name__}"))
    return found


def any_request(rng, policy, number):
    """Prompt, priority and sampling parameters: often a prefix that others have, often another policy."""
    shared = random_prompt(200, rng.randrange(4))[: rng.choice([0, 64, 150, 200])]
    asked = {"kv_policy": rng.choice([policy["name"], *policy["allow"]])} if rng.random() < 0.5 else {}
    if rng.random() < 0.2 and asked.get("kv_policy") != "full" and "bands" not in policy:
        asked["kv_budget"] = rng.choice([96, 128])
    sampling = {"max_tokens": rng.choice([1, 2, 10, 40, 100]), "extra_args": asked or None}
    for chance, options in ((0.2, {"stop": ["t7 "]}), (0.05, {"prompt_logprobs": 1}), (0.1, {"logprobs": 1})):
        sampling |= options if rng.random() < chance else {}
    return shared + random_prompt(rng.randrange(1, 250), 100 + number), rng.randrange(3), sampling


@pytest.mark.nightly(push=("blocks", "tokens", "pressure"))
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_remembered_of_requests_that_ended_and_events_tell_what_is_cached(engine, name):
    policy, rng = POLICIES[name], random.Random(0)
    server = engine(
        policy,
        blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        scheduling_policy="priority",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    mirror, vllm, live, made = Mirror(server), server.llm.llm_engine, set(), 0
    while made < REQUESTS or live:
        while made < REQUESTS and len(live) < 20:
            prompt, priority, sampling = any_request(rng, policy, made)
            live.add(f"books{made}")
            vllm.add_request(f"books{made}", {"prompt_token_ids": prompt}, greedy(**sampling), priority=priority)
            made += 1
        live -= {output.request_id for output in vllm.step() if output.finished}
        mirror.assert_right()
        if live and rng.random() < 0.15:
            (gone,) = rng.sample(sorted(live), 1)
            vllm.abort_request([gone])
            live.remove(gone)
        if rng.random() < 0.01:
            server.llm.reset_prefix_cache(reset_running_requests=True)
    metrics = server.metrics()
    assert metrics["blocks_evicted", policy["name"]] > 0 and metrics["vllm:num_preemptions"] > 0
    server.assert_nothing_left()
    # Workers keep the last batch till the next one, and its rows till others lack blocks: never more than one batch.
    server.generate([random_prompt(3)], max_tokens=1)
    server.drain()
    found = remembered(server.llm, server.core, server.worker, prefix="books")
    assert not {req_id: path for req_id, path in found.items() if " > Batch > " not in path}


@pytest.mark.parametrize("granularity", ["block", "token"])
def test_what_a_prompt_wrote_to_the_prefix_cache_is_told_with_what_was_evicted(engine, granularity):
    """`created_cache_tokens` of a response, and what Anthropic's clients are told: blocks that went are still there."""
    server = engine({"name": "snapkv", "granularity": granularity, **SIZES, "buffer": 0}, max_num_batched_tokens=128)
    prompt = random_prompt(600, 1)
    cached = [0]
    for _ in range(2):
        (output,) = server.generate([prompt], max_tokens=40)
        assert output.num_cached_tokens == cached[-1] and output.kv_usage.evicted_blocks
        assert output.num_cache_creation_tokens > 0
        cached.append(output.num_cached_tokens + output.num_cache_creation_tokens)
    assert server.generate([prompt], max_tokens=1)[0].num_cached_tokens == cached[-1]

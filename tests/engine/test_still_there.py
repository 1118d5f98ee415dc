"""Evicted blocks that no request has taken since: they come back without a copy."""

import numpy as np
import pytest
import torch
from engine import PLAN, random_prompt
from oracle.visible import BLOCK, assert_like_dense, visible
from parts import part_of

from vllm_evict.compute.offload import Offload
from vllm_evict.core.actions import Swap
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.mechanisms import Mechanism
from vllm_evict.core.residence import Offloaded
from vllm_evict.integration.engine.offloading import Offloading

SIZES = {"budget": 128, "buffer": 0, "sink": 32, "recent": 32}
QUEST = {"name": "h2o", **SIZES, "evict": "host", "host": "64MiB", "recall": "quest"}


class Swaps(Mechanism):
    """Every few steps what is on the host comes back, and what is resident goes."""

    @classmethod
    def serves(cls, config):
        return config.evict == "host"

    def decide(self, plan, reports):
        for group in self.view.groups:
            for req_id, blocks in group.residents.items():
                request = self.view.running_request(req_id)
                if blocks.residence.host and request is not None and request.num_computed_tokens % 3 == 0:
                    candidates, _ = blocks.replaceable(request.num_computed_tokens)
                    returns = np.array(sorted(blocks.residence.host), np.int64)
                    yield Swap(req_id, 0, holes=candidates[: len(returns)], returns=returns)


@pytest.mark.since("0.30", "its pool does not tell what it hands out", kind="unpublished")
@pytest.mark.parametrize("caching", [True, False], ids=["published", "unpublished"])
@pytest.mark.parametrize("poison", ["0", "1"])
def test_blocks_that_no_request_took_come_back_without_a_copy(engine, dense, monkeypatch, poison, caching):
    """Their bytes are those that went; in poison mode unpublished ones are poisoned, so they are copied into place."""
    monkeypatch.setenv("VLLM_EVICT_POISON", poison)
    server = engine({**QUEST, "recall_every": 512, "again": 0}, enable_prefix_caching=caching, blocks=64)
    masks, caches = visible(server), server.worker.model_runner.kv_caches
    scheduler, fetched, same = server.scheduler, [], []
    scheduler.mechanisms.add(Swaps(scheduler))
    schedule, offloading = scheduler.schedule, scheduler.part(Offloading)
    bring_back = offloading._bring_back

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        host = [each for blocks in server.manager.residents.values() for each in blocks.residence.host.values()]
        assert all(each.physical > 0 for each in host)
        fetched.extend(copy for copy in getattr(output, PLAN).orders if copy.kind == "fetch")
        return output

    def compared(action, resident, returns):
        waiting = {copy.number for copy in scheduler.next_plan.orders if copy.kind == "spill"}
        for logical in action.returns.tolist():
            block, number = (
                scheduler.part(Offloading).still_there(resident, logical),
                resident.residence.host[logical].number,
            )
            if block is not None and number not in waiting and (poison == "0" or caching):
                kept = part_of(server.runtime, Offload).blocks.pages.own
                same.append(all(torch.equal(own[number], page[block.block_id]) for own, page in zip(kept, caches)))
        bring_back(action, resident, returns)

    scheduler.schedule, offloading._bring_back = watched, compared
    prompts = [random_prompt(400), random_prompt(300, 1)]
    ids = [server.add(prompt, max_tokens=60, logprobs=1) for prompt in prompts]
    outputs = server.run()
    usages = [outputs[each].kv_usage for each in ids]
    there, recalled = sum(u.still_there_blocks for u in usages), sum(u.recalled_blocks for u in usages)
    assert 20 < there <= recalled
    assert same.count(True) == len(same) and (len(same) > 20) == (poison == "0" or caching)
    # What was not there was copied; so was what was there and poisoned.
    assert len(fetched) == recalled - there or (poison == "1" and not caching and len(fetched) == recalled)
    for prompt, req_id in zip(prompts, ids):
        assert_like_dense(dense, prompt, outputs[req_id], masks[req_id])
    assert server.metrics()["blocks_still_there", "h2o"] == there
    server.assert_nothing_left()


@pytest.mark.since("0.30", "its pool does not tell what it hands out")
def test_a_block_that_another_request_evicted_since_is_not_taken_for_one_s_own(engine):
    server = engine({**QUEST}, enable_prefix_caching=False)
    scheduler, pool = server.scheduler, server.scheduler.kv_cache_manager.block_pool
    a, b = (RequestBlocks(scheduler.kv_policy, None, BLOCK) for _ in range(2))
    (block,), lingering = pool.get_new_blocks(1), scheduler.part(Offloading)._lingering
    for whose in (a, b):
        scheduler._give_back([block])
        whose.residence.host[3], lingering[block.block_id] = Offloaded(0, block.block_id), (whose, 3)
        assert scheduler.part(Offloading).still_there(whose, 3) is block
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        assert (
            taken[-1] is block and scheduler.part(Offloading).still_there(whose, 3) is None
        )  # the last one that the pool hands out
        pool.free_blocks(taken[:-1])
    scheduler._give_back([block])
    lingering[block.block_id] = b, 3
    assert (
        scheduler.part(Offloading).still_there(a, 3) is None and scheduler.part(Offloading).still_there(b, 3) is block
    )


@pytest.mark.since("0.30", "its pool does not tell what it hands out")
def test_blocks_that_vllm_frees_later_are_copied(engine):
    """A KV connector may have vLLM defer frees: the pool then does not tell when it hands these blocks out."""
    scheduler = engine({**QUEST}, enable_prefix_caching=False).scheduler
    assert scheduler.part(Offloading)._lingers
    scheduler.defer_block_free = True
    assert not Offloading(scheduler)._lingers

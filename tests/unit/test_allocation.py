"""What mechanisms do where vLLM allocates blocks: steps are noted, and room is made (engine/allocation.py)."""

from types import SimpleNamespace

import pytest

from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.integration.engine.allocation import Reads, Slots

BLOCK = 16
READ = {"name": "full", "read": 128, "sink": 16, "recent": 32}


def managed(allocate, resident=None, make_room=None):
    """vLLM's manager of a cache, whose allocations are `allocate`, with the seams in it."""
    cache = SimpleNamespace(
        block_pool=SimpleNamespace(cache_full_blocks=None, cache_partial_block=None),
        coordinator=SimpleNamespace(get_num_blocks_to_allocate=lambda *args: 7),
        empty_kv_cache_blocks=SimpleNamespace(blocks=((),)),
        max_model_len=1024,
    )
    cache.allocate_slots = lambda *args, **kwargs: allocate(cache)
    slots = Slots(cache)
    if resident is not None:
        Reads(SimpleNamespace(residents={"a": resident}, blocks_of=lambda _: [resident], slots=slots))
    slots.make_room = make_room
    slots.replace()
    return cache


@pytest.fixture
def resident():
    return RequestBlocks(KVPolicyConfig.parse(READ), None, BLOCK)


def decoding(computed, tokens):
    return SimpleNamespace(request_id="a", num_computed_tokens=computed, num_tokens=tokens, num_prompt_tokens=300)


def test_a_step_that_gets_no_blocks_ends_no_purity(resident):
    without, with_blocks = managed(lambda _: None, resident), managed(lambda _: (), resident)
    assert without.allocate_slots(decoding(320, 321), 1) is None and resident.pure_tokens is None
    with_blocks.allocate_slots(decoding(320, 322), 2)  # a prompt that reads everything
    assert resident.pure_tokens is None
    with_blocks.allocate_slots(decoding(320, 321), 1)
    assert resident.pure_tokens == 320
    for cache in (with_blocks, without):  # nothing ends it again, and nothing takes it back
        cache.allocate_slots(decoding(321, 322), 1)
        assert resident.pure_tokens == 320


@pytest.mark.parametrize("noted", [True, False])
def test_room_is_made_until_blocks_are_there_or_no_room_is(resident, noted):
    """The step is noted for each try, and not while room is made: its request may lose blocks, too."""
    asked, left = [], [True, True, False]

    def make_room(request, **how):
        asked.append((request.request_id, how, resident.pure_tokens))
        return left.pop(0)

    def allocate(cache):
        assert resident.pure_tokens == (320 if noted else None)
        return () if cache.coordinator.get_num_blocks_to_allocate() and len(asked) == enough else None

    enough, request = 2, decoding(320, 321)
    cache = managed(allocate, resident if noted else None, make_room)
    assert cache.allocate_slots(request, 1, reserved_blocks=3, has_scheduled_reqs=False) == ()
    how = {"wanted": 7, "reserved": 3, "hit": ((),), "watermark": False}
    assert asked == [("a", how, None)] * 2
    resident.pure_tokens = None
    asked.clear()
    enough = None
    assert cache.allocate_slots(request, 1) is None and resident.pure_tokens is None and len(asked) == 1

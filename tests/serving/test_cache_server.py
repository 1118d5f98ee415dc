"""Blocks that LMCache's server keeps: no block computed over holes, and none that was rewritten before it was copied."""

import time
from types import SimpleNamespace

import cache_server
import pytest
import test_offloading
from cache_server import BLOCK, PER_CHUNK, CacheServer
from drafting import NGRAM, accepted
from engine import exactly, random_prompt
from test_offloading import ANSWER, H2O, assert_clean, mixed, on, settle
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

from vllm_evict.config import KVPolicyError
from vllm_evict.integration.engine.followers import LMCacheFollower
from vllm_evict.integration.start.connectors import LMCACHE, of_lmcache
from vllm_evict.integration.worker import unread

TRANSFER = {"kv_connector": LMCACHE, "kv_role": "kv_both"}
SERVED = {"kv_transfer_config": TRANSFER}
CHUNK = PER_CHUNK * BLOCK
stock = test_offloading.stock


@pytest.fixture
def cached(engine, monkeypatch, poisoned):
    """Factory of engines whose prompts the server keeps; freed blocks are full of NaN."""
    cache_server.install(monkeypatch)
    CacheServer.clear()
    yield lambda policy=H2O, **kwargs: engine(policy, **{"max_num_batched_tokens": 128, **SERVED, **kwargs})
    ensure_kv_transfer_shutdown()


@pytest.mark.parametrize(
    "granularity, drafts", [("block", None), ("token", None), ("block", NGRAM)], ids=["block", "token", "drafts"]
)
def test_what_is_kept_is_what_stock_vllm_computes(cached, stock, granularity, drafts):
    """Requests lose blocks, in a pool that is tight, while the server copies late, and drafts are rejected."""
    policy = {**H2O, "granularity": granularity, "allow": ["full", "keydiff"]}
    options = dict(blocks=72, max_model_len=1024, max_num_seqs=6, speculative_config=drafts)
    server, evicted = cached(policy, **options), 0
    CacheServer.delay = 6
    for seed in (1, 2):
        for prompt, asked in mixed(seed):
            if asked["extra_args"]["kv_policy"] == "sink-window":
                del asked["extra_args"]
            server.add(prompt, **asked)
        evicted += sum(output.kv_usage.evicted_blocks for output in server.run().values())
    settle(server)
    server.assert_nothing_left()
    assert evicted > 100 and server.metrics()["vllm:external_prefix_cache_hits"] > 0 and len(CacheServer.chunks) > 10
    assert not CacheServer.queue
    assert drafts is None or 0 < accepted(server)[0] < accepted(server)[1]
    ensure_kv_transfer_shutdown()  # the process has one connector for all engines
    assert_clean(CacheServer.chunks, stock)


def test_a_step_waits_for_copies_of_what_its_requests_lose(cached, stock, monkeypatch):
    """The server copies nothing before someone waits; the blocks that the first request lost are then another's."""
    server = cached(blocks=40, max_model_len=704, max_num_batched_tokens=512)
    CacheServer.delay = 10**6
    waited = []

    def wait(seconds):
        waited.append(seconds)
        CacheServer.queue[0]._left = 0

    monkeypatch.setattr("vllm_evict.integration.worker.unread.time.sleep", wait)
    prompt = random_prompt(500, 1)
    server.add(prompt, max_tokens=ANSWER)
    for _ in range(40):
        server.drain()
    assert waited and not CacheServer.queue
    kept = {tokens: content for tokens, content in CacheServer.chunks.items() if tokens == tuple(prompt[: len(tokens)])}
    assert kept
    CacheServer.delay = 1
    server.run()
    settle(server)
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()
    assert_clean(CacheServer.chunks, stock)


def test_a_step_waits_for_a_slow_server_and_says_so(cached, stock, monkeypatch, complaints):
    """vLLM's own adapter does not tell whether the server still answers. What it keeps in the end is right."""
    monkeypatch.delattr(cache_server.WorkerAdapter, "is_healthy")
    monkeypatch.setattr(unread, "SAID", 0.05)
    server = cached(max_model_len=704)
    CacheServer.delay = 10**12
    sleep = time.sleep

    def wait(seconds):
        sleep(seconds)
        for copy in CacheServer.queue if len(complaints) == 2 else ():
            copy._left = 0

    monkeypatch.setattr("vllm_evict.integration.worker.unread.time.sleep", wait)
    server.add(random_prompt(500, 1), max_tokens=ANSWER)
    for _ in range(ANSWER + 40):
        server.drain()
    assert len(complaints) == 2 and {level for level, _ in complaints} == {"WARNING"}
    assert "LMCache's server, which has not copied blocks of 1 requests for 0." in complaints[0][1]
    for each in CacheServer.queue:
        each._left = 0
    server.run()
    settle(server)
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()
    assert_clean(CacheServer.chunks, stock)


@pytest.mark.parametrize("by_step", [False, True], ids=["request", "step"])
def test_copies_that_the_adapter_forgets_are_waited_for(monkeypatch, by_step):
    """A request's next copy takes the place of the one before it, and vLLM's own adapter drops those of a step at once."""
    transfer = SimpleNamespace(kv_transfer_config=KVTransferConfig(**TRANSFER))
    adapter, asked = SimpleNamespace(store_futures={}), []
    copies = unread.Copies(transfer, SimpleNamespace(worker_adapter=adapter))

    def store(req_id):
        future = SimpleNamespace(done=False)
        future.query = lambda: future.done
        adapter.store_futures[req_id] = (future, []) if by_step else future
        asked.append(future)

    def sleep(seconds):
        next(future for future in asked if not future.done).done = True

    monkeypatch.setattr(unread.time, "sleep", sleep)
    for req_id in ("one", "other", "one"):
        store(req_id)
    adapter.store_futures.pop("other")
    asked[-1].done = True  # the adapter knows of no other copy of "one"
    copies.wait({"one"})
    assert [future.done for future in asked] == [True, by_step, True]
    store("other")
    copies.wait({"one"})
    assert asked[-1].done == by_step


@pytest.mark.parametrize("which", ["request_trackers", "worker_adapter", "store_futures", "num_stored_blocks"])
def test_a_connector_that_does_not_tell_what_is_stored_is_refused(which):
    part = SimpleNamespace(kv_connector=LMCACHE)
    with pytest.raises(KVPolicyError, match=f"without {which}; expected {which}.*install LMCache .*or leave"):
        of_lmcache(part, which)
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=KVTransferConfig(**TRANSFER)))
    with pytest.raises(KVPolicyError, match="without request_trackers"):
        LMCacheFollower(scheduler, part)
    with pytest.raises(KVPolicyError, match="without worker_adapter"):
        unread.Copies(scheduler.vllm_config, part)
    part.worker_adapter = SimpleNamespace()
    with pytest.raises(KVPolicyError, match="without store_futures"):
        unread.Copies(scheduler.vllm_config, part)


def test_hits_are_what_was_computed(cached):
    """Of a prompt that requests have under `full`, and then under a policy: no more than the pure chunks of these, and
    the same answers as after the first, to the bit."""
    prompt, others = random_prompt(500, 1), [random_prompt(300, seed) for seed in range(2, 5)]
    server, answers = cached(), []
    for policy, kept in (("full", 500 // CHUNK * CHUNK), ("h2o", 384)):
        CacheServer.clear()
        assert server.llm.reset_prefix_cache()
        server.generate([prompt, *others], max_tokens=60, **on(policy))
        settle(server)
        assert server.llm.reset_prefix_cache()
        (output,) = server.generate([prompt], max_tokens=30, logprobs=1, **on("full"))
        assert 0 < output.num_cached_tokens <= kept
        answers += exactly([output])
        settle(server)
    assert answers[0][0] == answers[1][0]

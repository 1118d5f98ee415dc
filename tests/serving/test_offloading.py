"""Blocks that vLLM's offloading connectors keep: no block computed over holes, and none that was rewritten before it was
stored."""

import numpy as np
import pytest
import torch
from connector import HostSpec, SimpleHostWorker, prompt_blocks
from drafting import NGRAM, accepted
from engine import Engine, exactly, logprobs_of, random_prompt
from parts import part_of, stored_codes
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash

from vllm_evict.compute.reach import Reach
from vllm_evict.integration.engine.reaching import Reaching

BLOCK, LAYERS = 32, 2
H2O = {"name": "h2o", "budget": 192, "recent": 64, "sink": 32, "allow": ["full", "keydiff", "sink-window"]}
ANSWER = 140


def on(policy):
    return {"extra_args": {"kv_policy": policy}}


def offloading(name, blocks, **extra):
    """Arguments for an engine with a connector that has room for so many blocks on the host."""
    room = {"cpu_bytes_to_use": blocks * BLOCK_BYTES, **extra}
    return dict(kv_transfer_config={"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": room})


#: Of the tiny Llama: keys and values of 32 tokens, 2 heads of 32 in float32, in two layers.
BLOCK_BYTES = 2 * BLOCK * 2 * 32 * 4 * LAYERS
HOSTS = {
    "offloading": ("OffloadingConnector", dict(spec_name="HostSpec", spec_module_path="connector")),
    "chunks": ("OffloadingConnector", dict(spec_name="HostSpec", spec_module_path="connector", blocks_per_chunk=2)),
    "simple": ("SimpleCPUOffloadConnector", {}),
}


@pytest.fixture
def offloads(engine, monkeypatch, poisoned):
    """Factory of engines whose connector copies late; freed blocks are full of NaN."""
    monkeypatch.setattr(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", SimpleHostWorker)

    def make(kind, policy=H2O, room=400, make=engine, delay=3, **kwargs):
        name, extra = HOSTS[kind]
        if name == "OffloadingConnector":
            extra = {**extra, "offload_prompt_only": False, "delay": delay}
        monkeypatch.setattr(SimpleHostWorker, "delay", delay)
        return make(policy, **{"max_num_batched_tokens": 128, **offloading(name, room, **extra), **kwargs})

    yield make
    ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def stock(tiny):
    """vLLM without the plugin's policies: what blocks have to hold."""
    made = Engine(tiny, max_num_batched_tokens=1024)
    yield made
    made.close()


class Books:
    """Which tokens each hash stands for, and what is stored under it."""

    def __init__(self, server, per_chunk=1):
        self._server, self._per_chunk, self.tokens = server, per_chunk, {}
        free = server.scheduler._free_request

        def noted(request, *args, **kwargs):
            for block, block_hash in enumerate(request.block_hashes):
                self.tokens[bytes(block_hash)] = tuple(request.all_token_ids[: (block + 1) * BLOCK])
            return free(request, *args, **kwargs)

        server.scheduler._free_request = noted

    def stored(self):
        """{tokens: for each layer the content of the last block(s)} of all that a request could hit."""
        connector, worker = self._server.scheduler.connector, get_kv_transfer_group()
        if (simple := getattr(connector, "scheduler_manager", None)) is not None:
            blocks = [block for block in simple.cpu_block_pool.blocks if block.block_hash is not None]
            places = {get_block_hash(block.block_hash): [block.block_id] for block in blocks}
            host = worker.worker_handler
        else:
            chunks, count = connector.scheduler.manager._policy.chunks, self._per_chunk
            places = {
                get_offload_block_hash(key): [chunk.chunk_id * count + i for i in range(count)]
                for key, chunk in chunks.items()
                if chunk.is_ready
            }
            host = HostSpec.workers[0]
        return {self.tokens[bytes(block_hash)]: host.content(at) for block_hash, at in places.items()}


def assert_clean(stored, stock):
    """Each stored block has what stock vLLM computes for its tokens."""
    computed = {}
    for tokens in sorted(stored, key=len, reverse=True):
        # The longest prompts first: the blocks of their prefixes come with them.
        longest = next((known for known in computed if known[: len(tokens)] == tokens), None)
        if longest is None:
            longest, computed[tokens] = tokens, prompt_blocks(stock, tokens)
        for content, layer in zip(stored[tokens], computed[longest], strict=True):
            end = len(tokens) // BLOCK
            expected = layer[end - len(content) : end].contiguous()
            found = content.reshape(-1).view(torch.uint8).view(torch.float32).reshape(expected.shape)
            torch.testing.assert_close(
                found, expected, atol=1e-4, rtol=1e-4, msg=lambda m: f"{len(tokens)} tokens: {m}"
            )


def mixed(seed, count=14):
    """Prompts, some with prefixes of others, and what their requests ask for."""
    rng, made = np.random.default_rng(seed), [random_prompt(400, seed)]
    for number in range(count):
        base = made[rng.integers(len(made))]
        prompt = [
            *base[: int(rng.integers(0, len(base)))],
            *random_prompt(int(rng.integers(90, 420)), 100 * seed + number),
        ]
        made.append(prompt[:700])
        policy = ("h2o", "h2o", "keydiff", "sink-window")[rng.integers(4)]
        yield made[-1], {"max_tokens": int(rng.integers(20, ANSWER)), "extra_args": {"kv_policy": policy}}


CASES = [*((kind, "block", False) for kind in HOSTS), ("offloading", "token", False)]
CASES += [(kind, "block", True) for kind in ("offloading", "simple")]


@pytest.mark.nightly(push=("offloading-block", "offloading-block-drafts", "simple-block-drafts"))
@pytest.mark.parametrize(
    "kind, granularity, drafts", CASES, ids=[f"{kind}-{unit}" + "-drafts" * drafts for kind, unit, drafts in CASES]
)
def test_what_is_stored_is_what_stock_vllm_computes(offloads, stock, kind, granularity, drafts):
    """Requests lose blocks, in a pool that is tight, while blocks are stored late, drafts are rejected, and the host runs
    out of room."""
    policy = {**H2O, "granularity": granularity}
    if granularity == "token":
        policy["allow"] = ["full", "keydiff"]
    options = dict(room=48, blocks=72, max_model_len=1024, max_num_seqs=6)
    server = offloads(kind, policy, **options, speculative_config=NGRAM if drafts else None)
    books, hits, evicted = Books(server, 2 if kind == "chunks" else 1), 0, 0
    for seed in (1, 2):
        for prompt, asked in mixed(seed):
            if granularity == "token" and asked["extra_args"]["kv_policy"] == "sink-window":
                del asked["extra_args"]
            server.add(prompt, **asked)
        outputs = server.run()
        evicted += sum(output.kv_usage.evicted_blocks for output in outputs.values())
    hits = server.metrics()["vllm:external_prefix_cache_hits"]
    assert not drafts or 0 < accepted(server)[0] < accepted(server)[1]
    settle(server)
    stored = books.stored()
    server.assert_nothing_left()
    assert evicted > 100 and hits > 0 and len(stored) > 10
    if kind != "simple":
        assert HostSpec.workers[0].waited > 0, "no block was handed out while it was stored"
    ensure_kv_transfer_shutdown()  # the process has one connector for all engines
    assert_clean(stored, stock)


def assert_indexed(server):
    """In the first layer the index has codes of all full blocks of running requests, those that were loaded too."""
    reach = part_of(server.runtime, Reach)
    for request in server.scheduler.running:
        table, on_host = (
            server.manager.req_to_blocks[request.request_id],
            server.scheduler.residents[request.request_id].residence.host,
        )
        full = range(request.num_computed_tokens // BLOCK)
        blocks = torch.tensor([table[index].block_id for index in full if index not in on_host], dtype=torch.int64)
        keys, _ = next(iter(reach._store.read(blocks, False)))
        assert torch.equal(stored_codes(keys), reach.index.of_layers[0][blocks])


@pytest.mark.parametrize("kind, drafts", [("offloading", None), ("simple", None), ("offloading", NGRAM)])
def test_what_is_stored_beside_blocks_that_layers_read_on_the_host(offloads, stock, kind, drafts):
    """Requests unload blocks while these are stored late; a prompt that the connector loads is indexed, and unloaded."""
    policy = {"name": "full", "evict": "host", "host": "64MiB", "budget": 192, "recent": 64, "sink": 32, "read": 160}
    options = dict(room=96, blocks=72, max_model_len=1024, max_num_seqs=6, enable_prefix_caching=True)
    server = offloads(kind, policy, **options, speculative_config=drafts)
    books, unloaded = Books(server), 0
    for seed in (1, 2):
        for prompt, asked in mixed(seed):
            server.add(prompt, max_tokens=asked["max_tokens"], logprobs=1)
        outputs = server.run(assert_indexed)
        unloaded += sum(output.kv_usage.evicted_blocks for output in outputs.values())
        assert all(np.isfinite(logprobs_of(output)).all() for output in outputs.values())
    hits = server.metrics()["vllm:external_prefix_cache_hits"]
    settle(server)
    stored = books.stored()
    server.assert_nothing_left()
    pool = server.scheduler.part(Reaching).pool
    assert pool.available == pool.blocks
    assert unloaded > 100 and hits > 0 and len(stored) > 10
    ensure_kv_transfer_shutdown()
    assert_clean(stored, stock)


@pytest.mark.parametrize("kind", HOSTS)
def test_hits_are_what_was_computed(offloads, kind):
    """Of a prompt that requests have under `full`, and then under a policy: no more than the pure blocks of these, and
    the same answers as after the first, to the bit."""
    prompt, others = random_prompt(500, 1), [random_prompt(300, seed) for seed in range(2, 5)]
    whole, pure = 500 // 64 * 64 if kind == "chunks" else 480, 384
    server, answers = offloads(kind), []
    for policy, kept in (("full", whole), ("h2o", pure), ("full", whole)):
        settle(server)
        assert server.llm.reset_prefix_cache(reset_connector=True)
        server.generate([prompt, *others], max_tokens=60, **on(policy))
        settle(server)
        assert server.llm.reset_prefix_cache()
        shared = [*prompt[: pure + 5], 7]
        for asked, hit in ((shared, pure), (prompt, kept)):
            (output,) = server.generate([asked], max_tokens=30, logprobs=1, **on("full"))
            assert output.num_cached_tokens == hit
            answers += exactly([output])
            settle(server)
            assert server.llm.reset_prefix_cache()
    assert answers[0] == answers[2] == answers[4] and answers[1] == answers[5]
    assert answers[1][0] == answers[3][0], "the last part of the prompt was computed again"


def test_blocks_that_are_stored_late_are_still_the_requests_own(offloads, stock):
    """The host has no room until a request has lost blocks, and another request has taken them: then it stores the
    blocks that the request holds, and no block under the numbers of those that it lost."""
    server = offloads("offloading", room=16, blocks=42, max_model_len=704, delay=45)
    books, late, given_on = Books(server), random_prompt(416, 2), []
    server.add(random_prompt(512, 1), "fills", max_tokens=100, **on("full"))
    server.add(late, "late", max_tokens=90)
    server.add(
        random_prompt(450, 3),
        "takes",
        max_tokens=90,
        extra_args={"kv_policy": "full", "kv_transfer_params": {"max_offload_tokens": 0}},
    )
    had = {}

    def watch(server):
        tables = {req_id.split("-")[0]: blocks for req_id, blocks in server.manager.req_to_blocks.items()}
        for index, block in enumerate(tables.get("late", ())):
            had.setdefault(index, block.block_id)
            if block.is_null and not HostSpec.workers[0].done:
                given_on.extend({had[index]} & {each.block_id for each in tables.get("takes", ())})

    outputs = server.run(watch)
    assert given_on, "no block that the request lost was another's before the host had room"
    settle(server)
    stored = books.stored()
    of_late = {len(tokens) // BLOCK - 1 for tokens in stored if tokens == tuple(late[: len(tokens)])}
    assert of_late and outputs["late"].kv_usage.evicted_blocks > 4
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()
    assert_clean(stored, stock)


def settle(server):
    """Step until all is stored, or copied."""
    while server.scheduler.has_requests():
        server.drain()

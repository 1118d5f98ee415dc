"""Blocks on the host beside windows, chunks, latents and states, and by several connectors: hits are what stock vLLM
computes.
"""

import importlib.util

import cache_server
import numpy as np
import pytest
from cache_server import BLOCK, CacheServer
from connector import Shelf, ShelfConnector, SimpleHostWorker
from engine import logprobs_of, random_prompt
from latent import keep_what_is_asked, make_latent, reference_mla
from linear import stand_in
from oracle.hybrids import make_tiny_hybrid
from oracle.latent_hybrids import LATENT_HYBRIDS, make_latent_hybrid
from oracle.logits import make_tiny
from oracle.tiny import make_tiny_llama
from test_cache_server import settle
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

H2O = {"name": "h2o", "budget": 192, "recent": 64, "sink": 32, "allow": ["full"]}
REACH = {"name": "full", "evict": "host", "host": "64MiB", "budget": 192, "recent": 64, "sink": 32, "buffer": 0}
HOST = {"cpu_bytes_to_use": 64 << 20, "spec_name": "HostSpec", "spec_module_path": "connector", "delay": 3}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": HOST}
SIMPLE = {**OFFLOADING, "kv_connector": "SimpleCPUOffloadConnector"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
BOTH = {**NIXL, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NIXL, OFFLOADING]}}
LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
MODELS = {
    "full attention": make_tiny_llama,
    "sliding windows": lambda folder: make_tiny_llama(folder, layers=4, windows=[48, 0, 48, 0]),
    "chunks": lambda folder: make_tiny(folder, "llama4_text"),
    "latents": lambda folder: make_latent(folder, "DeepseekV3ForCausalLM"),
    "states": lambda folder: make_tiny_hybrid(folder, "falcon_h1"),
    "latents beside states": lambda folder: make_latent_hybrid(folder, next(iter(LATENT_HYBRIDS))),
}
#: Tokens of a block, of other classes `BLOCK`. CPU_MLA reads blocks of 16 tokens; one with a state has 128 latents.
BLOCKS = {"latents": 16, "latents beside states": 128}
#: Classes of which vLLM else keeps a prompt's last blocks alone: they are computed over holes here.
KEPT = ("sliding windows", "states", "latents beside states")
CASES = [("full attention", BOTH), ("sliding windows", SIMPLE), ("sliding windows", OFFLOADING)]
CASES += [("latents", SIMPLE), ("latents", OFFLOADING), ("states", SIMPLE), ("states", OFFLOADING)]
CASES += [("latents", LMCACHE), ("chunks", SIMPLE), ("chunks", OFFLOADING)]
CASES += [("latents beside states", SIMPLE), ("latents beside states", OFFLOADING)]
#: Cases of each push: each class, and each connector beside one.
PUSHED = ("full attention-MultiConnector", "latents-LMCacheMPConnector", "states-OffloadingConnector")
PUSHED += ("sliding windows-SimpleCPUOffloadConnector", "chunks-OffloadingConnector")
#: vLLM's own connector to LMCache has one table of blocks; that of LMCache, by its package, has one for each KV group.
CASES += [("sliding windows", LMCACHE)] * (importlib.util.find_spec("lmcache") is not None)


@pytest.fixture
def folder(kind, tmp_path, monkeypatch):
    """A tiny model of a class. vLLM ends chunks where states are kept, and caches prefixes of latents, on a CPU too."""
    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
    keep_what_is_asked(monkeypatch)
    stand_in(monkeypatch)
    with reference_mla():
        MODELS[kind](tmp_path / "model")
        yield tmp_path / "model"


@pytest.mark.both_runners("states-OffloadingConnector")
@pytest.mark.nightly(push=PUSHED)
@pytest.mark.parametrize("kind, transfer", CASES, ids=[f"{kind}-{each['kv_connector']}" for kind, each in CASES])
def test_hits_after_requests_lost_blocks_are_what_stock_vllm_computes(
    engine, folder, kind, transfer, monkeypatch, poisoned
):
    """Prompts that requests computed and stored, while they lost blocks, are hit by requests that keep everything: with
    other ends, and with the answers, which were computed over holes."""
    check_hits(engine, folder, kind, transfer, monkeypatch, H2O)


#: Classes beside which layers read blocks on the host.
REACHED = [case for case in CASES if case[1] in (OFFLOADING, SIMPLE)]


@pytest.mark.nightly(push=("latents-OffloadingConnector", "sliding windows-SimpleCPUOffloadConnector"))
@pytest.mark.parametrize("kind, transfer", REACHED, ids=[f"{kind}-{each['kv_connector']}" for kind, each in REACHED])
def test_hits_beside_blocks_that_layers_read_on_the_host(engine, folder, kind, transfer, monkeypatch, poisoned):
    """Blocks of decodes that read less are stored no more; prompts that are loaded go to the host down to the budget."""
    check_hits(engine, folder, kind, transfer, monkeypatch, REACH)


def check_hits(engine, folder, kind, transfer, monkeypatch, policy):
    monkeypatch.setattr(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", SimpleHostWorker)
    monkeypatch.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)
    Shelf.clear()
    cache_server.install(monkeypatch)
    CacheServer.clear()
    CacheServer.block = BLOCKS.get(kind, BLOCK)
    scale = max(1, CacheServer.block // BLOCK)
    policy = {**policy, **{size: policy[size] * scale for size in ("budget", "recent", "sink")}}
    options = dict(model=folder, max_num_batched_tokens=128 * scale, block_size=CacheServer.block)
    options |= {"max_model_len": 1024 * scale, "enable_prefix_caching": True}
    if kind == "latents beside states":
        options["attention_backend"] = "CPU_MLA"  # else vLLM's platform takes blocks of 16 tokens
    if kind in KEPT:
        options["prefix_cache_retention_interval"] = CacheServer.block
    prompts = [random_prompt(length * scale, length) for length in (449, 641, 545)]
    # Where layers read blocks on the host, decodes read less than stock's.
    asked = {"max_tokens": 24 if policy["name"] == "h2o" else 1, "logprobs": 0}
    server = engine(policy, **options, kv_transfer_config=transfer)
    lost = server.generate(prompts, max_tokens=80)
    assert all(output.kv_usage.evicted_blocks > 4 for output in lost)
    settle(server)
    longer = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, lost, strict=True)]
    found = []
    for several in (prompts, longer):
        before = server.metrics()["vllm:external_prefix_cache_hits"]
        assert server.llm.reset_prefix_cache()
        found += server.generate(several, **asked, extra_args={"kv_policy": "full"})
        assert server.metrics()["vllm:external_prefix_cache_hits"] > before, "nothing was hit"
        settle(server)
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()
    for output, stock in zip(found, engine(**options).generate([*prompts, *longer], **asked), strict=True):
        assert output.outputs[0].token_ids == stock.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(stock), atol=1e-3)

"""Blocks on the host beside sliding windows, and by several connectors: hits are what stock vLLM computes."""

import numpy as np
import pytest
from connector import Shelf, ShelfConnector, SimpleHostWorker
from engine import logprobs_of, random_prompt
from oracle.tiny import make_tiny_llama
from test_cache_server import settle
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

pytestmark = pytest.mark.since("0.30", "its offloading connector has other hooks than the double of a host")

H2O = {"name": "h2o", "budget": 192, "recent": 64, "sink": 32, "allow": ["full"]}
HOST = {"cpu_bytes_to_use": 64 << 20, "spec_name": "HostSpec", "spec_module_path": "connector", "delay": 3}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": HOST}
SIMPLE = {**OFFLOADING, "kv_connector": "SimpleCPUOffloadConnector"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
BOTH = {**NIXL, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NIXL, OFFLOADING]}}
MODELS = {
    "full attention": make_tiny_llama,
    "sliding windows": lambda folder: make_tiny_llama(folder, layers=4, windows=[48, 0, 48, 0]),
}
CASES = [("full attention", BOTH), ("sliding windows", SIMPLE)]


@pytest.mark.parametrize("kind, transfer", CASES, ids=[f"{kind}-{each['kv_connector']}" for kind, each in CASES])
def test_hits_after_requests_lost_blocks_are_what_stock_vllm_computes(
    engine, kind, transfer, tmp_path, monkeypatch, poisoned
):
    """Prompts that requests computed and stored, while they lost blocks, are hit by requests that keep everything."""
    monkeypatch.setattr(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", SimpleHostWorker)
    monkeypatch.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)
    Shelf.clear()
    MODELS[kind](tmp_path / "model")
    options = dict(model=tmp_path / "model", max_num_batched_tokens=128, enable_prefix_caching=True)
    prompts = [random_prompt(length, length) for length in (449, 641, 545)]
    asked = {"max_tokens": 24, "logprobs": 0}
    expected = engine(**options).generate(prompts, **asked)
    server = engine(H2O, **options, kv_transfer_config=transfer)
    lost = server.generate(prompts, max_tokens=80)
    assert all(output.kv_usage.evicted_blocks > 4 for output in lost)
    settle(server)
    assert server.llm.reset_prefix_cache()
    found = server.generate(prompts, **asked, extra_args={"kv_policy": "full"})
    hits = server.metrics()["vllm:external_prefix_cache_hits"]
    assert hits > 0, "nothing was hit"
    for output, stock in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == stock.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(stock), atol=1e-3)
    settle(server)
    server.assert_nothing_left()
    ensure_kv_transfer_shutdown()

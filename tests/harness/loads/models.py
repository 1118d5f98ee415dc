"""Tiny models of a load, with random weights, and engines of them (cases.py)."""

import json
import os
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import cache_server
import numpy as np
import pytest
from cache_server import CacheServer
from connector import Shelf, ShelfConnector
from drafting import MODEL, make_dspark, make_eagle, speculative
from engine import Engine
from flash import FlashAttention
from interpreter import in_place_of
from latent import make_eagle3, make_latent, reference_mla
from linear import stand_in_for_gdn
from oracle.hybrids import HYBRIDS, add_mtp, make_tiny_hybrid
from oracle.images import make_tiny as make_seeing
from oracle.logits import make_tiny
from oracle.searched import make_searched
from oracle.tiny import make_tiny_llama
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from loads.adapters import Adapters
from loads.pages import Stock
from vllm_evict.compute import choosing
from vllm_evict.compute.kernels import reach as kernel

#: Blocks of the longest request.
LONGEST = 16

MODELS = {
    "plain": {},
    "heads": {"layers": 4, "heads": 8, "kv_heads": 4},
    "windows": {"layers": 4, "windows": [48, 0, 48, 0]},
    "latent": {},
    "llama4_text": {},
    "gemma3n_text": {},
    "mimo_v2_flash": {},
    "llava": {},
    "drafted": MODEL,
    "drafted-windows": {**MODEL, "layers": 4, "windows": [48, 0, 48, 0]},
    "drafted-window": {**MODEL, "layers": 3, "windows": [48, 0, 48]},
}
#: Models in which layers differ: KV heads of each layer, 0 for a layer without attention.
SEARCHED = {"searched": (2, 4, 0, 1), "gaps": (4, 0, 4, 4, 0, 4)}
#: Of drafts that are accepted by chance: of each of a step's, that it is and those before it are.
CHANCES = [0.8, 0.55, 0.35]
#: Layers x KV heads: one layer has no retrieval head, one has nothing else.
RETRIEVAL = [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def _arguments(model):
    """Engine arguments that a model needs."""
    seeing = {"limit_mm_per_prompt": {"image": LONGEST}, "skip_mm_profiling": True}
    return {"trust_remote_code": True} if model in SEARCHED else seeing if model == "llava" else {}


def _reach(rows, state, query, cache, *args):
    """`kernels.reach`, whose C++ wants pages that are one run of memory each; vLLM's pages for a GPU may be none."""
    function = kernel.reach if cache[0].is_contiguous() else kernel.reach_reference
    function(rows, state, query, cache, *args)


class Models:
    """Random models in a folder, and a stock engine of each. Each is made when it is first needed."""

    def __init__(self, folder):
        self.folder, self._stocks = Path(folder), {}
        self._doubles = pytest.MonkeyPatch()
        cache_server.install(self._doubles)
        self._doubles.setitem(KVConnectorFactory._registry, "NixlConnector", lambda: ShelfConnector)

    def path(self, name):
        path = self.folder / name / ("searched" if name in SEARCHED else "")
        if not (path / "config.json").exists():
            if name in SEARCHED:
                make_searched(path.parent, SEARCHED[name])
            elif name == "latent":
                make_latent(path, "DeepseekV3ForCausalLM")
            elif name in ("llama4_text", "gemma3n_text", "mimo_v2_flash"):
                make_tiny(path, name)
            elif name == "llava":
                make_seeing(path, name)
            elif name in HYBRIDS:
                make_tiny_hybrid(path, name)
                if name == "qwen3_next":
                    add_mtp(path)
            else:
                make_tiny_llama(path, **MODELS[name])
        return path

    def _made(self, case, *policy, **options):
        """An engine of the case's model, in float32: a published block of it equals stock's but for the last bits."""
        if case.model == "qwen3_next":
            stand_in_for_gdn()
        contexts = {"latent": reference_mla, "mimo_v2_flash": self._flash}
        with contexts.get(case.model, nullcontext)():
            return Engine(self.path(case.model), *policy, **options)

    def _flash(self):
        """Context in which engines take FlashAttention's backends, with a stand-in for its kernels."""
        FlashAttention(3).install(self._doubles)
        self._doubles.setattr(choosing, "reach", _reach)
        return in_place_of("CPU_ATTN", "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend")

    @cached_property
    def adapters(self):
        return Adapters(self.path("plain"), self.folder / "adapters")

    def gates(self, sink, recent):
        """A file of `RETRIEVAL`, for windows of this size."""
        folder = self.folder / f"gates-{sink}-{recent}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / "heads.tsv", np.array(RETRIEVAL, float), delimiter="\t")
        (folder / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
        return str(folder / "heads.tsv")

    def _drafter(self, name, model):
        """`speculative_config` of a drafter of a model."""
        path, of = self.folder / f"{model}-{name}", self.path(model)
        if name in ("SAME", "MTP"):
            return speculative("draft_model", of) if name == "SAME" else speculative("mtp")
        make = {"EAGLE": lambda *args: make_eagle(*args, "eagle"), "EAGLE3": make_eagle3, "DSPARK": make_dspark}[name]
        return speculative(name.lower(), path if path.exists() else make(path, of))

    def stock(self, case):
        cache = case.options.get("kv_cache_dtype", "auto")
        adapters = {each: case.options[each] for each in ("enable_lora", "max_lora_rank") if each in case.options}
        key = case.model, case.block_size, cache, *adapters
        if key not in self._stocks:
            longest = case.longest + case.block_size
            engine = self._made(
                case,
                block_size=case.block_size,
                blocks=8 * LONGEST,
                max_model_len=longest,
                max_num_batched_tokens=longest,
                enable_prefix_caching=False,
                async_scheduling=False,
                kv_cache_dtype=cache,
                **adapters,
                **_arguments(case.model),
            )
            # Rounding may take a key or value to the next number of fp8.
            self._stocks[key] = Stock(engine, self.adapters if adapters else None, 2e-3 if cache == "auto" else 0.1)
        return self._stocks[key]

    def engine(self, case):
        """A new engine that fills freed blocks with NaN."""
        ensure_kv_transfer_shutdown()  # the process has one connector for all engines
        Shelf.clear()
        CacheServer.clear()
        # vLLM's CPU kernel for Mamba2 makes no state inside a chunk; without blocks for these, chunks end at states.
        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
        policy = dict(case.policy)
        if policy.get("gates") == "HEADS":
            policy["gates"] = self.gates(policy.pop("sink"), policy.pop("recent"))
        options = {
            "max_model_len": case.longest,
            "block_size": case.block_size,
            **_arguments(case.model),
            **case.options,
        }
        if isinstance(drafter := options.get("speculative_config"), str):
            options["speculative_config"] = self._drafter(drafter, case.model)
        if case.by_chance:
            chances = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": CHANCES}
            options["speculative_config"] = {**options["speculative_config"], **chances}
        poison, os.environ["VLLM_EVICT_POISON"] = os.environ.get("VLLM_EVICT_POISON"), "1"
        try:
            if case.blocks is not None:
                return self._made(case, policy, blocks=case.blocks, **options)
            return self._smallest(case, policy, options)
        finally:
            del os.environ["VLLM_EVICT_POISON"]
            if poison is not None:
                os.environ["VLLM_EVICT_POISON"] = poison

    def _smallest(self, case, policy, options):
        for blocks in range(2, 100):
            try:
                return self._made(case, policy, blocks=blocks, **options)
            except ValueError:
                continue
        raise AssertionError("start-up accepts no pool")

    def close(self):
        for stock in self._stocks.values():
            stock.engine.close()
        self._stocks.clear()
        self._doubles.undo()

"""The bytes of each published block against those that stock vLLM computes for its hash."""

from collections import Counter
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from engine import greedy
from parts import part_of
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from loads.images import asked, tokens_of
from vllm_evict.compute.host_copies import HostCopies
from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.integration.engine.spec import policy_config
from vllm_evict.integration.start.attending import layout
from vllm_evict.integration.worker.layers import PARTS


def numbers(page):
    """View bytes of an fp8 cache as numbers, which may be NaN. NaN of e4m3 is NaN of e5m2 too."""
    return page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page


@dataclass
class Slice:
    """Some KV heads of one layer, and the memory that holds them.

    Attributes:
        layer: name of the layer.
        heads: KV heads, numbered as in the model's files.
        cache: [num_blocks, len(heads), block_size, 2 * D], keys and values of a block and head side by side.
    """

    layer: str
    heads: list[int]
    cache: torch.Tensor


def slices_of(engine):
    """`Slice`s of each KV group, in order."""
    config = engine.llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    attention = {name: layer for name, layer in layers.items() if isinstance(layer, (Attention, MLAAttention))}
    armed = bool(config.additional_config and "kv_policy" in config.additional_config)
    placed = layout(config, policy_config(config)) if armed else None
    found = []
    for group in engine.scheduler.kv_cache_config.kv_cache_groups:
        found.append([])
        for name in group.layer_names:
            if name in attention:
                cache = layers[name].kv_cache
                if isinstance(layers[name], MLAAttention):
                    cache = cache.unsqueeze(1)
                found[-1].append(Slice(name, list(range(cache.shape[1])), cache))
                continue
            if isinstance(layers[name], MambaBase):
                continue  # a wrong state shows in the answers of requests that hit it
            for number, (layer_name, layer) in enumerate(attention.items()):
                order = None if placed.order is None else placed.order[number].tolist()
                for part in getattr(layer, PARTS):
                    if part.pages == name:
                        heads = list(range(part.heads.start, part.heads.stop))
                        heads = heads if order is None else [order[head] for head in heads]
                        found[-1].append(Slice(layer_name, heads, part.kv_cache))
    return found


class Stock:
    """Computes the pages of a prefix with stock vLLM.

    Args:
        engine: an `Engine` without a policy and without prefix caching. Its chunks are as long as the longest prefix.
    """

    def __init__(self, engine):
        self.engine, self._groups = engine, slices_of(engine)
        self.layers = {each.layer for slices in self._groups for each in slices}

    def pages(self, tokens):
        """All blocks of a prefix: (layer, block) -> [Hkv, block_size, 2 * D]."""
        tables, schedule = {}, self.engine.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                tables.update(enumerate(new.block_ids))
            return output

        self.engine.scheduler.schedule = watched
        try:
            self._generate(tokens)
        finally:
            self.engine.scheduler.schedule = schedule
        # The request has ended, and its blocks keep their content until the pool hands them out again.
        return {
            (each.layer, block): each.cache[physical].clone()
            for group, slices in enumerate(self._groups)
            for each in slices
            for block, physical in enumerate(tables[group])
        }

    def logprobs(self, prompt, tokens):
        """Log-probability of each of `tokens` after `prompt` and those before it."""
        ids = [*prompt, *tokens]
        output = self._generate(ids, prompt_logprobs=0)
        rows = output.prompt_logprobs[len(prompt) :]
        return [row[token].logprob for row, token in zip(rows, tokens)]

    def _generate(self, tokens, **sampling):
        # The process has one connector for all engines, and this one has none.
        with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", None):
            (output,) = self.engine.llm.generate([asked(tokens)], greedy(1, **sampling), use_tqdm=False)
        return output


class Published:
    """Remembers the tokens of each hash, and compares published blocks with stock's.

    Args:
        engine: with a policy and prefix caching.
        stock: of the same model and block size.
    """

    def __init__(self, engine, stock):
        self.engine, self.stock = engine, stock
        # A drafter's layers are not the model's, so stock vLLM has no pages of theirs.
        self._slices = [[each for each in slices if each.layer in stock.layers] for slices in slices_of(engine)]
        self._tokens, self._pages = {}, {}
        (self._reaching,) = engine.scheduler.mechanisms.of(Reaching) or (None,)
        #: Of host blocks, as `_slices`.
        self._on_host = []
        if self._reaching:
            own = part_of(engine.runtime, HostCopies).blocks.own
            # The first layer of each group has the first page of a block, and so on.
            self._on_host = [
                [replace(each, cache=numbers(page)) for each, page in zip(slices, own)] for slices in self._slices
            ]
        #: "pages" that were compared, "bit-equal" ones, and the "worst" difference.
        self.counts = Counter()
        pool = engine.pool
        cache = pool.cache_full_blocks
        assert {manager.block_size for manager in engine.all_managers} == {pool.hash_block_size}

        def watched(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs):
            cache(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs)
            for at in range(num_cached_blocks, num_full_blocks):
                if request.block_hashes[at] not in self._tokens:
                    self._tokens[request.block_hashes[at]] = tuple(tokens_of(request)[: (at + 1) * block_size])

        pool.cache_full_blocks = watched

    def _cached(self):
        """Yield (hash with its group, blocks) of all blocks that can be hit."""
        for key, found in self.engine.pool.cached_block_hash_to_block._cache.items():
            yield key, list(found.values()) if isinstance(found, dict) else [found]

    def compare(self, tolerance):
        """Compare each block that can be hit now with stock's. The engine has to be idle.

        Args:
            tolerance: largest difference of a key or value, in the model's own units.

        Raises:
            AssertionError: a block differs by more, or its tokens are not known.
        """
        cached = [(get_group_id(key), get_block_hash(key), found) for key, found in self._cached()]
        hosted = self._hosted() if self._on_host else {}
        alive = {block_hash for _, block_hash, _ in cached} | set(map(get_block_hash, hosted))
        self._tokens = {block_hash: tokens for block_hash, tokens in self._tokens.items() if block_hash in alive}
        self._pages = {prefix: pages for prefix, pages in self._pages.items() if prefix in set(self._tokens.values())}
        # Stock's run of a prefix gives the pages of its own prefixes too.
        for prefix in sorted(self._tokens.values(), key=len, reverse=True):
            if prefix not in self._pages:
                self._compute(prefix, set(self._tokens.values()))
        for group, block_hash, blocks in cached:
            for block in blocks:
                self._compare_all(self._slices[group], block.block_id, block_hash, tolerance)
        for key, number in hosted.items():
            self._compare_all(self._on_host[get_group_id(key)], number, get_block_hash(key), tolerance)

    def _hosted(self):
        """Hash with its group -> host block, of those that can be hit; the next plan writes others."""
        pool, coming = self._reaching.pool, {copy.number for copy in self.engine.scheduler.next_plan.orders}
        return {key: number for key, number in pool._numbers.items() if number not in coming}

    def _compare_all(self, slices, block, block_hash, tolerance):
        prefix = self._tokens[block_hash]
        for each in slices:
            self._compare(each, block, self._pages[prefix][each.layer][each.heads], prefix, tolerance)

    def _compute(self, prefix, wanted):
        size = self.engine.pool.hash_block_size
        pages = self.stock.pages(list(prefix))
        layers = {layer for layer, _ in pages}
        for end in range(size, len(prefix) + 1, size):
            if prefix[:end] in wanted:
                self._pages[prefix[:end]] = {layer: pages[layer, end // size - 1] for layer in layers}

    def _compare(self, each, block, want, prefix, tolerance):
        got = each.cache[block]
        self.counts["pages"] += 1
        if torch.equal(got, want):
            self.counts["bit-equal"] += 1
            return
        worst = (got - want).abs().max().item()
        self.counts["worst"] = max(self.counts["worst"], worst)
        assert worst <= tolerance, (
            f"published block {block} ({len(prefix)} tokens: {list(prefix[:4])}...{list(prefix[-4:])}): heads "
            f"{each.heads} of {each.layer} differ from stock's by {worst}, where keys and values go up to "
            f"{want.abs().max().item():.3g}"
        )

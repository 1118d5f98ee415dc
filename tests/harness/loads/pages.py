"""The bytes of each published block against those that stock vLLM computes for its hash."""

from collections import Counter
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
from engine import greedy
from parts import part_of
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_block_hashes

from loads.adapters import number_of
from loads.images import asked, tokens_of
from vllm_evict.compute.host_copies import HostCopies
from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.integration.engine.spec import policy_config
from vllm_evict.integration.start.attending import layout
from vllm_evict.integration.worker.layers import PARTS


def numbers(page):
    """View bytes of an fp8 cache as numbers, which may be NaN. NaN of e4m3 is NaN of e5m2 too."""
    return page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page


def _first(page, tokens):
    """Keys and values of the first tokens of a block of vLLM's CPU attention, in float32: [2, Hkv, tokens, D]."""
    keys, values = page.unflatten(1, (2, -1)).flatten(2).unflatten(2, (page.shape[1], -1)).unbind(1)
    by_dimension = keys.flatten(1).unflatten(1, (-1, page.shape[1]))
    return torch.stack([by_dimension.mT[:, :tokens], values[:, :tokens]])


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
        adapters: its `Adapters`; None: it has none.
        tolerance: largest difference of a log-probability, for requests without evicted blocks.
    """

    def __init__(self, engine, adapters=None, tolerance=2e-3):
        self.engine, self.adapters, self.tolerance, self._groups = engine, adapters, tolerance, slices_of(engine)
        self.layers = {each.layer for slices in self._groups for each in slices}

    def pages(self, tokens, weights=None):
        """All blocks of a prefix: (layer, block) -> [Hkv, block_size, 2 * D].

        `weights`: `Adapters.newest` of an adapter, at some time; None: the model's own.
        """
        tables, schedule = {}, self.engine.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                tables.update(enumerate(new.block_ids))
            return output

        self.engine.scheduler.schedule = watched
        try:
            self._generate(tokens, weights)
        finally:
            self.engine.scheduler.schedule = schedule
        # The request has ended, and its blocks keep their content until the pool hands them out again.
        return {
            (each.layer, block): each.cache[physical].clone()
            for group, slices in enumerate(self._groups)
            for each in slices
            for block, physical in enumerate(tables[group])
        }

    def compare(self, number, prompt, completion, adapter=None):
        """Compare a completion's log-probabilities with stock's; of an adapter, by its weights now."""
        tokens, rows = completion.token_ids, completion.logprobs
        if adapter is None:
            theirs = self._generate([*prompt, *tokens], prompt_logprobs=0).prompt_logprobs[len(prompt) :]
        else:
            # vLLM's CPU engine has no log-probabilities of prompts beside adapters. A tie may go the other way.
            weights = self.adapters.newest(adapter)
            other = self._generate(prompt, weights, max_tokens=len(tokens), logprobs=0).outputs[0]
            alike = [one == two for one, two in zip(tokens, other.token_ids)]
            count = alike.index(False) if False in alike else len(tokens)
            assert count == len(tokens) or self._tie(rows[count], other.logprobs[count]), f"request {number}: no tie"
            tokens, theirs = tokens[:count], other.logprobs
        got, want = ([row[token].logprob for row, token in zip(each, tokens)] for each in (rows, theirs))
        np.testing.assert_allclose(got, want, atol=self.tolerance, err_msg=f"request {number}, without evicted blocks")

    def _tie(self, *rows):
        one, two = (next(iter(row.values())).logprob for row in rows)
        return abs(one - two) <= 2 * self.tolerance

    def _generate(self, tokens, weights=None, max_tokens=1, **sampling):
        adapter = None if weights is None else self.adapters.alone(*weights)
        # The process has one connector for all engines, and this one has none.
        with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", None):
            (output,) = self.engine.llm.generate(
                [asked(tokens)], greedy(max_tokens, **sampling), use_tqdm=False, lora_request=adapter
            )
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
        #: Hash -> number of the adapter, and tokens.
        self._prefixes = {}
        #: Weights, as `Adapters.newest`, and tokens of a prefix -> layer -> its last block.
        self._pages = {}
        #: Hashes of what the pool has of weights that an adapter had before, and requests that have computed with them.
        self._outdated, self._mixed = set(), set()
        (self._reaching,) = engine.scheduler.mechanisms.of(Reaching) or (None,)
        #: Of host blocks, as `_slices`.
        self._on_host = []
        if self._reaching:
            own = part_of(engine.runtime, HostCopies).blocks.own
            # The first layer of each group has the first page of a block, and so on.
            self._on_host = [
                [replace(each, cache=numbers(page)) for each, page in zip(slices, own)] for slices in self._slices
            ]
        #: "pages" that were compared, "bit-equal" ones, "ends" of prompts among them, and the "worst" difference.
        self.counts = Counter()
        (self._size,) = {manager.block_size for manager in engine.all_managers}
        pool, unit = engine.pool, engine.pool.hash_block_size
        whole, part = pool.cache_full_blocks, pool.cache_partial_block

        def watched(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs):
            whole(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs)
            hashes = resolve_block_hashes(request.block_hashes, unit, block_size)
            for at in range(num_cached_blocks, num_full_blocks):
                self._note(request, hashes[at], (at + 1) * block_size)

        def watched_part(request, block, num_tokens, *args, **kwargs):
            self._note(request, request.block_hashes[num_tokens // unit - 1], num_tokens)
            return part(request, block, num_tokens, *args, **kwargs)

        pool.cache_full_blocks, pool.cache_partial_block = watched, watched_part

    def _note(self, request, block_hash, tokens):
        before = request.block_hashes[: tokens // self.engine.pool.hash_block_size]
        if request.request_id in self._mixed or not self._outdated.isdisjoint(before):
            self._outdated.add(block_hash)
        if block_hash not in self._prefixes:
            self._prefixes[block_hash] = number_of(request.lora_request), tuple(tokens_of(request)[:tokens])

    def reload(self, number):
        """Note that an adapter got other weights. vLLM's prefix cache keeps what it has of the old ones, and what follows."""
        self._outdated |= {each for each, (adapter, _) in self._prefixes.items() if adapter == number}
        for req_id, request in self.engine.scheduler.requests.items():
            if number_of(request.lora_request) == number and request.num_computed_tokens:
                self._mixed.add(req_id)

    def reset(self):
        """Note that nothing is in the prefix cache, and that all requests start over."""
        self._outdated.clear()
        self._mixed.clear()

    def _cached(self):
        """Yield (hash with its group, blocks) of all blocks that can be hit."""
        for key, found in self.engine.pool.cached_block_hash_to_block._cache.items():
            yield key, list(found.values()) if isinstance(found, dict) else [found]

    def compare(self, tolerance):
        """Compare each block that can be hit now with stock's. The engine has to be idle.

        Blocks on the host are of the weights that adapters have now.

        Args:
            tolerance: largest difference of a key or value, in the model's own units.

        Raises:
            AssertionError: a block differs by more, or its tokens are not known.
        """
        cached = [(get_group_id(key), get_block_hash(key), found) for key, found in self._cached()]
        hosted = self._hosted() if self._on_host else {}
        alive = {block_hash for _, block_hash, _ in cached} | set(map(get_block_hash, hosted))
        self._prefixes = {each: prefix for each, prefix in self._prefixes.items() if each in alive}
        wanted = {self._of_now(each) for each in self._prefixes}
        self._pages = {prefix: pages for prefix, pages in self._pages.items() if prefix in wanted}
        # Stock's run of a prefix gives the pages of its own prefixes too.
        for prefix in sorted(wanted, key=lambda prefix: len(prefix[1]), reverse=True):
            if prefix not in self._pages:
                self._compute(*prefix, wanted)
        for group, block_hash, blocks in cached:
            for block in blocks if block_hash not in self._outdated else ():
                self._compare_all(self._slices[group], block.block_id, block_hash, tolerance)
        for key, number in hosted.items():
            self._compare_all(self._on_host[get_group_id(key)], number, get_block_hash(key), tolerance)

    def _of_now(self, block_hash):
        """The weights and the tokens of a hash, as of `_pages`."""
        adapter, tokens = self._prefixes[block_hash]
        return None if adapter is None else self.stock.adapters.newest(adapter), tokens

    def _hosted(self):
        """Hash with its group -> host block, of those that can be hit; the next plan writes others."""
        pool, coming = self._reaching.pool, {copy.number for copy in self.engine.scheduler.next_plan.orders}
        return {key: number for key, number in pool._numbers.items() if number not in coming}

    def _compare_all(self, slices, block, block_hash, tolerance):
        weights, tokens = self._of_now(block_hash)
        self.counts["ends"] += len(tokens) % self._size > 0
        for each in slices:
            self._compare(each, block, self._pages[weights, tokens][each.layer][each.heads], tokens, tolerance)

    def _compute(self, weights, tokens, wanted):
        pages, size, unit = self.stock.pages(list(tokens), weights), self._size, self.engine.pool.hash_block_size
        layers = {layer for layer, _ in pages}
        for end in range(unit, len(tokens) + 1, unit):
            if (weights, tokens[:end]) in wanted:
                self._pages[weights, tokens[:end]] = {layer: pages[layer, (end - 1) // size] for layer in layers}

    def _compare(self, each, block, want, tokens, tolerance):
        got = each.cache[block]
        if filled := len(tokens) % self._size:  # the end of a prompt
            got, want = _first(got, filled), _first(want, filled)
        self.counts["pages"] += 1
        if torch.equal(got, want):
            self.counts["bit-equal"] += 1
            return
        worst = (got - want).abs().max().item()
        self.counts["worst"] = max(self.counts["worst"], worst)
        assert worst <= tolerance, (
            f"published block {block} ({len(tokens)} tokens: {list(tokens[:4])}...{list(tokens[-4:])}): heads "
            f"{each.heads} of {each.layer} differ from stock's by {worst}, where keys and values go up to "
            f"{want.abs().max().item():.3g}"
        )

"""Launches each variant of the plugin's Triton kernels once at start-up, so that no request waits for the compiler.

Triton compiles a kernel again for other dtypes and constants, and for integers that are 1, multiples of 16 or neither.
Integers that differ between steps are not specialised (`triton_kernels.decode_mass.ATTEND_SIZES`), except tile sizes.
So the variants follow from the model, the layout of its cache and the policy. Launches write only vLLM's null block.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...core.actions import Compaction
from ...triton_kernels.combine import padded_splits
from ...triton_kernels.compact import compact
from ...triton_kernels.decode_classes import decode_classes, splits_of
from ...triton_kernels.decode_mass import decode_mass, plan_decode, programs_on
from ...triton_kernels.mass_from_lse import MAX_ROWS
from ...triton_kernels.tiles import MIN_ROWS
from ..group import GroupRuntime
from ..kernels.logits import logits_of
from ..kernels.paged import DecodeShape, PagedAttention
from ..probes import LayerCall, MassKind, MassTarget
from ..runtime import EvictionRuntime
from .device import keys_and_values, slices_of
from .fp8 import scales


class LayerHeads(NamedTuple):
    """The heads of one layer in one KV group.

    Attributes:
        group: index of the KV group.
        query_heads: range of the layer's query heads.
        kv_cache: [num_blocks, Hkv, block_size, 2 * D], cache of these heads; of latents [num_blocks, 1, block_size, D].
        place: of the layer in the KV group.
    """

    group: int
    query_heads: slice
    kv_cache: torch.Tensor
    place: int = 0


def warm_up(
    runtime: EvictionRuntime,
    layers: Sequence[tuple[Any, Sequence[LayerHeads]]],
    tables: Sequence[torch.Tensor],
    queries: int,
    blocks: int,
) -> None:
    """Launch all variants that a worker may need, behind `attention.device.DeviceOps`.

    Args:
        runtime: state of the worker.
        layers: pairs of a layer and its heads in each KV group.
        tables: vLLM's block table of each KV group, int32 [requests, width]. Not read.
        queries: most queries of a step.
        blocks: most blocks of a request.
    """
    runtime.views.warm_up(tables)
    for group in runtime.groups:
        for probe in group.probes:
            probe.warm_up()
    # `DeviceOps` makes plans for powers of two.
    rows, widths = ([1 << power for power in range((most - 1).bit_length() + 1)] for most in (queries, blocks))
    done = set()
    for layer, parts in layers:
        # One call may attend for both parts of a layer.
        for some in [[part] for part in parts] + [parts] * (len(parts) == 2):
            kind = tuple(_kind(layer, part) for part in some)
            if kind not in done:
                done.add(kind)
                _Launches(runtime, layer, some).all(rows, widths, tables[some[0].group])


def _kind(layer: Any, part: LayerHeads) -> tuple[Any, ...]:
    """Return a key of the variants that some heads need."""
    cache = part.kv_cache
    logits, where = logits_of(layer), (part.query_heads.start, cache.data_ptr() % 16)
    heads = part.group, layer.num_heads, layer.num_kv_heads, logits["soft_cap"], logits["sinks"] is None
    return *heads, cache.dtype, cache.shape[1:], cache.stride(), *where


class _Launches:
    """Launches for some heads of one layer, with one request whose blocks are all the null block."""

    def __init__(self, runtime: EvictionRuntime, layer: Any, parts: Sequence[LayerHeads]) -> None:
        self.ops, self.layer, self.parts = runtime.ops, layer, parts
        self.groups = [runtime.groups[part.group] for part in parts]
        measured = any(probe.kinds(1) for group in runtime.groups for probe in group.probes)
        self.decodes = self.groups[0].decodes and (runtime.decodes_lacking or measured)
        self.device, self.block_size = parts[0].kv_cache.device, parts[0].kv_cache.shape[2]
        self.dim, group = layer.impl.head_size, layer.num_heads // layer.num_kv_heads
        self.group_size = group // slices_of(group, self.ops.heads_at_once)
        self.heads = slice(parts[0].query_heads.start, parts[-1].query_heads.stop)

    def all(self, rows: Sequence[int], widths: Sequence[int], table: torch.Tensor) -> None:
        """Launch everything. `rows` and `widths` are the requests and blocks of all plans, `table` is a block table."""
        if len(self.parts) == 1:
            (part,), (group,) = self.parts, self.groups
            for mass in _measured(group, part):
                if mass.heads:
                    self._beside(part, mass)
            if any(mover.kind is Compaction for mover in group.movers):
                self._compact(part)
            for query in self._tensors(1, True):
                group.source.warm_up(LayerCall(self.ops, self.layer, part.place, query, part.kv_cache, None), table)
        if self.decodes:
            for splits, way in product(self._splits(rows, widths), self._ways()):
                self._decode(splits, way)

    def _ways(self) -> Iterator[list[MassKind]]:
        """Yield the mass, for each part, of all decodes that may occur."""
        yield [MassKind()] * len(self.parts)
        for index, (group, part) in enumerate(zip(self.groups, self.parts)):
            for mass in _measured(group, part):
                way = [mass._replace(heads=0)] * len(self.parts)
                way[index] = mass
                yield way

    def _splits(self, rows: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
        """Return numbers of splits for each class, one choice for each variant of the kernels."""
        kv_heads, programs = [part.kv_cache.shape[1] for part in self.parts], programs_on(self.device)
        choices: dict[tuple[int, ...], list[int]] = {}
        for count, *blocks in product(rows, *[widths] * len(self.parts)):
            splits = splits_of(count, kv_heads, [width * self.block_size for width in blocks], programs)
            choices.setdefault(tuple(map(padded_splits, splits)), splits)
        return list(choices.values())

    def _decode(self, splits: Sequence[int], way: Sequence[MassKind]) -> None:
        keys, values = zip(*(keys_and_values(self.layer, part.kv_cache) for part in self.parts))
        scale, value_scale = scales(self.layer, keys[0])
        table, starts, lens, row = self._batch(1)
        kv_heads = [its.shape[1] for its in keys]
        query_heads = [self.group_size * each for each in kv_heads]
        of_layer = self.dim, self.block_size, 1, self.layer.dtype, self.device
        plans = [
            plan_decode(DecodeShape(1, heads, each, *of_layer), per_token=way[0].per_token, splits=pieces)
            for heads, each, pieces in zip(query_heads, kv_heads, splits)
        ]
        weights, outs = self._weights(1, way[0]), [self._out(1, mass) for mass in way]
        shared = {"weights": weights, "per_token": way[0].per_token, **logits_of(self.layer)}
        for query, output in product(self._tensors(1, True), self._tensors(1)):
            outputs = output.split(query_heads, 1)
            classes = [
                PagedAttention(its, k, table, starts, lens, scale, v, value_scale, mass=out, **shared)
                for its, k, v, out in zip(query.split(query_heads, 1), keys, values, outs)
            ]
            if len(classes) == 2:
                decode_classes(classes, row, outputs, plans=plans)
            elif not self.ops.decoding.in_cuda(classes[0]):
                decode_mass(classes[0], row, output, plan=plans[0])

    def _beside(self, part: LayerHeads, mass: MassKind) -> None:
        """Launch `mass` beside a stock kernel, for all tile sizes: tiles have queries times G rows."""
        sizes = [1 << power for power in range(MIN_ROWS.bit_length() - 1, MAX_ROWS.bit_length())]
        for tokens in sorted({1, *(size // 2 // self.group_size + 1 for size in sizes)}):
            table, starts, lens, _ = self._batch(tokens)
            metadata = SimpleNamespace(
                block_table=table, query_start_loc=starts, seq_lens=lens, max_query_len=tokens, max_seq_len=tokens,
                num_actual_tokens=tokens,
            )  # fmt: skip
            for query in self._tensors(tokens, True):
                # Several queries with weights come with the number of those that count (`MassStep.last`).
                last = lens if mass.weighted and tokens > 1 else None
                measured = MassTarget(self._out(tokens, mass), self._weights(tokens, mass), mass.per_token, last)
                self.ops.warm_up_mass(LayerCall(self.ops, self.layer, 0, query, part.kv_cache, metadata), measured)

    def _compact(self, part: LayerHeads) -> None:
        """Launch `compact`, which copies each token of the null block to itself."""
        tokens = torch.arange(self.block_size, dtype=torch.int32, device=self.device)
        keep = tokens.expand(1, part.kv_cache.shape[1], -1).contiguous()
        block = torch.zeros(1, dtype=torch.int32, device=self.device)
        for ordered in (True, False):
            compact([part.kv_cache], block, keep, block, ordered=ordered)

    def _tensors(self, tokens: int, beside: bool = False) -> Iterator[torch.Tensor]:
        """Yield queries or outputs [T, H, D], one for each variant of their strides.

        They are separate tensors, parts of the layer's tensor, or (`beside`) parts of a tensor with keys and values.
        """
        mine, heads = self.heads.stop - self.heads.start, self.layer.num_heads
        of_row = [mine, heads] + [heads + 2 * self.layer.num_kv_heads] * beside
        for width in {width * self.dim % 16 == 0: width for width in of_row}.values():
            first = self.heads.start if width >= heads else 0
            rows = torch.zeros(tokens, width, self.dim, dtype=self.layer.dtype, device=self.device)
            yield rows[:, first : first + mine]

    def _batch(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return block table, offsets of queries, lengths and rows of one request."""
        numbers = [0] * -(-tokens // self.block_size), [0, tokens], [tokens], [0]
        table, *others = (torch.tensor(each, dtype=torch.int32, device=self.device) for each in numbers)
        return table[None], *others

    def _weights(self, tokens: int, mass: MassKind) -> torch.Tensor | None:
        return torch.ones(tokens, device=self.device) if mass.weighted else None

    def _out(self, tokens: int, mass: MassKind) -> torch.Tensor | None:
        width = tokens if mass.per_token else -(-tokens // self.block_size)
        return torch.zeros(1, mass.heads, width, device=self.device) if mass.heads else None


def _measured(group: GroupRuntime, part: LayerHeads) -> list[MassKind]:
    """Return the kinds of mass that one call measures for heads of a KV group."""
    return [kind for probe in group.probes for kind in probe.kinds(part.kv_cache.shape[1])]

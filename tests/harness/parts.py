"""The parts of a KV group's runtime, by their classes; holes and orders of a plan."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_evict.compute.attention.ops import BatchMetadata
from vllm_evict.compute.kernels.codes import packed_bytes, store_codes
from vllm_evict.compute.mass import BlockMass, TokenMass
from vllm_evict.core.residence import HOLE


def part_of(group, kind):
    """The part of that class; None if the group has none."""
    found = [part for part in (group.source, *group.probes, *group.movers) if type(part) is kind]
    return found[0] if found else None


def sums_of(group):
    """Running sums by block; None if there are none."""
    probe = part_of(group, BlockMass)
    return None if probe is None else probe.sums


def tokens_of(group):
    """Running sums by token; None if there are none."""
    probe = part_of(group, TokenMass)
    return None if probe is None else probe.sums


def stored_codes(keys):
    """Return the bytes that the server's kernel stores for keys of full blocks: uint8 [n, Hkv, X]."""
    _, heads, tokens, dims = keys.shape
    index = torch.zeros(len(keys), heads, packed_bytes(tokens, dims), dtype=torch.uint8)
    store_codes(index, torch.arange(len(keys)), keys)
    return index


def holes_of(changes):
    """Request -> its blocks that are holes by the changes of a plan; requests that have none are left out."""
    holes = {
        req_id: [block for block, physical in blocks.items() if physical == HOLE] for req_id, blocks in changes.items()
    }
    return {req_id: blocks for req_id, blocks in holes.items() if blocks}


def published(server, group):
    """Logical blocks of an engine's only request under whose hash something can be hit in a KV group."""
    (request,) = server.scheduler.requests.values()
    hashes = enumerate(request.block_hashes)
    return [block for block, hashed in hashes if server.pool.get_cached_block(hashed, [group])]


def orders_of(plan, kind):
    """The orders of one class, in the order of the plan."""
    return [order for order in plan.orders if isinstance(order, kind)]


def batch_of(req_ids, starts, seq_lens, lens, logical=None, held=None, **more):
    """The part of a step's `StepBatch` that running sums read; `lens` are on the device, and `held` the same on the
    host.
    """
    known = {"verified": None, "lengths": None, "slack": None, "resident_tokens": held, **more}
    return SimpleNamespace(
        req_ids=req_ids, starts=starts, queries=np.diff(starts), seq_lens=seq_lens, lens=lens, logical=logical, **known
    )


class Drawn:
    """One layer's call, for steps of probes without kernels: `mass` adds to the memory that kernels would add to.

    Args:
        mass: (weights or None, memory) -> None.
        kv_heads, heads: KV heads and query heads of the layer.
        mass_of: (queries, width) -> the mass of each query.
        place: of the layer.
    """

    def __init__(self, mass, kv_heads, heads, mass_of=None, place=0):
        self._mass, self.kv_heads, self.place, self.ops = mass, kv_heads, place, self
        self.query = torch.empty(0, heads, 0)
        self.mass_of = lambda call, *asked: mass_of(*asked)
        self.metadata, self.batch = None, BatchMetadata()

    def on(self, step):
        """Let the step take in the layer."""
        if (out := step.out(self)) is not None:
            self._mass(step.weights, out)
        step.add(self)

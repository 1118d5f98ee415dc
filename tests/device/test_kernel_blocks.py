"""Operations behind kernels that read smaller blocks than the pool's, against the same operations on whole blocks."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from vllm_evict.compute.attention.backends import ops_for
from vllm_evict.compute.attention.by_kernel_blocks import with_kernel_blocks
from vllm_evict.compute.attention.triton import TritonOps
from vllm_evict.compute.kernel_blocks import KernelBlockViews
from vllm_evict.compute.kernels.queries import Queries
from vllm_evict.compute.probes import LayerCall, MassTarget

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
BLOCK, KERNEL, BLOCKS, HEADS, DIM = 48, 16, 9, 2, 32
COUNT = BLOCK // KERNEL
LAYER = SimpleNamespace(
    dtype=torch.float32,
    num_heads=4,
    num_kv_heads=HEADS,
    impl=SimpleNamespace(scale=0.2, head_size=DIM, sliding_window=(-1, -1), alibi_slopes=None, logits_soft_cap=0),
)
#: Of a prompt's chunk and a decode, in the pool's blocks.
TABLE, LENS, STARTS = torch.tensor([[3, 7, 1], [5, 2, 0]]), torch.tensor([130, 60]), torch.tensor([0, 5, 6])


def by_kernels(pages):
    """Pages [blocks, heads, BLOCK, 2 * DIM] by kernel blocks."""
    return pages.unflatten(2, (COUNT, KERNEL)).transpose(1, 2).flatten(0, 1).contiguous()


def split(blocks):
    return (blocks[..., None] * COUNT + torch.arange(COUNT)).flatten(-2)


def batch(table):
    return SimpleNamespace(
        num_actual_tokens=6,
        block_table=table.int(),
        query_start_loc=STARTS.int(),
        seq_lens=LENS.int(),
        max_query_len=5,
        max_seq_len=130,
    )


@dataclass
class Pass:
    """The part of vLLM's `CommonAttentionMetadata` that a drafter's pass has."""

    block_table_tensor: torch.Tensor
    max_seq_len: int


@pytest.fixture
def both():
    """Operations with pages and a batch, by the pool's blocks and by the kernels'."""
    pages = torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM, generator=torch.Generator().manual_seed(0))
    whole, ops = TritonOps(), with_kernel_blocks(TritonOps, BLOCK)()
    return (whole, pages, batch(TABLE)), (ops, by_kernels(pages), batch(split(TABLE)))


QUERY = torch.randn(6, 4, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads, per_token", [(HEADS, False), (1, False), (HEADS, True)])
def test_mass_is_by_the_pools_blocks_or_by_token(both, heads, per_token):
    found = []
    for ops, pages, metadata in both:
        out = torch.ones(2, heads, 3 * BLOCK if per_token else 3)
        output, unmeasured, rows = torch.zeros_like(QUERY), torch.zeros_like(QUERY), torch.tensor([1]).int()
        call, measured = LayerCall(ops, LAYER, 0, QUERY, pages, metadata, output), MassTarget(out, per_token=per_token)
        ops.mass(call, measured)
        ops.decode(call, rows, metadata.seq_lens, measured)
        ops.decode(replace(call, output=unmeasured), rows, metadata.seq_lens, MassTarget())
        assert torch.equal(unmeasured, output) and output[5].abs().sum() > 0
        found.append((out, output))
    torch.testing.assert_close(*found)
    assert float((found[0][0] - 1).sum()) == pytest.approx((6 + 1) * 4, rel=1e-4)


def test_mass_of_single_queries(both):
    queries = Queries(torch.tensor([4, 5]), torch.tensor([0, 1]), LENS.int())
    calls = [LayerCall(ops, LAYER, 0, QUERY, pages, metadata) for ops, pages, metadata in both]
    whole, found = (call.ops.mass_of(call, queries, 3) for call in calls)
    assert found.shape == (2, HEADS, 3)
    torch.testing.assert_close(found, whole)


def test_blocks_are_read_written_and_compacted(both):
    (whole, pages, _), (ops, small, _) = both
    blocks, new = torch.tensor([5, 2]), torch.randn(2, 2, HEADS, BLOCK, DIM)
    for values in (True, False):
        torch.testing.assert_close(ops.read(LAYER, small, blocks, values), whole.read(LAYER, pages, blocks, values))
    for each, cache in ((whole, pages), (ops, small)):
        each.write(LAYER, cache, blocks, *new)
    assert torch.equal(small, by_kernels(pages))
    kept = torch.rand(1, HEADS, 2 * BLOCK, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :BLOCK]
    source, target = torch.tensor([3, 7], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for each, cache in ((whole, pages), (ops, small)):
        each.compact(LAYER, [cache], source, kept.sort(-1).values.int(), target)
    assert torch.equal(small[split(target)], by_kernels(pages)[split(target)])


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_a_drafters_pass_gets_a_view_of_kernel_blocks(holes, in_step):
    """After a step of the table that vLLM has split, and with a step of the runner's own."""
    seen = []

    def drafting_view(metadata):
        seen.append(metadata.block_table_tensor)
        return replace(metadata, block_table_tensor=TABLE[:, [0, 2, 1]], max_seq_len=2 * BLOCK) if holes else metadata

    group = SimpleNamespace(
        block_size=BLOCK,
        device=torch.device("cpu"),
        drafting_view=drafting_view,
        in_step=in_step,
        views=SimpleNamespace(memory=lambda _: SimpleNamespace(table=TABLE), table_of=lambda _: TABLE.int()),
    )
    metadata = Pass(split(TABLE).int(), 3 * BLOCK)
    viewed = KernelBlockViews(group, KERNEL).drafting_view(metadata)
    assert torch.equal(seen[0], TABLE.int()) and (viewed is metadata) == (not holes)
    if holes:
        assert torch.equal(viewed.block_table_tensor[:, : 2 * COUNT], split(TABLE[:, [0, 2]]).int())


def test_kernels_on_a_cpu_and_of_latents_have_none():
    for backend in ("CPU_ATTN", "CPU_MLA", "TRITON_MLA"):
        assert not ops_for(backend, BLOCK).by_kernel_blocks
    assert ops_for("FLASHINFER", BLOCK).by_kernel_blocks and not ops_for("FLASHINFER").splits_blocks

"""`decode_mass` for a layer whose heads form two classes, each with a block table of its own."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ..compute.kernels.decode import decode_classes_reference  # noqa: F401  (the reference)
from ..compute.kernels.paged import DecodeShape, PagedAttention
from .combine import COMBINE_OPTIONS, COMBINE_SIZES, MAX_SPLITS, combine_splits
from .decode_mass import (
    ATTEND_SIZES,
    MIN_SPLIT_TOKENS,
    STAGES,
    WARPS,
    DecodePlan,
    attend_split,
    check_arguments,
    launch_of,
    plan_decode,
    programs_on,
)
from .tiles import LOG2_E, require


def plan_classes(
    shapes: Sequence[DecodeShape],
    *,
    mass: bool = True,
    per_token: bool = False,
    splits: Sequence[int] | None = None,
    take: Callable[..., torch.Tensor] = torch.empty,
) -> list[DecodePlan]:
    """Make a plan for each class (see `plan_decode`). Classes differ in heads and blocks.

    Splits have about the same length in all classes. All classes together have as many programs as `plan_decode` makes.
    """
    if splits is None:
        kv_heads, tokens = zip(*((shape.kv_heads, shape.max_blocks * shape.block_size) for shape in shapes))
        splits = splits_of(shapes[0].rows, kv_heads, tokens, programs_on(shapes[0].device))
    return [
        plan_decode(shape, mass=mass, per_token=per_token, splits=pieces, take=take)
        for shape, pieces in zip(shapes, splits)
    ]


def splits_of(rows: int, kv_heads: Sequence[int], tokens: Sequence[int], programs: int) -> list[int]:
    """Return the number of splits of each class.

    Args:
        rows: requests.
        kv_heads, tokens: for each class its KV heads, and the tokens of its longest request.
        programs: number of programs that fill the device.
    """
    work = max(rows * sum(heads * longest for heads, longest in zip(kv_heads, tokens)), 1)
    share = max(triton.cdiv(work, programs), MIN_SPLIT_TOKENS)
    return [max(min(triton.cdiv(longest, share), MAX_SPLITS), 1) for longest in tokens]


def decode_classes(
    classes: Sequence[PagedAttention],
    rows: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    lses: Sequence[torch.Tensor | None] = (None, None),
    plans: Sequence[DecodePlan] | None = None,
) -> None:
    """`compute.kernels.decode.decode_classes` for two classes, in the two launches of `decode_mass`.

    A program works on a request, a KV head and a split of one class, so long and short classes fill the device
    together. With plans the outputs are those of `decode_mass` on each class alone with its plan, to the bit, and a
    CUDA graph can capture the launches.

    Args:
        classes: of each class its heads. Offsets of queries, scales, soft caps, weights, `per_token`, bs, D and dtypes
            of caches agree.
        rows: as for `decode_mass`.
        outputs, lses: for each class, as for `decode_mass`.
        plans: from `plan_classes`; None makes them.
    """
    require(len(classes) == len(outputs) == len(lses) == 2, "classes, outputs and lses must be of two classes")
    for attention, output, lse in zip(classes, outputs, lses):
        check_arguments(attention, rows, output, lse)
    n, one, kv_heads = len(rows), classes[0], [attention.key_cache.shape[1] for attention in classes]
    if not n:
        return
    if plans is None:
        shapes, wanted = [DecodeShape.of(each, n) for each in classes], any(each.mass is not None for each in classes)
        plans = plan_classes(shapes, mass=wanted, per_token=one.per_token)
    first, second = (launch_of(*each, n) for each in zip(classes, outputs, lses, plans))
    require(one.key_cache.dtype == classes[1].key_cache.dtype, "caches of both classes must have one dtype")
    require(
        first.attend_shape[:-1] == second.attend_shape[:-1], "classes must agree in block size, soft cap and weights"
    )
    has_mass = first.attend_shape[-1] or second.attend_shape[-1]
    shared = one.query_start_loc, rows, one.weights
    _attend_classes[(sum(count * plan.splits for count, plan in zip(kv_heads, plans)), n)](
        *shared, one.scale * LOG2_E, first.attend, second.attend, *first.attend_sizes, *second.attend_sizes,
        *first.attend_shape[:-1], has_mass, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _combine_classes[(n, first.roles + second.roles)](
        *shared, one.value_scale, first.combine, second.combine, first.roles,
        *first.combine_sizes, *second.combine_sizes,
        FIRST=first.combine_shape, SECOND=second.combine_shape, **COMBINE_OPTIONS,
    )  # fmt: skip


# Sizes that differ between steps or layers are separate arguments, since Triton specialises all numbers in a tuple.
@triton.jit(do_not_specialize=[f"{each}_{size}" for each in ("first", "second") for size in ATTEND_SIZES])
def _attend_classes(
    starts, rows, weights, scale, first, second,
    first_stride_table, first_kv_heads, first_capacity, first_splits,
    second_stride_table, second_kv_heads, second_capacity, second_splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GRANULES: tl.constexpr,
    SOFT_CAP: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_MASS: tl.constexpr,
):  # fmt: skip
    """Programs of the first class, then those of the second class; in a class by split, then by KV head."""
    program = tl.program_id(0)
    is_first = program < first_kv_heads * first_splits
    # One body with selected arguments: a body for each class would take its own shared memory.
    mine = ()
    for i in tl.static_range(len(first)):
        mine += (tl.where(is_first, first[i], second[i]),)
    program -= tl.where(is_first, 0, first_kv_heads * first_splits)
    splits = tl.where(is_first, first_splits, second_splits)
    kv_heads = tl.where(is_first, first_kv_heads, second_kv_heads)
    attend_split(
        tl.program_id(1), program % kv_heads, program // kv_heads, starts, rows, weights, scale, *mine,
        tl.where(is_first, first_stride_table, second_stride_table), kv_heads,
        tl.where(is_first, first_capacity, second_capacity), splits,
        HEAD_DIM, DIM, BLOCK_SIZE, TOKENS, PARTS, HAS_WEIGHTS, GROUP, ROWS, GRANULES, SOFT_CAP, PER_TOKEN, HAS_MASS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["first_roles", *(f"{each}_{size}" for each in ("first", "second") for size in COMBINE_SIZES)]
)
def _combine_classes(
    starts, rows, weights, value_scale, first, second, first_roles,
    first_heads, first_heads_out, first_capacity, first_splits, first_measured, first_chunks,
    first_stride_mr, first_stride_mh,
    second_heads, second_heads_out, second_capacity, second_splits, second_measured, second_chunks,
    second_stride_mr, second_stride_mh,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    # Constants are passed one by one, since Triton 3.6 cannot unpack them.
    role = tl.program_id(1)
    if role < first_roles:
        combine_splits(
            role, starts, rows, weights, value_scale, *first,
            first_heads, first_heads_out, first_capacity, first_splits, first_measured, first_chunks,
            first_stride_mr, first_stride_mh,
            FIRST[0], FIRST[1], FIRST[2], FIRST[3], FIRST[4], FIRST[5],
            FIRST[6], FIRST[7], FIRST[8], FIRST[9], FIRST[10], FIRST[11],
        )  # fmt: skip
    else:
        combine_splits(
            role - first_roles, starts, rows, weights, value_scale, *second,
            second_heads, second_heads_out, second_capacity, second_splits, second_measured, second_chunks,
            second_stride_mr, second_stride_mh,
            SECOND[0], SECOND[1], SECOND[2], SECOND[3], SECOND[4], SECOND[5],
            SECOND[6], SECOND[7], SECOND[8], SECOND[9], SECOND[10], SECOND[11],
        )  # fmt: skip

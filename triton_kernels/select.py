"""Which blocks go, chosen on the device for a whole batch in one launch."""

import torch
import triton
import triton.language as tl

from .tiles import check_int32, require

# Scores that a program keeps in registers (32 a thread at 8 warps): 128k tokens in blocks of 16. Longer rows are read
# again, from cache, in each of the 32 rounds.
MAX_CHUNK = 8192


def select(
    scores: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    k: torch.Tensor,
    victims: torch.Tensor,
    counts: torch.Tensor,
    *,
    chunk: int | None = None,
) -> None:
    """The k[r] least scores among entries first[r] .. last[r] - 1 of each row; of equal ones, the oldest.

    The choice is that of a stable argsort, as in `core.residency`. Entries before `first` (sinks) and from `last` on
    (recent window, padding) are protected. -0.0 equals 0.0; NaN comes last.

    A radix select, a bit a round: one program a row finds the k-th least key in 32 counts, takes all below it and the
    oldest that equal it. It reads nothing on the host and allocates nothing, so a CUDA graph can capture it.

    Args:
        scores: float32 [R, W], row stride arbitrary, in the order of the resident blocks.
        first, last: int32 [R], limits of what may go.
        k: int32 [R], how many go; what is below 0 or above the candidates or V is cut to that.
        victims: int32 [R, V], gets the chosen entries, ascending, then -1.
        counts: int32 [R], gets their number.
        chunk: entries in a round, a power of two; None chooses.

    Bytes moved: 4 for each candidate (33 times, but for the first from cache, where a row is longer than a chunk),
    4 * V for each row, 16 for its limits.
    """
    if scores.dtype != torch.float32:
        raise TypeError("scores must be float32")
    check_int32(first=first, last=last, k=k, victims=victims, counts=counts)
    for name, tensor in (("scores", scores), ("victims", victims)):
        require(tensor.dim() == 2 and tensor.stride(1) == 1, f"{name} must be 2-dimensional with dense rows")
    for tensor in (first, last, k, counts):
        require(tensor.shape == (len(scores),) and tensor.is_contiguous(), "limits and counts must be dense [R]")
    require(len(victims) == len(scores), "scores and victims must have the same number of rows")
    if not len(scores):
        return
    width = scores.shape[1]
    chunk = chunk or min(triton.next_power_of_2(max(width, victims.shape[1])), MAX_CHUNK)
    _select[(len(scores),)](
        scores, first, last, k, victims, counts, scores.stride(0), victims.stride(0), width, victims.shape[1],
        ONE_CHUNK=chunk >= width, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4,
    )  # fmt: skip


@triton.jit
def _keys(scores, index, first, last):
    """Unsigned keys in the order of the scores, and which entries are candidates."""
    candidate = (index >= first) & (index < last)
    score = tl.load(scores + index, mask=candidate, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    # Negative numbers fall with their magnitude; a NaN of either sign goes above +inf.
    key = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (key ^ -0x80000000).to(tl.uint32, bitcast=True), candidate


@triton.jit
def _select(
    scores, first, last, k, victims, counts, stride_scores, stride_victims, width, capacity,
    ONE_CHUNK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride_scores
    victims += row * stride_victims
    low = tl.maximum(tl.load(first + row), 0)
    high = tl.minimum(tl.load(last + row), width)
    wanted = tl.maximum(tl.minimum(tl.minimum(tl.load(k + row), high - low), capacity), 0)
    lanes = tl.arange(0, CHUNK)
    if ONE_CHUNK:
        key, candidate = _keys(scores, lanes, low, high)

    # The wanted-th least key, from its highest bit down; `ties` of the keys that equal it are taken.
    threshold = tl.zeros([], tl.uint32)
    ties = wanted
    for shift in range(31, -1, -1):
        below = 0  # candidates that share the bits above and have a 0 here
        if ONE_CHUNK:
            below = tl.sum((candidate & ((key >> shift) == (threshold >> shift))).to(tl.int32), 0)
        else:
            for start in range(0, high, CHUNK):
                key, candidate = _keys(scores, start + lanes, low, high)
                below += tl.sum((candidate & ((key >> shift) == (threshold >> shift))).to(tl.int32), 0)
        above = ties > below
        threshold = tl.where(above, threshold | (tl.full([], 1, tl.uint32) << shift), threshold)
        ties = tl.where(above, ties - below, ties)

    chosen = 0
    equals = 0
    if wanted > 0:
        for start in range(0, high, CHUNK):
            key, candidate = _keys(scores, start + lanes, low, high)
            equal = (candidate & (key == threshold)).to(tl.int32)
            older = equals + tl.cumsum(equal, 0) - equal
            taken = (candidate & ((key < threshold) | ((equal != 0) & (older < ties)))).to(tl.int32)
            place = chosen + tl.cumsum(taken, 0) - taken
            tl.store(victims + place, start + lanes, mask=taken != 0)
            chosen += tl.sum(taken, 0)
            equals += tl.sum(equal, 0)
    tl.store(counts + row, wanted)
    for start in range(wanted, capacity, CHUNK):
        tl.store(victims + start + lanes, tl.full([CHUNK], -1, tl.int32), mask=start + lanes < capacity)


def select_reference(
    scores: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    k: torch.Tensor,
    victims: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`select` in plain torch."""
    victims.fill_(-1)
    for row, (low, high, wanted) in enumerate(zip(first.tolist(), last.tolist(), k.tolist(), strict=True)):
        low, high = max(low, 0), min(high, scores.shape[1])
        wanted = max(min(wanted, high - low, victims.shape[1]), 0)
        counts[row] = wanted
        if wanted:
            order = scores[row, low:high].argsort(stable=True)
            victims[row, :wanted] = low + order[:wanted].sort().values

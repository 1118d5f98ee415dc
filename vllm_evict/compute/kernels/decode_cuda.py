"""`decode_mass` in CUDA C++ (csrc/cuda), for bfloat16 and float16 on GPUs from compute capability 8.0 on.

It has the contract of `triton_kernels.decode_mass`, which runs for inputs that this kernel does not support
(`refused`). The library is called by ctypes and does not link torch, so one build serves any version of torch.
"""

import ctypes
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from ...environment import decode_kernel
from .paged import DecodeShape, PagedAttention, require

logger = logging.getLogger("vllm.evict")

MODULE = "vllm_evict._C_cuda"
DTYPES = (torch.bfloat16, torch.float16)
#: Head size -> most query heads of a KV head, bounded by registers.
MOST_GROUP = {64: 16, 128: 16, 256: 8}
CHUNK = 16  # tokens of a granule; the block size is a multiple
ALIGNED = 16  # bytes, alignment of each row of keys and values
LEAST_CAPABILITY, BULK_CAPABILITY = (8, 0), (9, 0)

# H100 and H200 (SXM), for plans on a machine without a GPU
HOPPER_SMS, HOPPER_SHARED_BYTES = 132, 228 * 1024
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 128
# Cost of a split in tokens: its start, and its output written and read. A guess, not measured.
SPLIT_COST = 64

LOG2_E = 1.4426950408889634

_POINTERS = (
    *("query", "keys", "values", "table", "starts", "lens", "rows", "weights", "partial", "stats", "granules"),
    *("output", "lse", "mass"),
)
_SIZES = (
    *("query_token", "query_head", "key_block", "key_head", "key_token", "value_block", "value_head", "value_token"),
    *("table_row", "output_token", "output_head", "lse_token", "lse_head", "mass_row", "mass_head"),
    *("n", "kv_heads", "group", "head_dim", "block_size", "splits", "capacity", "measured", "mass_heads"),
    *("depth", "half", "bulk"),
)


class _Args(ctypes.Structure):
    """`DecodeArgs` of csrc/cuda/decode_mass.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_double),
    ]


class Library:
    """The compiled kernels.

    Raises:
        OSError: `path` cannot be loaded, or has another version.
    """

    def __init__(self, path: str) -> None:
        self.handle = ctypes.CDLL(path)
        try:
            size = self.handle.vllm_evict_decode_args_size
            self._decode, self._error = self.handle.vllm_evict_decode_mass, self.handle.vllm_evict_error
        except AttributeError as error:
            raise OSError(str(error)) from None
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(_Args):
            raise OSError(f"{path} is of another version: build it again")
        self._decode.argtypes = ctypes.POINTER(_Args), ctypes.c_void_p
        self._error.restype = ctypes.c_char_p

    def decode_mass(self, args: _Args, stream: int) -> None:
        code = self._decode(args, stream)
        if code:
            raise RuntimeError(f"decode_mass in CUDA: {self._error(code).decode()}")


@cache
def library() -> Library:
    """Load `vllm_evict._C_cuda`.

    Raises:
        OSError: the library was not built, or does not load.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise OSError(f"{MODULE} was not built (install with VLLM_EVICT_BUILD_CUDA=1 where nvcc is)")
    return Library(spec.origin)


def missing() -> str | None:
    """Return why the kernel cannot run in this process; None if it can."""
    try:
        library()
    except OSError as error:
        return str(error)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return "no GPU of compute capability 8.0 or above"
    return None


def refused(attention: PagedAttention) -> str | None:
    """Return why the kernel does not support these arguments; None if it supports them."""
    query, key_cache, value_cache = attention.query, attention.key_cache, attention.value_cache
    if value_cache is None or attention.per_token or attention.soft_cap or attention.sinks is not None:
        return "the kernel needs values, and computes no mass of tokens, no soft caps and no sinks"
    if query.dtype not in DTYPES or key_cache.dtype != query.dtype or value_cache.dtype != query.dtype:
        return "query and caches must have one dtype: bfloat16 or float16"
    head_dim, kv_heads, block_size = query.shape[2], key_cache.shape[1], key_cache.shape[2]
    if head_dim not in MOST_GROUP:
        return f"the head size must be one of {', '.join(map(str, MOST_GROUP))}"
    if query.shape[1] % kv_heads or query.shape[1] // kv_heads > MOST_GROUP[head_dim]:
        return f"query must have 1 to {MOST_GROUP[head_dim]} heads for each of the caches'"
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim or block_size % CHUNK:
        return "caches must be [num_blocks, Hkv, bs, D], of one shape, bs a multiple of 16"
    # A load takes two elements of a query, and eight of a key or value.
    for tensor, size in ((query, 2), (key_cache, ALIGNED // 2), (value_cache, ALIGNED // 2)):
        *outer, last = tensor.stride()
        if last != 1 or tensor.data_ptr() % (2 * size) or any(stride % size for stride in outer):
            return "rows of query and caches must be contiguous, the caches' aligned to 16 bytes"
    return None


class CudaPlan(NamedTuple):
    """Launch sizes and scratch of `decode_mass`. They follow from shapes, so layers of one shape share a plan.

    Attributes:
        splits, max_blocks, partial, stats: as in `triton_kernels.decode_mass.DecodePlan`.
        granules: float32 [n, Hkv, max_blocks * bs / 16, G], log2 of each 16 tokens' sum of exponentials; None: no mass.
        depth: most chunks of 16 tokens in flight for each of a program's four warps.
        bulk: whether bulk copies (compute capability 9.0) load keys and values, instead of cp.async.
    """

    splits: int
    max_blocks: int
    partial: torch.Tensor
    stats: torch.Tensor
    granules: torch.Tensor | None
    depth: int
    bulk: bool


def plan_decode(
    shape: DecodeShape,
    *,
    mass: bool = True,
    splits: int | None = None,
    depth: int | None = None,
    bulk: bool | None = None,
    take: Callable[..., torch.Tensor] = torch.empty,
) -> CudaPlan:
    """Make a plan for launches of up to these sizes.

    Args:
        shape: of the launches.
        mass: whether there is scratch for mass.
        splits: None chooses. The last bits of outputs depend on it, so a fixed number makes them independent of the
            batch.
        depth: None takes the largest with which three programs fit on an SM, or two if there are only two for each SM.
        bulk: None takes bulk copies if the device has them.
        take: allocates scratch, called like `torch.empty`.
    """
    rows, heads, kv_heads, head_dim = shape.rows, shape.heads, shape.kv_heads, shape.head_dim
    device, tokens = shape.device, shape.max_blocks * shape.block_size
    on_gpu = torch.device(device).type == "cuda"
    if bulk is None:
        bulk = not on_gpu or torch.cuda.get_device_capability(device) >= BULK_CAPABILITY
    sms, shared = HOPPER_SMS, HOPPER_SHARED_BYTES
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        sms, shared = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    together = 2 if heads // kv_heads > 8 or head_dim > 128 else 3  # programs on an SM, bounded by registers
    if splits is None:
        splits = splits_for(rows * kv_heads, tokens, together * sms)
    if depth is None:
        depth = depth_for(head_dim, 2 if rows * kv_heads * splits <= 2 * sms else together, shared)

    def scratch(*sizes: int) -> torch.Tensor:
        return take(rows, *sizes, dtype=torch.float32, device=device)

    granules = scratch(kv_heads, tokens // CHUNK, heads // kv_heads) if mass else None
    partial, stats = scratch(heads, splits, head_dim), scratch(heads, splits, 2)
    return CudaPlan(splits, shape.max_blocks, partial, stats, granules, depth, bulk)


def splits_for(pairs: int, tokens: int, places: int) -> int:
    """Return the number of splits with the least time, and of equal ones the smallest.

    Time is the number of waves of programs times the cost of a split, since a wave that is mostly empty takes as long
    as a full one.

    Args:
        pairs: number of pairs of a request and a KV head.
        tokens: tokens of each request.
        places: number of programs that run at once.
    """
    most = max(min(-(-tokens // MIN_SPLIT_TOKENS), MAX_SPLITS), 1)
    return min(range(1, most + 1), key=lambda n: -(-max(pairs, 1) * n // places) * (-(-tokens // n) + SPLIT_COST))


def depth_for(head_dim: int, programs: int, shared: int = HOPPER_SHARED_BYTES) -> int:
    """Return the most chunks in flight for each of four warps, if `programs` share the shared memory of an SM."""
    chunk = CHUNK * (4 * head_dim + 16) + 16  # rows of a key, a value and 16 bytes, and two barriers
    return max((shared // programs - 1024) // (4 * chunk), 1)  # CUDA takes 1 KiB of each


def decode_mass(
    attention: PagedAttention,
    rows: torch.Tensor,
    output: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    plan: CudaPlan | None = None,
    kernels: Library | None = None,
) -> None:
    """`triton_kernels.decode_mass.decode_mass` for arguments that `refused` accepts.

    It makes two launches on the current stream of the query's device, which must be the current device.

    Args:
        plan: from `plan_decode`; None makes one.
        kernels: None takes `library()`.

    Raises:
        ValueError: `refused` names a reason, or a shape or stride is wrong.
        TypeError: an int32 or float32 tensor has another dtype.
        OSError: the library was not built or does not load.
        RuntimeError: a launch failed, for the reason in the message.

    Bytes moved, for each request: 2 * seq_len * Hkv * D * 2 of keys and values, once. Beside them, written and read,
    4 * H * (D + 2) a split and 4 * H every 16 tokens for the mass: G / (8 * D) of the bytes, 0.4 % for G = 4, D = 128.
    """
    _check(attention, rows, output, lse)
    query, key_cache, value_cache = attention.query, attention.key_cache, attention.value_cache
    block_table, mass, weights = attention.block_table, attention.mass, attention.weights
    assert value_cache is not None
    n, heads, head_dim = len(rows), query.shape[1], query.shape[2]
    kv_heads, block_size = key_cache.shape[1:3]
    if not n:
        return
    if plan is None:
        plan = plan_decode(DecodeShape.of(attention, n), mass=mass is not None)
    group, has_mass = attention.group, mass is not None
    capacity = plan.max_blocks * block_size // CHUNK if has_mass else 0
    require(
        len(plan.partial) >= n
        and plan.partial.shape[1:] == (heads, plan.splits, head_dim)
        and (not has_mass or (plan.granules is not None and plan.granules.shape[1:] == (kv_heads, capacity, group))),
        "plan must be for this shape, block size and at least n rows",
    )
    args = _Args(
        *(query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_table.data_ptr()),
        *(attention.query_start_loc.data_ptr(), attention.seq_lens.data_ptr(), rows.data_ptr()),
        weights.data_ptr() if weights is not None else None,
        *(
            plan.partial.data_ptr(),
            plan.stats.data_ptr(),
            plan.granules.data_ptr() if plan.granules is not None and has_mass else None,
        ),
        *(output.data_ptr(), lse.data_ptr() if lse is not None else None),
        mass.data_ptr() if mass is not None else None,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *output.stride()[:2],
        *(lse.stride() if lse is not None else (0, 0)),
        *(mass.stride()[:2] if mass is not None else (0, 0)),
        *(n, kv_heads, group, head_dim, block_size, plan.splits, capacity),
        min(plan.max_blocks, block_table.shape[1], mass.shape[2]) if mass is not None else 0,
        mass.shape[1] if mass is not None else 0,
        *(plan.depth, query.dtype == torch.float16, plan.bulk),
        attention.scale * LOG2_E,
    )
    stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else 0
    (kernels or library()).decode_mass(args, stream)


def _check(attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None) -> None:
    problem = refused(attention)
    require(problem is None, problem)
    table, starts, lens = attention.block_table, attention.query_start_loc, attention.seq_lens
    query, mass, weights = attention.query, attention.mass, attention.weights
    for dtype, tensors in (
        (torch.int32, {"block_table": table, "query_start_loc": starts, "seq_lens": lens, "rows": rows}),
        (torch.float32, {"mass": mass, "weights": weights, "lse": lse}),
    ):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype != dtype:
                raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}")
    require(len(lens) == len(table) == len(starts) - 1, "R must agree")
    dense = table, starts, lens, rows, *((weights,) if weights is not None else ())
    require(all(each.stride(-1) == 1 for each in dense), "rows of block_table, and vectors, must be dense")
    require(
        output.shape == query.shape and output.dtype == query.dtype and output.stride(2) == 1,
        "output must be like query",
    )
    if mass is not None:
        require(mass.dim() == 3 and mass.stride(2) == 1 and len(mass) == len(lens), "mass must be [R, H, W]")
        require(mass.shape[1] in (1, attention.key_cache.shape[1]), "mass must be [R, Hkv or 1, Wout]")


def library_if_wanted() -> Library | None:
    """Return `library()` if VLLM_EVICT_DECODE=cuda, else None. If the kernel cannot run, log why and return None."""
    if decode_kernel() != "cuda":
        return None
    if (why := missing()) is not None:
        logger.warning("VLLM_EVICT_DECODE=cuda: %s; the Triton kernel decodes", why)
        return None
    logger.info("VLLM_EVICT_DECODE=cuda: decodes in CUDA C++ where %s takes the layer's shape", MODULE)
    return library()

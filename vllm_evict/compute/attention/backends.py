"""The backends that policies run on, and the `BackendOps` of each."""

from .by_kernel_blocks import with_kernel_blocks
from .cpu import CPUOps
from .device import DeviceOps
from .flash import FlashOps
from .flashinfer import FlashInferOps
from .latent_cpu import LatentOps
from .latent_device import DeviceLatentOps
from .ops import BackendOps
from .triton import TritonOps

#: Name of a backend -> its `BackendOps`. No module of these imports Triton, which a CPU may lack.
OPS: dict[str, type[BackendOps]] = {
    "CPU_ATTN": CPUOps,
    "FLASH_ATTN": FlashOps,
    "FLASHINFER": FlashInferOps,
    "TRITON_ATTN": TritonOps,
    "FLASH_ATTN_DIFFKV": FlashOps,
    "TRITON_ATTN_DIFFKV": TritonOps,
    "CPU_MLA": LatentOps,
    "AMX_MLA": LatentOps,
    "FLASHMLA": DeviceLatentOps,
    "FLASHINFER_MLA": DeviceLatentOps,
    "FLASH_ATTN_MLA": DeviceLatentOps,
    "TRITON_MLA": DeviceLatentOps,
}
#: Backends of multi-head latent attention (MLA), on a CPU and on a device.
LATENT = ("CPU_MLA", "AMX_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
#: Backends of keys and values of unlike dimensions, on a device.
UNLIKE = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
#: Backends some of whose kernels plan for all heads of a layer. Policies that split heads run with their other kernels.
WHOLE_LAYERS = ("FLASHINFER",)


def ops_for(backend: str, block_size: int | None = None) -> BackendOps:
    """Make the `BackendOps` of a backend, with scratch of its own, for all layers of one engine.

    Args:
        backend: name.
        block_size: tokens of a block of the pool, if the backend's kernels on a device may read smaller ones.
    """
    ops = OPS[backend]
    if block_size is not None and issubclass(ops, DeviceOps) and not ops.splits_blocks:
        ops = with_kernel_blocks(ops, block_size)
    return ops()

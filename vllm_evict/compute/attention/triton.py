"""`BackendOps` of vLLM's Triton attention backend."""

from typing import Any

from .device import DeviceOps


class TritonOps(DeviceOps):
    """Metadata is vLLM's `TritonAttentionMetadata`."""

    def can_decode(self, layer: Any) -> bool:
        return super().can_decode(layer) and layer.impl.chunk_lookback == -1

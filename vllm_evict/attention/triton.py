"""vLLM's Triton attention backend."""

from typing import Any

from .device import DevicePasses


class TritonPasses(DevicePasses):
    """Metadata is vLLM's `TritonAttentionMetadata`."""

    def can_decode(self, layer: Any) -> bool:
        return super().can_decode(layer) and layer.impl.chunk_lookback == -1

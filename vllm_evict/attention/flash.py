"""vLLM's FlashAttention backend, whichever version of FlashAttention it runs on."""

from typing import Any

from .device import DevicePasses


class FlashPasses(DevicePasses):
    """Metadata is vLLM's `FlashAttentionMetadata`."""

    def can_decode(self, layer: Any) -> bool:
        return super().can_decode(layer) and layer.impl.sliding_window == (-1, -1)

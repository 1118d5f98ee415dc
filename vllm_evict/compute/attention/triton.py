"""`BackendOps` of vLLM's Triton attention backend."""

from typing import Any

from .device import DeviceOps
from .ops import Fit


class TritonOps(DeviceOps):
    """Metadata is vLLM's `TritonAttentionMetadata`."""

    def fit(self, layer: Any) -> Fit:
        return (its := super().fit(layer))._replace(decodes=its.decodes and layer.impl.chunk_lookback == -1)

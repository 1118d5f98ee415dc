"""`BackendOps` of vLLM's FlashAttention backend, for any version of FlashAttention."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..kernels.paged import PagedAttention
from ..probes import LayerCall, MassTarget
from .device import DeviceOps
from .ops import Fit


class FlashOps(DeviceOps):
    """Metadata is vLLM's `FlashAttentionMetadata`. Mass beside its kernel uses the kernel's own LSE.

    In layers with sinks a separate pass computes the LSE, since FlashAttention does not document whether its own
    includes them.
    """

    beside = "FlashAttention's LSE and mass_from_lse"

    def __init__(self) -> None:
        super().__init__()
        #: Makes a context manager. Its list gets the LSE of each call of FlashAttention, float32 [H, T].
        self.capture_lse: Callable[[], AbstractContextManager[list[torch.Tensor]]]
        #: LSE of the last attended layer, float32 [H, T]; None once its mass is measured.
        self._lse: torch.Tensor | None = None

    def fit(self, layer: Any) -> Fit:
        return (its := super().fit(layer))._replace(decodes=its.decodes and layer.impl.sliding_window == (-1, -1))

    @contextmanager
    def attending(self) -> Iterator[None]:
        with self.capture_lse() as captured:
            yield
        # Several calls are parts of one softmax, and no call gives none: then `query_lse` computes it.
        self._lse = captured[0] if len(captured) == 1 else None

    def warm_up_mass(self, call: LayerCall, measured: MassTarget) -> None:
        self._lse = torch.zeros(call.query.shape[1], len(call.query), device=call.query.device)
        super().warm_up_mass(call, measured)
        super().warm_up_mass(call, measured)  # without an LSE from the kernel

    def _lse_of(self, attention: PagedAttention, longest: int) -> torch.Tensor:
        (tokens, heads, _), lse = attention.query.shape, self._lse
        self._lse = None
        if lse is None or lse.shape != (heads, tokens) or attention.sinks is not None:
            return super()._lse_of(attention, longest)
        return lse.T

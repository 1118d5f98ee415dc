"""vLLM's FlashInfer backend: FlashInfer's own kernels, TensorRT-LLM's, or XQA, as vLLM chooses among them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .device import DeviceOps


class FlashInferOps(DeviceOps):
    """Metadata is vLLM's `FlashInferMetadata`, with the block table and lengths that it was made of."""

    def can_decode(self, layer: Any) -> bool:
        return super().can_decode(layer) and layer.impl.sliding_window == (-1, -1)

    @staticmethod
    def metadata(builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """vLLM's keeps plans, or slices for decodes and prefills; we read the batch as a whole.

        Each step is planned for on the host and copied to the device: not where nobody runs the plan.
        """
        if needed:
            with _for_graphs(builder, in_graph):
                metadata = stock()
        else:
            metadata = SimpleNamespace(num_actual_tokens=common.num_actual_tokens)
        metadata.block_table, metadata.seq_lens = common.block_table_tensor, common.seq_lens
        metadata.query_start_loc = common.query_start_loc
        metadata.max_query_len, metadata.max_seq_len = common.max_query_len, common.max_seq_len
        return metadata


@contextmanager
def _for_graphs(builder: Any, in_graph: bool) -> Iterator[None]:
    """For decodes vLLM's builder keeps a wrapper, of 8 MiB on the device, for each batch size that has had a plan.

    To vLLM all batches of decodes are graphs', of a few sizes. Those of ours that are none may have any.
    """
    enabled = builder.enable_cuda_graph
    builder.enable_cuda_graph = enabled and in_graph
    try:
        yield
    finally:
        builder.enable_cuda_graph = enabled

"""`BackendOps` of vLLM's FlashInfer backend, for FlashInfer's own kernels, TensorRT-LLM's and XQA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..transfer import to_device
from .device import DeviceOps
from .ops import BatchMetadata, Fit

#: Attributes of metadata: the builder whose page indices FlashInfer's own kernels read, or None; and the places in the
#: block table of these indices, int64 [n], once they were needed.
PLANNER, PLACES = "kv_evict_planner", "kv_evict_places"


class PagedMetadata(BatchMetadata):
    """vLLM's `FlashInferMetadata`, with the batch's block table, lengths and offsets, which vLLM keeps in slices only.

    If the backend's kernel attends to nothing, vLLM's plan of the step is skipped.
    """

    def build(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        if needed:
            with _for_graphs(builder, in_graph):
                metadata = stock()
        else:
            metadata = SimpleNamespace(num_actual_tokens=common.num_actual_tokens, slot_mapping=common.slot_mapping)
        metadata.block_table, metadata.seq_lens = common.block_table_tensor, common.seq_lens
        metadata.query_start_loc = common.query_start_loc
        metadata.max_query_len, metadata.max_seq_len = common.max_query_len, common.max_seq_len
        parts = getattr(metadata, "prefill", None), getattr(metadata, "decode", None)
        setattr(metadata, PLANNER, builder if any(hasattr(part, "wrapper") for part in parts) else None)
        return metadata

    def rewritten(self, metadata: Any) -> None:
        """Do as `BatchMetadata.rewritten` says. FlashInfer's own kernels read the pages of all requests one after the
        other.

        TensorRT-LLM's read a copy of the rows of prompts where the cache alone is fp8: layers write none of these.
        """
        table, builder = metadata.block_table, getattr(metadata, PLANNER)
        if builder is None:
            return
        if (places := getattr(metadata, PLACES, None)) is None:
            starts = builder.paged_kv_indptr.np[: len(table) + 1].astype(np.int64)
            firsts = np.arange(len(table)) * table.shape[1] - starts[:-1]
            places = to_device(np.arange(starts[-1]) + np.repeat(firsts, np.diff(starts)), table.device)
            setattr(metadata, PLACES, places)
        torch.take(table, places, out=builder.paged_kv_indices[: len(places)])

    def for_parts(self, builder: Any) -> None:
        """Do as `BatchMetadata.for_parts` says. TensorRT-LLM's kernels take no plan, and compute prompts of all
        lengths.
        """
        builder.attention_config = copy(builder.attention_config)
        builder.attention_config.use_trtllm_attention = True


class FlashInferOps(DeviceOps):
    """Metadata is `PagedMetadata`."""

    batch = PagedMetadata()

    def fit(self, layer: Any) -> Fit:
        return (its := super().fit(layer))._replace(decodes=its.decodes and layer.impl.sliding_window == (-1, -1))


@contextmanager
def _for_graphs(builder: Any, in_graph: bool) -> Iterator[None]:
    """Let vLLM's builder use graph wrappers only for steps in a graph.

    The builder keeps a wrapper of 8 MiB on the device for each batch size of decodes. Graphs have few sizes, and other
    steps may have any size.
    """
    enabled = builder.enable_cuda_graph
    builder.enable_cuda_graph = enabled and in_graph
    try:
        yield
    finally:
        builder.enable_cuda_graph = enabled

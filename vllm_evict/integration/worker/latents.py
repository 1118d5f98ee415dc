"""vLLM's layers of multi-head latent attention (MLA), with the step's `StepWork` around the stock kernels.

A layer, and not its `AttentionImpl`, sees all queries of a step.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention

from ...compute.attention.ops import BackendOps
from ...compute.kernel_blocks import whole_blocks
from ...compute.probes import LayerCall
from ...compute.work import StepWork
from ..seams import replaces
from .backend import PLACE, STEP_WORK

#: The layer that Kimi-Linear and Kimi K3 have on NVIDIA GPUs. A CPU may not import its module.
KIMI = ("vllm.models.kimi_k3.nvidia.mla", "MultiHeadLatentAttention")


def latent_types() -> tuple[type, ...]:
    """vLLM's layers of MLA that `working_latent` takes."""
    module = sys.modules.get(KIMI[0])  # only a model with such layers imports it
    return (MLAAttention,) if module is None else (MLAAttention, getattr(module, KIMI[1]))


def name_as_others(layer: Any) -> None:
    """Give a layer of Kimi's the attributes by which `MLAAttention` has the same things."""
    if not isinstance(layer, MLAAttention):
        layer.num_heads, layer.num_kv_heads, layer.sliding_window = layer.num_local_heads, 1, None


def working_latent(layer: type, ops: BackendOps, attended: set[Any], block_size: int) -> type:
    """Make a subclass of an MLA layer of vLLM that does the step's `StepWork` around the stock kernels, with absorbed
    queries.

    Args:
        layer: vLLM's layer.
        ops: of the backend.
        attended: gets each layer that has attended.
        block_size: tokens of a block of the pool; kernels may read smaller ones.
    """

    class Working(layer):
        @property
        def dtype(self) -> torch.dtype:
            """Of absorbed queries on a device. AMX_MLA keeps no `W_UK_T`."""
            return self.W_UK_T.dtype

        def kv_evict_write(
            self, q: torch.Tensor, metadata: Any, output: torch.Tensor, stored: bool = True
        ) -> StepWork | None:
            """Let the step's work write what the stock kernel reads; return it, None: there is none.

            `stored`: whether the cache has the step's tokens.
            """
            work: StepWork | None = getattr(metadata, STEP_WORK, None)
            if work is None or not work.precedes:
                return None
            # Rows that the backend takes for chunks of prompts may read blocks of the host, too.
            end = max(metadata.num_decode_tokens, work.queried)
            work.before(replace(self.kv_evict_call(q[:end], metadata, output), stored=stored))
            return work

        def kv_evict_measure(self, q: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
            if metadata is not None:  # None: a dummy step without attention
                attended.add(self)
            work = getattr(metadata, STEP_WORK, None)
            if work is not None and work.follows:
                work.do(self.kv_evict_call(q, metadata, output))

        def kv_evict_call(self, q: torch.Tensor, metadata: Any, output: torch.Tensor) -> LayerCall:
            nope, rotated = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            query = q.new_empty(*q.shape[:2], self.head_size)
            absorbed, query[..., self.kv_lora_rank :] = query[..., : self.kv_lora_rank], rotated
            nope, absorbed = nope.transpose(0, 1), absorbed.transpose(0, 1)
            if getattr(self.impl, "uses_amx_bmm", False):  # AMX_MLA: weights are packed; as in vLLM's forward_impl
                torch.ops._C.bmm_cpu(absorbed, nope, self.impl._w_uk_packed, True, self.impl._w_scale)
            else:
                torch.bmm(nope, self.W_UK_T, out=absorbed)
            cache = whole_blocks(self.kv_cache, block_size)
            return LayerCall(ops, self, getattr(self.impl, PLACE), query, cache, metadata, output)

    @replaces(
        "vllm.model_executor.layers.attention:MLAAttention",
        methods="forward_impl",
        why="does the step's work around the stock kernels; a layer that the model has becomes one of this class",
        remove_when="vLLM lets backends wrap a whole layer of latents",
    )
    class WorkingLatent(Working):
        def forward_impl(
            self,
            q: Any,
            k_c_normed: Any,
            k_pe: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            self.kv_evict_write(q, attn_metadata, output)
            result = super().forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *args, **kwargs)
            self.kv_evict_measure(q, attn_metadata, output)
            return result

    @replaces(
        "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention",
        methods="_attention",
        why="does the step's work around the kernels of Kimi's layer, which becomes one of this class",
        remove_when="vLLM lets backends wrap a whole layer of latents",
    )
    class WorkingKimi(Working):
        @eager_break_during_capture
        def _attention(self, positions: Any, q: Any, kv_c_normed: Any, k_pe: Any, attn_out: Any) -> None:
            of_layers = get_forward_context().attn_metadata
            if of_layers is None:  # a profiling run
                super()._attention(positions, q, kv_c_normed, k_pe, attn_out)
                return
            metadata = of_layers[self.layer_name]
            work = self.kv_evict_write(q, metadata, attn_out, stored=False)
            super()._attention(positions, q, kv_c_normed, k_pe, attn_out)
            if work is not None:
                work.after(self.kv_evict_call(q[:0], metadata, attn_out))
            self.kv_evict_measure(q, metadata, attn_out)

    return WorkingLatent if issubclass(layer, MLAAttention) else WorkingKimi

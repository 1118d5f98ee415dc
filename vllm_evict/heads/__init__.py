"""Retrieval and streaming heads: which KV heads need the whole context, after DuoAttention.

    pattern    files of gates, thresholds, and what either class holds      dense     a transformers model by head class
    passkeys   synthetic documents with answers far from their facts        profile   attention mass on the facts
    train      gates by distillation                                        show      heat maps and memory
    arrange    ranks, KV groups and head slots                              cli       `vllm-evict heads`

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", ICLR 2025,
arXiv:2410.10819. Only `pattern` is imported here; it and `arrange` need numpy alone.
"""

from ..config.gates import HeadGates, HeadPattern, HeadsError

__all__ = ["HeadGates", "HeadPattern", "HeadsError"]

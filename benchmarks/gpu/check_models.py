"""Small random models of other classes than Llama, and dense models of the same weights (tests/harness/oracle)."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HARNESS = Path(__file__).resolve().parents[2] / "tests" / "harness"


def _windows(folder: Path) -> Callable[[], Any]:
    from oracle.logits import DenseLogits, make_tiny

    make_tiny(folder, "gemma2")
    return lambda: DenseLogits(folder)


def _latents(folder: Path) -> Callable[[], Any]:
    from latent import DenseLatent, make_latent

    # Kernels for prompts on Hopper know DeepSeek's dimensions alone.
    make_latent(folder, "DeepseekV3ForCausalLM", qk_nope_head_dim=128, v_head_dim=128)
    return lambda: DenseLatent(folder)


def _states(folder: Path) -> Callable[[], Any]:
    from oracle.hybrids import DenseHybrid, make_tiny_hybrid

    make_tiny_hybrid(folder, "granitemoehybrid")
    return lambda: DenseHybrid(folder)


#: Class -> function that writes a model to a folder, and returns one that makes its dense model.
MODELS = {"gemma2": _windows, "DeepseekV3ForCausalLM": _latents, "granitemoehybrid": _states}
#: Bytes of a KV pool that all of them can fill.
POOL = 256 << 20


class RandomModel:
    """A model in a folder of its own.

    Args:
        kind: of `MODELS`.

    Attributes:
        folder: its files.
        dense: makes its dense model, in float32.
    """

    def __init__(self, kind: str) -> None:
        sys.path.insert(0, str(HARNESS))
        self._temporary = tempfile.TemporaryDirectory()
        self.kind, self.folder = kind, Path(self._temporary.name)
        self.dense = MODELS[kind](self.folder)

    def engine(self, blocks: int) -> dict[str, Any]:
        """Return arguments of an engine that differ from those of other models."""
        more = {"block_size": None} if self.kind == "granitemoehybrid" else {}
        return {"kv_cache_memory_bytes": POOL, "num_gpu_blocks_override": blocks, **more}

    def prompt(self, tokens: int) -> list[int]:
        import torch

        return torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()

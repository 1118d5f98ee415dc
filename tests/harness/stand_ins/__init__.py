"""Functions in the place of Model Runner V2's Triton kernels, which take most of a step under Triton's interpreter.

Each does what one kernel of vLLM's does, to the bit, with numpy. It is taken where the kernel is one of those that it
was written for; other kernels are interpreted. tests/engine/test_stand_ins.py holds each of them to the interpreter.
"""

from . import batch, drafts, sampling, states
from .registry import STAND_INS, digest_of, install, parameters, use_torch

__all__ = ["STAND_INS", "batch", "digest_of", "drafts", "install", "parameters", "sampling", "states", "use_torch"]

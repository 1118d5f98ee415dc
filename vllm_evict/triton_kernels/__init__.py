"""Stands for `triton_kernels/` of a checkout, where this package's modules are; a wheel has them here instead."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "triton_kernels")]

"""The operations of attention backends stay few, and each backend has a file."""

import inspect

import pytest

from vllm_evict.compute.attention.backends import LATENT, OPS, UNLIKE, WHOLE_LAYERS, ops_for
from vllm_evict.compute.attention.by_kernel_blocks import with_kernel_blocks
from vllm_evict.compute.attention.decoding import Decoding
from vllm_evict.compute.attention.flashinfer import FlashInferOps
from vllm_evict.compute.attention.ops import BackendOps, BatchMetadata, Scratch

MOST = 12
EACH = {*OPS.values(), with_kernel_blocks(FlashInferOps, 64)}
PARTS = {type(part) for backend in OPS for part in (ops_for(backend).batch, ops_for(backend).scratch)}


def public_methods(kind):
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", sorted({BackendOps, *EACH}, key=lambda kind: kind.__name__))
def test_a_backend_has_few_methods(kind):
    """Those that it inherits count."""
    assert len(public_methods(BackendOps)) <= len(public_methods(kind)) <= MOST, public_methods(kind)


@pytest.mark.parametrize("kind", sorted({BatchMetadata, Scratch, Decoding, *PARTS}, key=lambda kind: kind.__name__))
def test_parts_of_a_backend_have_fewer(kind):
    assert 2 <= len(public_methods(kind)) <= 4, public_methods(kind)


def test_a_backend_is_a_file():
    assert len({kind.__module__ for kind in OPS.values()}) == len(set(OPS.values())) > 5
    assert {*LATENT, *UNLIKE, *WHOLE_LAYERS} < OPS.keys()

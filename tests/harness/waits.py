"""Finds calls for which the host would wait for a GPU, on a CPU."""

from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: Calls whose results tell sizes or values to the host.
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


class NoWaits(TorchDispatchMode):
    """Context in which a call raises if torch would wait for a device in it.

    Beside the calls that read a device's memory, torch waits where a number is assigned to indexed elements
    (`x[index] = 0`): the number is a tensor on the host, and is copied from memory that is not pinned.
    """

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call in READS or any(index is not None and index.dtype == torch.bool for index in _indices(call, args)):
            raise AssertionError(f"the host would wait for a GPU: {call}")
        if call in (aten.index_put_.default, aten._index_put_impl_.default) and args[2].dim() == 0:
            raise AssertionError("the host would wait for a GPU: a number is assigned to indexed elements")
        return call(*args, **(kwargs or {}))


def _indices(call, args):
    """Yield the index tensors of a call; those of booleans become positions, whose number the host has to know."""
    if call in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        yield from args[1]


def without_waits(owner: Any, name: str) -> None:
    """Have a method of one object run in `NoWaits`."""
    call = getattr(owner, name)

    @wraps(call)
    def checked(*args, **kwargs):
        with NoWaits():
            return call(*args, **kwargs)

    setattr(owner, name, checked)

"""Between host and device without a wait. On the CPU tensors and arrays share memory, and nothing is copied."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor where the step's tensors are; the copy is queued with the step's kernels."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's contents. From a device they arrive in pinned memory with the next `copied`, and not before."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host.numpy()


def stashed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, for `restored` alone: from a device it arrives when the device comes to it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def restored(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tensors of one shape out of `stashed`, stacked on a device; the copies are queued with the step's kernels."""
    stacked = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, device=device)
    for row, tensor in zip(stacked, tensors):
        row.copy_(tensor, non_blocking=True)
    return stacked


def fetched(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's contents, now: this waits for a device."""
    return tensor.cpu().numpy()


def copied(device: torch.device) -> Any:
    """An event after all copies that were queued so far, to wait for; None on the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device.type)
    event.record()
    return event

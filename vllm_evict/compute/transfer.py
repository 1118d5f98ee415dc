"""Copies between host and device that do not wait. On the CPU tensors and arrays share memory without a copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on `device`. The copy is queued with the step's kernels."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's contents. A device's contents are valid only after the event of the next `copied`."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host.numpy()


def stashed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory for `restored`. A device's contents arrive later, in the order of its work."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def restored(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Stack tensors of one shape from `stashed` on a device. The copies are queued with the step's kernels."""
    stacked = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, device=device)
    for row, tensor in zip(stacked, tensors):
        row.copy_(tensor, non_blocking=True)
    return stacked


def fetched(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's contents. Waits for a device."""
    return tensor.cpu().numpy()


def copied(device: torch.device) -> Any:
    """Return an event after all copies queued so far; None on the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device.type)
    event.record()
    return event

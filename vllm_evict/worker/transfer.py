"""Between host and device without a wait. On the CPU tensors and arrays share memory, and nothing is copied."""

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

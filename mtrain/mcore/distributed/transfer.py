"""Copies from the host to the device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, in the order of the device's work; the tensor itself where that is the CPU."""
    # from pageable memory a non-blocking copy waits all the same
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

"""Copies from the host to the device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, in the order of the device's work; returns the tensor itself on a CPU."""
    # from pageable memory even a non-blocking copy waits
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

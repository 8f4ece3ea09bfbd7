"""GPUs and their links, as the makers state them, and the shares of these rates that programs reach.

Everything here is an assumption that can be overridden; docs/planning.md has the sources and the check against
published numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtrain.base.errors import ConfigError

GIB = 2**30
USABLE_MEMORY = 0.9
"""Share of a GPU's memory that the estimate may fill: context, libraries, buffers of communication and fragmentation
take the rest."""
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}


@dataclass(frozen=True)
class Gpu:
    """One device; rates a second, bandwidths in one direction."""

    name: str
    flops: float
    """Dense peak in bf16 and fp16, in FLOP/s."""
    fp32_flops: float
    memory_bytes: int
    memory_bandwidth: float
    """Bytes a second between a GPU and its memory."""
    nvlink_bandwidth: float
    """Bytes a second between this GPU and all others of its node."""
    network_bandwidth: float
    """Bytes a second between this GPU and other nodes: a network card for each GPU is assumed."""
    matrix_efficiency: float
    """Share of the peak that a product of large matrices reaches under the device's power limit."""
    attention_efficiency: float
    """Share of the peak that fused attention reaches, forward and backward together."""


GPUS = {
    "a100": Gpu("a100", 312e12, 19.5e12, 80 * GIB, 2.0e12, 300e9, 25e9, 0.80, 0.50),
    "h100": Gpu("h100", 989e12, 67e12, 80 * GIB, 3.35e12, 450e9, 50e9, 0.62, 0.42),
    "h800": Gpu("h800", 989e12, 67e12, 80 * GIB, 3.35e12, 200e9, 50e9, 0.62, 0.42),
    "h200": Gpu("h200", 989e12, 67e12, 140 * GIB, 4.8e12, 450e9, 50e9, 0.64, 0.42),
    "b200": Gpu("b200", 2250e12, 75e12, 180 * GIB, 8.0e12, 900e9, 50e9, 0.62, 0.38),
}
"""Known GPUs by name, from data sheets of NVIDIA (SXM, dense): what they call GB of memory are about as many GiB."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, in nodes of one size."""

    gpu: Gpu
    gpus_per_node: int = 8
    link_efficiency: float = 0.8
    """Share of a link's bandwidth that large transfers reach."""
    nvlink_latency_s: float = 10e-6
    """Latency of one collective inside a node."""
    network_latency_s: float = 30e-6
    """Latency of one collective between nodes."""
    launch_s: float = 4e-6
    """Time that the host needs to launch each kernel."""


def gpu_named(name: str) -> Gpu:
    """Returns the GPU of this name.

    Raises:
        ConfigError: No GPU has this name.
    """
    if name.lower() not in GPUS:
        raise ConfigError(
            f"--gpu {name} is not known; choose {', '.join(GPUS)}, and give what differs by --tflops, --nvlink-gbs and "
            "--network-gbs"
        )
    return GPUS[name.lower()]


def memory_size(text: str) -> int:
    """Returns the bytes of a size such as 80GiB, 141GB or 79.5 GiB.

    Raises:
        ConfigError: The text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"--gpu-memory {text} is no size; write it as 80GiB or 141GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])

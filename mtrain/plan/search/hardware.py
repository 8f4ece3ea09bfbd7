"""GPUs and their links according to data sheets, and the shares of these rates that programs reach.

Everything here is an assumption that the user can override, links within a node by a measurement;
docs/machines/planning.md has the sources and the check against published numbers.

Transfers between ranks follow the alpha-beta model: a latency, and bytes over a bandwidth. Ranks are numbered with tp
innermost, then cp, dp, pp (mtrain/arch/layout.py). A group whose members are `stride` ranks apart fits into a node if
stride x size does; otherwise its members in a node use one network card each.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.plain_files import parsed_json, read_plain_file

GIB = 2**30
USABLE_MEMORY = 0.9
"""Share of a GPU's memory that the estimate may fill; the remainder is for libraries, buffers and fragmentation."""
MEASURED = "machine.json"
"""Name of the file with measured links that `mtrain verify machine` writes."""
_MOST_BYTES = 64 << 20
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}


@dataclass(frozen=True)
class Gpu:
    """One device, with rates per second and bandwidths in one direction."""

    name: str
    flops: float
    """Dense peak in bf16 and fp16, in FLOP/s."""
    fp32_flops: float
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second between the GPU and its memory."""
    nvlink_bandwidth: float
    """Bytes per second between this GPU and the others of its node."""
    network_bandwidth: float
    """Bytes per second between this GPU and other nodes, with one network card per GPU."""
    matrix_efficiency: float
    """Share of the peak that a product of large matrices reaches under the device's power limit."""
    attention_efficiency: float
    """Share of the peak that fused attention reaches, forward and backward together."""
    grouped_share: float = 0.5
    """Rate of a grouped product of experts, relative to a single product of an expert's size. Fitted to the only
    measured step of a model with experts, on an h100, so it also covers the permutation of tokens."""


GPUS = {
    "a100": Gpu("a100", 312e12, 19.5e12, 80 * GIB, 2.0e12, 300e9, 25e9, 0.80, 0.50),
    "h100": Gpu("h100", 989e12, 67e12, 80 * GIB, 3.35e12, 450e9, 50e9, 0.62, 0.42),
    "h800": Gpu("h800", 989e12, 67e12, 80 * GIB, 3.35e12, 200e9, 50e9, 0.62, 0.42),
    "h200": Gpu("h200", 989e12, 67e12, 140 * GIB, 4.8e12, 450e9, 50e9, 0.64, 0.42),
    "b200": Gpu("b200", 2250e12, 75e12, 180 * GIB, 8.0e12, 900e9, 50e9, 0.62, 0.38),
}
"""Known GPUs by name, from NVIDIA's data sheets (SXM, dense), whose GB of memory are closer to GiB."""


Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv"]
"""Transfer between ranks that the cost model predicts."""
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class MeasuredTransfer:
    collective: Collective
    num_bytes: _Count
    """Bytes of a rank's whole tensor, as the cost model counts them."""
    seconds: _Positive
    """Median of the slowest rank's time."""
    assumed_s: _Positive | None
    """Seconds that `mtrain plan` predicts without this measurement; None for an unknown device."""


@dataclass(frozen=True)
class Pair:
    """Transfer between two ranks, while all others wait."""

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    num_bytes: _Count
    seconds: _Positive


@dataclass(frozen=True)
class MeasuredLinks:
    """Links between the ranks of one node, measured by `mtrain verify machine`."""

    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")]
    """ISO 8601, UTC."""
    device: Annotated[str, Field(pattern=r"^[ -~]{1,100}$")]
    """Name of the GPUs, such as `NVIDIA H100 80GB HBM3`; `cpu` for gloo."""
    num_ranks: Annotated[int, Field(ge=2, le=1024)]
    bandwidth: _Positive
    """Bytes per second of a rank in large transfers."""
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    transfers: tuple[MeasuredTransfer, ...]
    pairs: tuple[Pair, ...]
    format: Literal[1] = 1

    @property
    def fingerprint(self) -> str:
        """Short hash of all measured numbers."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """Describes the measurement in one line: ranks, device, date and speed."""
        return (
            f"{self.num_ranks} x {self.device}, measured by mtrain verify machine on {self.created[:10]} (fingerprint "
            f"{self.fingerprint}): large transfers reach {self.bandwidth / 1e9:.3g} GB/s, after "
            f"{self.latency_s * 1e6:.3g} us"
        )


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    gpus_per_node: int = 8
    link_efficiency: float = 0.8
    """Share of a link's bandwidth that large transfers reach."""
    nvlink_latency_s: float = 10e-6
    network_latency_s: float = 30e-6
    launch_s: float = 4e-6
    """Seconds that the host needs to launch a kernel."""
    links: MeasuredLinks | None = None
    """Measured links of a node; None: bandwidth and latency are assumed."""

    def measured(self, links: MeasuredLinks) -> Self:
        """Returns the cluster with these links inside its nodes.

        Raises:
            ConfigError: The links were measured on CPUs or another GPU.
        """
        known = known_gpu(links.device)
        if links.device == "cpu":
            raise ConfigError(
                "--measured names links of CPUs over gloo, which say nothing about GPUs; run mtrain verify machine on "
                "a node with GPUs"
            )
        if known is not None and known.name != self.gpu.name:
            raise ConfigError(
                f"--measured names links of {links.device}, but --gpu is {self.gpu.name}; write --gpu {known.name}, or "
                f"measure a node of {self.gpu.name}"
            )
        # transfers multiply by `link_efficiency`, which also applies to the network
        gpu = replace(self.gpu, nvlink_bandwidth=links.bandwidth / self.link_efficiency)
        return replace(self, gpu=gpu, nvlink_latency_s=links.latency_s, links=links)


def read_links(path: Path) -> MeasuredLinks:
    """Reads the links from a file that `mtrain verify machine` wrote.

    Raises:
        DataError: The file is missing or damaged, or has no measured links.
    """
    needed = f"give the {MEASURED} of a finished mtrain verify machine"
    try:
        content = parsed_json(read_plain_file(path, _MOST_BYTES))
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise DataError(f"--measured {path} cannot be read as JSON ({reason}); {needed}") from None
    links = content.get("links") if isinstance(content, dict) else None
    if links is None:
        raise DataError(f"--measured {path} contains no measured links; {needed}")
    try:
        return TypeAdapter(MeasuredLinks).validate_json(json.dumps(links), strict=True)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        location = ".".join(map(str, ("links", *first["loc"])))
        raise DataError(f"--measured {path} is damaged: {location}: {first['msg']}; {needed}") from None


def known_gpu(device: str) -> Gpu | None:
    """Returns the known GPU with a device's name, such as `NVIDIA A100-SXM4-80GB`; None for another device."""
    return next((gpu for name, gpu in GPUS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE)), None)


def gpu_named(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise ConfigError(
            f"--gpu {name} is not known; choose {', '.join(GPUS)}, and set differing values with --tflops, "
            "--nvlink-gbs and --network-gbs"
        )
    return GPUS[name.lower()]


def memory_size(text: str) -> int:
    """Returns the bytes of a size such as 80GiB, 141GB or 79.5 GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"--gpu-memory {text} is not a size; write it as 80GiB or 141GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends, and the seconds that they take."""

    seconds: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(
            self.seconds + other.seconds,
            self.nvlink_bytes + other.nvlink_bytes,
            self.network_bytes + other.network_bytes,
        )

    def __mul__(self, times: float) -> "Transfer":
        return Transfer(self.seconds * times, self.nvlink_bytes * times, self.network_bytes * times)


@dataclass(frozen=True)
class Group:
    size: int
    stride: int
    """Difference between the ranks of neighbours."""

    def members_in_a_node(self, cluster: Cluster) -> int:
        return max(1, min(self.size, cluster.gpus_per_node // self.stride))


def gathered(cluster: Cluster, group: Group, whole_bytes: float) -> Transfer:
    """Predicts an all-gather or a reduce-scatter of `whole_bytes` on each rank, in a ring."""
    if group.size == 1:
        return Transfer()
    sent = whole_bytes * (group.size - 1) / group.size
    local = group.members_in_a_node(cluster)
    if local == group.size:
        bandwidth = cluster.gpu.nvlink_bandwidth * cluster.link_efficiency
        return Transfer(cluster.nvlink_latency_s + sent / bandwidth, nvlink_bytes=sent)
    # rings enter and leave a node through the network cards of all members there
    cards = min(cluster.gpu.nvlink_bandwidth, local * cluster.gpu.network_bandwidth) * cluster.link_efficiency
    latency = cluster.network_latency_s * math.log2(group.size / local) + cluster.nvlink_latency_s
    return Transfer(latency + sent / cards, nvlink_bytes=sent * (local - 1) / local, network_bytes=sent / local)


def reduced(cluster: Cluster, group: Group, whole_bytes: float) -> Transfer:
    """Predicts an all-reduce as a reduce-scatter and an all-gather."""
    return gathered(cluster, group, whole_bytes) * 2


def exchanged(cluster: Cluster, group: Group, own_bytes: float) -> Transfer:
    """Predicts an all-to-all in which each rank sends an equal part of its `own_bytes` to every rank."""
    if group.size == 1:
        return Transfer()
    local = group.members_in_a_node(cluster)
    near, far = own_bytes * (local - 1) / group.size, own_bytes * (group.size - local) / group.size
    gpu, share = cluster.gpu, cluster.link_efficiency
    latency = cluster.nvlink_latency_s if far == 0 else cluster.network_latency_s
    seconds = latency + max(near / gpu.nvlink_bandwidth, far / gpu.network_bandwidth) / share
    return Transfer(seconds, near, far)


def sent(cluster: Cluster, stride: int, num_bytes: float) -> Transfer:
    """Predicts a transfer to the rank that is `stride` higher."""
    if stride < cluster.gpus_per_node:
        bandwidth = cluster.gpu.nvlink_bandwidth * cluster.link_efficiency
        return Transfer(cluster.nvlink_latency_s + num_bytes / bandwidth, nvlink_bytes=num_bytes)
    bandwidth = cluster.gpu.network_bandwidth * cluster.link_efficiency
    return Transfer(cluster.network_latency_s + num_bytes / bandwidth, network_bytes=num_bytes)

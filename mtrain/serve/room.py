"""Checks memory before a client gets more of it: a failed allocation would end the service."""

import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mtrain.arch.activations import FP32_BYTES, element_bytes
from mtrain.arch.features import LAYER_PARTS
from mtrain.arch.layout import Layout
from mtrain.arch.memory import memory_per_rank, trained_parameters
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.core.ranks.init import any_rank

_PEAK = 1.5
"""Memory that is needed while something is made, as a share of what stays."""
MOST_SEQUENCES = 64
"""Number of sequences that a rank continues at a time, where its memory holds them."""
_CGROUP = Path("/sys/fs/cgroup")


class Sizes:
    """Sizes of what a client trains, on the rank that holds most."""

    def __init__(self, config: Config) -> None:
        self._config, self._layout = config, Layout.from_config(config, dist.get_world_size())

    @property
    def trained_bytes(self) -> int:
        found = [memory_per_rank(self._config, self._layout, pp_rank) for pp_rank in range(self._layout.pp)]
        if self._config.adapter is not None:
            return max(each.adapter_bytes for each in found)
        return max(each.weights_bytes + each.gradients_bytes + each.optimizer_bytes for each in found)

    @property
    def weights_bytes(self) -> int:
        layout = self._layout
        numbers = max(trained_parameters(self._config, layout, pp_rank).total for pp_rank in range(layout.pp))
        return numbers * element_bytes(self._config.train)

    def sequence_bytes(self, length: int) -> int:
        layout, model, size = self._layout, self._config.model, element_bytes(self._config.train)
        most = 0
        for pp_rank in range(layout.pp):
            chunks = [layout.layers(model.num_layers, pp_rank, vpp_rank) for vpp_rank in range(layout.vpp)]
            places = [(part, layer) for layers in chunks for layer in layers for part in LAYER_PARTS]
            kept = [part.remembered(model, layout, length) for part, layer in places if part.is_in(model, layer)]
            most = max(most, sum(some * size + wide * FP32_BYTES for some, wide in kept))
        scores = 2 * FP32_BYTES * length * model.num_attention_heads // layout.tp  # and their softmax
        return scores + most


def check_room(device: torch.device, on_device: int, on_host: int, asked: str) -> None:
    """Refuses what memory does not hold: bytes that each rank needs on its device and in host memory for what a client
    asks for. One small all-reduce over the world."""
    if device.type == "cuda":
        is_short = on_device * _PEAK > _free_on_device(device)
    else:
        is_short, on_host = False, on_host + on_device
    if any_rank(is_short or on_host * _PEAK > _free_on_host() / _num_local(), device):
        gigabytes = (on_device + on_host) / 1e9
        raise ConfigError(
            f"{asked} needs {gigabytes:.3g} GB of a rank, and there is not enough memory; use a smaller rank, or "
            "close unused sessions"
        )


def sequences_at_once(sizes: Sizes, device: torch.device, length: int) -> int:
    """Returns how many sequences of `length` tokens, prompt and answer, each rank can continue at a time by the memory
    that is left; the same on all ranks. One small all-reduce over the world."""
    each = sizes.sequence_bytes(length)
    free = _free_on_device(device) if device.type == "cuda" else _free_on_host() / _num_local()
    # one more is for tokens that only pad a row
    count = torch.tensor([min(free / (each * _PEAK) - 1, MOST_SEQUENCES)], dtype=torch.float64, device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    if count.item() < 1:
        raise ConfigError(
            f"an answer of up to {length} tokens, the prompt among them, needs {2 * each / 1e9:.3g} GB of a rank for "
            "keys and values, and there is not enough memory; request fewer tokens, or close unused sessions"
        )
    return int(count.item())


def _num_local() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _free_on_device(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _free_on_host() -> int:
    """Returns the free bytes of this machine, or of the cgroup of this process."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / each).read_text()) for each in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return free
    return min(free, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))

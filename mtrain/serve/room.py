"""Checks memory before a client gets more of it: a failed allocation would end the service."""

import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mtrain.arch.features import LAYER_PARTS
from mtrain.arch.layout import Layout
from mtrain.arch.memory import memory_per_rank, trained_parameters
from mtrain.arch.parameters import FP32_BYTES, element_bytes
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.core.ranks.init import any_rank

_PEAK = 1.5
"""Peak memory while something is created, relative to what it occupies afterwards."""
MOST_SEQUENCES = 64
"""Most sequences that a rank continues at a time, even if its memory has room for more."""
_CGROUP = Path("/sys/fs/cgroup")


class Sizes:
    """Sizes of a client's model, on the rank that holds most of it."""

    def __init__(self, config: Config) -> None:
        self._config, self._layout = config, Layout.from_config(config, dist.get_world_size())

    @property
    def trained_bytes(self) -> int:
        ranks = [memory_per_rank(self._config, self._layout, pp_rank) for pp_rank in range(self._layout.pp)]
        if self._config.adapter is not None:
            return max(rank.adapter_bytes for rank in ranks)
        return max(rank.weights_bytes + rank.gradients_bytes + rank.optimizer_bytes for rank in ranks)

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
            parts = [(part, layer) for layers in chunks for layer in layers for part in LAYER_PARTS]
            sizes = [part.remembered(model, layout, length) for part, layer in parts if part.is_in(model, layer)]
            most = max(most, sum(some * size + wide * FP32_BYTES for some, wide in sizes))
        scores = 2 * FP32_BYTES * length * model.num_attention_heads // layout.tp  # and their softmax
        return scores + most


def check_room(device: torch.device, on_device: int, on_host: int, what: str) -> None:
    """Refuses `what`, named in the error, if a rank lacks the bytes that it needs on its device or in host memory. One
    small all-reduce over the world."""
    if device.type == "cuda":
        is_short = on_device * _PEAK > _free_on_device(device)
    else:
        is_short, on_host = False, on_host + on_device
    if any_rank(is_short or on_host * _PEAK > _free_on_host() / _num_local(), device):
        gigabytes = (on_device + on_host) / 1e9
        raise ConfigError(
            f"{what} needs {gigabytes:.3g} GB on each rank, and there is not enough memory; use an adapter of smaller "
            "rank, or close unused sessions"
        )


def sequences_at_once(sizes: Sizes, device: torch.device, length: int) -> int:
    """Returns how many sequences of `length` tokens, prompt and answer, fit into the free memory of every rank at a
    time; the same on all ranks. One small all-reduce over the world."""
    size = sizes.sequence_bytes(length)
    free = _free_on_device(device) if device.type == "cuda" else _free_on_host() / _num_local()
    # one sequence less: tokens that only pad a row need room as well
    count = torch.tensor([min(free / (size * _PEAK) - 1, MOST_SEQUENCES)], dtype=torch.float64, device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    if count.item() < 1:
        raise ConfigError(
            f"an answer of up to {counted(length, 'token')}, including the prompt, needs {2 * size / 1e9:.3g} GB on "
            "each rank for keys and values, and there is not enough memory; request fewer tokens, or close unused "
            "sessions"
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
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return free
    return min(free, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))

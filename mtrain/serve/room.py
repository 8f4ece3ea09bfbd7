"""Memory that a service has left, before a client gets more of it: an allocation that fails would end the service."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mtrain.arch.activations import element_bytes
from mtrain.arch.layout import Layout
from mtrain.arch.memory import memory_per_rank, trained_parameters
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.core.ranks.init import any_rank

_PEAK = 1.5
"""Memory that is needed while something is made, as a share of what stays."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Sizes:
    """Sizes of what a client trains, on the rank that holds most."""

    config: Config

    @property
    def trained_bytes(self) -> int:
        """Returns the size of what is trained, with gradients and moments."""
        found = [memory_per_rank(self.config, self._layout, pp_rank) for pp_rank in range(self._layout.pp)]
        if self.config.adapter is not None:
            return max(each.adapter_bytes for each in found)
        return max(each.weights_bytes + each.gradients_bytes + each.optimizer_bytes for each in found)

    @property
    def weights_bytes(self) -> int:
        """Returns the size of the weights that are trained."""
        layout = self._layout
        numbers = max(trained_parameters(self.config, layout, pp_rank).total for pp_rank in range(layout.pp))
        return numbers * element_bytes(self.config.train)

    @property
    def _layout(self) -> Layout:
        return Layout.from_config(self.config, dist.get_world_size())


def check_room(device: torch.device, on_device: int, on_host: int, asked: str) -> None:
    """Refuses what memory does not hold. One small all-reduce over the world.

    Args:
        device: Device of this rank.
        on_device: Bytes that each rank needs on its device.
        on_host: Bytes that each rank needs in host memory.
        asked: What a client asks for, as its error names it.

    Raises:
        ConfigError: A rank has less; on all ranks.
    """
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        is_short = on_device * _PEAK > torch.cuda.mem_get_info(device)[0] + unused
    else:
        is_short, on_host = False, on_host + on_device
    if any_rank(is_short or on_host * _PEAK * num_local > _free_on_host(), device):
        gigabytes = (on_device + on_host) / 1e9
        raise ConfigError(
            f"{asked} needs {gigabytes:.3g} GB of a rank, and there is not enough memory; take a smaller rank, or "
            "close sessions that are not used any more"
        )


def _free_on_host() -> int:
    """Returns the bytes that this machine, or the group that confines this process, has left."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / each).read_text()) for each in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return free
    return min(free, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))

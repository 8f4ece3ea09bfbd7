"""A choice as a configuration, with the machine that it is for in its first line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.yaml_text import yaml_text
from mtrain.config import Config
from mtrain.plan.search.cost import step_mfu
from mtrain.plan.search.hardware import GIB, Cluster
from mtrain.plan.search.search import Choice

_MACHINE = re.compile(r"^# GPUs: (\d+) x (\w+) (\d+(?:\.\d+)?) ?Gi?B\b", re.MULTILINE)
"""GB of a GPU are GiB, as its maker writes them."""
_HEAD_BYTES = 4096


class StatedMachine(NamedTuple):
    """What a configuration says that it is for, in a line such as `# GPUs: 64 x h100 80 GiB`."""

    num_gpus: int
    memory_bytes: int
    gpu: str


def stated_machine(paths: Iterable[Path]) -> StatedMachine | None:
    """What the files say that they are for; of several the last one that says so. None where none does."""
    found = None
    for path in paths:
        if path.is_file():
            with disk_faults(f"read {path}"), path.open("rb") as file:
                match = _MACHINE.search(file.read(_HEAD_BYTES).decode(errors="replace"))
            if match is not None:
                found = StatedMachine(int(match[1]), int(float(match[3]) * GIB), match[2])
    return found


def write_choice(choice: Choice, cluster: Cluster, memory_bytes: int, path: Path) -> None:
    """Writes a configuration that `mtrain check` and `mtrain train` take as it is; nothing is overwritten.

    Raises:
        ConfigError: The file is there.
        MachineError: It cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists, and nothing is overwritten; name another file, or move it away")
    seconds = choice.cost.time.total
    share = step_mfu(choice.config, choice.layout, cluster, seconds)
    head = (
        f"# GPUs: {choice.layout.world_size} x {cluster.gpu.name} {memory_bytes / GIB:.4g} GiB\n"
        f"# {choice.layout}: {choice.memory.total_bytes / GIB:.1f} GiB on the heaviest rank; predicted by mtrain plan: "
        f"{seconds:.3f} s a step, MFU {share:.1%}\n"
    )
    if choice.config.data.kind == "mock":
        head += "# data.kind=mock draws random tokens, to try the layout: name a corpus or records in its place\n"
    write_atomically(path, head + yaml_text(_needed(choice.config)))


def _needed(config: Config) -> dict[str, Any]:
    """Every key that is not at its default, and kinds."""
    content: dict[str, Any] = config.model_dump(exclude_defaults=True)
    for name in ("data", "optimizer", "adapter"):
        if name in content:
            content[name] = {"kind": getattr(config, name).kind, **content[name]}
    return content

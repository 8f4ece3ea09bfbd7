"""A choice as a configuration, with the machine that it is for in its first line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.base.yaml_text import yaml_text
from mtrain.config import Config
from mtrain.plan.search.cost import step_mfu
from mtrain.plan.search.hardware import GIB, Cluster
from mtrain.plan.search.search import Choice


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

"""A choice as a configuration file, whose first line states the machine in a comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.yaml_text import yaml_text
from mtrain.plan.search.cost import step_mfu
from mtrain.plan.search.hardware import GIB, Cluster
from mtrain.plan.search.layer_cost import Workload
from mtrain.plan.search.search import Choice

_GIB = 2**30
_MACHINE = re.compile(r"^# GPUs: (\d+) x (\w+) (\d+(?:\.\d+)?) ?Gi?B\b", re.MULTILINE)
"""Line that states the machine; GB of a GPU are GiB, as its maker writes them."""
_HEAD_BYTES = 4096


class StatedMachine(NamedTuple):
    """Machine in a line such as `# GPUs: 64 x h100 80 GiB`."""

    num_gpus: int
    memory_bytes: int
    gpu: str


def stated_machine(paths: Iterable[Path]) -> StatedMachine | None:
    """Reads the machine that the last of the files states; None if none does."""
    found = None
    for path in paths:
        if path.is_file():
            with disk_faults(f"read {path}"), path.open("rb") as file:
                match = _MACHINE.search(file.read(_HEAD_BYTES).decode(errors="replace"))
            if match is not None:
                found = StatedMachine(int(match[1]), int(float(match[3]) * _GIB), match[2])
    return found


_CHOSEN = ("micro_batch_size", "recompute", "recompute_modules", "recompute_layers")
"""Keys of `train` that a plan chooses besides `layout`; every other key is the user's."""


def write_choice(
    choice: Choice, given: Mapping[str, Any], left_out: Sequence[str], cluster: Cluster, memory_bytes: int, path: Path
) -> None:
    """Writes the user's sections with the chosen layout, micro-batch size and recomputation; overwrites nothing.

    Args:
        left_out: Keys that a run needs, but `given` lacks; the file names them in a comment.
    """
    if path.exists():
        raise ConfigError(f"{path} exists, and nothing is overwritten; name another file, or move it away")
    seconds = choice.cost.time.total
    share = step_mfu(Workload(choice.config, choice.layout, cluster), seconds)
    head = (
        f"# GPUs: {choice.layout.world_size} x {cluster.gpu.name} {memory_bytes / GIB:.4g} GiB\n"
        f"# {choice.layout}: {choice.memory.total_bytes / GIB:.1f} GiB on the heaviest rank; predicted by mtrain plan: "
        f"{seconds:.3f} s a step, MFU {share:.1%}\n"
    )
    if left_out:
        head += f"# a run also needs {', '.join(left_out)}, which the plan was not given\n"
    write_atomically(path, head + yaml_text(chosen_content(choice, given)))


def chosen_content(choice: Choice, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the chosen keys in the sections of `given`."""
    layout = choice.config.layout.model_dump(exclude_defaults=True)
    others = {key: value for key, value in given["train"].items() if key not in _CHOSEN}
    train = {**choice.config.train.model_dump(include=set(_CHOSEN), exclude_defaults=True), **others}
    sections = {**given, "layout": layout, "train": train}
    return {name: sections[name] for name in sections if name != "layout" or layout}

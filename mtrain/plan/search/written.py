"""A choice as a configuration file, with its machine in the first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.files import write_atomically
from mtrain.base.yaml_text import yaml_text
from mtrain.plan.search.cost import step_mfu
from mtrain.plan.search.hardware import GIB, Cluster
from mtrain.plan.search.layer_cost import Workload
from mtrain.plan.search.search import Choice

_CHOSEN = ("micro_batch_size", "recompute", "recompute_modules", "recompute_layers")
"""Keys of `train` that a plan chooses, as it chooses all of `layout`; every other key is the user's."""


def write_choice(
    choice: Choice, given: Mapping[str, Any], left_out: Sequence[str], cluster: Cluster, memory_bytes: int, path: Path
) -> None:
    """Writes the user's sections with the chosen layout, micro-batch size and recomputation; nothing is overwritten.

    Args:
        choice: Layout that was chosen, with the micro-batch size and recomputation.
        given: Sections as the user's files and overrides give them.
        left_out: Keys that a run needs, but `given` lacks; the file names them in a comment.
        cluster: Cluster on which the run is to run.
        memory_bytes: Memory of one GPU in bytes.
        path: Path of the new file.

    Raises:
        ConfigError: The file exists.
        MachineError: The file cannot be written.
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
    """Returns the sections of `given` with the chosen keys in place of their own."""
    layout = choice.config.layout.model_dump(exclude_defaults=True)
    others = {key: value for key, value in given["train"].items() if key not in _CHOSEN}
    train = {**choice.config.train.model_dump(include=set(_CHOSEN), exclude_defaults=True), **others}
    sections = {**given, "layout": layout, "train": train}
    return {name: sections[name] for name in sections if name != "layout" or layout}

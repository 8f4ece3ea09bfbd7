"""Verdict whether a run fits into a GPU's memory, and what to change where it does not."""

from __future__ import annotations

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.plan.layout import Layout
from mtrain.plan.search.changes import smallest_change
from mtrain.plan.search.cost import step_cost
from mtrain.plan.search.hardware import GIB, USABLE_MEMORY, Cluster
from mtrain.plan.search.layer_cost import Workload
from mtrain.plan.search.report import nothing_fits, recompute_name
from mtrain.plan.search.search import heaviest, search


def verdict(config: Config, num_gpus: int, cluster: Cluster, memory_bytes: int) -> str:
    """Describes that the run fits, and with how much room.

    Args:
        config: Configuration of the run.
        num_gpus: Number of GPUs, the world size.
        cluster: Cluster on which the run is to run; the fastest of several remedies is named.
        memory_bytes: Memory of one GPU in bytes; the estimate may fill USABLE_MEMORY of it.

    Raises:
        ConfigError: The run does not fit; the message names the smallest change with which it does.
    """
    layout = Layout.from_config(config, num_gpus)
    needed, usable = heaviest(config, layout).total_bytes, memory_bytes * USABLE_MEMORY
    of_memory = f"{usable / GIB:.1f} GiB ({USABLE_MEMORY:.0%} of {memory_bytes / GIB:.1f})"
    if needed <= usable:
        return f"fits: the heaviest rank needs {needed / GIB:.1f} of {of_memory}"
    begin = f"does not fit: the heaviest rank needs {needed / GIB:.1f} GiB, but may fill {of_memory}; "
    change = smallest_change(config, num_gpus, cluster, memory_bytes)
    if change is not None:
        slower = change.choice.cost.time.total / step_cost(Workload(config, layout, cluster)).time.total - 1
        then = change.choice.memory.total_bytes / GIB
        raise ConfigError(f"{begin}set {change}, which needs {then:.1f} GiB ({slower:+.0%} predicted time of a step)")
    found = search(config, num_gpus, cluster, memory_bytes, 1)
    if not found.choices:
        raise ConfigError(begin + str(nothing_fits(config, found, num_gpus, memory_bytes)))
    best = found.choices[0]
    raise ConfigError(
        f"{begin}no change of two keys is enough; {best.layout} with train.micro_batch_size="
        f"{best.config.train.micro_batch_size} and recompute {recompute_name(best.config.train)} needs "
        f"{best.memory.total_bytes / GIB:.1f} GiB (`mtrain plan` writes it)"
    )

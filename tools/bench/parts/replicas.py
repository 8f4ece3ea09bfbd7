"""Cost of a comparison of replicas next to a step: `python tools/bench/parts/replicas.py`.

Ranks of gloo train a small model; checks alternate with steps in one run. A column shows how many bytes a check reads,
which does not depend on the machine: everything that has replicas, once. A digest takes about ten integer operations
per element.
The last column is what the check adds to training at the default interval of 100 steps.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.arch.layout import Layout
from mtrain.checkpoint.state.replicas import ReplicaCheck
from mtrain.config import Config
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.training.build import build_step
from mtrain.verify.core.ranks import Pool

LAYOUTS = [Layout(dp=2), Layout(tp=2), Layout(dp=2, tp=2)]


class Cost(NamedTuple):
    """Costs on one rank, medians."""

    compared_bytes: int
    first_s: float
    """Time of the first check, with the exchange of what is held where."""
    check_s: float
    step_s: float


def config_of(hidden_size: int, num_layers: int) -> Config:
    """Makes the configuration of a model in bf16 on mock data."""
    model = {"num_layers": num_layers, "hidden_size": hidden_size, "ffn_hidden_size": 4 * hidden_size}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {**model, "num_attention_heads": 8, "vocab_size": 4096},
            "train": {"global_batch_size": 4, "num_steps": 1000, "precision": "bf16"},
            "optimizer": {"lr": 1e-4},
            "data": {"kind": "mock", "seq_length": 256},
        }
    )


def measure(groups: Groups, config: Config, num_rounds: int) -> Cost:
    """Measures steps and checks in turn."""
    built = build_step(config, groups, Objective.from_config(config.loss, config.model))
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp) if groups.tp_rank == 0 else None
    check, steps, checks = ReplicaCheck(groups), [], []
    for number in range(num_rounds + 1):
        began = time.perf_counter()
        totals = built.training.forward_backward(None if loader is None else loader.batches(number))
        built.training.update(totals, config.optimizer.lr)
        done = time.perf_counter()
        check.run(built.model)
        steps.append(done - began)
        checks.append(time.perf_counter() - done)
    compared = check.compared_bytes(built.model)
    return Cost(compared, checks[0], statistics.median(checks[1:]), statistics.median(steps[1:]))


def main(
    hidden_size: Annotated[int, typer.Option(help="Of the model.")] = 512,
    num_layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
    num_rounds: Annotated[int, typer.Option(help="Steps, each followed by a check.")] = 5,
) -> None:
    """Prints a table in Markdown."""
    pool: Any = Pool()
    config = config_of(hidden_size, num_layers)
    print("| layout | MB compared a rank | first check | check | step | added at 1 in 100 |\n|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        costs = pool.run(measure, layout, config, num_rounds)
        worst = max(costs, key=lambda cost: cost.check_s)
        added = worst.check_s / (100 * worst.step_s)
        times = " | ".join(f"{1000 * seconds:.0f} ms" for seconds in worst[1:])
        print(f"| {layout} | {worst.compared_bytes / 1e6:.1f} | {times} | {added:.2%} |")


if __name__ == "__main__":
    typer.run(main)

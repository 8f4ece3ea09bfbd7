"""Effect of `train.compile`: `python tools/bench/parts/compiled.py`.

Models of the same configuration train in one process, one eager and one for each choice, a step in turns; their losses
have to agree. Times are user + system seconds of a step on one core, medians and the least of all rounds, after the
steps in which graphs are compiled, whose time is a column of its own.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple, get_args

import torch
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.config.schema.train import Compilation
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.training.build import build_step
from mtrain.verify.core.ranks import Pool

WARM_UP_STEPS = 2


class Seconds(NamedTuple):
    """Seconds and losses of one choice of `train.compile`."""

    first_s: float
    """Time of the steps that compile."""
    steps_s: list[float]
    losses: list[float]


def config_of(choice: str, precision: str, hidden: int, layers: int, seq: int) -> Config:
    """Makes the configuration of a dense model on mock data."""
    model = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_attention_heads": 8}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {**model, "vocab_size": 1024},
            "train": {"global_batch_size": 4, "num_steps": 1000, "precision": precision, "compile": choice},
            "optimizer": {"lr": 1e-4},
            "data": {"kind": "mock", "seq_length": seq},
        }
    )


def measure(groups: Groups, configs: dict[str, Config], num_rounds: int) -> dict[str, Seconds]:
    """Measures steps in turns."""
    torch.set_num_threads(1)
    contenders: dict[str, tuple[Any, StepLoader]] = {}
    for choice, config in configs.items():
        built = build_step(config, groups, Objective.from_config(config.loss))
        contenders[choice] = built, StepLoader(config, groups.dp_rank, groups.layout.dp)
    found = {choice: Seconds(0.0, [], []) for choice in configs}
    for step in range(WARM_UP_STEPS + num_rounds):
        for choice, (built, loader) in contenders.items():
            microbatches = loader.batches(step)
            start = time.process_time()
            totals = built.training.forward_backward(microbatches)
            built.training.update(totals, 1e-4)
            seconds = time.process_time() - start
            found[choice].losses.append(totals.objective)
            if step < WARM_UP_STEPS:
                found[choice] = found[choice]._replace(first_s=found[choice].first_s + seconds)
            else:
                found[choice].steps_s.append(seconds)
    return found


def main(
    hidden: Annotated[int, typer.Option(help="width")] = 256,
    layers: Annotated[int, typer.Option(help="of the model")] = 4,
    seq: Annotated[int, typer.Option(help="tokens of a row")] = 256,
    precision: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    rounds: Annotated[int, typer.Option(help="of all")] = 9,
) -> None:
    """Prints the table."""
    configs = {choice: config_of(choice, precision, hidden, layers, seq) for choice in get_args(Compilation)}
    (found,) = Pool(timeout_s=3600).run(measure, Layout(), configs, rounds)
    eager = found["none"].losses
    furthest = max(abs(a / b - 1) for one in found.values() for a, b in zip(one.losses, eager, strict=True))
    typer.echo(f"width {hidden}, {layers} layers, 4 rows of {seq}, {precision}, one core; losses within {furthest:.1e}")
    typer.echo(f"{'train.compile':14}{'first s':>9}{'median s':>10}{'least s':>9}")
    for choice, seconds in found.items():
        median, least = statistics.median(seconds.steps_s), min(seconds.steps_s)
        typer.echo(f"{choice:14}{seconds.first_s:9.2f}{median:10.3f}{least:9.3f}")


if __name__ == "__main__":
    typer.run(main)

"""How training scales over ranks of one CPU machine, axis by axis: `python tools/bench/scaling.py`.

Each axis (tp with sp, pp, vpp, cp, dp, ep) on 1, 2, 4 and 8 ranks: weak, the batch growing with the ranks, and strong,
the batch of one rank for all. Layouts alternate in rounds; a row has the least processor seconds for a token over all
ranks, and their ratio to one rank, which more ranks than cores change little; megabytes that a rank sends for each
kind of collective; the share of the wall time that gloo's threads spend in each kind; and of pipelines the bubble, by
counting the slots of the schedule, beside the formula (p - 1) / (m v + p - 1).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.plan.layout import Layout
from mtrain.verify.core.ranks import Pool
from tools.bench import slots

AXES = ("tp", "pp", "vpp", "cp", "dp", "ep")
ROWS = 8
"""Of one rank's batch: as many as the longest pipeline has stages."""


@dataclass(frozen=True)
class Size:
    """Of the model and its rows."""

    hidden: int = 256
    layers: int = 16
    seq: int = 256


@dataclass(frozen=True)
class OfRank:
    """What one rank did in a step."""

    cpu_s: float
    wall_s: float
    megabytes: dict[str, float]
    """By axis and kind."""
    gloo_share: dict[str, float]
    """By kind, of the wall time."""
    slots: list[slots.Slot]


@dataclass(frozen=True)
class Row:
    """Of the table."""

    axis: str
    ranks: int
    kind: str
    cpu_us_a_token: float
    megabytes: dict[str, float]
    gloo_share: dict[str, float]
    bubble: float | None
    bubble_by_formula: float | None


def config_of(axis: str, ranks: int, kind: str, size: Size) -> Config:
    """One axis divided over all ranks."""
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": size.hidden} if axis == "ep" else None
    sections: dict[str, dict[str, Any]] = {
        "tp": {"tp": ranks, "sp": ranks > 1},
        "pp": {"pp": ranks},
        "cp": {"cp": ranks},
    }
    sections |= {"vpp": {"pp": ranks, "vpp": 2 if ranks > 1 else 1}, "ep": {"ep": ranks}}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {
                "num_layers": size.layers,
                "hidden_size": size.hidden,
                "ffn_hidden_size": 2 * size.hidden,
                "num_attention_heads": 8,
                "vocab_size": 4096,
                "experts": experts,
            },
            "layout": sections.get(axis, {}),
            "train": {
                "global_batch_size": ROWS * (ranks if kind == "weak" else 1),
                "num_steps": 1000,
                "precision": "fp32",
                "device": "cpu",
            },
            "optimizer": {"lr": 1e-4},
            "data": {"kind": "mock", "seq_length": size.seq},
        }
    )


def measure(groups: Groups, config: Config, rounds: int) -> OfRank:
    """The least processor time of some steps; then one that is counted and one that is profiled."""
    from torch.profiler import ProfilerActivity, profile

    from mtrain.data.loader import StepLoader
    from mtrain.loss.objective import Objective
    from mtrain.training.build import build_parts
    from tools.bench.traffic import measured

    parts = build_parts(config, groups, Objective.from_config(config.loss, config.model.mtp_depths))
    batches = StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0) if groups.tp_rank == 0 else None

    def step() -> None:
        totals = parts.training.forward_backward(batches)
        parts.training.update(totals, config.optimizer.lr)

    step()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    with slots.recorded(parts.chunks, groups.layout, groups.pp_rank) as ran:
        calls = measured(groups, step)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        step()
    wall = time.perf_counter() - start
    shares = {
        each.key.removeprefix("gloo:"): each.cpu_time_total / 1e6 / wall
        for each in watched.key_averages()
        if each.key.startswith("gloo:")
    }
    megabytes = {f"{axis} {kind}": each.sent_bytes / 1e6 for (axis, kind), each in calls.items() if each.sent_bytes}
    return OfRank(min(seconds), wall, megabytes, shares, ran)


def row_of(axis: str, ranks: int, kind: str, config: Config, layout: Layout, found: Sequence[OfRank]) -> Row:
    """Processor time of all ranks together; bytes and shares of the first."""
    tokens = config.train.global_batch_size * config.data.seq_length
    cpu = sum(each.cpu_s for each in found) / tokens * 1e6
    bubbles: tuple[float | None, float | None] = (None, None)
    if layout.pp > 1:
        microbatches = layout.num_microbatches(config.train.global_batch_size, 1)
        bubbles = (slots.bubble([each.slots for each in found], layout), slots.formula(layout, microbatches))
    return Row(axis, ranks, kind, cpu, found[0].megabytes, found[0].gloo_share, *bubbles)


def rows(axes: Sequence[str], numbers: Sequence[int], kinds: Sequence[str], size: Size, rounds: int) -> list[Row]:
    """Every axis on every number of ranks; one rank once for each axis."""
    pool, found = Pool(timeout_s=1800), []
    for axis in axes:
        for ranks in numbers:
            for kind in kinds if ranks > 1 else ["weak"]:
                config = config_of(axis, ranks, kind, size)
                layout = Layout.from_config(config, ranks)
                found.append(row_of(axis, ranks, kind, config, layout, pool.run(measure, layout, config, rounds)))
                print(_line(found), flush=True)
    return found


def _line(found: Sequence[Row]) -> str:
    row = found[-1]
    alone = next(each for each in found if each.axis == row.axis)
    ratio = row.cpu_us_a_token / alone.cpu_us_a_token
    sent = ", ".join(f"{name} {number:.2f}" for name, number in row.megabytes.items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row.gloo_share.items())
    bubble = "" if row.bubble is None else f"{row.bubble:.3f} / {row.bubble_by_formula:.3f}"
    cells = [row.axis, row.ranks, row.kind, f"{row.cpu_us_a_token:.1f}", f"{ratio:.2f}", sent, shares, bubble]
    return f"| {' | '.join(map(str, cells))} |"


def main(
    axes: Annotated[str, typer.Option(help="between commas")] = ",".join(AXES),
    ranks: Annotated[str, typer.Option(help="between commas; 1 is always there")] = "2,4,8",
    kinds: Annotated[str, typer.Option(help="weak, strong or both")] = "weak,strong",
    hidden: Annotated[int, typer.Option(help="width of the model")] = 256,
    layers: Annotated[int, typer.Option(help="of the model; 16 for 8 ranks of 2 virtual stages")] = 16,
    seq: Annotated[int, typer.Option(help="positions of a row")] = 256,
    rounds: Annotated[int, typer.Option(help="steps of which the least is taken")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="file for all numbers")] = None,
) -> None:
    """Prints the table."""
    print("| axis | ranks | batch | cpu-us a token | of one rank | MB sent by the first rank | gloo's time | bubble |")
    print("|---" * 8 + "|", flush=True)
    numbers = [1, *(int(each) for each in ranks.split(","))]
    found = rows(axes.split(","), numbers, kinds.split(","), Size(hidden, layers, seq), rounds)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    typer.run(main)

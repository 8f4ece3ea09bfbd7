"""Scaling of training over ranks of one CPU machine, axis by axis: `python tools/bench/scaling.py`.

Each axis (tp with sp, pp, vpp, cp by all-gather, ulysses and ring, dp, ep) on 1, 2, 4 and 8 ranks: weak, the batch
growing with the ranks, and strong, the batch of one rank for all. More ranks than cores take turns, so nothing here is
wall time: a row has the least processor seconds of a rank for a step, and their sum for a token next to that of one
rank; the share of them that gloo's threads need; calls and megabytes of each kind that a rank sends; and of pipelines
the bubble, by the schedule that ran: with even slots, which is the formula (p - 1) / (m v + p - 1), and with the
processor seconds that each slot had. The model of costs of `mtrain plan`, given what products, attention, memory and an
all-gather cost on this machine (parts/machine.py), predicts the seconds of a rank. `--page` writes
docs/proof/scaling.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.plan.search.cost import Workload, step_cost
from mtrain.plan.search.hardware import Cluster
from mtrain.verify.core.ranks import Pool
from tools.bench import slots
from tools.bench.all import written
from tools.bench.parts import machine

AXES = ("tp", "pp", "vpp", "cp-allgather", "cp-ulysses", "cp-ring", "dp", "ep")
LAYERS = {"pp": 8, "vpp": 16}
"""Number of layers of pipelines: one for each of 8 ranks, and for each of their two virtual stages."""
ROWS = 8
"""Number of rows in one rank's batch: as many as the longest pipeline has stages."""
HEADS = 8
GLOO = ("gloo_", "pt_gloo_")
"""Prefixes of the names of gloo's threads."""
PAGE = Path(__file__).parents[2] / "docs/proof/scaling.md"
BEGIN, END = "<!-- written by tools/bench/scaling.py -->", "<!-- end -->"
HEAD = (
    "| axis | ranks | batch | cpu-ms a rank | a token, of one rank's | of it gloo | calls and MB that a rank sends "
    "| bubble: even slots, formula, measured slots | predicted / measured |\n" + "|---" * 9 + "|"
)


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its rows."""

    hidden: int = 128
    layers: int = 4
    """Number of layers, except in pipelines."""
    seq: int = 64


@dataclass(frozen=True)
class Sent:
    """Traffic of one kind, by one rank in a step."""

    calls: int
    megabytes: float


@dataclass(frozen=True)
class OfRank:
    """Measurement of one rank in a step."""

    cpu_s: float
    gloo_s: float
    """Part of `cpu_s` in gloo's threads."""
    sent: dict[str, Sent]
    """Traffic by axis and kind."""
    slots: list[slots.Slot]
    slot_s: list[float]
    """Processor seconds of each slot."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    axis: str
    ranks: int
    kind: str
    cpu_s: float
    """Processor seconds of a rank, their mean."""
    cpu_us_a_token: float
    """Processor time of all ranks together per token."""
    gloo_share: float
    sent: dict[str, Sent]
    predicted_s: float
    bubble: float | None = None
    """Bubble of a pipeline; None without one."""
    bubble_by_formula: float | None = None
    bubble_by_seconds: float | None = None
    slowest_s: float | None = None
    """Processor seconds of the slowest rank of a pipeline; None without one."""

    @property
    def deviation(self) -> float:
        """Ratio of the prediction, which is for the slowest stage, to the measurement."""
        return self.predicted_s / (self.slowest_s or self.cpu_s)

    @property
    def key(self) -> tuple[str, int, str]:
        """Key of the measurement: axis, ranks and kind."""
        return self.axis, self.ranks, self.kind


def config_of(axis: str, ranks: int, kind: str, size: Size) -> Config:
    """Divides one axis over all ranks; microbatches of one row in a pipeline, else two, if there are enough rows."""
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": size.hidden} if axis == "ep" else None
    sections: dict[str, dict[str, Any]] = {
        "tp": {"tp": ranks, "sp": ranks > 1},
        "pp": {"pp": ranks},
        "vpp": {"pp": ranks, "vpp": 2 if ranks > 1 else 1},
        "dp": {},
        "ep": {"ep": ranks},
    }
    batch = ROWS * (ranks if kind == "weak" else 1)
    of_rank = batch // ranks if axis in ("dp", "ep") else batch
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {
                "num_layers": LAYERS.get(axis, size.layers),
                "hidden_size": size.hidden,
                "ffn_hidden_size": 2 * size.hidden,
                "num_attention_heads": HEADS,
                "vocab_size": 4096,
                "experts": experts,
            },
            "layout": sections.get(axis) or ({"cp": ranks, "cp_comm": axis[3:]} if axis.startswith("cp-") else {}),
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": 1 if axis in LAYERS else max(1, of_rank // 2),
                "num_steps": 1000,
                "precision": "fp32",
                "device": "cpu",
                "recompute": "none",
            },
            "optimizer": {"lr": 1e-4},
            "data": {"kind": "mock", "seq_length": size.seq},
        }
    )


def gloo_seconds() -> float:
    """Returns the processor seconds of gloo's threads in this process so far."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().startswith(GLOO):
                total += int((thread / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has ended
            continue
    return total / 1e9


def measure(groups: Groups, config: Config, rounds: int) -> OfRank:
    """Measures the step with the least processor time of several; then counts the collectives of another one."""
    from mtrain.core.loss.objective import Objective
    from mtrain.data.loader import StepLoader
    from mtrain.training.build import build_step
    from tools.bench.traffic import measured

    built = build_step(config, groups, Objective.from_config(config.loss, config.model))
    batches = StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0) if groups.tp_rank == 0 else None

    def step() -> None:
        totals = built.training.forward_backward(batches)
        built.training.update(totals, config.optimizer.lr)

    step()
    found: list[tuple[float, float, slots.Timeline, list[float]]] = []
    for _ in range(rounds):
        start, of_gloo = time.process_time(), gloo_seconds()
        with slots.recorded(built.model.chunks, groups.layout, groups.pp_rank) as timeline:
            step()
        end = time.process_time()
        found.append((end - start, gloo_seconds() - of_gloo, timeline, timeline.costs(end)))
    seconds, of_gloo, timeline, costs = min(found, key=lambda each: each[0])
    calls = measured(groups, step)
    sent = {f"{axis} {kind}": Sent(each.count, each.sent_bytes / 1e6) for (axis, kind), each in calls.items()}
    return OfRank(
        seconds, of_gloo, {name: each for name, each in sent.items() if each.megabytes}, timeline.slots, costs
    )


def row_of(axis: str, kind: str, config: Config, layout: Layout, found: Sequence[OfRank], of_machine: Cluster) -> Row:
    """Makes a row from the seconds of all ranks, and the traffic of the first one."""
    tokens, ranks = config.train.global_batch_size * config.data.seq_length, layout.world_size
    cpu, of_gloo = sum(each.cpu_s for each in found), sum(each.gloo_s for each in found)
    of_pipeline: dict[str, float] = {}
    if layout.pp > 1:
        microbatches = layout.num_microbatches(config.train.global_batch_size, config.train.micro_batch_size)
        ran = [each.slots for each in found]
        of_pipeline = {
            "bubble": slots.bubble(ran, layout),
            "bubble_by_formula": slots.formula(layout, microbatches),
            "bubble_by_seconds": slots.bubble(ran, layout, [each.slot_s for each in found]),
            "slowest_s": max(each.cpu_s for each in found),
        }
    planned = step_cost(Workload(config, layout, of_machine)).time
    return Row(
        axis=axis,
        ranks=ranks,
        kind=kind,
        cpu_s=cpu / ranks,
        cpu_us_a_token=cpu / tokens * 1e6,
        gloo_share=of_gloo / cpu,
        sent=found[0].sent,
        predicted_s=planned.total - planned.bubble,
        **of_pipeline,
    )


def clusters(pool: Pool, numbers: Sequence[int], size: Size, rounds: int) -> dict[int, Cluster]:
    """Describes this machine, by the number of ranks.

    Products, attention and all-gathers are measured alone. The rate at which other operations move memory is chosen so
    that the prediction for one rank with few large microbatches is right, and then the host's time for an operation by
    one with many small ones. Every row of several ranks is then a prediction.
    """
    (found,) = pool.run(machine.core, Layout(), 4 * size.seq, size.seq, size.hidden, HEADS)
    links = {number: pool.run(machine.links, Layout(dp=number))[0] for number in numbers if number > 1}
    large, small = (config_of(axis, 1, "weak", size) for axis in ("dp", "pp"))
    of_large, of_small = (pool.run(measure, Layout(), config, rounds)[0].cpu_s for config in (large, small))
    fit = fitted(found, size, large, of_large, small, of_small)
    return {number: machine.cluster(found, links.get(number, machine.NOBODY), fit, size.hidden) for number in numbers}


def fitted(
    found: machine.Core, size: Size, large: Config, of_large: float, small: Config, of_small: float
) -> machine.Fitted:
    """Fits the model to processor seconds of one rank with large microbatches, and of one with small ones."""

    def seconds(config: Config, fit: machine.Fitted) -> float:
        alone = machine.cluster(found, machine.NOBODY, fit, size.hidden)
        return step_cost(Workload(config, Layout(), alone)).time.total

    bandwidth = machine.fitted(lambda rate: seconds(large, machine.Fitted(rate, 0.0)), of_large)
    return machine.Fitted(
        bandwidth, 1 / machine.fitted(lambda rate: seconds(small, machine.Fitted(bandwidth, 1 / rate)), of_small)
    )


def described(by_ranks: Mapping[int, Cluster]) -> str:
    """Describes the measured machine in a line."""
    of_one = by_ranks[1].gpu
    several = "; ".join(
        f"{number} ranks {each.nvlink_latency_s * 1e6:.0f} us and {each.gpu.nvlink_bandwidth / 1e9:.2f} GB/s"
        for number, each in by_ranks.items()
        if number > 1
    )
    return (
        f"One thread: products {of_one.fp32_flops / 1e9:.1f} GFLOP/s, attention "
        f"{of_one.attention_efficiency * of_one.fp32_flops / 1e9:.1f}, other bytes {of_one.memory_bandwidth / 1e9:.1f} "
        f"GB/s (fitted to one rank of dp), an operation of the host {by_ranks[1].launch_s * 1e6:.0f} us (one of pp). "
        f"An all-gather, in processor time of a rank: {several}."
    )


def rows(
    axes: Sequence[str], kinds: Sequence[str], size: Size, rounds: int, pool: Pool, by_ranks: Mapping[int, Cluster]
) -> Iterator[Row]:
    """Measures every axis on every number of ranks; a single rank once for each axis."""
    for axis in axes:
        for ranks, of_machine in by_ranks.items():
            for kind in kinds if ranks > 1 else ["weak"]:
                config = config_of(axis, ranks, kind, size)
                layout = Layout.from_config(config, ranks)
                yield row_of(axis, kind, config, layout, pool.run(measure, layout, config, rounds), of_machine)


def line(row: Row, others: Sequence[Row]) -> str:
    """Formats a row as a line of the table."""
    alone = next((each for each in others if each.axis == row.axis and each.ranks == 1), None)
    ratio = "" if alone is None else f"{row.cpu_us_a_token / alone.cpu_us_a_token:.2f}"
    sent = "; ".join(f"{name} {each.calls}, {each.megabytes:.2f}" for name, each in row.sent.items())
    bubble = "" if row.bubble is None else f"{row.bubble:.3f}, {row.bubble_by_formula:.3f}, {row.bubble_by_seconds:.3f}"
    batch = "" if row.ranks == 1 else row.kind
    predicted = f"{row.deviation:.2f}"
    cells = [row.axis, row.ranks, batch, f"{1e3 * row.cpu_s:.0f}", ratio, f"{row.gloo_share:.0%}", sent, bubble]
    return f"| {' | '.join(map(str, cells))} | {predicted} |"


def table(found: Sequence[Row], size: Size, of_machine: str) -> str:
    """Formats the table, with the machine it was measured on and the deviation of predictions."""
    where = f"{os.cpu_count()} cores, {platform.machine()}; hidden {size.hidden}, rows of {size.seq} tokens"
    both = sorted(row.deviation for row in found if row.ranks > 1)
    deviation = f"median {statistics.median(both):.2f}, from {both[0]:.2f} to {both[-1]:.2f}" if both else "no rows"
    lines = [f"Measured on: {where}. {of_machine}", "", HEAD, *(line(row, found) for row in found)]
    return "\n".join([*lines, "", f"Predicted over measured, of several ranks: {deviation}."])


def earlier(path: Path | None, size: Size) -> list[Row]:
    """Reads the rows that `--json` wrote before; empty where there is no file.

    Raises:
        typer.BadParameter: The rows are of a model of another size.
    """
    if path is None or not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["size"] != asdict(size):
        raise typer.BadParameter(
            f"{path} has rows of {content['size']}, and these are of {asdict(size)}; name a new file"
        )
    return [
        Row(**{**row, "sent": {name: Sent(**each) for name, each in row["sent"].items()}}) for row in content["rows"]
    ]


def main(
    axes: Annotated[str, typer.Option(help="between commas")] = ",".join(AXES),
    ranks: Annotated[str, typer.Option(help="between commas; 1 is always there")] = "2,4,8",
    kinds: Annotated[str, typer.Option(help="weak, strong or both")] = "weak,strong",
    hidden: Annotated[int, typer.Option(help="width of the model")] = 128,
    layers: Annotated[int, typer.Option(help="of the model; pipelines have 8 and 16")] = 4,
    seq: Annotated[int, typer.Option(help="positions of a row")] = 64,
    rounds: Annotated[int, typer.Option(help="steps of which the least is taken")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="file for all numbers; other axes in it stay")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="write docs/proof/scaling.md, with all that is in the file")
    ] = False,
) -> None:
    """Prints the table."""
    wanted, size = axes.split(","), Size(hidden, layers, seq)
    if unknown := [axis for axis in wanted if axis not in AXES]:
        raise typer.BadParameter(f"--axes {','.join(unknown)}: not known; choose from {','.join(AXES)}")
    found = earlier(json_path, size)
    numbers = [1, *(int(each) for each in ranks.split(",") if int(each) > 1)]
    pool = Pool(timeout_s=1800)
    by_ranks = clusters(pool, numbers, size, rounds)
    print(described(by_ranks) + "\n\n" + HEAD, flush=True)
    for row in rows(wanted, kinds.split(","), size, rounds, pool, by_ranks):
        found = [each for each in found if each.key != row.key] + [row]
        found.sort(key=lambda each: (AXES.index(each.axis), each.ranks, each.kind != "weak"))
        print(line(row, found), flush=True)
        if json_path is not None:
            content = {"size": asdict(size), "machine": described(by_ranks), "rows": [asdict(each) for each in found]}
            json_path.write_text(json.dumps(content, indent=1))
        if page:
            PAGE.write_text(written(PAGE.read_text(), table(found, size, described(by_ranks)), BEGIN, END))


if __name__ == "__main__":
    typer.run(main)

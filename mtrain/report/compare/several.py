"""Compares more than two runs, each with the first: a table, a page of curves, and a page for each pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.log import output_console
from mtrain.config.changes import flat_keys
from mtrain.report.compare.report import comparison_page
from mtrain.report.compare.runs import Comparison, compare_runs
from mtrain.report.metrics.plot import distinct_names, load_curves
from mtrain.report.metrics.record import StepRecord
from mtrain.report.pages.charts import Curve, value_chart
from mtrain.report.pages.html import render
from mtrain.runs.folder import RunFolder

PAGE = "compare.html"


@dataclass(frozen=True)
class ComparedRun:
    """One of several runs, and its comparison with the first."""

    label: str
    """Name of its folder, distinct, and `run.name` if it has one."""
    notes: str
    records: tuple[StepRecord, ...]
    comparison: Comparison | None
    """Comparison with the first run; None for the first one itself."""
    page: str
    """File name of that comparison's page."""

    @property
    def verdict(self) -> str:
        """Verdict in a few words."""
        if self.comparison is None:
            return "reference"
        divergence = self.comparison.divergence
        return "equal" if divergence is None else f"divergent from step {divergence.step}, {divergence.name}"

    @property
    def is_equal(self) -> bool:
        return self.comparison is None or self.comparison.divergence is None

    @property
    def last(self) -> StepRecord:
        return self.records[-1]


def report_several(runs: Sequence[Path], rtol: float | None, output: Path) -> bool:
    """Compares each run with the first, prints a table and writes the pages; returns whether all are equal.

    Args:
        rtol: Largest relative difference that counts as equal; None uses the rounding of the runs' precision.
    """
    found = compare_several(runs, rtol)
    with disk_faults(f"write the comparison to {output}"):
        output.mkdir(parents=True, exist_ok=True)
        for each in found:
            if each.comparison is not None:
                write_atomically(output / each.page, comparison_page(each.comparison))
        write_atomically(output / PAGE, page_of_several(found))
    console = output_console()
    console.print(_table(found, plain=not console.is_terminal))
    console.print(output / PAGE, markup=False, soft_wrap=True)
    return all(each.is_equal for each in found)


def compare_several(runs: Sequence[Path], rtol: float | None) -> list[ComparedRun]:
    names = distinct_names(list(runs))
    found = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        text = RunFolder(run).saved_config()
        keys = {} if text is None else flat_keys(text)
        own_name = keys.get("run.name")
        found.append(
            ComparedRun(
                f"{name} ({own_name})" if own_name else name,
                keys.get("run.notes") or "",
                tuple(load_curves(run).steps),
                None if number == 0 else compare_runs(runs[0], run, rtol),
                f"compare-{number}.html",
            )
        )
    return found


def page_of_several(found: Sequence[ComparedRun]) -> str:
    """Makes the page: verdicts, then the curves of all runs."""
    different = [each for each in found if not each.is_equal]
    count = len(found) - 1
    return render(
        "several.html",
        runs=found,
        is_equal=not different,
        headline=f"{count - len(different)} of {count} runs are the run of {found[0].label}.",
        curves=_curves(found, "loss"),
        figures=[
            (name, [("by step", value_chart(f"{name} by step", _curves(found, key), ()))]) for name, key in _QUANTITIES
        ],
    )


_QUANTITIES = (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr"))


def _curves(found: Sequence[ComparedRun], key: str) -> list[Curve]:
    return [
        Curve(
            f"run{slot}",
            each.label,
            slot,
            tuple(
                (record.step, value)
                for record in each.records
                if not record.empty and math.isfinite(value := getattr(record, key))
            ),
        )
        for slot, each in enumerate(found)
    ]


def _table(found: Sequence[ComparedRun], plain: bool) -> Table:
    table = Table(pad_edge=False)
    if plain:
        table.box = None
    table.add_column("run")
    for heading in ("steps", "last loss", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("against the first")
    table.add_column("notes")
    for each in found:
        last = each.last
        cells = (f"{last.step:,}", f"{last.loss:.6g}", f"{last.tokens_per_second:,.0f}")
        table.add_row(escape(each.label), *cells, escape(each.verdict), escape(each.notes))
    return table

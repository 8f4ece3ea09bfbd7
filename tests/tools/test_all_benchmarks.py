"""Table of docs/proof/performance.md: what is read from outputs, judged and written. Nothing is timed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.messages import refuses
from tests.paths import DOCS, ROOT
from tools.bench import all as benchmarks
from tools.bench.all import BEGIN, END, Earlier, Result, measured, merged, of_gpu, of_page, table, written
from tools.bench.rows import GPU_ROWS, ROWS, Row

OUTPUTS = {
    "training, dense: tokens per cpu-s": "| dense, single | loop: 1.040 (1.050) | trainer: 1.104 (1.100) |",
    "finetuning, packed: trained tokens per cpu-s": "| transformers, padded to the longest | 0.68 | 342 | 1.92 |",
    "output layer and loss in chunks: time": "whole 1.0 1.00 9\nchunks of 512       0.02    0.81       9",
    "`mtrain --help`": "| import torch | 1.2 | 1 | 1 |\n| mtrain --help | 0.140 | 0.150 | 0.1 |",
    "`mtrain tokenize --fast`": "ours, 1 worker  5.00  3.10  3.20\nours, 1 worker, --fast  50.00  30.00  31.00",
    "packing 1M documents: samples per cpu-s": "| 500 | 4096 | 99.9%, 5.9 M/s (1.0x) | 99.9%, 0.1 M/s (41.5x) |",
    "imbalance of 64 ranks x 8 rows up to 32k": "| 1000 | 2048 | 1.2 | 1.05 | 1.0100 |\n"
    "| 8000 | 8192 | 1.2 | 1.05 | 1.0310 |",
    "loss pairs: time added to a step": "| 2 (a) | 1 | 0.1 | 0.9 | 1.1 | 0.2 | 0.31 | 0.2 |\n"
    "| 4 (b) | 3, apart | 1 | 1 | 1 | 1 | 9.0 | 9 |",
    "import with proof, 2 workers: GB/s": "import and proof, 2 workers        1.20    0.71           100",
    "checkpoint, 1, 2 and 4 ranks: GB/s": "| 1 (x) | 1.0 | 2.0 | 0.90 | 0.7 | 1.1 | 3 |\n"
    "| 4 (x) | 1.0 | 2.0 | 0.42 | 0.7 | 1.2 | 3 |",
}
"""Name of a row -> output of its command."""
EXPECTED = {
    "training, dense: tokens per cpu-s": (1.04, "met"),
    "finetuning, packed: trained tokens per cpu-s": (1.92, "met"),
    "output layer and loss in chunks: time": (0.81, "met"),
    "`mtrain --help`": (0.14, "bold"),
    "`mtrain tokenize --fast`": (31.0, "bold"),
    "packing 1M documents: samples per cpu-s": (41.5, "bold"),
    "imbalance of 64 ranks x 8 rows up to 32k": (1.031, "missed"),
    "loss pairs: time added to a step": (0.31, "bold"),
    "import with proof, 2 workers: GB/s": (0.71, "met"),
    "checkpoint, 1, 2 and 4 ranks: GB/s": (0.42, "missed"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_worst_figure_of_an_output_is_judged(name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    figure = row.figure(OUTPUTS[name])
    assert figure is not None
    assert (figure, row.verdict(figure)) == EXPECTED[name]
    assert row.figure("something else") is None


def test_every_row_of_the_page_has_a_command_that_is_there() -> None:
    page = (DOCS / "proof" / "performance.md").read_text()
    lines = [line for line in page.partition(BEGIN)[2].splitlines() if line.startswith("|")]
    named = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[2:]]
    expected = [*((row.name, row.contender) for row in ROWS), *((row.name, row.contender) for row in GPU_ROWS)]
    assert [each for each in named if each != ("", "")][: len(expected)] == expected
    assert [row.command[0] for row in ROWS if not (ROOT / "tools/bench" / row.command[0]).exists()] == []


def test_a_command_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    missing = Row("none", "nothing", 1.0, 2.0, ("none.py",), "x")
    broken = Row("broken", "nothing", 1.0, 2.0, ("rows.py", "--x"), r"no such (\d)")
    found = list(measured([missing, broken], is_small=True))
    assert [each.verdict for each in found] == ["tools/bench/none.py is not there", "the output has no such figure"]
    text = table([*found, Result(missing, 0.5)], "a machine")
    assert "| none | nothing | 1 | 2 | 0.5 | missed |" in text


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = f"# A\n{BEGIN}\nold\n<!-- end -->\nB"
    assert written(written(page, "new"), "newer") == f"# A\n{BEGIN}\n\nnewer\n\n<!-- end -->\nB"
    with refuses(ValueError):
        written("# A", "new")


def test_rows_of_a_gpu_come_from_its_report() -> None:
    assert {each.verdict for each in merged([], Earlier("", {})) if each.row in GPU_ROWS} == {"needs a GPU"}
    dense = {"mtrain": {"MFU": 0.47, "update s": 0.02}, "compiled reference": {"mtrain is faster by": 0.99}}
    report: dict[str, Any] = {
        "machine": {"tiny": False},
        "sections": {"1B": {"found": dense}, "8B, 8 layers": {"found": {}, "error": "stopped after 100 s"}},
    }
    verdicts = [each.verdict for each in of_gpu(report)]
    assert verdicts == [
        "met",
        "bold",
        "not in the report",
        "stopped after 100 s",
        "missed",
        "not in the report",
        "left out",
    ]
    with refuses(typer.BadParameter):
        of_gpu({"machine": {"tiny": True}, "sections": {}})


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the documentation's page by one without figures."""
    path = tmp_path / "performance.md"
    path.write_text(f"# Performance\n{BEGIN}\n{END}\n")
    monkeypatch.setattr(benchmarks, "PAGE", path)
    return path


def said(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], json_path: Path | None, **options: Any) -> int:
    """Returns the exit code of a run whose commands print `outputs`, by the name of their row."""

    def output_of(row: Row, is_small: bool) -> str:
        texts = [outputs[each.name] for each in ROWS if each.command == row.command and each.name in outputs]
        if not texts:
            raise RuntimeError("no such output")
        return "\n".join(texts)

    monkeypatch.setattr(benchmarks, "output_of", output_of)
    given = {"gpu_report": None, "only": "", "missing": False, "minutes": None, "small": False}
    with pytest.raises(typer.Exit) as ended:
        benchmarks.main(json_path, **given | options)
    return ended.value.exit_code


def test_parts_are_put_together(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packing, help_ = tmp_path / "figures.json", "packing 1M documents: samples per cpu-s", "`mtrain --help`"
    assert said(monkeypatch, OUTPUTS, path, only=packing) == 0
    assert said(monkeypatch, OUTPUTS, path, only="--help,convert.py") == 1, "the export has no output"
    for place in (of_page(page.read_text()), benchmarks.of_file(path)):
        by_name = {name: figure for (name, _), figure in place.figures.items()}
        assert by_name == {packing: 41.5, help_: 0.14, "import with proof, 2 workers: GB/s": 0.71}
    # a new measurement replaces the old one; without a file, the page is the source of old figures
    assert said(monkeypatch, {help_: "| mtrain --help | 0.4 |"}, None, only="--help") == 0
    assert of_page(page.read_text()).figures[(help_, "seconds")] == 0.4
    assert "| packing 1M documents: samples per cpu-s | best fit one by one, or TRL | 10 | 40 | 41.5 | bold |" in (
        page.read_text()
    )
    assert said(monkeypatch, OUTPUTS, path, missing=True) == 1
    assert (packing, "best fit one by one, or TRL") in of_page(page.read_text()).figures
    measured_now = {name for name, _ in of_page(page.read_text()).figures}
    assert measured_now >= OUTPUTS.keys()


def test_no_command_begins_when_the_time_is_up(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, OUTPUTS, None, minutes=-1.0) == 0
    assert f"the time is up: {len(ROWS)} rows are left; go on with --missing" in capsys.readouterr().out
    assert of_page(page.read_text()).figures == {}


def test_figures_of_another_machine_or_of_small_sizes_are_not_mixed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, small = tmp_path / "figures.json", tmp_path / "small.json"
    said(monkeypatch, OUTPUTS, path, only="packing.py")
    for place in (page, path):
        place.write_text(place.read_text().replace(" cores, ", "1 cores, "))
    for json_path, named in ((None, "performance.md"), (path, "figures.json")):
        with pytest.raises(typer.BadParameter, match=rf"{named} has figures of .* cannot be mixed with them"):
            benchmarks.main(json_path, None, "packing.py")
    assert said(monkeypatch, OUTPUTS, tmp_path / "new.json", only="--help") == 0
    assert {name for name, _ in of_page(page.read_text()).figures} == {"`mtrain --help`"}
    assert said(monkeypatch, OUTPUTS, small, only="--help", small=True) == 0
    with refuses(typer.BadParameter, "--small"):
        benchmarks.main(small, None, "--help")
    with refuses(typer.BadParameter):
        benchmarks.main(None, None, "nonsense")


@pytest.mark.nightly  # a layer of GPT-OSS has 50 MB an expert, and a table of its vocabulary 190
def test_a_model_in_mxfp4_is_converted_and_comes_back(tmp_path: Path) -> None:
    small = ("--mxfp4", "--layers", "1", "--experts", "4", "--rounds", "1")
    command = [sys.executable, str(ROOT / "tools" / "bench" / "convert.py"), str(tmp_path / "models"), *small]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "0.484 GB came back byte for byte\n" in text
    names = ("import and proof, 1 worker", "export and proof, 1 worker", "transformers", "export in MXFP4 and proof")
    rows = [re.search(rf"^{name}.* ([\d.]+)$", text, re.MULTILINE) for name in names]
    assert all(row is not None and float(row[1]) > 0 for row in rows), text
    assert not (tmp_path / "models").exists()

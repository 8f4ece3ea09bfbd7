"""Program for one GPU, on a CPU with small shapes: every section that needs no command of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from mtrain.arch.layout import Layout
from tests.paths import ROOT
from tests.pool import Pool
from tests.tools.gpu_ranks import TINY, answers
from tools.bench import gpu
from tools.bench.gpu import DEADLINE_S, SECTIONS, answer_apart, main
from tools.bench.one_gpu import correctness
from tools.bench.one_gpu.report import markdown
from tools.bench.one_gpu.shapes import Bench

BY_DAY = ("fp32 against float64", "experts")
"""Two kinds of sections: a comparison with a judge, and a race of contenders."""
NAMES = (
    *BY_DAY,
    "waits of the host",
    "grouped product",
    "attention kernels",
    "products",
    "1B",
    "fp8",
    "experts apart",
    "hybrid",
    "packed finetuning",
    "on the host",
    "deterministic runs",
)


@pytest.mark.parametrize(
    "names", [BY_DAY, pytest.param(NAMES, marks=pytest.mark.nightly)], ids=["one of each kind", "all"]
)
def test_sections_measure_what_they_say(pool: Pool, names: tuple[str, ...]) -> None:
    (found,) = pool.run(answers, Layout(), names)
    assert {name: each.get("error") for name, each in found.items() if not each["passed"]}.keys() == {
        "judged otherwise"  # with rotary angles of another base: so the comparison can fail
    }
    assert "from float64" in found["judged otherwise"]["error"]
    assert max(found[NAMES[0]]["found"]["relative difference"].values()) < 2e-6
    compared = {name: found[name]["found"] for name in ("1B", "experts", "hybrid") if name in names}
    for each in compared.values():
        assert all(3.0 < one["loss"] < 6.5 for one in each.values()), "about the logarithm of the vocabulary"
        assert {name for name, one in each.items() if "mtrain is faster by" in one} == each.keys() - {"mtrain"}
        assert all(len(one["top 10 kernels"]) == 10 and one["step s"] > 0 for one in each.values())
        assert each["mtrain"]["estimated bytes"] > 0
        assert each["mtrain"]["MFU"] is each["mtrain"]["peak bytes"] is None, "neither is known of a CPU"
        assert sum(each["mtrain"]["share of kernels"].values()) == pytest.approx(1)
        assert each["mtrain"]["share of kernels"]["products"] > 0.01
    assert len(compared.get("1B", "four")) == 4
    assert "fp8" not in found or found["fp8"]["found"].keys() == {"mtrain", "mtrain, fp8 rowwise"}
    assert compared["experts"].keys() == {"mtrain", "mtrain, weight gradients added apart", "megatron-core local"}
    moved = found["on the host"]["found"] if "on the host" in names else {}
    assert len({each["loss"] for each in moved.values()}) <= 1
    assert [name for name, each in moved.items() if each["estimated bytes on the host"]] == list(moved)[1:]
    ordered = found["deterministic runs"]["found"] if "deterministic runs" in names else {}
    assert all(each["compared"] > 70 and each["a run without has the same bits"] for each in ordered.values())
    waits = found["waits of the host"]["found"] if "waits of the host" in names else {}
    assert all(":" in line for reads in waits.values() for line in reads)
    sections = {name: {"right if": "it is right", **each} for name, each in found.items()}
    page = markdown({"machine": {"device": "CPU"}, "seconds": 1, "sections": sections})
    assert "| judged otherwise | **failed**: WrongError: " in page
    assert page.count("| mtrain |") == len(compared) + ("fp8" in names)
    assert "| megatron-core local | " in page


def test_the_report_says_what_every_section_must_show() -> None:
    nothing = {"found": {}, "seconds": 1.0}
    answers: dict[str, dict[str, Any]] = {
        "broken": {**nothing, "passed": False, "error": "no kernel", "right if": "it runs"},
        "waits": {**nothing, "passed": True, "found": {"dense": {}, "packed": {"step.py": 1}}, "right if": "one"},
    }
    page = markdown({"machine": {"device": "CPU"}, "seconds": 2, "sections": answers})
    assert "## broken\n\nRight if: it runs.\n\nNothing was found.\n" in page
    assert "## waits\n\nRight if: one.\n\n- dense: none\n- packed:\n  - step.py: 1\n" in page


def test_a_section_that_takes_too_long_is_stopped_and_reported(tmp_path: Path) -> None:
    answer = answer_apart("1B", TINY, 0.3, tmp_path)
    assert not answer["passed"]
    assert answer["error"].startswith("stopped after 0 s")


def test_commands_of_a_section_are_of_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that nothing has to be installed, wherever the program is started."""
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert correctness.from_here()["PYTHONPATH"] == f"{ROOT}{os.pathsep}packages"
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert correctness.from_here()["PYTHONPATH"] == str(ROOT)


def test_sections_after_the_deadline_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks also that no section gets more time than is left."""
    given: list[float] = []
    now = iter([0.0, 0.0, 0.0, 5260.0, 5260.0, 5296.0, 5296.0])
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: next(now)))

    def answer(name: str, bench: Bench, seconds: float, folder: Path) -> dict[str, Any]:
        given.append(seconds)
        return {"passed": True, "found": {}, "seconds": 1.0}

    monkeypatch.setattr(gpu, "answer_apart", answer)
    with pytest.raises(typer.Exit) as ended:
        main(tmp_path, "cpu", True, sections="products; 1B; experts")
    assert ended.value.exit_code == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert given == [500, 40.0], "ten times as long on a CPU: 5,300 s in all"
    assert report["sections"]["experts"]["error"] == "left out: the time of all sections is up"
    assert "| experts | **failed**: left out" in (tmp_path / "report.md").read_text()


def test_what_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device, sections in (("cuda", ""), ("cpu", "1B; 2B")):
        with pytest.raises(typer.Exit) as ended:
            main(tmp_path, device, sections=sections)
        assert ended.value.exit_code == 2
    said = capsys.readouterr().out
    assert "--device cuda: needs cpu, or cuda where torch sees a GPU, which it does not here" in said
    assert f"--sections 2B: not known; choose from {'; '.join(SECTIONS)}" in said


def test_all_sections_fit_into_nine_minutes() -> None:
    assert DEADLINE_S < 540
    assert all(section.seconds <= 150 for section in SECTIONS.values())

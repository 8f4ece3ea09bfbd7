"""A report on a terminal: no number and no name is cut, however narrow it is."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mtrain.verify.core.result import ParityReport
from mtrain.verify.report.print import print_report
from mtrain.verify.report.text import BACKEND, HF, MACHINE, PARITY, PREEMPT, RESUME, Count, ReportText
from tests.verify.reports import TENSORS, read_back, report, report_in_float64


def shown(width: int, *, is_terminal: bool, found: ParityReport | None = None) -> list[str]:
    text = io.StringIO()
    output = Console(file=text, width=width, force_terminal=is_terminal, color_system=None, highlight=False)
    print_report(report(0.5) if found is None else found, Path("out"), output)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200, 260])
@pytest.mark.parametrize("is_terminal", [False, True], ids=["plain", "terminal"])
def test_the_worst_tensor_of_every_layout_is_named_in_full(width: int, is_terminal: bool) -> None:
    lines = shown(width, is_terminal=is_terminal)
    (bad,) = (line for line in lines if f"gradient of {TENSORS[-1]}, step 2" in line and "cp2" in line)
    assert bad.count("tp1-pp1-cp2-dp1-mbs1") == 1
    row = next(line for line in lines if line.strip("│ ").startswith("tp1-pp1-cp2-dp1-mbs1"))
    assert "5.0e-01 !" in row
    assert "FAIL" in row
    assert "…" not in "".join(lines)


def test_a_wide_terminal_has_one_table_and_a_narrow_one_lines_below() -> None:
    assert not any(line.startswith("worst tensor of") for line in shown(200, is_terminal=True))
    assert sum(line.startswith("worst tensor of") for line in shown(80, is_terminal=True)) == 2


@pytest.mark.parametrize(
    ("found", "judged"),
    [
        (report(), "Losses and gradients were judged in float32."),
        (report_in_float64(), "were judged in float64, at the"),
    ],
    ids=["float32", "float64"],
)
def test_the_precision_that_was_judged_is_said_and_what_float32_rounded(found: ParityReport, judged: str) -> None:
    lines = shown(200, is_terminal=False, found=found)
    assert sum(judged in line for line in lines) == 1
    heading = next(line for line in lines if line.startswith("layout"))
    assert ("rounding" in heading) == (found.precision == "float64")
    assert any("3.0e-05" in line for line in lines) == (found.precision == "float64")
    assert read_back(ParityReport, found.to_json()) == found


@pytest.mark.parametrize(
    ("gradient", "slots", "sentence"),
    [
        (1e-7, (0,), "1 layout is the run of one process"),
        (1e-7, (0, 1), "2 layouts are the run of one process"),
        (0.5, (1,), "1 of 1 layout is not the run of one process"),
        (0.5, (0, 1), "1 of 2 layouts is not the run of one process"),
        (0.5, (1, 1, 0), "2 of 3 layouts are not the run of one process"),
    ],
)
def test_the_verdict_agrees_with_the_number_of_layouts(gradient: float, slots: tuple[int, ...], sentence: str) -> None:
    found = report(gradient)
    few = replace(found, layouts=tuple(found.layouts[slot] for slot in slots))
    assert few.in_words(few.text.agreement) == sentence


@pytest.mark.parametrize("text", [PARITY, RESUME, PREEMPT, HF, BACKEND, MACHINE], ids=lambda text: text.verb)
def test_every_sentence_agrees_with_its_number(text: ReportText) -> None:
    for sentence in (text.agreement, text.disagreement, text.headline, text.length):
        one, two = (sentence.format(**dict.fromkeys(("count", "failed", "steps"), Count(number))) for number in (1, 2))
        assert re.search(r"\b1 \w+s\b|\b2 \w*[^s\W] (is|does)\b|[{}|]", f"{one} {two}") is None
        assert not {"All", "are"} & set(one.split())
        assert not {"is", "does", "once"} & set(two.split())

"""Checks that the page on naive normalisation agrees with the data of its picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import DOCS, ROOT


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "pictures/seed_curves.json").read_text())
    return found


def spread(runs: dict[str, Any], name: str) -> float:
    """Returns (largest - smallest) / smallest over the layouts, at the worst step."""
    return float(max((max(step) - min(step)) / min(step) for step in zip(*(run[name] for run in runs.values()))))


def test_only_the_pair_gives_one_curve(measured: dict[str, Any]) -> None:
    for name in ("loss", "grad_norm"):
        found = {rule: spread(runs, name) for rule, runs in measured["runs"].items()}
        for rule, value in found.items():
            assert measured["largest_spread"][rule][name] == pytest.approx(value, rel=1e-6)
        assert found["pair"] < 1e-6
        assert min(found["micro-steps"], found["ranks"]) > 0.05


def test_the_page_has_the_numbers_of_the_data(measured: dict[str, Any]) -> None:
    page = (DOCS / "proof" / "same-loss-on-any-layout.md").read_text()
    for rule, digits in (("micro-steps", 3), ("ranks", 3), ("pair", 6)):
        held_out = ", ".join(f"{value:.{digits}f}" for value in measured["held_out_loss"][rule].values())
        (row,) = [line for line in page.splitlines() if line.endswith(f"| {held_out} |")]
        _, _, loss, grad_norm, _, _ = row.split("|")
        for cell, name in ((loss, "loss"), (grad_norm, "grad_norm")):
            expected = 100 * measured["largest_spread"][rule][name]
            assert float(cell.strip().removesuffix(" %")) == pytest.approx(expected, rel=0.15)
    assert measured["command"] in page
    assert f"in {measured['seconds']:.0f} s" in page


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=["README", "home page"])
def test_the_first_screen_has_the_numbers_of_the_data(measured: dict[str, Any], page: Path) -> None:
    text = page.read_text()
    assert "pictures/seed_curves.png)" in text
    cells = {"micro-steps": "of each micro-step", "ranks": "of each rank", "pair": "once, by all tokens of the step"}
    for rule, cell in cells.items():
        (row,) = [line for line in text.splitlines() if line.startswith("| ") and cell in line]
        for shown, name in zip(row.split("|")[2:4], ("loss", "grad_norm"), strict=True):
            expected = 100 * measured["largest_spread"][rule][name]
            assert float(shown.strip().removesuffix(" %")) == pytest.approx(expected, rel=0.15)

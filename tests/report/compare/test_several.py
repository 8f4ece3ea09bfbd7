"""Comparing several runs: each with the first one, in a table and on a page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mtrain.report.compare.report import compare_several, page_of_several
from tests.browser import Browser
from tests.cli.command_line import call
from tests.elements import assert_is_accessible, assert_is_self_contained, read_html
from tests.report.compare.test_runs import CONFIG, run, steps

NAMED = CONFIG.replace("run: {dir: a}", "run: {dir: a, name: with warm-up, notes: 'tp 2, the old corpus'}")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The first one, its like, and one that parts from it in step 3."""
    other = [
        dataclasses.replace(each, grad_norm=each.grad_norm * 1.5 if each.step == 3 else each.grad_norm)
        for each in steps()
    ]
    return [
        run(tmp_path / "first", steps()),
        run(tmp_path / "like", steps(), NAMED),
        run(tmp_path / "other", other),
    ]


def test_each_run_is_compared_with_the_first(runs: list[Path]) -> None:
    first, like, other = compare_several(runs, 1e-5)
    assert (first.verdict, like.verdict) == ("reference", "equal")
    assert other.verdict == "divergent from step 3, gradient norm"
    assert like.label == "like (with warm-up)"
    assert like.notes == "tp 2, the old corpus"


def test_the_command_shows_all_of_them(runs: list[Path], tmp_path: Path) -> None:
    code, text = call("compare", *runs, "--output", tmp_path / "out")
    assert code == 1
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "equal" in lines["like"]
    assert "tp 2, the old corpus" in lines["like"]
    assert "divergent from step 3" in lines["other"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "compare-1.html",
        "compare-2.html",
        "compare.html",
    ]
    code, text = call("compare", runs[0], runs[1], runs[0], "--output", tmp_path / "equal")
    assert code == 0, text


def test_one_run_is_too_few(runs: list[Path]) -> None:
    code, text = call("compare", runs[0])
    assert (code, "name a second run folder" in text) == (2, True)


@pytest.mark.nightly  # by day the page of two runs in a browser: test_runs.py
def test_the_page_reads_well(runs: list[Path], tmp_path: Path, chromium: Browser) -> None:
    text = page_of_several(compare_several(runs, None))
    page = read_html(text)
    assert_is_accessible(page)
    assert_is_self_contained(page)
    assert "1 of 2 runs is the run of first." in text
    links = [(each.attributes["href"], each.text) for each in page.all("a")]
    assert ("compare-2.html", "compare-2.html") in links
    assert all(href == text for href, text in links)
    (tmp_path / "compare.html").write_text(text)
    visit = chromium.open(tmp_path / "compare.html", 390)
    assert visit.complaints == []
    assert chromium.evaluate("document.documentElement.scrollWidth") == 390

"""Heat maps: one square a pair, by how many tolerances it is."""

import math

import pytest

from mtrain.verify.drawing.heat_map import Cell, heat_legend, heat_map
from tests.verify.elements import Element, read_html


def squares(excess: float) -> Element:
    return read_html(heat_map("name", ["row"], ["column"], {("row", "column"): Cell(excess, "all about it")}))


@pytest.mark.parametrize(
    ("excess", "kind", "fails"),
    [
        (0.0, "b0", False),
        (1e-7, "b1", False),
        (0.5, "b5", False),
        (1.0, "b5", False),
        (1.001, "b6", True),
        (500.0, "b7", True),
        (math.inf, "b8", True),
        (math.nan, "b8", True),
    ],
)
def test_a_square_tells_how_many_tolerances(excess: float, kind: str, fails: bool) -> None:
    page = squares(excess)
    (rect,) = page.all("rect")
    assert rect.attributes["class"] == kind
    assert rect.text == "all about it"
    assert bool(page.all("path", "cross")) == fails


def test_every_row_and_column_has_its_name_and_its_squares() -> None:
    rows, columns = ["first", "second", "third"], ["left", "right"]
    cells = {("first", "left"): Cell(0.1, ""), ("third", "right"): Cell(2.0, "")}
    page = read_html(heat_map("name", rows, columns, cells))
    assert [text.text for text in page.all("text")] == [*columns, *rows]
    assert [rect.attributes["class"] for rect in page.all("rect")] == ["b4", "none", "none", "none", "none", "b6"]


def test_nothing_to_show_is_a_picture_too() -> None:
    assert read_html(heat_map("name", [], [], {})).all("svg")


def test_the_legend_has_the_tolerance_between_what_passes_and_what_fails() -> None:
    entries = read_html(heat_legend()).all("li")
    place = [entry.text for entry in entries].index("tolerance = 1")
    assert [bool(entry.all("path")) for entry in entries] == [False] * (place + 1) + [True] * 3 + [False]

"""Charts: equal curves take turns, long ones keep their peaks, differences show the tolerance."""

import math
import re

import pytest

from mtrain.verify.drawing.chart import Curve, difference_chart, thinned, value_chart
from tests.verify.elements import Element, read_html

EQUAL = ((1, 4.0), (2, 3.0), (3, 2.0))


def curves(count: int, points: tuple[tuple[int, float], ...] = EQUAL) -> list[Curve]:
    return [Curve(str(slot), slot, points) for slot in range(count)]


def picture(text: str) -> Element:
    (svg,) = read_html(text).all("svg")
    assert "nan" not in "".join(str(each.attributes) for each in svg.everything())
    assert "inf" not in "".join(str(each.attributes) for each in svg.everything())
    return svg


@pytest.mark.parametrize("count", [2, 3, 12])
def test_equal_curves_are_all_visible(count: int) -> None:
    groups = picture(value_chart("x", curves(count), EQUAL)).all("g")
    assert [group.attributes["data-curve"] for group in groups] == [str(slot) for slot in range(count)]
    whole, *dashed = [group.all("path", "line")[0].attributes for group in groups]
    assert "stroke-dasharray" not in whole
    for attributes in dashed:
        dash, gap = map(float, str(attributes["stroke-dasharray"]).split())
        assert gap == pytest.approx(dash * (count - 1)), "the others' turns stay free"
    turns = {-float(str(attributes["stroke-dashoffset"])) / dash % count for attributes in dashed}
    assert turns == set(range(1, count))
    assert len({group.attributes["style"] for group in groups}) == count


def test_a_curve_that_stands_out_lies_on_top_of_the_others() -> None:
    first, *rest = curves(3)
    groups = picture(value_chart("x", [Curve("0", 0, first.points, stands_out=True), *rest], ())).all("g")
    assert [group.attributes["data-curve"] for group in groups] == ["1", "2", "0"]
    assert "stands-out" in str(groups[-1].attributes["class"])
    last = groups[-1].all("path", "line")[0].attributes
    assert last["stroke-dasharray"] == "6 6", "what lies below stays visible"


def test_a_value_that_is_no_number_interrupts_the_curve() -> None:
    (group,) = picture(value_chart("x", curves(1, ((1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, 1.0))), ())).all(
        "g"
    )
    assert re.sub("[^ML]", "", str(group.all("path", "line")[0].attributes["d"])) == "MLML"


def test_one_step_and_no_points_are_drawn() -> None:
    drawn = picture(value_chart("x", [*curves(1, ((7, 2.0),)), Curve("9", 9, ())], ((7, 2.0),)))
    assert len(drawn.all("g")) == 2
    assert drawn.all("path", "mark")


def test_differences_stand_side_by_side_above_and_below_the_tolerance() -> None:
    points = ((1, 1e-9), (2, 1e-3), (3, math.inf), (4, 0.0))
    drawn = picture(difference_chart("x", curves(3, points), 1e-6))
    (limit,) = drawn.all("line", "limit")
    y_limit = float(str(limit.attributes["y1"]))
    columns = []
    for group in drawn.all("g"):
        found = re.findall(r"M([\d.]+) ([\d.]+)", str(group.all("path", "mark")[0].attributes["d"]))
        heights = [float(y) for _, y in found]
        assert heights[3] > heights[0] > y_limit > heights[1] > heights[2]
        columns.append(float(found[0][0]))
    assert columns[0] < columns[1] < columns[2]
    assert "tolerance 1.0e-06" in drawn.text


def test_a_long_curve_keeps_its_peaks_and_what_is_no_number() -> None:
    points = [(step, 1.0 + step % 7) for step in range(100_000)]
    points[31_234], points[77_777] = (31_234, 99.0), (77_777, math.nan)
    kept = thinned(points)
    assert len(kept) < 700
    assert (31_234, 99.0) in kept
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert len(value_chart("x", [Curve("0", 0, tuple(points))], ())) < 20_000

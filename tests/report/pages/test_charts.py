"""Charts: equal curves alternate, long ones keep their peaks, axes tell values apart, colours are the page's."""

import itertools
import math
import re

import matplotlib
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.report.pages.charts import Curve, difference_chart, swatch, value_chart
from tests.elements import Element, read_html

FEW = 10
"""Number of examples of a test that draws every one with matplotlib."""
EQUAL = ((1, 4.0), (2, 3.0), (3, 2.0))


def curves(count: int, points: tuple[tuple[int, float], ...] = EQUAL) -> list[Curve]:
    return [Curve(str(slot), f"run {slot}", slot, points) for slot in range(count)]


def picture(text: str) -> Element:
    (svg,) = read_html(text).all("svg")
    shown = "".join(str(each.attributes) for each in svg.everything() if each.name != "title")
    assert not re.search(r"\b(nan|inf)\b|#0[01][0-9a-f]{4}", shown), "a place that is none, or a colour that is none"
    return svg


def style(element: Element) -> dict[str, str]:
    return dict(part.split(": ") for part in str(element.attributes["style"]).split("; "))


def groups(svg: Element) -> dict[str, list[Element]]:
    """Returns key of a curve -> its elements, from below to above; the keys in the order of their last part."""
    found: dict[str, list[Element]] = {}
    for group in svg.all("g", "curve"):
        key = str(group.attributes["data-curve"])
        found[key] = [*found.pop(key, []), group]
    return found


def line(drawn: list[Element]) -> dict[str, str]:
    """Returns the attributes of the line itself, which lies on top of the curve's thin copy."""
    return style(drawn[-1].all("path")[0])


def marks(drawn: list[Element]) -> list[tuple[float, float]]:
    uses = [each.attributes for group in drawn for each in group.all("use")]
    return [(float(str(each["x"])), float(str(each["y"]))) for each in uses]


def labels(svg: Element) -> dict[str, float]:
    """Returns the text of every label next to the axis -> its height, from the top."""
    texts = [each for each in svg.all("text") if "end" in str(each.attributes["style"])]
    found = {each.text: float(str(each.attributes["y"])) for each in texts if "tolerance" not in each.text}
    assert len(found) + ("tolerance" in svg.text) == len(texts), "a label stands there twice"
    return found


@pytest.mark.parametrize("count", [2, 3, 12])
def test_equal_curves_are_all_visible(count: int) -> None:
    found = groups(picture(value_chart("x", curves(count), EQUAL)))
    assert list(found) == [str(slot) for slot in range(count)]
    whole, *dashed = map(line, found.values())
    assert "stroke-dasharray" not in whole
    turns = set()
    for each in dashed:
        dash, gap = map(float, each["stroke-dasharray"].split(","))
        assert gap == pytest.approx(dash * (count - 1)), "the others' turns stay free"
        turns.add(-float(each["stroke-dashoffset"]) / dash % count)
    assert turns == set(range(1, count))
    assert len({line(drawn)["stroke"] for drawn in found.values()}) == count
    assert all(marks(drawn) for drawn in found.values())


def test_a_curve_that_stands_out_lies_on_top_of_the_others() -> None:
    first, *rest = curves(3)
    special = Curve("0", "run 0", 0, first.points, stands_out=True)
    found = groups(picture(value_chart("x", [special, *rest], ())))
    assert list(found) == ["1", "2", "0"]
    assert line(found["0"])["stroke-dasharray"] == "6,6", "what lies below stays visible"
    filled, hollow = (style(found[key][-1].all("use")[0])["fill"] for key in "01")
    assert (filled, hollow) == (line(found["0"])["stroke"], "var(--paper)")


def test_a_value_that_is_no_number_interrupts_the_curve() -> None:
    points = ((1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0), (7, 2.0))
    (drawn,) = groups(picture(value_chart("x", curves(1, points), ()))).values()
    assert re.sub("[^ML]", "", str(drawn[-1].all("path")[0].attributes["d"])) == "MLMML"


def test_one_step_and_no_points_are_drawn() -> None:
    drawn = picture(value_chart("x", [*curves(1, ((7, 2.0),)), Curve("9", "empty", 9, ())], ((7, 2.0),)))
    assert len(marks(groups(drawn)["0"])) == 1
    assert [each.text for each in drawn.all("text") if "middle" in str(each.attributes["style"])] == ["7"]
    assert picture(difference_chart("x", curves(2, ((7, 0.0),)), None)).all("use")


def test_differences_stand_side_by_side_above_and_below_the_tolerance() -> None:
    points = ((1, 1e-9), (2, 1e-3), (3, math.inf), (4, 0.0))
    drawn = picture(difference_chart("x", curves(3, points), 1e-6))
    (limit,) = drawn.all("g", "limit")
    (y_limit,) = {float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", str(limit.all("path")[0].attributes["d"]))}
    columns = []
    for found in map(marks, groups(drawn).values()):
        heights = [y for _, y in found]
        assert heights[3] > heights[0] > y_limit > heights[1] > heights[2]
        columns.append(found[0][0])
    assert columns[0] < columns[1] < columns[2]
    assert "tolerance 1.0e-06" in drawn.text


def test_a_pointer_on_a_curve_tells_whose_it_is() -> None:
    hostile = "</title></svg><script>alert(1)</script>&amp; #000001 #010002"
    curve = Curve("a", hostile, 0, EQUAL)
    for drawn in (value_chart(hostile, [curve], ()), difference_chart(hostile, [curve], None)):
        svg = picture(drawn)
        assert svg.attributes["aria-label"] == hostile
        assert {each.text for each in svg.all("title")} == {hostile}


def test_a_long_curve_keeps_its_peaks_and_what_is_no_number() -> None:
    points = [(step, 1.0 + step % 7) for step in range(100_000)]
    points[31_234], points[77_777] = (31_234, 99.0), (77_777, math.nan)
    text = value_chart("x", [Curve("0", "long", 0, tuple(points))], ())
    assert len(text) < 20_000
    svg = picture(text)
    assert not svg.all("use"), "as many markers as points would hide it"
    path = str(groups(svg)["0"][0].all("path")[0].attributes["d"])
    heights = sorted({float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)})
    axis = labels(svg)
    pixels = (axis["0"] - axis["80"]) / 80
    assert heights[-1] - heights[0] == pytest.approx(98 * pixels, abs=1), "from 1 to 99"
    assert heights[1] - heights[0] == pytest.approx(92 * pixels, abs=1), "the next highest are 7"
    assert path.count("M") == 2, "interrupted once"


@settings(max_examples=FEW)
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9))
@example([2041.0, 2041.0])
@example([0.0])
@example([1e9, 1e9 + 1])
@example([1.0, 1.0 + 1e-15])
def test_an_axis_keeps_the_order_and_tells_its_labels_apart(values: list[float]) -> None:
    svg = picture(value_chart("x", curves(1, tuple(enumerate(values))), ()))
    placed = [y for _, y in marks(groups(svg)["0"])]
    for (a, at), (b, after) in itertools.combinations(zip(values, placed), 2):
        assert (a - b) * (at - after) <= 0, "larger values stand higher"
    heights = labels(svg).values()
    assert len(heights) > 1
    assert all(0 < height < 200 for height in heights)


def test_labels_say_where_they_are() -> None:
    svg = picture(value_chart("x", curves(1, ((1, 4.1), (2, 4.9), (3, math.nan), (4, math.inf))), ()))
    axis = labels(svg)
    assert list(axis) == ["4.2", "4.4", "4.6", "4.8"]
    (_, low), (_, high) = marks(groups(svg)["0"])
    slope = (axis["4.2"] - axis["4.8"]) / 0.6
    assert low - high == pytest.approx(0.8 * slope, abs=0.01)


@settings(max_examples=FEW)
@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=9))
def test_an_axis_of_steps_has_whole_numbers(steps: set[int]) -> None:
    svg = picture(value_chart("x", curves(1, tuple((step, 1.0) for step in sorted(steps))), ()))
    texts = [each for each in svg.all("text") if "middle" in str(each.attributes["style"])]
    shown = {int(each.text.replace(",", "")): float(str(each.attributes["x"])) for each in texts}
    assert 1 <= len(shown) == len(texts) <= 10
    assert all(min(steps) <= step <= max(steps) for step in shown)
    assert [shown[step] for step in sorted(shown)] == sorted(shown.values())
    placed = dict(zip(sorted(steps), (x for x, _ in marks(groups(svg)["0"]))))
    assert all(placed[step] == pytest.approx(shown[step], abs=0.01) for step in placed.keys() & shown.keys())


positive = st.floats(1e-300, 1e300)


@settings(max_examples=FEW)
@given(st.lists(st.one_of(positive, st.just(0.0), st.sampled_from([math.inf, math.nan])), min_size=1, max_size=9))
def test_an_axis_of_logarithms_has_room_for_0_and_for_what_is_no_number(values: list[float]) -> None:
    svg = picture(difference_chart("x", curves(1, tuple(enumerate(values))), None))
    heights = dict(enumerate(y for _, y in marks(groups(svg)["0"])))
    assert len(heights) == len(values), "every value has a place"
    finite = sorted((value, -heights[place]) for place, value in enumerate(values) if math.isfinite(value))
    for (a, at), (b, after) in itertools.pairwise(finite):
        assert at <= after + 0.001
        assert at < after or a > 0 or b == 0, "0 is distinct from everything else"
    others = {heights[place] for place, value in enumerate(values) if not math.isfinite(value)}
    assert len(others) <= 1
    assert all(height < min((-y for _, y in finite), default=math.inf) for height in others)
    axis = labels(svg)
    assert ("∞, nan" in axis) == bool(others)
    assert ("0" in axis) == (0.0 in values)
    assert len(axis) >= 2
    assert all(0 < height < 150 for height in axis.values())


def test_a_page_of_pictures_is_the_same_every_time_and_names_nothing_twice() -> None:
    def page() -> str:
        charts = [value_chart(name, curves(2), EQUAL) for name in ("one", "two")]
        return "".join([*charts, difference_chart("three", curves(2), 1e-5), *map(swatch, range(7))])

    text = page()
    with matplotlib.rc_context({"text.usetex": True, "lines.marker": "x", "axes.grid": True, "axes.labelcolor": "red"}):
        swatch.cache_clear()
        assert text == page(), "whatever the user's matplotlibrc says"
    names = re.findall(r' id="([^"]*)"', text)
    assert len({*names}) == len(names) > 0
    assert {*re.findall(r'xlink:href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)} == {*names}
    assert "<style" not in text
    assert "<metadata" not in text

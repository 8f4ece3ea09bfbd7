"""The page of a parity report: its content, that all text is escaped, and how a real browser shows it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from mtrain.base.errors import MachineError
from mtrain.report.pages.html import write_page
from mtrain.verify.core.result import KINDS, Deviation, LayoutResult, ParityReport
from mtrain.verify.report.page import report_page
from tests.browser import Browser, Visit
from tests.elements import Element, assert_is_accessible, assert_is_self_contained, read_html, rows
from tests.messages import refuses
from tests.verify.reports import TENSORS, layout_result, report, report_in_float64

HOSTILE = "</pre></title></style><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"&amp;"
GRADIENTS = [1e-7, 0.5, math.inf, math.nan]


_TEXTS: dict[str, str] = {}


def text_of(found: ParityReport) -> str:
    """Returns the page of a report, made once, as its pictures take half a second."""
    if (key := repr(found)) not in _TEXTS:
        _TEXTS[key] = report_page(found)
    return _TEXTS[key]


def page(found: ParityReport) -> Element:
    return read_html(text_of(found))


def open_page(found: ParityReport, chromium: Browser, folder: Path, *width: int, dark: bool = False) -> Visit:
    path = folder / "parity.html"
    path.write_bytes(text_of(found).encode())
    return chromium.open(path, *width, dark=dark)


def stopped() -> ParityReport:
    """Builds a report in which no layout reached its first step."""
    layouts = tuple(LayoutResult(name, {}, 2, 0.1, error="no") for name in ("one", "two"))
    return dataclasses.replace(report(0.5), layouts=layouts)


def hostile(value: Any) -> Any:
    """Appends the hostile text to every text of a report."""
    return changed(value, lambda text: text if text in KINDS else text + HOSTILE)


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Changes every text of a report."""
    match value:
        case str():
            return change(value)
        case tuple():
            return tuple(changed(item, change) for item in value)
        case dict():
            return {change(key): changed(item, change) for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **{name: changed(item, change) for name, item in fields.items()})
        case _:
            return value


@pytest.mark.parametrize("found", [*map(report, GRADIENTS), stopped()], ids=[*map(str, GRADIENTS), "stopped"])
def test_the_page_is_whole_self_contained_and_accessible(found: ParityReport) -> None:
    read = page(found)
    assert_is_self_contained(read)
    assert_is_accessible(read)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_the_verdict_comes_first(gradient: float) -> None:
    found = report(gradient)
    read = page(found)
    verdict = "PASS" if found.passed else "FAIL"
    assert read.all("title")[0].text.startswith(verdict)
    main = read.all("main")[0]
    first = next(each for each in main.children if isinstance(each, Element))
    assert verdict in first.all("h1")[0].text
    assert ("All 2 layouts" if found.passed else "2 of 3 layouts are not") in first.text
    assert ("planted on purpose: cp-scaled-loss" in main.text) == (found.injected is not None)


def test_the_table_tells_each_layouts_worst_deviations() -> None:
    headings, *found = rows(page(report(0.5)).all("table", "layouts")[0])
    assert headings[:6] == [
        "layout",
        "verdict",
        "samples",
        "learning rate",
        "denominator",
        "losstolerance 1.0e-06",
    ]
    assert headings[6] == "gradientstolerance 1.0e-06"
    good, bad, refused = found
    worst = ["0", "1.0e-16step 9", "0", "2.0e-08step 1", "1.0e-07step 1"]
    assert good[:7] == ["tp2-pp1-cp1-dp1-mbs12 ranks", "✓ pass", *worst]
    assert bad[1] == "✗ FAIL"
    assert bad[6] == "✗ 5.0e-01step 2"
    assert refused[1:] == ["✗ FAIL", *["none"] * 7, "0.1 s"]
    table = next(each for each in page(report(0.5)).all("table") if "The worst tensor" in each.text)
    assert rows(table)[2] == ["tp1-pp1-cp2-dp1-mbs1", TENSORS[-1], "gradients, step 2"]
    assert rows(table)[3][1:] == ["none", "none"]


def test_the_page_says_which_precision_was_judged_and_what_float32_rounded() -> None:
    plain, wide = page(report()), page(report_in_float64())
    assert "judged in float32." in plain.all("main")[0].text
    assert "judged in float64, at the weights of the run, which is in float32." in wide.all("main")[0].text
    headings, *found = rows(wide.all("table", "layouts")[0])
    at = headings.index("rounding of float32")
    assert [row[at] for row in found] == ["3.0e-05step 1"] * 2
    assert "rounding of float32" not in rows(plain.all("table", "layouts")[0])[0]


def test_why_a_layout_stopped_is_reported() -> None:
    found = report(0.5)
    guarded = dataclasses.replace(layout_result("guarded", {}), guards=("denominator is off", "so is the norm"))
    texts = [each.text for each in page(dataclasses.replace(found, layouts=(*found.layouts, guarded))).all("pre")]
    assert "rank 0 raised" in texts
    assert "denominator is off\nso is the norm" in texts


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_failure_is_diagnosed_and_nothing_else(gradient: float) -> None:
    found = report(gradient)
    read = page(found)
    assert ("one\ntwo" in [each.text for each in read.all("pre")]) == (not found.passed)
    assert ("Where it breaks" in [each.text for each in read.all("h2")]) == (not found.passed)


def test_every_layout_has_its_curve_in_every_picture() -> None:
    figures = [each for each in page(report()).all("figure") if each.all("svg", "chart")]
    names = ["loss of main", "loss of z", "gradient norm", "denominator of main", "denominator of z"]
    assert [each.all("figcaption")[0].text for each in figures] == names
    for figure in figures:
        values, *differences = figure.all("svg", "chart")
        assert {group.attributes["data-curve"] for group in values.all("g", "curve")} == {"0", "1"}
        assert len(values.all("g", "backdrop")) == 1
        is_exact = "denominator" in figure.all("figcaption")[0].text
        assert len(differences) == (0 if is_exact else 1)
        assert ("exactly 0 in every step of every layout" in figure.text) == is_exact


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_tensor_of_every_layout_has_its_square(gradient: float) -> None:
    found = report(gradient)
    gradients, updates = (each for each in page(found).all("div", "heat"))
    assert [each.text for each in gradients.all("span", "column")] == [layout.name for layout in found.layouts]
    assert [each.text for each in gradients.all("span", "row")] == list(TENSORS)
    cells = gradients.all("i", "cell")
    assert len(cells) == len(TENSORS) * len(found.layouts)
    shown = [str(cell.attributes["title"]) for cell in cells if "title" in cell.attributes]
    assert len(shown) == len(TENSORS) * 2
    assert sum(cell.attributes["class"] == "cell" for cell in cells) == len(TENSORS) * (len(found.layouts) - 2)
    assert [cell.text for cell in cells if cell.text] == ["✕"] * (not found.passed)
    assert not any(cell.text for cell in updates.all("i", "cell"))
    wanted = f"{TENSORS[-1]}\ntp1-pp1-cp2-dp1-mbs1\nworst at step 2: {gradient:.1e}, tolerance 1.0e-05"
    assert (wanted in shown) == (not found.passed)
    assert ("1 of 6 beyond" in str(gradients.attributes["aria-label"])) == (not found.passed)


SQUARES = [
    (0.0, "b0"),
    (1e-7, "b1"),
    (0.5, "b5"),
    (1.0, "b5"),
    (1.001, "b6"),
    (500.0, "b7"),
    (math.inf, "b8"),
    (math.nan, "b8"),
]


def test_a_square_tells_how_many_tolerances() -> None:
    layouts = []
    for number, (excess, _) in enumerate(SQUARES):
        only = (Deviation("gradient", TENSORS[0], 1, excess * 1e-5, 1e-5),)
        layouts.append(dataclasses.replace(layout_result(str(number), {}), deviations=only))
    gradients = page(dataclasses.replace(report(), layouts=tuple(layouts))).all("div", "heat")[0]
    squares = [cell for cell in gradients.all("i", "cell") if "title" in cell.attributes]
    assert [square.attributes["class"] for square in squares] == [f"cell {kind}" for _, kind in SQUARES]
    assert [square.text for square in squares] == ["" if excess <= 1 else "✕" for excess, _ in SQUARES]


def test_the_legend_of_squares_has_the_tolerance_between_what_passes_and_what_fails() -> None:
    entries = page(report()).all("ul", "heat-legend")[0].all("li")
    place = [entry.text for entry in entries].index("tolerance = 1")
    assert ["✕" in entry.text for entry in entries] == [False] * (place + 1) + [True] * 3 + [False]
    kinds = [str(cell.attributes["class"]) for entry in entries for cell in entry.all("i")]
    assert kinds == [*(f"cell b{number}" for number in range(9)), "cell"]


def test_the_worst_layout_of_every_tensor_stands_in_a_table() -> None:
    table = next(each for each in page(report(0.5)).all("table") if "Worst layout" in each.text)
    assert rows(table)[-1][:2] == [TENSORS[-1], "✗ 5.0e-01tp1-pp1-cp2-dp1-mbs1"]


def test_tolerances_circumstances_and_configuration_are_reported() -> None:
    found = report()
    text = page(found).text
    table = next(each for each in page(found).all("table") if "tolerances come from" in each.text)
    assert rows(table)[1] == ["loss", "1.0e-06", "relative", "u", "u = 5.96e-08"]
    for shown in (*found.changes, found.command, found.data, "2026-01-01 00:00 UTC", "2.13", "num_layers: 2"):
        assert shown in text


def test_whatever_a_text_holds_stays_text(tmp_path: Path, chromium: Browser) -> None:
    found = hostile(report(0.5))
    read = page(found)
    assert len(read.all("script")) == 1
    assert "window.hit" not in read.all("script")[0].text
    assert read.all("img") == []
    for shown in (found.command, found.data, *found.changes, *found.diagnosis.lines, found.layouts[0].name):
        assert shown in read.text
    pictures = [*read.all("svg", "chart"), *read.all("div", "heat")]
    assert any(HOSTILE in str(each.attributes["aria-label"]) for each in pictures)
    assert {HOSTILE in each.text for each in pictures[0].all("title")} == {True}
    assert any(HOSTILE in str(cell.attributes.get("title")) for cell in read.all("i", "cell"))
    assert open_page(found, chromium, tmp_path).complaints == []
    assert chromium.evaluate("typeof window.hit") == "undefined"


def test_what_utf_8_or_html_cannot_hold_is_replaced() -> None:
    found = dataclasses.replace(report(), command="a\x00b\x1bc\ud800d\te\nf", changes=())
    assert "a\ufffdb\ufffdc\ufffdd\te\nf" in [each.text for each in page(found).all("pre")]
    assert text_of(found).encode()


def test_a_page_is_the_same_every_time() -> None:
    assert text_of(report(0.5)) == report_page(report(0.5))


def test_a_page_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(MachineError):
        write_page(tmp_path / "file" / "parity.html", report_page(report()))
    write_page(tmp_path / "new" / "parity.html", report_page(report()))
    assert (tmp_path / "new" / "parity.html").read_text().startswith("<!DOCTYPE html>")


def test_the_browser_tells_of_requests_and_errors(tmp_path: Path, chromium: Browser) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('a'); throw new Error('b')</script>")
    visit = chromium.open(path)
    assert visit.requests == [path.as_uri(), "http://127.0.0.1:9/x.png"]
    assert any("a" in each for each in visit.complaints)
    assert any("Error: b" in each for each in visit.complaints)


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WIDE_TABLES = """
[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)
  .map(each => each.getAttribute('aria-label'))
"""
"""Tables that a reader has to scroll sideways."""
SMALLEST_PICTURE = (
    "Math.min(...[...document.querySelectorAll('[role=img]')].map(e => e.getBoundingClientRect().height))"
)
LOWEST_CONTRAST = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b };
  const paper = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c } return [255, 255, 255] };
  const names = 'h1,h2,h3,p,th,td,small,dt,dd,li,code,pre,button,summary,caption,figcaption,svg text,'
    + '.row,.column b,.cell';
  const all = [...document.querySelectorAll(names)];
  return Math.min(...all.filter(e => e.textContent).map(e => {
    const style = getComputedStyle(e), ink = light(rgb(e.namespaceURI.includes('svg') ? style.fill : style.color));
    const back = light(paper(e)); return (Math.max(ink, back) + .05) / (Math.min(ink, back) + .05) }));
})()"""


@pytest.mark.parametrize(
    ("gradient", "width", "dark"),
    [
        (0.5, 360, True),
        (1e-7, 1280, False),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in [(0.5, 1280, False), (1e-7, 360, True)]),
    ],  # by day every value once
)
def test_a_browser_shows_the_page(tmp_path: Path, chromium: Browser, gradient: float, width: int, dark: bool) -> None:
    found = report(gradient)
    visit = open_page(found, chromium, tmp_path, width, dark=dark)
    assert visit.requests == [(tmp_path / "parity.html").as_uri()]
    assert visit.complaints == []
    assert chromium.evaluate(OVERFLOW) == 0, "the page itself does not scroll sideways"
    assert width < 1280 or chromium.evaluate(WIDE_TABLES) == []
    assert chromium.evaluate(SMALLEST_PICTURE) > 60
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    assert chromium.evaluate(LOWEST_CONTRAST) >= 4.5
    shown = chromium.accessible()
    assert ("table", "Every layout against the reference") in shown
    assert sum(role == "rowheader" and name.startswith("tp") for role, name in shown) == 2 * len(found.layouts)
    pictures = [name for role, name in shown if role == "image"]
    assert any(name.startswith("loss of main of every layout") for name in pictures)
    assert any(name.startswith("worst deviation of the gradients, 3 tensors by") for name in pictures)


@pytest.mark.nightly  # a browser shows their sizes and names by day, above
def test_the_pictures_are_painted(tmp_path: Path, chromium: Browser) -> None:
    open_page(report(0.5), chromium, tmp_path)
    chromium.picture(tmp_path / "page.png")
    colours = painted(tmp_path / "page.png")
    squares = ((f".heat .{kind}", "backgroundColor") for kind in ("b3", "b8"))
    for selector, style in (*squares, (".chart .curve path", "stroke"), (".chart .limit path", "stroke")):
        shown = chromium.evaluate(f"getComputedStyle(document.querySelector('figure {selector}')).{style}")
        wanted = [int(number) for number in re.findall(r"\d+", shown)]
        assert np.abs(colours - wanted).max(axis=1).min() <= 3, selector  # edges are blended


def painted(picture: Path) -> np.ndarray:
    """Returns the colours of a picture, 0 to 255, shape [colour, 3]."""
    pixels = np.round(matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
    found = np.unique(pixels @ [1 << 16, 1 << 8, 1])
    return np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)


LONG = "decoder.layers.0.mlp.experts." + "local_experts." * 12 + "linear_fc1.weight"
LINES_OF_NAMES = """(() => { const range = document.createRange();
  const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node; node = walk.nextNode();) for (const { index } of node.data.matchAll(NAME)) {
    range.setStart(node, index); range.setEnd(node, index + NAME.length);
    if (range.getBoundingClientRect().height) found.push(new Set([...range.getClientRects()].map(r => r.top)).size) }
  return found; })()"""


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.nightly)])  # narrow is the harder one
def test_the_name_of_a_tensor_is_never_broken(tmp_path: Path, chromium: Browser, width: int) -> None:
    found = report(0.5)
    assert found.diagnosis is not None
    named = renamed(dataclasses.replace(found, diagnosis=dataclasses.replace(found.diagnosis, lines=(f"x of {LONG}",))))
    open_page(named, chromium, tmp_path, width)
    chromium.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    lines = chromium.evaluate(LINES_OF_NAMES.replace("NAME.length", str(len(LONG))).replace("NAME", repr(LONG)))
    assert len(lines) == page(named).all("main")[0].text.count(LONG) > 5
    assert {*lines} == {1}
    assert chromium.evaluate(OVERFLOW) == 0


def renamed(value: Any) -> Any:
    """Gives a report's last tensor a long name."""
    return changed(value, lambda text: LONG if text == TENSORS[-1] else text)


def test_the_legend_brings_out_one_layout(tmp_path: Path, chromium: Browser) -> None:
    open_page(report(), chromium, tmp_path)
    faint = "[...new Set([...document.querySelectorAll('.faint')].map(e => e.dataset.curve))].join()"
    press = "document.querySelectorAll('[data-pick]')[1].click()"
    assert chromium.evaluate(faint) == ""
    chromium.evaluate(press)
    assert chromium.evaluate(faint) == "0"
    assert chromium.evaluate("document.querySelectorAll('[aria-pressed=true]').length") == 1
    chromium.evaluate(press)
    assert chromium.evaluate(faint) == ""

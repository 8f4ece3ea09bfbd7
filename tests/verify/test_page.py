"""The page of a parity report: what it says, that nothing escapes, and how a real browser shows it."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from mtrain.base.errors import MachineError
from mtrain.verify.core.result import KINDS, LayoutResult, ParityReport
from mtrain.verify.page import report_page, write_page
from tests.verify.browser import Browser
from tests.verify.elements import Element, assert_is_accessible, assert_is_self_contained, read_html, rows
from tests.verify.reports import TENSORS, layout_result, report

HOSTILE = "</pre></title></style><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"&amp;"
GRADIENTS = [1e-7, 0.5, math.inf, math.nan]


def page(found: ParityReport) -> Element:
    return read_html(report_page(found))


def stopped() -> ParityReport:
    """No layout came to its first step."""
    layouts = tuple(LayoutResult(name, {}, 2, 0.1, error="no") for name in ("one", "two"))
    return dataclasses.replace(report(0.5), layouts=layouts)


def hostile(value: Any) -> Any:
    """The same report with the hostile text at the end of every text."""
    match value:
        case str() if value not in KINDS:
            return value + HOSTILE
        case tuple():
            return tuple(map(hostile, value))
        case dict():
            return {hostile(key): hostile(item) for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{each.name: hostile(getattr(value, each.name)) for each in dataclasses.fields(value)}
            )
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
    assert isinstance(main.children[0], Element)
    assert verdict in main.children[0].all("h1")[0].text
    assert ("All 2 layouts" if found.passed else "2 of 3 layouts are not") in main.children[0].text
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
    assert bad[9] == f"{TENSORS[-1]}gradients, step 2"
    assert refused[1:] == ["✗ FAIL", *["none"] * 8, "0.1 s"]


def test_why_a_layout_stopped_is_told() -> None:
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
        assert {group.attributes["data-curve"] for group in values.all("g")} == {"0", "1"}
        assert len(values.all("path", "backdrop")) == 1
        is_exact = "denominator" in figure.all("figcaption")[0].text
        assert len(differences) == (0 if is_exact else 1)
        assert ("exactly 0 in every step of every layout" in figure.text) == is_exact


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_tensor_of_every_layout_has_its_square(gradient: float) -> None:
    found = report(gradient)
    gradients, updates = page(found).all("svg", "heat")[-2:]
    told = [rect.text for rect in gradients.all("rect") if rect.text]
    assert len(told) == len(TENSORS) * 2
    assert len(gradients.all("rect", "none")) == len(TENSORS) * (len(found.layouts) - 2)
    assert len(gradients.all("path", "cross")) == (not found.passed)
    assert len(updates.all("path", "cross")) == 0
    wanted = f"{TENSORS[-1]}\ntp1-pp1-cp2-dp1-mbs1\nworst at step 2: {gradient:.1e}, tolerance 1.0e-05"
    assert (wanted in told) == (not found.passed)
    assert ("1 of 6 beyond" in str(gradients.attributes["aria-label"])) == (not found.passed)


def test_the_worst_layout_of_every_tensor_stands_in_a_table() -> None:
    table = next(each for each in page(report(0.5)).all("table") if "Worst layout" in each.text)
    assert rows(table)[-1][:2] == [TENSORS[-1], "✗ 5.0e-01tp1-pp1-cp2-dp1-mbs1"]


def test_tolerances_circumstances_and_configuration_are_told() -> None:
    found = report()
    text = page(found).text
    table = next(each for each in page(found).all("table") if "tolerances come from" in each.text)
    assert rows(table)[1] == ["loss", "1.0e-06", "relative", "u", "u = 5.96e-08"]
    for told in (*found.changes, found.command, found.data, found.created, "2.13", "num_layers: 2"):
        assert told in text


def test_whatever_a_text_holds_stays_text(tmp_path: Path, chromium: Browser) -> None:
    found = hostile(report(0.5))
    read = page(found)
    assert len(read.all("script")) == 1
    assert "window.hit" not in read.all("script")[0].text
    assert read.all("img") == []
    for told in (found.command, found.data, *found.changes, *found.diagnosis.lines, found.layouts[0].name):
        assert told in read.text
    write_page(found, tmp_path / "parity.html")
    assert chromium.open(tmp_path / "parity.html").complaints == []
    assert chromium.evaluate("typeof window.hit") == "undefined"


def test_a_page_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="could not write"):
        write_page(report(), tmp_path / "file" / "parity.html")
    write_page(report(), tmp_path / "new" / "parity.html")
    assert (tmp_path / "new" / "parity.html").read_text().startswith("<!DOCTYPE html>")


def test_the_browser_tells_of_requests_and_errors(tmp_path: Path, chromium: Browser) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('a'); throw new Error('b')</script>")
    visit = chromium.open(path)
    assert visit.requests == [path.as_uri(), "http://127.0.0.1:9/x.png"]
    assert any("a" in each for each in visit.complaints)
    assert any("Error: b" in each for each in visit.complaints)


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SMALLEST_PICTURE = (
    "Math.min(...[...document.querySelectorAll('svg[role=img]')].map(e => e.getBoundingClientRect().height))"
)
LOWEST_CONTRAST = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b };
  const paper = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c } return [255, 255, 255] };
  const names = 'h1,h2,h3,p,th,td,small,dt,dd,li,code,pre,button,summary,caption,figcaption,svg text';
  const all = [...document.querySelectorAll(names)];
  return Math.min(...all.filter(e => e.textContent).map(e => {
    const style = getComputedStyle(e), ink = light(rgb(e.namespaceURI.includes('svg') ? style.fill : style.color));
    const back = light(paper(e)); return (Math.max(ink, back) + .05) / (Math.min(ink, back) + .05) }));
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("gradient", [1e-7, 0.5])
def test_a_browser_shows_the_page(tmp_path: Path, chromium: Browser, gradient: float, width: int, dark: bool) -> None:
    path = tmp_path / "parity.html"
    found = report(gradient)
    write_page(found, path)
    visit = chromium.open(path, width, dark=dark)
    assert visit.requests == [path.as_uri()]
    assert visit.complaints == []
    assert chromium.evaluate(OVERFLOW) == 0, "the page itself does not scroll sideways"
    assert chromium.evaluate(SMALLEST_PICTURE) > 60
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    assert chromium.evaluate(LOWEST_CONTRAST) >= 4.5
    shown = chromium.accessible()
    assert ("table", "Every layout against the reference") in shown
    assert sum(role == "rowheader" and name.startswith("tp") for role, name in shown) == len(found.layouts)
    pictures = [name for role, name in shown if role == "image"]
    assert any(name.startswith("loss of main of every layout") for name in pictures)
    assert any(name.startswith("worst deviation of the gradients, 3 tensors by") for name in pictures)


def test_the_pictures_are_painted(tmp_path: Path, chromium: Browser) -> None:
    write_page(report(0.5), tmp_path / "parity.html")
    chromium.open(tmp_path / "parity.html")
    chromium.picture(tmp_path / "page.png")
    colours = painted(tmp_path / "page.png")
    for selector, style in ((".heat rect.b3", "fill"), (".heat rect.b8", "fill"), (".chart .line", "stroke")):
        told = chromium.evaluate(f"getComputedStyle(document.querySelector('figure {selector}')).{style}")
        wanted = [int(number) for number in re.findall(r"\d+", told)]
        assert np.abs(colours - wanted).max(axis=1).min() <= 3, selector  # edges are blended


def painted(picture: Path) -> np.ndarray:
    """The colours of a picture, 0 to 255, shape [colour, 3]."""
    pixels = np.round(matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
    found = np.unique(pixels @ [1 << 16, 1 << 8, 1])
    return np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)


def test_the_legend_brings_out_one_layout(tmp_path: Path, chromium: Browser) -> None:
    write_page(report(), tmp_path / "parity.html")
    chromium.open(tmp_path / "parity.html")
    faint = "[...new Set([...document.querySelectorAll('.faint')].map(e => e.dataset.curve))].join()"
    press = "document.querySelectorAll('[data-pick]')[1].click()"
    assert chromium.evaluate(faint) == ""
    chromium.evaluate(press)
    assert chromium.evaluate(faint) == "0"
    assert chromium.evaluate("document.querySelectorAll('[aria-pressed=true]').length") == 1
    chromium.evaluate(press)
    assert chromium.evaluate(faint) == ""

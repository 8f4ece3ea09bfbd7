"""Markup: what is text stays text."""

from mtrain.verify.drawing.markup import Markup, element, escaped, joined
from tests.verify.elements import read_html

HOSTILE = "</td><script>alert('1')</script>&amp;\"'"


def test_text_and_attributes_come_back_as_they_were() -> None:
    (read,) = read_html(element("td", {"title": HOSTILE}, HOSTILE, element("b", {}, HOSTILE))).all("td")
    assert read.attributes == {"title": HOSTILE}
    assert read.children[0] == HOSTILE
    assert read.text == HOSTILE * 2
    assert [each.name for each in read.everything()] == ["b"]


def test_markup_is_not_escaped_again() -> None:
    assert joined([Markup("<b>"), "<b>"]) == "<b>&lt;b&gt;"


def test_what_utf_8_or_html_cannot_hold_is_replaced() -> None:
    assert escaped("a\x00b\x1bc\ud800d\te\nf") == "a\ufffdb\ufffdc\ufffdd\te\nf"


def test_coordinates_are_short() -> None:
    assert element("i", {"a": 1.0, "b": 0.126, "c": 3, "d": -2.5}) == '<i a="1" b="0.13" c="3" d="-2.5"></i>'


def test_void_elements_have_no_end() -> None:
    assert element("br", {}) == "<br>"

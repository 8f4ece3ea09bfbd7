"""The frame of a page: one file that asks for nothing else, in light and dark, on wide screens and narrow ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.verify.drawing.chart import swatch
from mtrain.verify.drawing.markup import Markup, element, joined
from mtrain.verify.drawing.style import SCRIPT, STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Makes the browser itself refuse whatever would be loaded from elsewhere."""


def document(title: str, *body: Markup) -> str:
    """The whole file; `body` is what stands inside <main>."""
    head = element(
        "head",
        {},
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("title", {}, title),
        element("style", {}, Markup(STYLE)),
    )
    page = element("body", {}, element("main", {}, *body), element("script", {}, Markup(SCRIPT)))
    return f"<!DOCTYPE html>\n{element('html', {'lang': 'en'}, head, page)}\n"


def verdict_header(name: str, headline: str, *, is_good: bool, notes: Sequence[str]) -> Markup:
    """The first thing to be read: a word, a sentence, and small print."""
    word = element("strong", {"class": "word"}, ("✓ " if is_good else "✗ ") + name)
    lines = [element("p", {"class": "note"}, note) for note in notes]
    kind = "verdict good" if is_good else "verdict bad"
    return element("header", {"class": kind}, element("h1", {}, word, " ", headline), *lines)


def section(heading: str, *content: str) -> Markup:
    """A part of the page with its heading."""
    return element("section", {}, element("h2", {}, heading), *content)


def paragraph(*content: str) -> Markup:
    """Running text."""
    return element("p", {}, *content)


def preformatted(text: str) -> Markup:
    """Text line by line, as a terminal shows it."""
    return element("pre", {}, text)


def axis_name(text: str) -> Markup:
    """What the axis of the picture that follows tells."""
    return element("p", {"class": "axis-name"}, text)


def folded(summary: str, *content: Markup) -> Markup:
    """Content that opens on demand."""
    return element("details", {}, element("summary", {}, summary), *content)


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> Markup:
    """A table that scrolls sideways where the screen is narrow.

    Args:
        caption: Its name.
        columns: Headings; may be Markup.
        rows: The first cell of each is the row's heading. A cell that is a whole <td> stands as it is.
        kind: Class for the style sheet.
    """
    head = element("tr", {}, *(element("th", {"scope": "col"}, column) for column in columns))
    body = [element("tr", {}, element("th", {"scope": "row"}, row[0]), *map(_cell, row[1:])) for row in rows]
    inside = element(
        "table",
        {"class": kind},
        element("caption", {}, caption),
        element("thead", {}, head),
        element("tbody", {}, *body),
    )
    return scrolling(caption, inside)


def scrolling(name: str, content: Markup) -> Markup:
    """A region that scrolls sideways, also by keyboard."""
    return element("div", {"class": "scroll", "role": "region", "aria-label": name, "tabindex": "0"}, content)


def facts(values: Mapping[str, str]) -> Markup:
    """Names and values."""
    pairs = [joined([element("dt", {}, name), element("dd", {}, value)]) for name, value in values.items()]
    return element("dl", {}, *pairs)


def legend(entries: Sequence[tuple[str, str, int]]) -> Markup:
    """Buttons that bring one curve of all pictures out.

    Args:
        entries: (key of the curves, label, slot).
    """
    buttons = [
        element("button", {"type": "button", "aria-pressed": "false", "data-pick": key}, swatch(slot), label)
        for key, label, slot in entries
    ]
    return element("div", {"class": "legend", "role": "group", "aria-label": "Bring out one curve"}, *buttons)


def figures(*content: Markup) -> Markup:
    """Figures beside each other where there is room."""
    return element("div", {"class": "figures"}, *content)


def figure(caption: str, *pictures: Markup) -> Markup:
    """Pictures that belong together, with their name."""
    return element("figure", {}, element("figcaption", {}, caption), *pictures)


def yaml_like(content: Mapping[str, Any]) -> str:
    """Nested sections, one value a line, for reading."""
    lines: list[str] = []
    _write_section(lines, content, 0)
    return "\n".join(lines)


def _write_section(lines: list[str], content: Mapping[str, Any], depth: int) -> None:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{'  ' * depth}{key}:")
            _write_section(lines, value, depth + 1)
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")


def _cell(content: str) -> Markup:
    return content if isinstance(content, Markup) and content.startswith("<td") else element("td", {}, content)

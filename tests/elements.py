"""Parser for HTML: which elements there are, their text, and whether every one of them is closed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"img", "meta", "br", "hr", "link", "col"}


@dataclass
class Element:
    """Element with everything inside."""

    name: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Returns all text inside."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str, kind: str = "") -> list[Element]:
        """Lists elements of this name and class inside, in the order of the page."""
        return [each for each in self._walk() if each.name == name and kind in (each.attributes.get("class") or "")]

    def _walk(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._walk()

    def everything(self) -> list[Element]:
        """Lists all elements inside."""
        return list(self._walk())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, dict(attrs))
        assert len(made.attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.name == tag, f"</{tag}> closes <{closed.name}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_html(text: str) -> Element:
    """Returns the page's root; every element must be closed by its own end tag."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], f"left open: {[each.name for each in reader.open[1:]]}"
    return reader.root


def rows(table: Element) -> list[list[str]]:
    """Returns the texts of a table's cells, headings first."""
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in table.all("tr")]


def assert_is_self_contained(page: Element) -> None:
    """Checks that the page has nothing that a browser would fetch, and a policy that forbids it.

    A link to a page in the same folder is fetched by nobody but its reader.
    """
    for each in page.everything():
        if each.name == "a":
            assert re.fullmatch(r"[\w%.-]+\.html", str(each.attributes["href"])), each
            continue
        assert not {"src", "href", "srcset", "action", "data", "poster", "background"} & each.attributes.keys(), each
        assert each.name not in {"link", "iframe", "object", "embed", "base", "img"}
        inside = [str(value) for name, value in each.attributes.items() if "url(" in str(value) or ":href" in name]
        assert all(re.match(r"(url\()?#", value) for value in inside), inside
    style = "".join(each.text for each in page.all("style"))
    assert "url(" not in style
    assert "@import" not in style
    policy = [each.attributes["content"] for each in page.all("meta") if "http-equiv" in each.attributes]
    assert len(policy) == 1
    assert str(policy[0]).startswith("default-src 'none'")


def assert_is_accessible(page: Element) -> None:
    """Checks language, title, one h1; tables with captions and scopes; pictures with texts; names of scrolling
    regions."""
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    assert page.all("title")[0].text
    assert len(page.all("h1")) == 1
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(heading.attributes["scope"] in ("col", "row") for heading in table.all("th"))
        assert len({len(row) for row in rows(table)}) == 1, rows(table)
    for picture in [*page.all("svg"), *page.all("div", "heat")]:
        assert picture.attributes.get("aria-hidden") == "true" or (
            picture.attributes["role"] == "img" and picture.attributes["aria-label"]
        )
    for region in page.all("div", "scroll"):
        assert region.attributes["aria-label"]
        assert region.attributes["tabindex"] == "0"

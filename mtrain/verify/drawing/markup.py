"""HTML and SVG as text in which everything that is not markup is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping

Attributes = Mapping[str, str | float]

_VOID = ("meta", "br", "hr", "link", "col")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of characters that UTF-8 cannot hold."""


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def element(name: str, attributes: Attributes, *children: str) -> Markup:
    """`<name attributes>children</name>`; children that are not Markup are escaped, as are the attributes' values."""
    told = "".join(f' {key}="{escaped(_text(value))}"' for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """One after the other; what is not Markup is escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escaped(child) for child in children))


def escaped(text: str) -> Markup:
    """Text as it is to be read, also inside an attribute."""
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", text)))


def _text(value: str | float) -> str:
    """Coordinates need no more than a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

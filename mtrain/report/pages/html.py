"""Renders pages from templates: single files that open without a network."""

import base64
import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.spelling import counted
from mtrain.report.pages.charts import swatch

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates, which UTF-8 cannot encode."""


def render(template: str, **values: object) -> str:
    """Returns the text of a page; escapes values that are not Markup, and raises UndefinedError for a missing one."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    environment.filters["counted"] = counted
    environment.filters["data_url"] = data_url
    environment.globals["swatch"] = swatch
    return _UNPRINTABLE.sub("\ufffd", environment.get_template(template).render(values))


def write_page(path: Path, page: str) -> None:
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)


def moment(iso: str) -> str:
    """Formats a time in UTC, such as `2026-11-27T04:29:09+00:00`, for people: `2026-11-27 04:29 UTC`."""
    return f"{iso[:10]} {iso[11:16]} UTC"


def data_url(image: bytes) -> str:
    """Returns an image as a data: URL for a page. Browsers recognise the format by the first bytes."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

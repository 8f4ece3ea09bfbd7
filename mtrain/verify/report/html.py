"""Pages: one file each, made from templates, that opens without a network."""

from __future__ import annotations

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from mtrain.verify.report.charts import swatch

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of characters that UTF-8 cannot hold."""


def render(package: str, template: str, **values: object) -> str:
    """The text of a page; whatever is no markup is escaped.

    Args:
        package: Its `templates` folder holds the template; base.html and parts.html are those of this package.
        template: File name.
        values: What the template asks for; a missing one is an error.
    """
    loader = ChoiceLoader([PackageLoader(package), PackageLoader(__package__)])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["short"] = short
    environment.globals["swatch"] = swatch
    return _UNPRINTABLE.sub("\ufffd", environment.get_template(template).render(values))


def short(value: float) -> str:
    """A deviation with two digits."""
    return "0" if value == 0 else f"{value:.1e}"

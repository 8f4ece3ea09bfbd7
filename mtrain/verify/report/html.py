"""Rendering of pages from templates: single files that open without a network."""

from __future__ import annotations

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from mtrain.verify.report.charts import swatch

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Pattern of control characters, and of surrogates, which UTF-8 cannot encode."""


def render(package: str, template: str, **values: object) -> str:
    """Returns the text of a page; values that are not Markup are escaped.

    Args:
        package: Package whose `templates` folder holds the template; base.html and parts.html are in this package.
        template: File name of the template.
        values: Values that the template uses; a missing one is an error.
    """
    loader = ChoiceLoader([PackageLoader(package), PackageLoader(__package__)])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["short"] = short
    environment.globals["swatch"] = swatch
    return _UNPRINTABLE.sub("\ufffd", environment.get_template(template).render(values))


def short(value: float) -> str:
    """Formats a deviation with two digits."""
    return "0" if value == 0 else f"{value:.1e}"

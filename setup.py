"""Builds the package by pyproject.toml, with a README whose links work on a package index.

There its relative links lead nowhere. They become addresses of the documentation's site, which MTRAIN_DOCS or
`Documentation` in project.urls names, and plain text where the site has no such page, or if neither names it.
"""

import os
import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description() -> str:
    """Returns the text of the package on an index, in Markdown."""
    errors = runpy.run_path(str(ROOT / "mtrain" / "base" / "errors.py"))
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    address = (os.environ.get(errors["SITE"]) or urls.get("Documentation", "")).rstrip("/")
    text: str = (ROOT / "README.md").read_text(encoding="utf-8")
    if address:
        text = errors["with_addresses"](text, address).replace("(docs/pictures/", f"({address}/pictures/")
    text = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n*", "", text)  # a picture without an address
    return re.sub(r"\[([^]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


setup(long_description=description(), long_description_content_type="text/markdown")

"""Builds the package by pyproject.toml, with links of the README that work on a package index.

There its relative links lead nowhere: if MTRAIN_DOCS names the documentation's site, they become addresses of it, and
links to other files become plain text.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description() -> str:
    """Returns the text of the package on an index, in Markdown."""
    errors = runpy.run_path(str(ROOT / "mtrain" / "base" / "errors.py"))
    text: str = errors["with_addresses"]((ROOT / "README.md").read_text(encoding="utf-8"))
    if address := os.environ.get(errors["SITE"], "").rstrip("/"):
        text = text.replace("(docs/pictures/", f"({address}/pictures/")
        text = re.sub(r"\[([^]]*)\]\((?!https?://)[^)]*\)", r"\1", text)
    return text


setup(long_description=description(), long_description_content_type="text/markdown")

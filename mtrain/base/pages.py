"""Addresses of the documentation's pages, which messages name by their files in a checkout."""

import os
import re

SITE = "MTRAIN_DOCS"
"""Environment variable with the address of the site, for programs that were installed without the files."""

_PAGE = re.compile(r"\bdocs/([\w./-]+)\.md\b")


def with_addresses(text: str) -> str:
    """Replaces files of the documentation by their addresses on the site; unchanged without `SITE`."""
    address = os.environ.get(SITE, "").rstrip("/")
    return _PAGE.sub(lambda page: f"{address}/{page[1]}.html", text) if address else text

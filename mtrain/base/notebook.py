"""Notebooks: whether this process runs in one, outputs of a cell that change in place, tables in HTML."""

import sys
from collections.abc import Iterable
from html import escape
from typing import Any


def shell() -> Any | None:
    """Returns the IPython shell of this process, in a notebook or a terminal; None in a plain program."""
    ipython = sys.modules.get("IPython")  # every shell has imported it
    return None if ipython is None else ipython.get_ipython()


def is_in_notebook() -> bool:
    """Says whether output goes into the cells of a notebook, not to a terminal or a file."""
    running = shell()
    return running is not None and type(running).__name__ != "TerminalInteractiveShell"


class CellOutput:
    """One output of a notebook's cell, whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any | None = None

    def show(self, html: str, text: str) -> None:
        """Replaces the content; front ends without HTML show `text`."""
        from IPython.display import display  # only where IPython runs

        bundle = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values as HTML."""
    cells = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"

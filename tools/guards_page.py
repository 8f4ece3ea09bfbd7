"""Writes the page on guards from the table in the code: python tools/guards_page.py docs/guards.md"""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.files import write_atomically
from mtrain.cli.main import one_message
from tests.known_issues.page import page


def main(output: Annotated[Path, typer.Argument(help="The Markdown file to write.", show_default=False)]) -> None:
    """The silent faults of megatron-core, and what becomes of each here."""
    with one_message():
        write_atomically(output, page())
    typer.echo(output)


if __name__ == "__main__":
    typer.run(main)

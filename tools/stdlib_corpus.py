"""Builds a small real corpus from this Python's standard library: python tools/stdlib_corpus.py --output corpus"""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.main import one_message
from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus


def main(
    output: Annotated[Path, typer.Option(help="Folder for the JSONL files.", show_default=False)],
) -> None:
    """Writes text-train, text-valid (sources), qa-train and qa-valid (signature -> docstring), all .jsonl."""
    with one_message():
        written = [*build_stdlib_corpus("text", output), *build_stdlib_corpus("qa", output)]
    for file in written:
        typer.echo(f"{file.path}: {file.num_documents} lines")


if __name__ == "__main__":
    typer.run(main)

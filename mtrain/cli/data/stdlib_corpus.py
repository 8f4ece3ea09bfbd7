"""`mtrain stdlib-corpus`: a real corpus that needs no download."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def stdlib_corpus(
    output: Annotated[Path, typer.Option(help="Folder for the JSONL files.", show_default=False)],
) -> None:
    """Builds a small corpus from the sources of this Python's standard library, to try training on.

    Writes text-train, text-valid (sources), qa-train, qa-valid (signature -> docstring), chat-train and chat-valid (the
    same as conversations), all .jsonl.
    """
    with one_message():
        from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus

        written = [
            *build_stdlib_corpus("text", output),
            *build_stdlib_corpus("qa", output),
            *build_stdlib_corpus("chat", output),
        ]
    for file in written:
        typer.echo(f"{file.path}: {file.num_documents} lines")

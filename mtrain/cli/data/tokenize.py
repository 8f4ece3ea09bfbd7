"""`mtrain tokenize`: text to a corpus for pretraining."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.arguments import GlobOption, TextInputs, TextKeyOption
from mtrain.cli.messages import one_message


def tokenize(
    inputs: TextInputs,
    tokenizer: Annotated[
        Path, typer.Option(help="A sentencepiece .model, a tokenizer.json, or their folder.", show_default=False)
    ],
    output_prefix: Annotated[
        str, typer.Option(help="Where the pair is written, without .bin and .idx.", show_default=False)
    ],
    glob: GlobOption = "**/*.txt",
    text_key: TextKeyOption = "text",
    workers: Annotated[int, typer.Option(min=1, help="Processes; the output does not depend on it.")] = 1,
    append_eos: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    fast: Annotated[
        bool, typer.Option("--fast", help="Encode by gigatoken, compared on the way; byte-level tokenizer.json only.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing pair.")] = False,
) -> None:
    """Writes Megatron's .bin/.idx pair: one document for each text file and for each line of JSONL."""
    with one_message():
        from mtrain.data.formats.documents import PACKED_SUFFIXES, find_files
        from mtrain.data.preparation.tokenize import tokenize_corpus
        from mtrain.tokenizer import PARALLELISM

        # this process does nothing else, and `--workers` says how many threads there are
        os.environ.setdefault(PARALLELISM, "false")
        files = find_files(inputs, glob)
        is_packed = any(path.suffix in PACKED_SUFFIXES for path in files)
        # the amount of text in a packed file is only known at its end
        with _progress(None if is_packed else sum(path.stat().st_size for path in files)) as progress:
            summary = tokenize_corpus(
                inputs,
                tokenizer,
                output_prefix,
                pattern=glob,
                text_key=text_key,
                num_workers=workers,
                append_eos=append_eos,
                overwrite=overwrite,
                is_fast=fast,
                progress=progress,
            )
    empty = f" ({summary.num_empty} empty ones left out)" if summary.num_empty else ""
    typer.echo(
        f"{output_prefix}: {summary.num_documents} documents{empty}, {summary.num_tokens} tokens from "
        f"{summary.num_bytes / 1e6:.1f} MB in {summary.seconds:.1f} s"
    )


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many of `total` bytes are done; elsewhere it imports and shows nothing."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)

"""`mtrain stdlib-corpus`, `tokenize` and `train-tokenizer`: make a corpus and a tokenizer from text."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.cli.arguments import GlobOption, TextInputs, TextKeyOption
from mtrain.cli.messages import one_message


def stdlib_corpus(
    output: Annotated[Path, typer.Option(help="Folder for the JSONL files.", show_default=False)],
) -> None:
    """Builds a small corpus to try training on, from the sources of this Python's standard library.

    Writes text-train.jsonl and text-valid.jsonl (sources), qa-train.jsonl and qa-valid.jsonl (signature -> docstring),
    and chat-train.jsonl and chat-valid.jsonl (the same as conversations).
    """
    with one_message():
        from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus

        written = [file for kind in ("text", "qa", "chat") for file in build_stdlib_corpus(kind, output)]
    for file in written:
        typer.echo(f"{file.path}: {counted(file.num_documents, 'line')}")


def tokenize(
    inputs: TextInputs,
    tokenizer: Annotated[
        Path, typer.Option(help="A sentencepiece .model, a tokenizer.json, or their folder.", show_default=False)
    ],
    output_prefix: Annotated[
        str, typer.Option(help="Path of the pair to write, without .bin and .idx.", show_default=False)
    ],
    glob: GlobOption = "**/*.txt",
    text_key: TextKeyOption = "text",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes; the output does not depend on it.")] = 1,
    append_eos: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    fast: Annotated[
        bool, typer.Option("--fast", help="Encode with gigatoken and compare samples; byte-level tokenizer.json only.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing pair.")] = False,
) -> None:
    """Writes Megatron's .bin/.idx pair: one document for each text file and for each line of JSONL."""
    with one_message():
        from mtrain.data.formats.documents import PACKED_SUFFIXES, TextFiles
        from mtrain.data.preparation.tokenize import Encoding, tokenize_corpus
        from mtrain.hf.tokenizer.tokenizer import PARALLELISM

        # the tokenizer's own threads would compete with the workers
        os.environ.setdefault(PARALLELISM, "false")
        texts = TextFiles(inputs, glob, text_key)
        files = texts.files()
        is_packed = any(path.suffix in PACKED_SUFFIXES for path in files)
        # the amount of text in a compressed file is only known at its end
        with _progress(None if is_packed else sum(path.stat().st_size for path in files)) as progress:
            summary = tokenize_corpus(
                texts,
                Encoding(tokenizer, append_eos, fast),
                output_prefix,
                num_workers=workers,
                overwrite=overwrite,
                progress=progress,
            )
    empty = f" ({summary.num_empty} empty ones skipped)" if summary.num_empty else ""
    typer.echo(
        f"{output_prefix}: {counted(summary.num_documents, 'document')}{empty}, {counted(summary.num_tokens, 'token')} "
        f"from {summary.num_bytes / 1e6:.1f} MB in {summary.seconds:.1f} s"
    )


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a progress bar of `total` bytes; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class Algorithm(Enum):
    BPE = "bpe"
    UNIGRAM = "unigram"


TokenizerKind = StrEnum("TokenizerKind", ["SENTENCEPIECE", "HF"])


def train_tokenizer(
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(help="The .model to write; with --kind hf a folder.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(min=1, help="Number of tokens, including bytes and control tokens.")],
    kind: Annotated[
        TokenizerKind, typer.Option(help="hf: byte-level BPE as tokenizer.json, which chat templates need.")
    ] = TokenizerKind.SENTENCEPIECE,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="sentencepiece: algorithm of the vocabulary; default bpe.")
    ] = None,
    special_token: Annotated[
        list[str], typer.Option(help="hf: text that becomes one token if a chat template writes it; repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    chat_template: Annotated[
        str | None, typer.Option(help="hf: chatml, with its special tokens, or a .jinja file.")
    ] = None,
    glob: GlobOption = "**/*.txt",
    text_key: TextKeyOption = "text",
    bos_id: Annotated[
        int | None, typer.Option(min=-1, help="sentencepiece: token that begins a sample; -1: none; default 1.")
    ] = None,
    eos_id: Annotated[
        int | None, typer.Option(min=0, help="sentencepiece: token that ends a document; default 2.")
    ] = None,
    pad_id: Annotated[
        int | None, typer.Option(min=-1, help="sentencepiece: token that fills rows; -1: none; default 3.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing tokenizer.")] = False,
) -> None:
    """Trains a tokenizer that can encode every text: bytes stand for text outside the vocabulary."""
    with one_message():
        if kind is TokenizerKind.HF:
            other_kind = {"--algorithm": algorithm, "--bos-id": bos_id, "--eos-id": eos_id, "--pad-id": pad_id}
            _refuse([name for name, value in other_kind.items() if value is not None], "sentencepiece")
            from mtrain.data.formats.documents import TextFiles
            from mtrain.data.preparation.train_tokenizer import train_hf_tokenizer

            train_hf_tokenizer(
                TextFiles(inputs, glob, text_key),
                output,
                vocab_size,
                special_tokens=special_token,
                chat_template=chat_template,
                overwrite=overwrite,
            )
        else:
            hf_options = {"--special-token": special_token or None, "--chat-template": chat_template}
            _refuse([name for name, value in hf_options.items() if value is not None], "hf")
            from mtrain.data.formats.documents import TextFiles
            from mtrain.data.preparation.train_tokenizer import ControlIds
            from mtrain.data.preparation.train_tokenizer import train_tokenizer as train_model

            ids = {"bos_id": bos_id, "eos_id": eos_id, "pad_id": pad_id}
            train_model(
                TextFiles(inputs, glob, text_key),
                output,
                vocab_size,
                kind=(algorithm or Algorithm.BPE).value,
                control=ControlIds(**{name: number for name, number in ids.items() if number is not None}),
                overwrite=overwrite,
            )
    typer.echo(f"{output}: {counted(vocab_size, 'token')}")


def _refuse(names: list[str], kind: str) -> None:
    if names:
        raise ConfigError(f"{', '.join(names)} belongs to --kind {kind}; remove it, or set --kind {kind}")

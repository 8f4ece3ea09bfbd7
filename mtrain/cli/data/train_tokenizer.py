"""`mtrain train-tokenizer`: a sentencepiece model from text."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.arguments import GlobOption, TextInputs, TextKeyOption
from mtrain.cli.messages import one_message


class Algorithm(Enum):
    """How the vocabulary is found."""

    BPE = "bpe"
    UNIGRAM = "unigram"


def train_tokenizer(
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(help="The .model to write.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens, bytes and control tokens included.")],
    algorithm: Annotated[Algorithm, typer.Option(help="How the vocabulary is found.")] = Algorithm.BPE,
    glob: GlobOption = "**/*.txt",
    text_key: TextKeyOption = "text",
    bos_id: Annotated[int, typer.Option(min=-1, help="Begins a sample; -1 for none.")] = 1,
    eos_id: Annotated[int, typer.Option(min=0, help="Ends a document.")] = 2,
    pad_id: Annotated[int, typer.Option(min=-1, help="Fills rows; -1 for none.")] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")] = False,
) -> None:
    """Trains a sentencepiece model that spells every text: what the vocabulary lacks is written in bytes."""
    with one_message():
        from mtrain.data.preparation.train_tokenizer import train_tokenizer as train_model

        train_model(
            inputs,
            output,
            vocab_size,
            kind=algorithm.value,
            pattern=glob,
            text_key=text_key,
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            overwrite=overwrite,
        )
    typer.echo(f"{output}: {vocab_size} tokens")

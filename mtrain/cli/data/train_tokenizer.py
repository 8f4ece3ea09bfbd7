"""`mtrain train-tokenizer`: a sentencepiece model, or a tokenizer as Hugging Face keeps it, from text."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.errors import ConfigError
from mtrain.cli.arguments import GlobOption, TextInputs, TextKeyOption
from mtrain.cli.messages import one_message


class Algorithm(Enum):
    """Algorithm that finds the vocabulary."""

    BPE = "bpe"
    UNIGRAM = "unigram"


class TokenizerKind(Enum):
    """Format of the tokenizer that is written."""

    SENTENCEPIECE = "sentencepiece"
    HF = "hf"


AlgorithmOption = Annotated[
    Algorithm | None, typer.Option(help="sentencepiece: how the vocabulary is found; default bpe.")
]
SpecialTokenOption = Annotated[
    list[str], typer.Option(help="hf: a text that is one token where a chat template writes it; may be given again.")
]
TemplateOption = Annotated[
    str | None, typer.Option(help="hf: chatml, which brings its special tokens, or a .jinja file.")
]
BosOption = Annotated[int | None, typer.Option(min=-1, help="sentencepiece: begins a sample; -1 for none; default 1.")]
EosOption = Annotated[int | None, typer.Option(min=0, help="sentencepiece: ends a document; default 2.")]
PadOption = Annotated[int | None, typer.Option(min=-1, help="sentencepiece: fills rows; -1 for none; default 3.")]


def train_tokenizer(
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(help="The .model to write; with --kind hf a folder.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens, bytes and control tokens included.")],
    kind: Annotated[
        TokenizerKind, typer.Option(help="hf: byte-level BPE as tokenizer.json, which chat templates need.")
    ] = TokenizerKind.SENTENCEPIECE,
    algorithm: AlgorithmOption = None,
    special_token: SpecialTokenOption = [],  # noqa: B006 - typer copies it
    chat_template: TemplateOption = None,
    glob: GlobOption = "**/*.txt",
    text_key: TextKeyOption = "text",
    bos_id: BosOption = None,
    eos_id: EosOption = None,
    pad_id: PadOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Trains a tokenizer that spells every text: what the vocabulary lacks is written in bytes."""
    with one_message():
        if kind is TokenizerKind.HF:
            of_sentencepiece = {"--algorithm": algorithm, "--bos-id": bos_id, "--eos-id": eos_id, "--pad-id": pad_id}
            _refuse([name for name, value in of_sentencepiece.items() if value is not None], "sentencepiece")
            from mtrain.data.preparation.train_hf_tokenizer import train_hf_tokenizer

            train_hf_tokenizer(
                inputs,
                output,
                vocab_size,
                special_tokens=special_token,
                chat_template=chat_template,
                pattern=glob,
                text_key=text_key,
                overwrite=overwrite,
            )
        else:
            of_hf = {"--special-token": special_token or None, "--chat-template": chat_template}
            _refuse([name for name, value in of_hf.items() if value is not None], "hf")
            from mtrain.data.preparation.train_tokenizer import train_tokenizer as train_model

            train_model(
                inputs,
                output,
                vocab_size,
                kind=(algorithm or Algorithm.BPE).value,
                pattern=glob,
                text_key=text_key,
                bos_id=1 if bos_id is None else bos_id,
                eos_id=2 if eos_id is None else eos_id,
                pad_id=3 if pad_id is None else pad_id,
                overwrite=overwrite,
            )
    typer.echo(f"{output}: {vocab_size} tokens")


def _refuse(names: list[str], kind: str) -> None:
    if names:
        raise ConfigError(f"{', '.join(names)} belongs to --kind {kind}; remove it, or set --kind {kind}")

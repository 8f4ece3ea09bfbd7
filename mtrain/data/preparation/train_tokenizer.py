"""Training of a sentencepiece tokenizer that can spell every text."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.data.formats.documents import documents, find_files

_MAX_LINE_BYTES = 65536
"""Longest line that takes part in the training."""

_LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}


def train_tokenizer(
    inputs: Sequence[Path],
    output: Path,
    vocab_size: int,
    *,
    kind: Literal["bpe", "unigram"] = "bpe",
    pattern: str = "**/*.txt",
    text_key: str = "text",
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 3,
    overwrite: bool = False,
) -> None:
    """Writes a `.model` whose decode(encode(text)) is the text.

    What the vocabulary lacks is spelt in bytes, white space is kept as it is, and digits stand alone. The unknown token
    has id 0. The same inputs give the same model.

    Args:
        inputs: Paths of text files, JSONL files and folders.
        output: Path of the model.
        vocab_size: Number of tokens, 256 bytes and the control tokens included.
        kind: Algorithm of the tokenizer.
        pattern: Pattern of the files that are read of a folder.
        text_key: Key of the text in JSONL.
        bos_id: Id of the token that begins a sample; -1 for none.
        eos_id: Id of the token that ends a document.
        pad_id: Id of the token that fills rows; -1 for none.
        overwrite: Whether an existing file is replaced.

    Raises:
        DataError: An input is bad, the text yields fewer tokens, or the output exists.
        MachineError: The output cannot be written.
    """
    from sentencepiece import SentencePieceTrainer

    _refuse_existing(output, overwrite)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(find_files(inputs, pattern), text_key),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            max_sentence_length=_MAX_LINE_BYTES,
            num_threads=1,  # the same inputs have to give the same model, on any number of processors
            minloglevel=2,
            **_LOSSLESS,
        )
    except RuntimeError as fault:
        raise DataError(
            f"no tokenizer of {vocab_size} tokens can be trained on this text: {' '.join(str(fault).split())}; change "
            "the number of tokens or give more text"
        ) from fault
    _write(output, model.getvalue())


def _refuse_existing(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists; choose another output, or overwrite it with --overwrite")


def _write(output: Path, content: bytes) -> None:
    with disk_faults(f"write the tokenizer {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as new:
            new.write_bytes(content)


def _lines(files: Sequence[Path], text_key: str) -> Iterator[str]:
    for document in documents(files, text_key):
        yield from (line for line in document.text.split("\n") if line.strip())

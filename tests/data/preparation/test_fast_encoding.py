"""Encoding by gigatoken: the same bytes, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.tokenize import CheckedEncoding, Encoding, tokenize_corpus
from mtrain.data.preparation.train_tokenizer import train_hf_tokenizer, train_tokenizer
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.messages import refuses

SOURCE = Path(json.__file__).with_name("decoder.py")
TEXTS = ["naïve 日本 🙂 12345", "a <|im_start|>user<|endoftext|> b", "  x = 1\n\n\ty", ""]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a byte-level tokenizer with special tokens."""
    folder = tmp_path_factory.mktemp("bpe")
    train_hf_tokenizer(TextFiles([SOURCE]), folder, 500, chat_template="chatml")
    return folder


def changed(bpe: Path, folder: Path, **model: Any) -> Path:
    """Writes the tokenizer with other settings of its model."""
    content = json.loads((bpe / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "model": {**content["model"], **model}}))
    (folder / "tokenizer_config.json").write_bytes((bpe / "tokenizer_config.json").read_bytes())
    return folder


def test_both_libraries_write_the_same_bytes(bpe: Path, tmp_path: Path) -> None:
    lines = [*TEXTS, SOURCE.read_text()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    for name, is_fast in (("slow", False), ("fast", True)):
        tokenize_corpus(TextFiles([tmp_path / "in.jsonl"]), Encoding(bpe, is_fast=is_fast), str(tmp_path / name))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"fast.{ending}").read_bytes() == (tmp_path / f"slow.{ending}").read_bytes()


def test_other_tokens_are_refused_before_the_first_text(bpe: Path, tmp_path: Path) -> None:
    """One library leaves merges out as the file asks for, the other does not."""
    with refuses(DataError, "tokenizer.json", "--fast"):
        CheckedEncoding(load_tokenizer(changed(bpe, tmp_path, dropout=1.0)))


def test_other_tokens_are_noticed_in_any_chunk(bpe: Path, tmp_path: Path) -> None:
    encoding = CheckedEncoding(load_tokenizer(bpe))
    assert encoding.encode(["def"]) == [load_tokenizer(bpe).encode("def")]
    # as if the two had agreed on all texts until now
    encoding._tokenizer = load_tokenizer(changed(bpe, tmp_path, dropout=1.0))  # type: ignore[assignment]
    with refuses(DataError, "'def self'"):
        encoding.encode(["a", "def self"])


def test_what_it_cannot_read_is_refused(bpe: Path, tmp_path: Path) -> None:
    content = json.loads((bpe / "tokenizer.json").read_text())
    changed(bpe, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(DataError, match=r"gigatoken cannot encode with .*Unsupported normalizer.*leave --fast out"):
        CheckedEncoding(load_tokenizer(tmp_path))
    train_tokenizer(TextFiles([SOURCE]), tmp_path / "m.model", 400)
    with refuses(DataError, "--fast", "tokenizer.json"):
        CheckedEncoding(load_tokenizer(tmp_path / "m.model"))

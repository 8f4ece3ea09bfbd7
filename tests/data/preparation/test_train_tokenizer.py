"""Training of sentencepiece tokenizers."""

from pathlib import Path
from typing import Literal

import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.train_tokenizer import ControlIds, train_tokenizer
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.messages import refuses

WORDS = ["value", "weight", "index", "length", "colour", "height", "parent", "child", "reader", "writer"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"class Number{n}:\n    {w} = {n}" for n in range(400) for w in WORDS))
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_models_have_the_size_asked_for_and_are_repeatable(
    text: Path, tmp_path: Path, kind: Literal["bpe", "unigram"]
) -> None:
    for name in ("a.model", "b.model"):
        train_tokenizer(TextFiles([text]), tmp_path / name, vocab_size=300, kind=kind)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    tokenizer = load_tokenizer(tmp_path / "a.model")
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode("class Number")) < len("class Number")
    assert tokenizer.decode(tokenizer.encode("\t日本\n\n  x")) == "\t日本\n\n  x"


def test_control_tokens_are_where_they_were_asked_for(text: Path, tmp_path: Path) -> None:
    train_tokenizer(
        TextFiles([text]), tmp_path / "a.model", vocab_size=300, control=ControlIds(bos_id=-1, eos_id=1, pad_id=-1)
    )
    tokenizer = load_tokenizer(tmp_path / "a.model")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 1, 1)


def test_a_size_that_the_text_cannot_give_is_reported(text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="90000"):
        train_tokenizer(TextFiles([text]), tmp_path / "a.model", vocab_size=90000)
    assert not (tmp_path / "a.model").exists()


def test_an_existing_model_is_replaced_only_if_asked(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.model"
    output.write_text("precious")
    with refuses(DataError, "a.model", "--overwrite"):
        train_tokenizer(TextFiles([text]), output, vocab_size=300)
    assert output.read_text() == "precious"
    train_tokenizer(TextFiles([text]), output, vocab_size=300, overwrite=True)
    assert load_tokenizer(output).vocab_size == 300

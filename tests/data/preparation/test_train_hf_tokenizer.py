"""Tokenizers in the form of Hugging Face, with a chat template."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mtrain.base.errors import ConfigError, DataError
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.train_tokenizer import END, train_hf_tokenizer
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.cli.command_line import call
from tests.messages import refuses

SPECIALS = ("<|im_start|>", "<|im_end|>")
WORDS = ["value", "weight", "index", "length", "colour", "height", "parent", "child", "reader", "writer"]
FILES = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
VOCABULARY = 320


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"class Number{n}:\n    {w} = {n}  <|im_end|>" for n in range(60) for w in WORDS))
    return path


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hf") / "made" / "here"
    train_hf_tokenizer(TextFiles([text]), output, VOCABULARY, chat_template="chatml")
    return output


def test_the_same_text_gives_the_same_files_of_the_size_asked_for(text: Path, folder: Path, tmp_path: Path) -> None:
    train_hf_tokenizer(TextFiles([text]), tmp_path, VOCABULARY, chat_template="chatml")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert [(tmp_path / name).read_bytes() for name in FILES] == [(folder / name).read_bytes() for name in FILES]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == VOCABULARY
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.name(0)) == (None, 0, 0, END)
    assert tokenizer.special_tokens() == {END, *SPECIALS}
    assert [tokenizer.name(id_) for id_ in (1, 2)] == [*SPECIALS]
    assert len(tokenizer.encode("class Number")) < len("class Number")


@settings(max_examples=60)
@given(text=st.text())
def test_every_text_can_be_spelt(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("1717")
    assert [tokenizer.name(id_) for id_ in digits] == [*"1717"]


def test_transformers_reads_it_and_writes_conversations_in_its_template(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    messages = [{"role": "user", "content": "class é?"}, {"role": "assistant", "content": "a value"}]
    rendered = "<|im_start|>user\nclass é?<|im_end|>\n<|im_start|>assistant\na value<|im_end|>\n"
    assert theirs.apply_chat_template(messages, tokenize=False) == rendered
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert ids == ours.encode_with_offsets(rendered, special_tokens=True).ids
    assert ids.count(1) == ids.count(2) == 2
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (0, 0, None)


def test_a_template_of_ones_own_comes_with_its_tokens(text: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ '<a>' + messages[0].content + '<b>' }}")
    train_hf_tokenizer(
        TextFiles([text]), tmp_path / "out", 300, special_tokens=["<a>", "<b>"], chat_template=str(template)
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template.read_text()
    assert load_tokenizer(tmp_path / "out").special_tokens() == {END, "<a>", "<b>"}


def test_nothing_is_replaced_unasked(text: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("precious")
    with refuses(DataError, "tokenizer_config.json", "--overwrite"):
        train_hf_tokenizer(TextFiles([text]), tmp_path, VOCABULARY)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]
    train_hf_tokenizer(TextFiles([text]), tmp_path, VOCABULARY, overwrite=True)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END


def test_what_cannot_be_made_is_refused(text: Path, tmp_path: Path) -> None:
    with refuses(DataError, "90000"):
        train_hf_tokenizer(TextFiles([text]), tmp_path / "out", 90000)
    with refuses(ConfigError, "--vocab-size=200", "256", "259"):
        train_hf_tokenizer(TextFiles([text]), tmp_path / "out", 200, chat_template="chatml")
    with refuses(DataError):
        train_hf_tokenizer(TextFiles([text]), tmp_path / "out", VOCABULARY, chat_template="chatmll")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "hf", "--eos-id", "3"], "--eos-id belongs to --kind sentencepiece; remove it"),
        (["--chat-template", "chatml"], "--chat-template belongs to --kind hf; remove it, or set --kind hf"),
    ],
)
def test_options_of_the_other_kind_are_refused(text: Path, tmp_path: Path, options: list[str], message: str) -> None:
    arguments = ["train-tokenizer", str(text), "--output", str(tmp_path / "out"), "--vocab-size", "300"]
    code, output = call(*arguments, *options)
    assert (code, message in output, output.count("\n")) == (2, True, 1)

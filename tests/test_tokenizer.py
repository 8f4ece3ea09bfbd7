"""Tests of tokenizers: both kinds behave alike, and bad files are reported."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtrain.base.errors import DataError
from mtrain.data.formats.documents import TextFiles
from mtrain.data.preparation.train_tokenizer import ControlIds, train_tokenizer
from mtrain.hf.tokenizer.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, load_tokenizer
from tests.fault_table import Notice
from tests.messages import refuses

TEXTS = ["def f(x):\n    return x + 1\n", "    indented  twice", "", "naïve 日本 🙂 12345", "<s> </s> is text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with a sentencepiece model and, in folders of their own, the two kinds."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text("\n".join(f"def function_{n}(x):\n    return x + {n}" for n in range(300)))
    (folder / "sp").mkdir()
    train_tokenizer(TextFiles([folder / "text.txt"]), folder / "sp" / "m.model", vocab_size=320)
    (folder / "hf").mkdir()
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    model.train([str(folder / "text.txt")], trainer)
    model.enable_truncation(3)
    model.enable_padding(length=50)
    model.save(str(folder / "hf" / "tokenizer.json"))
    settings = {"bos_token": None, "eos_token": {"content": "</s>"}}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_text_comes_back_as_it_was(folder: Path, kind: str) -> None:
    tokenizer = load_tokenizer(folder / kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
        assert tokenizer.eos_id not in ids
        assert tokenizer.bos_id not in ids


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_batches_are_encoded_like_single_texts(folder: Path, kind: str, num_threads: int) -> None:
    tokenizer = load_tokenizer(folder / kind)
    assert tokenizer.encode_batch(TEXTS, num_threads) == [tokenizer.encode(text) for text in TEXTS]


def test_control_tokens_come_from_the_files(folder: Path) -> None:
    sentencepiece, huggingface = load_tokenizer(folder / "sp"), load_tokenizer(folder / "hf")
    assert isinstance(sentencepiece, SentencePieceTokenizer)
    assert isinstance(huggingface, HuggingFaceTokenizer)
    assert (sentencepiece.bos_id, sentencepiece.eos_id, sentencepiece.pad_id) == (1, 2, 3)
    assert (huggingface.bos_id, huggingface.eos_id, huggingface.pad_id) == (None, 1, 300)
    assert (sentencepiece.vocab_size, huggingface.vocab_size) == (320, 301)
    assert sentencepiece.decode([1, *sentencepiece.encode("x + 1"), 2, 3]) == "x + 1"
    assert huggingface.decode([*huggingface.encode("x + 1"), 1]) == "x + 1"


def test_the_fingerprint_is_the_files(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.model"
    copy.write_bytes((folder / "sp" / "m.model").read_bytes())
    assert load_tokenizer(copy).fingerprint == load_tokenizer(folder / "sp").fingerprint
    assert load_tokenizer(copy).fingerprint != load_tokenizer(folder / "hf").fingerprint


def test_a_directory_with_both_kinds_gives_the_json(folder: Path, tmp_path: Path) -> None:
    for name in ("sp/m.model", "hf/tokenizer.json", "hf/tokenizer_config.json"):
        (tmp_path / Path(name).name).write_bytes((folder / name).read_bytes())
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)


def _two_models(path: Path, folder: Path) -> None:
    for name in ("a.model", "b.model"):
        (path / name).write_bytes((folder / "sp" / "m.model").read_bytes())


def _without_eos(path: Path, folder: Path) -> None:
    (path / "tokenizer.json").write_bytes((folder / "hf" / "tokenizer.json").read_bytes())


def _with_foreign_eos(path: Path, folder: Path) -> None:
    _without_eos(path, folder)
    (path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def _with_broken_settings(path: Path, folder: Path) -> None:
    _without_eos(path, folder)
    (path / "tokenizer_config.json").write_text("{")


@pytest.mark.parametrize(
    ("prepare", "name", "fact"),
    [
        (lambda path, _: None, "none.model", "none.model"),
        (
            lambda path, _: (path / "m.model").write_bytes(b"garbage"),
            "m.model",
            "m.model",
        ),
        (lambda path, _: (path / "m.model").write_bytes(b""), "m.model", "m.model"),
        (lambda path, _: (path / "tokenizer.json").write_text("{}"), "", "tokenizer.json"),
        (lambda path, _: (path / "vocab.txt").write_text("a"), "vocab.txt", "vocab.txt"),
        (lambda path, _: None, "", "tokenizer.json"),
        (_two_models, "", "tokenizer.json"),
        (_without_eos, "", "eos_token"),
        (_with_foreign_eos, "", "'<end>'"),
        (_with_broken_settings, "", "tokenizer_config.json"),
    ],
)
def test_bad_files_are_reported(
    folder: Path, tmp_path: Path, prepare: Callable[[Path, Path], object], name: str, fact: str
) -> None:
    prepare(tmp_path, folder)
    with refuses(DataError, fact):
        load_tokenizer(tmp_path / name)


def _changed(folder: Path, path: Path, **changes: object) -> Path:
    """Makes the tokenizer with other parts."""
    content = json.loads((folder / "hf" / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    (path / "tokenizer_config.json").write_bytes((folder / "hf" / "tokenizer_config.json").read_bytes())
    return path


def _precompiled(charsmap: str) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


@pytest.mark.fault(
    "folders",
    "tokenizer.json that ends in a panic of the library, when it is opened or on a text",
    happens="refused by one message that names the file",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("charsmap", "why"),
    [
        ("AAAA", r"is not a tokenizer\.json \(Precompiled"),
        ("CAAAAP////////8AAAAA", "cannot encode or decode .index out of"),
    ],
)
def test_a_panic_of_the_library_is_one_message(
    folder: Path, tmp_path: Path, charsmap: str, why: str, notice: Notice
) -> None:
    with notice, pytest.raises(DataError, match=why) as error:
        load_tokenizer(_changed(folder, tmp_path, normalizer=_precompiled(charsmap))).encode("naïve")
    assert error.value.exit_code == notice.exit_code


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_that_is_missing_is_one_message(folder: Path, tmp_path: Path, threads: int) -> None:
    model = {"type": "WordLevel", "vocab": {"</s>": 1, "a": 2}, "unk_token": "[UNK]"}
    tokenizer = load_tokenizer(_changed(folder, tmp_path, model=model))
    with refuses(DataError, "tokenizer.json"):
        tokenizer.encode_batch(["b"], threads)


@pytest.mark.parametrize("prefix", ["#", "toolong"])
def test_merges_that_would_end_the_process_are_refused(folder: Path, tmp_path: Path, prefix: str) -> None:
    model = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "é": 2, "aé": 3}, "merges": ["a é"]}
    path = _changed(folder, tmp_path, model={**model, "continuing_subword_prefix": prefix})
    with refuses(DataError, f"'{prefix}'"):
        load_tokenizer(path)


def test_merges_with_their_prefix_are_read(folder: Path, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "##b": 2, "ab": 3}, "merges": [["a", "##b"]]}
    path = _changed(folder, tmp_path, model={**model, "continuing_subword_prefix": "##"}, pre_tokenizer=None)
    assert load_tokenizer(path).encode("ab") == [3]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_bombs_and_pipes_are_reported(folder: Path, tmp_path: Path, name: str) -> None:
    _changed(folder, tmp_path)
    (tmp_path / name).write_bytes(b'{"a":' * 10**6)
    with refuses(DataError, name):
        load_tokenizer(tmp_path)
    os.truncate(tmp_path / name, 40 * 2**30)
    with refuses(DataError, name, "42949672960"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with refuses(DataError, name):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_an_endless_name_is_shortened(folder: Path, tmp_path: Path) -> None:
    _changed(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x" * 70_000}))
    with refuses(DataError, "eos_token") as error:
        load_tokenizer(tmp_path)
    assert len(str(error.value)) < 1000


def test_a_model_without_an_end_is_refused(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(
        TextFiles([folder / "text.txt"]), tmp_path / "m.model", vocab_size=320, control=ControlIds(eos_id=-1)
    )
    with refuses(DataError):
        load_tokenizer(tmp_path / "m.model")

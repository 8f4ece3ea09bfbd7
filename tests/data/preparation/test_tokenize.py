"""Tokenising of text into corpora."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats.documents import TextFiles
from mtrain.data.formats.megatron_indexed import Corpus
from mtrain.data.preparation import tokenize as module
from mtrain.data.preparation.tokenize import Encoding, tokenize_corpus
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.messages import refuses
from tests.warm import completed


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Creates a folder with text files in several folders, and JSONL."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for name, text in [("b.txt", "a b"), ("a.txt", "c d e"), ("deep/c.txt", "f"), ("empty.txt", ""), ("x.md", "j j")]:
        (folder / name).write_text(text)
    lines = [{"text": "g h", "title": "i"}, {"text": "", "title": "j"}, {"text": "j", "title": "a"}]
    (folder / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read(prefix: Path) -> list[list[int]]:
    found = Corpus(str(prefix), 1000)
    return [found.read(number, 0, int(length)).tolist() for number, length in enumerate(found.document_lengths)]


def test_documents_keep_the_order_of_the_inputs(texts: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    """The ids are a = 4, b = 5, ..., </s> = 2; folders are sorted by path, empty texts left out."""
    summary = tokenize_corpus(
        TextFiles([texts / "more.jsonl", texts]), Encoding(word_tokenizer), str(tmp_path / "out" / "c")
    )
    assert read(tmp_path / "out" / "c") == [[10, 11, 2], [13, 2], [6, 7, 8, 2], [4, 5, 2], [9, 2]]
    assert (summary.num_documents, summary.num_empty, summary.num_tokens, summary.num_bytes) == (5, 2, 14, 13)


def test_options_choose_files_keys_and_ends(texts: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    titles = TextFiles([texts], "*.jsonl", "title")
    tokenize_corpus(titles, Encoding(word_tokenizer, append_eos=False), str(tmp_path / "c"))
    assert read(tmp_path / "c") == [[12], [13], [4]]


def test_packed_inputs_are_unpacked(tmp_path: Path, word_tokenizer: Path) -> None:
    zst = pyarrow.compress(b'{"text": "d"}\n{"text": "e"}\n', "zstd", asbytes=True)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"c\nc"))
    (tmp_path / "c.jsonl.zst").write_bytes(zst)
    tokenize_corpus(TextFiles([tmp_path], "*"), Encoding(word_tokenizer), str(tmp_path / "out"))
    assert read(tmp_path / "out") == [[4, 2], [5, 2], [6, 6, 2], [7, 2], [8, 2]]


def test_damaged_packs_and_tables_are_refused(tmp_path: Path, word_tokenizer: Path) -> None:
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"c" * 100)[:-9])
    with refuses(DataError, "b.txt.gz"):
        tokenize_corpus(TextFiles([tmp_path / "b.txt.gz"]), Encoding(word_tokenizer), str(tmp_path / "out"))
    (tmp_path / "b.jsonl.gz").write_bytes(b"PAR1")
    with refuses(DataError, "b.jsonl.gz"):
        tokenize_corpus(TextFiles([tmp_path / "b.jsonl.gz"]), Encoding(word_tokenizer), str(tmp_path / "out"))


def test_torch_is_not_loaded(texts: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    """Loading torch takes longer than ten megabytes of text."""
    program = "import sys; from pathlib import Path; from mtrain.data.formats.documents import TextFiles\n"
    program += "from mtrain.data.preparation.tokenize import Encoding, tokenize_corpus\n"
    program += "tokenize_corpus(TextFiles([Path(sys.argv[1])]), Encoding(Path(sys.argv[2])), sys.argv[3])\n"
    program += "print({'torch', 'megatron'} & sys.modules.keys())"
    command = [sys.executable, "-c", program, str(texts), str(word_tokenizer), str(tmp_path / "c")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_CHARACTERS", 200)  # many chunks for two workers
    rng = np.random.default_rng(0)
    lines = [{"text": " ".join(rng.choice(list("abcdefghij"), size=rng.integers(0, 40)))} for _ in range(200)]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done: list[int] = []
    one = tokenize_corpus(TextFiles([path]), Encoding(word_tokenizer), str(tmp_path / "one"))
    two = tokenize_corpus(
        TextFiles([path]), Encoding(word_tokenizer), str(tmp_path / "two"), num_workers=2, progress=done.append
    )
    assert (one.num_documents, one.num_tokens) == (two.num_documents, two.num_tokens)
    assert sum(done) == two.num_bytes
    assert len(done) > 10
    for ending in ("bin", "idx"):
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()
    tokenizer = load_tokenizer(word_tokenizer)
    assert read(tmp_path / "two") == [[*tokenizer.encode(one["text"]), 2] for one in lines if one["text"]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_bad_input_is_named_and_leaves_nothing(tmp_path: Path, word_tokenizer: Path, num_workers: int) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    out = tmp_path / "out"
    with refuses(DataError, "line 2", "bad.jsonl", "'text'", "--text-key"):
        tokenize_corpus(TextFiles([path]), Encoding(word_tokenizer), str(out / "c"), num_workers=num_workers)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b'{"text": 3}\n', "in.jsonl"),
        (b'{"text": "\\ud800"}\n', "in.jsonl"),
        (b'{"text": ""}\n', "in.jsonl"),
    ],
)
def test_bad_lines_are_reported(tmp_path: Path, word_tokenizer: Path, content: bytes, fact: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with refuses(DataError, fact):
        tokenize_corpus(TextFiles([path]), Encoding(word_tokenizer), str(tmp_path / "c"))


def test_bad_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with refuses(DataError, "a.txt"):
        list(TextFiles([tmp_path / "a.txt"]).documents())
    with refuses(DataError):
        TextFiles([tmp_path / "none"], "*").files()
    with refuses(DataError, "'*.md'"):
        TextFiles([tmp_path], "*.md").files()


def test_an_existing_pair_is_replaced_only_if_asked(texts: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    prefix = str(tmp_path / "c")
    tokenize_corpus(TextFiles([texts]), Encoding(word_tokenizer), prefix)
    with refuses(DataError, "c.bin", "--overwrite"):
        tokenize_corpus(TextFiles([texts / "b.txt"]), Encoding(word_tokenizer), prefix)
    assert len(read(tmp_path / "c")) == 3
    tokenize_corpus(TextFiles([texts / "b.txt"]), Encoding(word_tokenizer), prefix, overwrite=True)
    assert read(tmp_path / "c") == [[4, 5, 2]]


def test_the_tool_tells_what_it_wrote_and_leaves_with_the_errors_code(
    texts: Path, tmp_path: Path, word_tokenizer: Path
) -> None:
    command = [sys.executable, "tools/tokenize_corpus.py", str(texts), "--tokenizer", str(word_tokenizer)]
    command += ["--output-prefix", str(tmp_path / "c")]
    first, second = completed(command), completed(command)
    assert (first.returncode, second.returncode) == (0, 3)
    assert f"{tmp_path / 'c'}: 3 documents (1 empty ones skipped), 9 tokens" in first.stdout
    assert second.stderr.startswith(f"error: {tmp_path / 'c'}.bin exists")
    assert read(tmp_path / "c") == [[6, 7, 8, 2], [4, 5, 2], [9, 2]]

"""Corpus from the standard library."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.data.encoding.plain import pair_parts
from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus
from tests.messages import refuses

SOURCE = '''"""About the module."""
import sys
sys.exit("a corpus never imports what it reads")

class Box(dict, metaclass=type):
    """A box.

    With details.
    """

    def open(self, *keys: str, key: int = 3, **more) -> None:
        """Open the
        box."""

    def silent(self): pass

async def fetch(url, /, *, timeout=1.5):
    r"""Fetch \\d+ things."""
'''


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Creates a small library with folders that are left out."""
    root = tmp_path / "lib"
    files = {"pkg/__init__.py": SOURCE, "pkg/test/test_a.py": SOURCE, "site-packages/b.py": SOURCE, "old.py": "print 1"}
    files |= {f"m{n:02}.py": f'def f():\n    """Answer {n % 7}."""\n' for n in range(40)}
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    (root / "latin.py").write_bytes(b"# \xe4\n")
    return root


def test_questions_are_signatures_and_answers_first_paragraphs(library: Path, tmp_path: Path) -> None:
    written = build_stdlib_corpus("qa", tmp_path / "out", library)
    assert [file.path.name for file in written] == ["qa-train.jsonl", "qa-valid.jsonl"]
    pairs = {
        one["prompt"]: one["response"] for file in written for one in lines(file.path) if one["path"].startswith("pkg")
    }
    assert pairs == {
        "class pkg.Box(dict)": "A box.",
        "def pkg.Box.open(self, *keys: str, key: int=3, **more)": "Open the box.",
        "async def pkg.fetch(url, /, *, timeout=1.5)": "Fetch \\d+ things.",
    }


def test_held_out_answers_do_not_occur_in_training(library: Path, tmp_path: Path) -> None:
    train, valid = (lines(file.path) for file in build_stdlib_corpus("qa", tmp_path / "out", library))
    assert len(train) == 40
    assert not {one["response"] for one in train} & {one["response"] for one in valid}


def test_texts_are_the_sources_in_a_fixed_order(library: Path, tmp_path: Path) -> None:
    written = build_stdlib_corpus("text", tmp_path / "out", library)
    train, valid = (lines(file.path) for file in written)
    assert [file.num_documents for file in written] == [len(train), len(valid)] == [39, 3]
    assert [one["path"] for one in valid] == ["m00.py", "m20.py", "old.py"]
    assert train[-1] == {"text": SOURCE, "path": "pkg/__init__.py"}
    first = [file.path.read_bytes() for file in written]
    assert [file.path.read_bytes() for file in build_stdlib_corpus("text", tmp_path / "out", library)] == first


@pytest.mark.nightly  # a large library; the other tests show what is made of one
def test_this_pythons_library_gives_hundreds_of_texts_and_thousands_of_pairs(tmp_path: Path) -> None:
    before = set(sys.modules)
    counts = [sum(file.num_documents for file in build_stdlib_corpus(kind, tmp_path)) for kind in ("text", "qa")]
    assert counts[0] > 200
    assert counts[1] > 2000
    assert "turtle" not in set(sys.modules) - before
    pairs = lines(tmp_path / "qa-train.jsonl")
    for pair in pairs:
        assert pair_parts(pair, frozenset({"path"}))
    assert any(pair["prompt"] == "def os.path.join(a, *p)" for pair in pairs + lines(tmp_path / "qa-valid.jsonl"))


def test_a_conversation_is_about_a_class_or_a_function(library: Path, tmp_path: Path) -> None:
    methods = "".join(f'    def m{number}(self):\n        """Method {number}."""\n' for number in range(5))
    (library / "deep.py").write_text(f'class Deep:\n    """Depth."""\n{methods}def f():\n    """A function."""\n')
    written = build_stdlib_corpus("chat", tmp_path / "out", library)
    found = [one for file in written for one in lines(file.path)]
    texts = [[message["content"] for message in one["messages"]] for one in found if one["path"] == "deep.py"]
    assert sorted(texts, key=len, reverse=True) == [  # one of them is held out
        ["What is `class deep.Deep`?", "Depth."]
        + [text for n in range(3) for text in (f"What does `def deep.Deep.m{n}(self)` do?", f"Method {n}.")],
        [text for n in (3, 4) for text in (f"What does `def deep.Deep.m{n}(self)` do?", f"Method {n}.")],
        ["What does `def deep.f()` do?", "A function."],
    ]
    assert {tuple(message["role"] for message in one["messages"][:2]) for one in found} == {("user", "assistant")}
    train, valid = (lines(file.path) for file in written)
    answers = {message["content"] for one in train for message in one["messages"][1::2]}
    assert answers.isdisjoint(message["content"] for one in valid for message in one["messages"][1::2])
    pairs = [one for file in build_stdlib_corpus("qa", tmp_path / "qa", library) for one in lines(file.path)]
    assert {one["response"] for one in pairs} == {m["content"] for one in found for m in one["messages"][1::2]}


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with refuses(DataError):
        build_stdlib_corpus("text", tmp_path / "out", tmp_path)

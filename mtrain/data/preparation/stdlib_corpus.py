"""A small real corpus that every Python has: the sources of its standard library.

`text`: each module's source is a document. `qa`: the signature of each documented function, method and class is the
question, the first paragraph of its docstring the answer. `chat`: the same as conversations, about a class and its
methods in turn, or about a function. Sources are parsed, never imported.
"""

import ast
import inspect
import itertools
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, write_atomically

_LEFT_OUT = {
    *("test", "tests", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "encodings"),
    *("site-packages", "dist-packages", "_bundled", "lib-dynload", "__pycache__"),
}
"""Folders of tests, applications, tables and third-party packages."""
_PUBLIC_NAMES = {"posixpath": "os.path"}
"""Modules that users import under another name."""
_HOLD_OUT_EVERY = 20

_MOST_TURNS = 4

Kind = Literal["text", "qa", "chat"]


@dataclass(frozen=True)
class WrittenCorpus:
    path: Path
    num_documents: int


def build_stdlib_corpus(kind: Kind, output: Path, library: Path | None = None) -> list[WrittenCorpus]:
    """Writes `<kind>-train.jsonl` and, with every twentieth document, `<kind>-valid.jsonl`, in a fixed order.

    `text` has lines {"text", "path"}, `qa` lines {"prompt", "response", "path"}, `chat` lines {"messages", "path"}. No
    held-out answer occurs in the training part. `library` is by default the standard library of this Python.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    documents = list(_documents(kind, root))
    if not documents:
        raise DataError(f"{root} holds no Python sources; install them or use another Python")
    train = [one for number, one in enumerate(documents) if number % _HOLD_OUT_EVERY]
    valid = documents[::_HOLD_OUT_EVERY]
    if kind != "text":
        answers = {answer for one in train for answer in _answers(one)}
        valid = [one for one in valid if answers.isdisjoint(_answers(one))]
    with disk_faults(f"write the corpus into {output}"):
        output.mkdir(parents=True, exist_ok=True)
        return [_write(output / f"{kind}-{part}.jsonl", lines) for part, lines in (("train", train), ("valid", valid))]


def _documents(kind: Kind, root: Path) -> Iterator[dict[str, Any]]:
    match kind:
        case "text":
            return ({"text": source, "path": str(name)} for name, source in _sources(root) if source.strip())
        case "qa":
            return _pairs(root)
        case "chat":
            return _conversations(root)
        case _:
            assert_never(kind)


def _answers(line: dict[str, Any]) -> list[str]:
    if "messages" not in line:
        return [line["response"]]
    return [message["content"] for message in line["messages"] if message["role"] == "assistant"]


def _conversations(root: Path) -> Iterator[dict[str, Any]]:
    for path, pairs in itertools.groupby(_pairs(root), key=lambda pair: pair["path"]):
        # the documented parts of one class are neighbours in a source
        for _, group in itertools.groupby(pairs, key=lambda pair: _topic(pair["prompt"])):
            topic_pairs = list(group)
            for first in range(0, len(topic_pairs), _MOST_TURNS):
                turns = [_turn(pair) for pair in topic_pairs[first : first + _MOST_TURNS]]
                yield {"messages": [message for turn in turns for message in turn], "path": path}


def _topic(signature: str) -> str:
    """Returns the class, or the class of the method; for a function, the function itself."""
    name = signature.partition("(")[0].split()[-1]
    scope = name.rpartition(".")[0]
    is_method = not signature.startswith("class ") and scope.rpartition(".")[2][:1].isupper()
    return scope if is_method else name


def _turn(pair: dict[str, str]) -> list[dict[str, str]]:
    question = f"What does `{pair['prompt']}` do?"
    if pair["prompt"].startswith("class "):
        question = f"What is `{pair['prompt']}`?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": pair["response"]}]


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> WrittenCorpus:
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return WrittenCorpus(path, len(lines))


def _sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields each module's path below the root and its source, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # the few modules in older encodings


def _pairs(root: Path) -> Iterator[dict[str, str]]:
    seen: set[tuple[str, str]] = set()
    for name, source in _sources(root):
        scope = ".".join(part for part in name.with_suffix("").parts if part != "__init__")
        for prompt, docstring in _documented(_parsed(source), _PUBLIC_NAMES.get(scope, scope)):
            response = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
            if response and (prompt, response) not in seen:
                seen.add((prompt, response))
                yield {"prompt": prompt, "response": response, "path": str(name)}


def _parsed(source: str) -> list[ast.stmt]:
    """Returns the statements of a module; none if another version of Python wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the strings of old modules
        try:
            return ast.parse(source).body
        except SyntaxError:
            return []


def _documented(body: Iterable[ast.stmt], scope: str) -> Iterator[tuple[str, str]]:
    """Yields (signature, docstring) of each definition in a module or class, in source order."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield _signature(node, scope), docstring
        if isinstance(node, ast.ClassDef):
            yield from _documented(node.body, f"{scope}.{node.name}")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, scope: str) -> str:
    name = f"{scope}.{node.name}"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {name}({ast.unparse(node.args)})"

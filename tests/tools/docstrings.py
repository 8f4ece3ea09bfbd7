"""Finds docstrings that cannot be read alone: they lean on the name above them instead of saying what it is.

`help()`, an editor's hint and the API pages show a text without the code around it, so each text has to name its
subject: "Rows of one rank", not "Of one rank".

usage: python -m tests.tools.docstrings PATH...; exit code 1 where a text is refused
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEANING = frozenset(
    re.findall(
        r"\w+",
        "of as by that theirs those these in with without from for to on at after before until under between than like "
        "per else because since then also same its",
    )
)
"""First words that continue a sentence which does not exist."""

LEANING_OUTSIDE_RAISES = frozenset({"it", "they"})
"""First words that are only refused outside `Raises:`, where the subject is the call itself: "It has ended" says
enough."""

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"    (\*{0,2}[\w.`]+): (.*)$")


class Text(NamedTuple):
    """A text that a reader may meet without the code around it."""

    line: int
    subject: str
    """Name of the described thing; for an argument, `function.argument`."""

    section: str | None
    """Section of the text, such as `Args`; None for the description itself."""

    words: str


def texts(source: str, module: str) -> Iterator[Text]:
    """Finds the docstrings of a module, the entries of their sections, and the texts below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring, raw = ast.get_docstring(node), ast.get_docstring(node, clean=False)
            if docstring and raw:
                empty_lines = raw[: len(raw) - len(raw.lstrip())].count("\n")  # cleaning drops them
                yield from _of_docstring(docstring, node.body[0].lineno + empty_lines, getattr(node, "name", module))
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
                    value = following.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                        yield Text(following.lineno, ast.unparse(target), None, value.value)


def fault(text: Text) -> str | None:
    """Says what is wrong with a text; None where it can be read alone."""
    words = re.findall(r"[\w'`.-]+", text.words)
    if not words:
        return "is empty"
    first = words[0].lower()
    if first in LEANING or (first in LEANING_OUTSIDE_RAISES and text.section != "Raises"):
        return f"begins with {words[0]!r} and names no subject"
    if len(words) == 1:
        return "is a single word"
    return None


def _of_docstring(docstring: str, line: int, subject: str) -> Iterator[Text]:
    if not _SECTION.match(docstring.splitlines()[0]):
        yield Text(line, subject, None, docstring)
    section, is_first = None, False
    for offset, content in enumerate(docstring.splitlines()):
        if opened := _SECTION.match(content):
            section, is_first = opened[1], True
        elif section and content and not content.startswith(" "):
            section = None
        elif section in ("Returns", "Yields"):
            if content and is_first:
                yield Text(line + offset, subject, section, content.strip())
                is_first = False
        elif section and (entry := _ENTRY.match(content)):
            yield Text(line + offset, f"{subject}.{entry[1]}", section, entry[2])


def main() -> None:
    """Prints every text that is refused; exits with 1 where there is one."""
    refused = 0
    for root in map(Path, sys.argv[1:]):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for text in texts(path.read_text(), path.stem):
                if wrong := fault(text):
                    where = f"{text.section}: " if text.section else ""
                    print(f"{path}:{text.line}: {where}{text.subject}: the text {wrong}: {text.words.splitlines()[0]}")
                    refused += 1
    if refused:
        sys.exit(f"{refused} texts refused; begin each with what it describes")


if __name__ == "__main__":
    main()

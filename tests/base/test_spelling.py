"""Nouns after numbers: one rank, two ranks, in every text of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.base.spelling import counted
from tests.paths import ROOT
from tests.tools.sources import modules

NOUNS = (
    *("layout", "rank", "GPU", "node", "step", "microbatch", "sample", "document", "record", "file", "token"),
    *("sequence", "row", "line", "message", "tensor", "layer", "label", "image", "patch", "piece", "prompt"),
    *("rollout", "minute", "source", "result"),
)
PLURALS = "|".join(re.escape(counted(2, noun).removeprefix("2 ")) for noun in NOUNS)
BEFORE = r"(?:(?:more|such|common|dense|packed|rejected|special|training|data-parallel|expert-parallel)\s)*"
IN_TEXT = re.compile(rf"\s{BEFORE}(?:{PLURALS})\b(?!/)")
TEMPLATE = re.compile(rf"\}}\}}(?:</?\w+>)*\s{BEFORE}(?:{PLURALS})\b")


@pytest.mark.parametrize(
    ("number", "noun", "form", "text"),
    [
        (0, "rank", "", "0 ranks"),
        (1, "rank", "", "1 rank"),
        (2, "rank", "", "2 ranks"),
        (1, "packed row", ",", "1 packed row"),
        (12345, "sample", "", "12345 samples"),
        (12345, "sample", ",", "12,345 samples"),
        (1, "microbatch", "", "1 microbatch"),
        (2, "microbatch", "", "2 microbatches"),
    ],
)
def test_a_noun_agrees_with_its_number(number: int, noun: str, form: str, text: str) -> None:
    assert counted(number, noun, form) == text


def plurals_in(tree: ast.AST) -> Iterator[str]:
    """Yields numbers in f-strings that a plural follows; the limits in constants are never one."""
    for node in ast.walk(tree):
        for value, after in zip(node.values, node.values[1:]) if isinstance(node, ast.JoinedStr) else ():
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                number, words = ast.unparse(value.value), IN_TEXT.match(str(after.value))
                if words is not None and not re.fullmatch(r"(\w+\.)*_?[A-Z][A-Z_]+", number):
                    yield f"{{{number}}}{words[0]}"


def test_no_text_of_the_package_has_a_plural_after_any_number() -> None:
    """`counted` writes them: 1 ranks is wrong. Verbs that look like plurals, such as runs, are not checked."""
    wrong = ast.parse("f'{len(x):,} more files, {n} rows, {LIMIT} tokens, {name} runs, {counted(n, noun)} on'")
    assert list(plurals_in(wrong)) == ["{len(x)} more files", "{n} rows"]
    assert [f"{module.name}: {found}" for module in modules() for found in plurals_in(module.tree)] == []


def test_no_template_of_a_page_has_a_plural_after_any_number() -> None:
    assert TEMPLATE.search("{{ runs | length }}</b> files") is not None
    pages: list[Path] = sorted(ROOT.glob("mtrain/report/pages/templates/*.html"))
    assert pages != []
    assert [(page.name, found[0]) for page in pages for found in TEMPLATE.finditer(page.read_text())] == []

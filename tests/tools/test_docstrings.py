"""Checks which docstrings the linter refuses."""

from __future__ import annotations

import pytest

from tests.tools.docstrings import fault, texts

MODULE = '''"""Rows of a step."""

SIZE = 1
"""{attribute}"""

def function(rows):
    """{function}

    Args:
        rows: {argument}

    Returns:
        {returned}

    Raises:
        ValueError: It is empty.
    """
'''
GOOD = {
    "attribute": "Bytes of a row.",
    "function": "Counts the rows.",
    "argument": "Rows to count, of\n            this rank.",
    "returned": "How many there are.",
}


@pytest.mark.parametrize(
    ("changed", "subject"),
    [
        ({"attribute": "Of a row."}, "SIZE"),
        ({"attribute": "Bytes."}, "SIZE"),
        ({"function": "Theirs, counted."}, "function"),
        ({"function": "It counts."}, "function"),
        ({"argument": "As `count` takes them."}, "function.rows"),
        ({"argument": "By default none."}, "function.rows"),
        ({"returned": "That of the rows."}, "function"),
    ],
)
def test_a_text_without_a_subject_is_refused(changed: dict[str, str], subject: str) -> None:
    found = list(texts(MODULE.format(**GOOD), "module"))
    assert [text.subject for text in found] == [
        "module", "SIZE", "function", "function.rows", "function", "function.ValueError",
    ]  # fmt: skip
    assert not any(map(fault, found))
    refused = [text for text in texts(MODULE.format(**{**GOOD, **changed}), "module") if fault(text)]
    assert [text.subject for text in refused] == [subject]


@pytest.mark.parametrize("opening", ["Counts the rows.\n\n    ", "\n    ", "\n\n    "])
def test_each_text_is_found_at_its_line(opening: str) -> None:
    source = f'''def function(rows):
    """{opening}Args:
        rows: Rows to count.
        size: Bytes of a row.
    """
'''
    lines = source.splitlines()
    found = {text.subject: lines[text.line - 1].strip() for text in texts(source, "module") if text.section}
    assert found == {"function.rows": "rows: Rows to count.", "function.size": "size: Bytes of a row."}

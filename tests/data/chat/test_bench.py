"""Each available published template, with drawn conversations: the tokens are those of transformers, or it is
refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.data.chat.bench import COUNTS, counts

WRONG = (
    *("other ids", "other marks", "taken, though transformers refuses it"),
    "an answer is not given, or does not end",
)
PINNED: dict[str, dict[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8"))


def test_no_pinned_count_is_wrong() -> None:
    total = Counter[str]()
    for each in PINNED.values():
        total.update(each)
    assert [total[outcome] for outcome in WRONG] == [0, 0, 0, 0]
    assert len(PINNED) == 82
    assert sum("ids and marks agree" in each for each in PINNED.values()) == 32
    assert (total["ids agree"], total["ids and marks agree"], total.total()) == (1051, 941, 3936)


@pytest.mark.nightly
def test_templates_give_the_pinned_counts() -> None:
    """The counts have to be written again after a change of trl's templates or of the draws: python -m
    tests.data.chat.bench."""
    assert counts() == PINNED

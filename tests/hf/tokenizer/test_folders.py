"""Token ids are those of AutoTokenizer, for every folder that is not refused by name."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from mtrain.base.errors import DataError
from mtrain.hf.tokenizer import known
from mtrain.tokenizer import load_tokenizer
from tests.hf.tokenizer.folders import NAMES, folders, written

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*NAMES, " ", "  ", "\n", "\r\n", "▁", "the", " reader", "é", "日", "\u0301", "12"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)
OUTCOMES: collections.Counter[str] = collections.Counter()


def without_surrogates(text: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in text)


def agree(folder: Path, texts: list[str]) -> str:
    """Compares; says what became of the folder."""
    try:
        theirs: Any = AutoTokenizer.from_pretrained(str(folder))
    except Exception as fault:
        theirs = fault
    refusal = None
    try:
        ours = load_tokenizer(folder)
    except DataError as fault:
        refusal = str(fault)
    if refusal is not None:
        assert len(refusal.splitlines()) == 1
        assert str(folder) in refusal
        return "refused by both" if isinstance(theirs, Exception) else "refused"
    if isinstance(theirs, Exception):
        return "refused by transformers alone"
    for text in texts:
        assert (
            ours.encode_with_offsets(text, special_tokens=True).ids
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
        assert ours.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    with_added, alone = theirs("a")["input_ids"], theirs("a", add_special_tokens=False)["input_ids"]
    if alone:
        assert with_added[: len(ours.begin_ids) + len(alone)] == [*ours.begin_ids, *alone]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert dict(ours.named) == theirs.special_tokens_map
    return "alike"


def drawn(max_examples: int, tmp_path: Path) -> None:
    @settings(
        max_examples=max_examples,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        derandomize=max_examples < 100,
    )
    @given(folders(), st.lists(TEXTS.filter(without_surrogates), min_size=3, max_size=5))
    def check(files: dict[str, Any], texts: list[str]) -> None:
        OUTCOMES[agree(written(files, tmp_path / "drawn"), texts)] += 1

    OUTCOMES.clear()
    check()
    assert OUTCOMES["alike"] > 0.5 * OUTCOMES.total(), OUTCOMES


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    drawn(60, tmp_path)


@pytest.mark.nightly
def test_ids_are_those_of_transformers_for_many_folders(tmp_path: Path) -> None:
    drawn(2000, tmp_path)


def test_the_tables_of_classes_are_those_of_transformers() -> None:
    mapping = {model: name for model, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items() if name is not None}
    theirs = {model: name.removesuffix("Fast") for model, name in mapping.items() if model != "EvollaModel"}
    assert theirs == known.CLASS_OF_MODEL
    assert known.WRONG_CLASS == tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {*theirs.values()} - {"TokenizersBackend"} <= known.CLASSES

"""Token ids are those of AutoTokenizer, for every folder that is not refused by name."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from mtrain.base.errors import DataError
from mtrain.hf.tokenizer import classes
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
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
    """Compares the ids; returns the outcome for the folder."""
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

    def of_theirs(text: str, **options: bool) -> list[int] | None:
        return ids_of(lambda given: theirs(given, **options)["input_ids"], text)

    for text in texts:
        ids = of_theirs(text, add_special_tokens=False)
        assert ids_of(lambda given: ours.encode_with_offsets(given, special_tokens=True).ids, text) == ids
        assert ids_of(ours.encode, text) == of_theirs(text, add_special_tokens=False, split_special_tokens=True)
        if ids is not None:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    with_added, alone = of_theirs("a"), of_theirs("a", add_special_tokens=False)
    if alone and with_added is not None:
        assert with_added[: len(ours.begin_ids) + len(alone)] == [*ours.begin_ids, *alone]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert dict(ours.named) == theirs.special_tokens_map
    return "alike"


def ids_of(encode: Callable[[str], list[int]], text: str) -> list[int] | None:
    """Encodes a text; None where it needs an unknown token that the vocabulary lacks, which is not known before."""
    try:
        return encode(text)
    except Exception as fault:
        if "not found in the vocabulary" not in str(fault):
            raise
        return None


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


CLASSES = ["GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "CohereTokenizer"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_padding_token_of_the_file_yields_to_that_of_a_class(tmp_path: Path, name: str) -> None:
    outcomes = set()

    @settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
    @given(folders().filter(lambda files: "tokenizer.json" in files))
    def check(files: dict[str, Any]) -> None:
        padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        padding |= {"pad_type_id": 0, "pad_token": "</s>"}
        changed = {
            **files,
            "tokenizer.json": {**files["tokenizer.json"], "padding": padding},
            "tokenizer_config.json": {**files.get("tokenizer_config.json", {}), "tokenizer_class": name},
        }
        outcomes.add(agree(written(changed, tmp_path / "padded"), ["a the <pad> é", "</s> "]))

    check()
    assert "alike" in outcomes, outcomes


@pytest.mark.parametrize("name", [*CLASSES, "Qwen3_5Tokenizer"])
def test_a_vocabulary_and_merges_are_read_for_classes_that_read_them(name: str) -> None:
    built = classes.built_class(name)
    assert built is not None
    assert built.reads_merges_file == ("merges_file" in getattr(transformers, name).vocab_files_names)


def test_the_tables_of_classes_are_those_of_transformers() -> None:
    mapping = {model: name for model, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items() if name is not None}
    theirs = {model: name.removesuffix("Fast") for model, name in mapping.items() if model != "EvollaModel"}
    assert theirs == classes.CLASS_OF_MODEL
    assert classes.WRONG_CLASS == tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {*theirs.values()} - {"TokenizersBackend"} <= classes.CLASSES

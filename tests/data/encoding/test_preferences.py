"""Records of pairs and of answers as sequences: the forms of TRL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.sample import SampleEncoder, TokenizedSample
from mtrain.data.encoding.compared import source_encoder
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.fault_table import Notice
from tests.messages import refuses


def encoder(folder: Path, compares: Any, **changes: Any) -> SampleEncoder:
    given = {"kind": "sft", "seq_length": 32, "tokenizer": str(folder), "train": [{"path": "x"}]}
    section = SftSection.model_validate({**given, "chat_template": "plain", **changes})
    return source_encoder(section, load_tokenizer(folder), compares)


def sequences(folder: Path, compares: Any, record: dict[str, Any], **changes: Any) -> tuple[TokenizedSample, ...]:
    found = encoder(folder, compares, **changes).encode(record)
    assert isinstance(found, tuple)
    return found


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


A, B, C, D = 4, 5, 6, 7
BOS, EOS = 1, 2


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a b", "chosen": " c", "rejected": " d c"},
        {"chosen": "a b c", "rejected": "a b d c"},
    ],
    ids=["explicit", "implicit"],
)
def test_a_pair_of_texts(word_tokenizer: Path, record: dict[str, Any]) -> None:
    chosen, rejected = sequences(word_tokenizer, "pairs", record)
    assert chosen.ids.tolist() == [BOS, A, B, C, EOS]
    assert rejected.ids.tolist() == [BOS, A, B, D, C, EOS]
    assert chosen.loss_weights.tolist() == [0, 0, 0, 1, 1]
    assert rejected.loss_weights.tolist() == [0, 0, 0, 1, 1, 1]


def test_messages_count_in_the_answers_alone(word_tokenizer: Path) -> None:
    """Explicit and implicit prompts give the same pair; an answer inside the prompt is not judged."""
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    ours, theirs = [message("assistant", "d")], [message("assistant", "a a")]
    explicit = sequences(word_tokenizer, "pairs", {"prompt": prompt, "chosen": ours, "rejected": theirs, "weight": 0.5})
    implicit = sequences(word_tokenizer, "pairs", {"chosen": prompt + ours, "rejected": prompt + theirs, "weight": 0.5})
    for one, other in zip(explicit, implicit, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.loss_weights, other.loss_weights)
        assert one.weight == other.weight == 0.5
    chosen, rejected = explicit
    assert chosen.ids[chosen.loss_weights > 0].tolist() == [D, EOS]
    assert rejected.ids[rejected.loss_weights > 0].tolist() == [A, A, EOS]


def test_an_answer_carries_its_label_as_the_sign_of_its_weight(word_tokenizer: Path) -> None:
    for label in (True, False):
        for weight in (2.0, 0.0):
            record = {"prompt": "a", "completion": " b", "label": label, "weight": weight}
            (found,) = sequences(word_tokenizer, "answers", record)
            assert abs(found.weight) == weight
            assert (math.copysign(1, found.weight) > 0) == label
            assert found.ids[found.loss_weights > 0].tolist() == [B, EOS]


@pytest.mark.fault(
    "input",
    "a record of preferences without an answer, a prompt or a label, with answers of two forms, or with a key that "
    "nobody reads",
    happens="a DataError says what is missing or not read, before the first step",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("compares", "record", "fact"),
    [
        ("pairs", {"prompt": "a", "chosen": "b"}, "'rejected'"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected'"),
        ("pairs", {"chosen": "a b", "rejected": ""}, "'rejected'"),
        ("pairs", {"chosen": "a b", "rejected": "a b"}, "'chosen'"),
        ("pairs", {"chosen": [message("user", "a")], "rejected": []}, "'rejected'"),
        ("pairs", {"chosen": "a", "rejected": "b"}, "'prompt'"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": [message("assistant", "b")]}, "'rejected'"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}, "'score'"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{}]}, "'tools'"),
        ("answers", {"prompt": "a", "completion": "b"}, "'label'"),
        ("answers", {"completion": "b", "label": True}, "'prompt'"),
    ],
)
def test_what_is_no_preference_is_named(
    word_tokenizer: Path, compares: str, record: dict[str, Any], fact: str, notice: Notice
) -> None:
    with notice, refuses(DataError, fact) as found:
        sequences(word_tokenizer, compares, record)
    assert found.value.exit_code == notice.exit_code

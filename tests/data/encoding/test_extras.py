"""Records with numbers for the loss functions: read, cached, cut like their tokens, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mtrain.base.errors import DataError, NumericError
from mtrain.config import Config
from mtrain.data.datum import Datum, sample_of
from mtrain.data.loader import StepLoader
from tests.fault_table import Notice
from tests.messages import refuses

NAMES = ("advantages", "old_logprobs")
GOOD: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "advantages": 1.5}
TOKENS = GOOD | {"old_logprobs": [9.0, -0.25, -0.5, -0.75]}
"""The first token is predicted by nothing, so its number is not used."""
PREDICTED = GOOD | {"input_ids": [8, 7, 6], "loss_mask": [0, 1, 1], "old_logprobs": [-1, -2]}
WORDS = {"prompt": "a", "response": "b c", "advantages": -1, "old_logprobs": 0.5}

TOP_K = ("topk_ids:2", "topk_logprobs:2")
TEACHER: dict[str, Any] = {
    "input_ids": [5, 6, 7, 8],
    "loss_mask": [1, 0, 1, 1],
    "topk_ids": [[0, 0], [0, 0], [3, 4], [9, 2]],
    "topk_logprobs": [[0.0, 0.0], [0.0, 0.0], [-0.5, -1.5], [-0.1, -10000.0]],
}
"""The first token is not predicted, and the second one does not count."""


@pytest.fixture
def configured(tmp_path: Path, word_tokenizer: Path, make_config: Callable[..., Config]) -> Callable[..., Config]:
    def make(records: list[Any], extras: tuple[str, ...] = NAMES, **data: Any) -> Config:
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        source = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(word_tokenizer), "extras": extras}
        return make_config({**source, "cache_dir": str(tmp_path / "cache"), **data})

    return make


def extras_of(config: Config) -> dict[tuple[int, ...], dict[str, list[float]]]:
    """Returns the extras of the records of a step, by their labels."""
    loader = StepLoader(config, 0, 1, extras=NAMES)
    samples = [loader.samples(0).sample(slot) for slot in range(config.train.global_batch_size)]
    assert all(sample is not None for sample in samples)
    return {
        tuple(each.labels.tolist()): {name: values.tolist() for name, values in each.extras.items()}
        for each in samples
        if each is not None
    }


def test_numbers_stand_with_the_tokens_that_they_belong_to(configured: Callable[..., Config]) -> None:
    config = configured([TOKENS, PREDICTED, WORDS])
    for _ in range(2):  # built, then found in the cache
        found = extras_of(config)
        assert found[6, 7, 8] == {"advantages": [1.5] * 3, "old_logprobs": [-0.25, -0.5, -0.75]}
        assert found[7, 6] == {"advantages": [1.5] * 2, "old_logprobs": [-1.0, -2.0]}
        (words,) = (each for each in found.values() if each["advantages"][0] == -1.0)
        assert set(words["old_logprobs"]) == {0.5}
    batches = StepLoader(config, 0, 1, extras=NAMES).batches(0)
    batch = np.concatenate([each.extras["old_logprobs"].numpy() for each in batches])
    assert batch.dtype == np.float32
    assert np.isin([-0.25, -2.0, 0.5], batch).all()


def test_what_is_cut_off_a_record_takes_its_numbers_along(configured: Callable[..., Config]) -> None:
    whole = GOOD | {"input_ids": list(range(2, 14)), "loss_mask": [1] * 12, "old_logprobs": [-t / 4 for t in range(12)]}
    kept = {"start": range(7, 12), "end": range(1, 6)}
    for too_long, places in kept.items():
        config = configured([whole], seq_length=5, too_long=too_long)
        assert [each["old_logprobs"] for each in extras_of(config).values()] == [[-t / 4 for t in places]]


def test_other_numbers_are_other_data(configured: Callable[..., Config]) -> None:
    one, other = ([TOKENS | {"advantages": value}] for value in (1.0, 2.0))
    fingerprints = [StepLoader(configured(each), 0, 1).fingerprint for each in (one, other)]
    assert fingerprints[0] != fingerprints[1]
    plain = {key: value for key, value in TOKENS.items() if key not in NAMES}
    assert StepLoader(configured([plain], extras=()), 0, 1).fingerprint not in fingerprints


@pytest.mark.fault(
    "input",
    "rollouts with a number that is not finite, as an extra of data.extras",
    happens="refused before the first step, with file, line, name and token",
    exit_code=4,
)
def test_a_number_that_is_none_ends_the_run(configured: Callable[..., Config], notice: Notice) -> None:
    ill = TOKENS | {"old_logprobs": [0.0, 1e39, 0.0, 0.0]}
    with (
        notice,
        refuses(NumericError, "line 2", "'old_logprobs'") as raised,
    ):
        StepLoader(configured([PREDICTED, ill, TOKENS]), 0, 1)
    assert raised.value.exit_code == notice.exit_code
    with refuses(DataError, "line 1"):  # JSON has no word for it
        StepLoader(configured([TOKENS | {"advantages": float("nan")}]), 0, 1)


def test_a_temperature_that_divides_nothing_is_refused(configured: Callable[..., Config]) -> None:
    """The first token of a list is not predicted, and may have none."""
    plain = {key: value for key, value in TOKENS.items() if key not in NAMES}
    good = plain | {"temperature": [0.7] * (len(plain["input_ids"]) - 1)}
    config = configured([good, plain | {"temperature": 1}], ("temperature",))
    assert StepLoader(config, 0, 1, extras=("temperature",)).fingerprint
    with refuses(DataError, "line 2", "'temperature'"):
        StepLoader(configured([good, plain | {"temperature": 0}], ("temperature",)), 0, 1)


def test_not_a_number_in_parquet_is_named(configured: Callable[..., Config], tmp_path: Path) -> None:
    """Parquet has a value for it, also as one of several numbers a token."""
    path = tmp_path / "teacher.parquet"
    rows = [TEACHER, TEACHER | {"topk_logprobs": [[0, 0], [-1, -2], [-1, float("nan")], [-1, -1]]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with refuses(NumericError, "row 2", "'topk_logprobs[1]'") as raised:
        StepLoader(configured([], TOP_K, train=[{"path": str(path)}]), 0, 1)
    assert raised.value.exit_code == 4


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"old_logprobs": None}, "'old_logprobs'"),
        ({"old_logprobs": [0.5] * 7}, "'old_logprobs'"),
        ({"advantages": True}, "'advantages'"),
        ({"rewards": 1}, "'rewards'"),
    ],
)
def test_records_of_another_form_are_refused(
    configured: Callable[..., Config], change: dict[str, Any], fact: str
) -> None:
    with refuses(DataError, fact):
        StepLoader(configured([TOKENS | change]), 0, 1)


def test_a_record_without_them_is_refused(configured: Callable[..., Config]) -> None:
    with refuses(DataError, "line 1", "'old_logprobs'", "data.extras"):
        StepLoader(configured([GOOD]), 0, 1)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (("advantages", "advantages"), "extras names 'advantages' twice"),
        (("loss_mask",), "extras names 'loss_mask', but needs names"),
    ],
)
def test_names_that_cannot_be_are_refused(
    configured: Callable[..., Config], extras: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        configured([TOKENS], extras)


def test_extras_need_records(make_config: Callable[..., Config]) -> None:
    with pytest.raises(ValidationError, match="are keys of records, but kind=mock has none; set kind to sft"):
        make_config({"kind": "mock", "extras": ["advantages"]})


def test_several_numbers_a_token_are_columns(configured: Callable[..., Config]) -> None:
    names = ("topk_ids[0]", "topk_ids[1]", "topk_logprobs[0]", "topk_logprobs[1]")
    predicted = (
        TEACHER | {"input_ids": [8, 7, 6, 5]} | {name: TEACHER[name][1:] for name in ("topk_ids", "topk_logprobs")}
    )
    loader = StepLoader(configured([TEACHER, predicted], TOP_K), 0, 1, extras=names)
    for slot in range(2):
        sample = loader.samples(0).sample(slot)
        assert sample is not None
        found = [sample.extras[name].tolist() for name in names]
        assert found[:2] == [[0, 3, 9], [0, 4, 2]]
        assert found[2:] == [pytest.approx([0, -0.5, -0.1]), pytest.approx([0, -1.5, -10000])]


BAD_TEACHERS = [
    ({"topk_ids": [[0, 0], [0, 0.5], [3, 4], [9, 2]]}, "topk_ids"),
    (
        {"topk_ids": [[0, 0], [0, 0], [3, 4], [9, 1000]]},
        "topk_ids",
    ),
    ({"topk_ids": [[0, 0], [0, 0], [3, 3], [9, 2]]}, "topk_ids"),
    (
        {"topk_logprobs": [[0, 0], [0, 0], [-0.5, 3.5], [-1, -1]]},
        "topk_logprobs",
    ),
]


@pytest.mark.parametrize(("change", "fact"), BAD_TEACHERS)
def test_what_no_teacher_says_is_refused(configured: Callable[..., Config], change: dict[str, Any], fact: str) -> None:
    """Both files and programs are checked."""
    config = configured([TEACHER, TEACHER | change], TOP_K)
    with refuses(DataError, fact):
        StepLoader(config, 0, 1)
    record = TEACHER | change
    extras = {name: record[name] for name in ("topk_ids", "topk_logprobs")}
    datum = Datum(record["input_ids"], record["loss_mask"], extras=extras)
    with refuses(DataError, "sample 3"):
        sample_of(datum, "sample 3", config)


def test_several_numbers_have_to_be_so_many(configured: Callable[..., Config]) -> None:
    for bad in (1.0, [[0, 0], [-1, -2], [-1], [-1, -1]], [-1, -2, -1, -1]):
        with refuses(DataError, "line 1", "'topk_logprobs'"):
            StepLoader(configured([TEACHER | {"topk_logprobs": bad}], TOP_K), 0, 1)
    with pytest.raises(ValidationError, match=r"extras names 'topk_ids:x', but needs the count of numbers"):
        configured([TEACHER], ("topk_ids:x",))
    with pytest.raises(ValidationError, match="extras names 'topk_ids' twice"):
        configured([TEACHER], ("topk_ids:2", "topk_ids:3"))
    datum = Datum([5, 6, 7], extras={"topk_logprobs": [[-1.0, -2.0], [-1.0, float("nan")], [-1.0, -1.0]]})
    with refuses(NumericError, "'topk_logprobs'"):
        sample_of(datum, "sample 0", configured([TEACHER], TOP_K))
    lacking = Datum([5, 6], extras={"topk_logprobs": [[-1.0, -2.0]]})
    with refuses(DataError, "topk_logprobs"):
        sample_of(lacking, "0", configured([TEACHER], TOP_K), ["a", *(f"topk_logprobs[{each}]" for each in range(3))])

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
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.data.loader import StepLoader
from mtrain.data.shown import headline
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
        sections = {name: data.pop(name) for name in ("model", "loss") if name in data}
        return make_config({**source, "cache_dir": str(tmp_path / "cache"), **data}, **sections)

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
        (("loss_mask",), "extras names 'loss_mask', but a name has only letters"),
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
    with pytest.raises(
        ValidationError, match=r"extras names 'topk_ids:x', but the colon must be followed by the count of numbers"
    ):
        configured([TEACHER], ("topk_ids:x",))
    with pytest.raises(ValidationError, match="extras names 'topk_ids' twice"):
        configured([TEACHER], ("topk_ids:2", "topk_ids:3"))
    datum = Datum([5, 6, 7], extras={"topk_logprobs": [[-1.0, -2.0], [-1.0, float("nan")], [-1.0, -1.0]]})
    with refuses(NumericError, "'topk_logprobs'"):
        sample_of(datum, "sample 0", configured([TEACHER], TOP_K))
    lacking = Datum([5, 6], extras={"topk_logprobs": [[-1.0, -2.0]]})
    with refuses(DataError, "topk_logprobs"):
        sample_of(lacking, "0", configured([TEACHER], TOP_K), ["a", *(f"topk_logprobs[{each}]" for each in range(3))])


LAYERS, TOP_K_EXPERTS = 2, 4
ROUTES = [[[0] * 4, [5, 1, 7, 2]], [[0] * 4, [3, 0, 6, 4]], [[0] * 4, [-1] * 4]]
"""Experts of each token that is read; 0 in a dense layer, as vLLM writes there."""
ROUTED = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "routed_experts": ROUTES}


@pytest.fixture
def routed(configured: Callable[..., Config]) -> Callable[..., Config]:
    """Returns a function that builds a configuration of a model whose second layer has eight experts."""

    def make(records: list[Any], **data: Any) -> Config:
        experts = {"num_experts": 8, "top_k": TOP_K_EXPERTS, "ffn_hidden_size": 8, "first_dense_layers": 1}
        extras = ("routed_experts:2x4",)
        return configured(records, extras, model={"num_layers": LAYERS, "experts": experts}, **data)

    return make


def routes_of(config: Config, count: int) -> list[Any]:
    samples = StepLoader(config, 0, 1).samples(0)
    found = [samples.sample(slot) for slot in range(count)]
    assert all(each is not None and not each.extras for each in found)
    return sorted(each.choices["routed_experts"].tolist() for each in found if each is not None and each.choices)


def test_experts_stand_with_the_tokens_that_are_read(routed: Callable[..., Config], tmp_path: Path) -> None:
    """A row for each token but the last, or for each; of lines and of parquet; built, then found in the cache."""
    whole = ROUTED | {"input_ids": [9, 6, 7, 8], "routed_experts": [*ROUTES[::-1], [[9] * 4] * 2]}
    records, wanted = [ROUTED, whole], sorted([ROUTES, ROUTES[::-1]])
    for _ in range(2):
        assert routes_of(routed(records), 2) == wanted
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rollouts.parquet")
    assert routes_of(routed([], train=[{"path": str(tmp_path / "rollouts.parquet")}]), 2) == wanted
    (batch,) = StepLoader(routed([ROUTED]), 0, 1, extras=("routed_experts",)).batches(0)[:1]
    assert batch.choices["routed_experts"][0, :3].tolist() == ROUTES


def test_what_is_cut_off_a_record_takes_its_experts_along(routed: Callable[..., Config]) -> None:
    routes = [[[0] * 4, [token % 4, (token + 1) % 4, 4 + token // 4, 7]] for token in range(11)]
    whole = {"input_ids": list(range(2, 14)), "loss_mask": [1] * 12, "routed_experts": routes}
    for too_long, starts in {"start": [6], "end": [0], "split": [0, 5, 10]}.items():
        wanted = sorted(routes[start : start + 5] for start in starts)
        assert routes_of(routed([whole], seq_length=5, too_long=too_long), len(starts)) == wanted


def changed(token: int, experts: list[int]) -> list[Any]:
    return [[dense, experts if number == token else own] for number, (dense, own) in enumerate(ROUTES)]


BAD_ROUTES: list[tuple[Any, list[str]]] = [
    (None, ["line 2: has no 'routed_experts'"]),
    (ROUTES[:1], ["has 4 tokens", "shape [1, 2, 4]", "[3, 2, 4]"]),
    (np.swapaxes(ROUTES, 1, 2).tolist(), ["shape [3, 4, 2]", "[3, 2, 4]"]),
    ([[*dense, *own] for dense, own in ROUTES], ["shape [3, 8]"]),
    (changed(1, [1, 2, 3]), ["rows of equal lengths"]),
    (changed(1, [1, 2, 3, 0.5]), ["dtype float64"]),  # type: ignore[list-item]
    (changed(1, [0, 1, 2, 8]), ["token 1 in layer 1", "[0, 1, 2, 8]", "0 to 7"]),
    (changed(2, [0, 1, 2, -2]), ["token 2 in layer 1", "0 to 7"]),
    (changed(0, [0, -1, 2, 3]), ["token 0 in layer 1", "must be 4 experts"]),
    (changed(1, [3, 1, 2, 3]), ["token 1 in layer 1", "different experts"]),
    (changed(1, [0, 1, 2, 10**12]), ["token 1 in layer 1", "0 to 7"]),
]


@pytest.mark.fault(
    "input",
    "rollouts whose routed_experts are of another shape, or are no experts of the model",
    happens="refused before the first step, with file, line, token and layer",
    exit_code=3,
)
@pytest.mark.parametrize(("routes", "facts"), BAD_ROUTES, ids=[facts[-1] for _, facts in BAD_ROUTES])
def test_experts_that_cannot_be_are_refused(
    routed: Callable[..., Config], routes: Any, facts: list[str], notice: Notice
) -> None:
    with notice, refuses(DataError, "line 2", "routed_experts", *facts) as raised:
        StepLoader(routed([ROUTED, ROUTED | {"routed_experts": routes}]), 0, 1)
    assert raised.value.exit_code == notice.exit_code


def test_a_record_without_experts_is_refused(routed: Callable[..., Config]) -> None:
    plain = {key: value for key, value in ROUTED.items() if key != "routed_experts"}
    with refuses(DataError, "line 2", "'routed_experts'", "data.extras", "[tokens, layers, k]"):
        StepLoader(routed([ROUTED, plain]), 0, 1)


MOE: dict[str, Any] = {"num_experts": 8, "top_k": TOP_K_EXPERTS, "ffn_hidden_size": 8}


@pytest.mark.parametrize(
    ("extra", "model", "message"),
    [
        ("routed_experts:2x4", {}, "routed_experts, but the model has no experts"),
        (
            "routed_experts",
            {"experts": MOE},
            r"names routed_experts, but model.num_layers=1 .*write routed_experts:1x4",
        ),
        ("routed_experts:4x1", {"experts": MOE}, "names routed_experts:4x1, but .*write routed_experts:1x4"),
        ("routed_experts:1x4x2", {"experts": MOE}, "must be followed by the count of numbers"),
        ("topk_ids:1x4", {"experts": MOE}, "must be followed by the count of numbers"),
        ("routed_experts:1x4", {"experts": MOE | {"capacity_factor": 1.0}}, "capacity_factor=1.0 drops tokens"),
        ("routed_experts:1x4", {"experts": MOE, "num_labels": 2}, "records with a label"),
    ],
)
def test_a_model_that_has_no_such_experts_is_refused(
    configured: Callable[..., Config], extra: str, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        configured([ROUTED], (extra,), model=model, loss={"allow_layout_dependent": True})


def test_a_batch_and_a_ledger_show_experts(routed: Callable[..., Config]) -> None:
    """Counts the tokens whose experts are named, none of them by what stands in a dense layer."""
    digests = set()
    for routes in (ROUTES, [[[0] * 4, [-1] * 4]] * 3):
        loader = StepLoader(routed([ROUTED | {"routed_experts": routes}]), 0, 1)
        count = sum(own[0] >= 0 for _, own in routes)
        assert headline(loader.shown(1, 1).samples[0]).endswith(f"; experts of {count} tokens replayed")
        with loader.iterate(0) as steps:
            next(iter(steps))
        digests.add(loader.next_entry(1).digest)
    assert len(digests) == 2

"""Records come back from their line of JSON as they were."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.report.metrics.record import (
    ChangeRecord,
    Record,
    StepRecord,
    TermRecord,
    ValidRecord,
    from_json_line,
    to_json_line,
)
from tests.report.metrics.records import step_record

finite = st.floats(allow_nan=False, allow_infinity=False)
number = st.floats(allow_nan=False)
terms = st.dictionaries(
    st.text(max_size=8), st.builds(TermRecord, loss=number, numerator=number, denominator=finite), max_size=3
)
steps = st.builds(
    StepRecord,
    step=st.integers(1, 2**40),
    loss=number,
    denominator=finite,
    grad_norm=number,
    lr=finite,
    tokens=st.integers(0, 2**50),
    seconds=finite,
    tokens_per_second=finite,
    padding_tokens=st.none() | st.integers(0, 2**50),
    loss_tokens=st.none() | st.integers(0, 2**50),
    terms=terms,
    sources=terms,
    empty=st.booleans(),
    skipped=st.none() | st.sampled_from(["fp16 overflow", "NaN", "line\nbreak"]),
    loss_scale=st.none() | finite,
    mfu=st.none() | finite,
    layout_dependent=st.booleans(),
)
passes = st.builds(
    ValidRecord,
    step=st.integers(0, 2**40),
    valid_loss=number,
    denominator=finite,
    samples=st.integers(0, 2**40),
    seconds=finite,
    terms=terms,
    valid_sets=terms,
)


def test_a_line_written_before_passes_had_terms_is_read() -> None:
    line = to_json_line(ValidRecord(step=1, valid_loss=2.0, denominator=3.0, samples=4, seconds=5.0))
    older = line.replace(', "terms": {}', "").replace(', "valid_sets": {}', "")
    assert "valid_sets" not in older
    assert from_json_line(older) == from_json_line(line)


changes = st.builds(
    ChangeRecord,
    step=st.integers(0, 2**40),
    key=st.text(),
    old=st.none() | st.text(),
    new=st.none() | st.text(),
)


@given(steps | passes | changes)
def test_a_record_survives_its_line_bit_for_bit(record: Record) -> None:
    line = to_json_line(record)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert from_json_line(line) == record


def test_numbers_that_are_none_are_strings_in_valid_json() -> None:
    record = ValidRecord(step=1, valid_loss=math.nan, denominator=math.inf, samples=2, seconds=-math.inf)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads(to_json_line(record), parse_constant=refuse)
    assert (values["valid_loss"], values["denominator"], values["seconds"]) == ("NaN", "Infinity", "-Infinity")
    back = from_json_line(to_json_line(record))
    assert isinstance(back, ValidRecord)
    assert math.isnan(back.valid_loss)


def test_the_line_of_a_step_carries_the_public_contract() -> None:
    record = StepRecord(
        step=7,
        loss=0.1 + 0.2,
        denominator=64.0,
        grad_norm=1.5,
        lr=3e-4,
        tokens=128,
        seconds=0.25,
        tokens_per_second=512.0,
        terms={"main": TermRecord(loss=0.1 + 0.2, numerator=19.2, denominator=64.0)},
    )
    values = json.loads(to_json_line(record))
    assert values["kind"] == "step"
    assert {"step", "loss", "denominator", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second"} <= values.keys()
    assert values["loss"] == 0.30000000000000004
    assert values["terms"]["main"] == {"loss": 0.30000000000000004, "numerator": 19.2, "denominator": 64.0}


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "null", "{}", '{"kind": "step"}', '{"kind": "other"}', '{"kind": "valid", "step": 1}']
)
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(DataError, match="not a record"):
        from_json_line(line)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in ("null", '"1"', "1.0", "true", "[1]", "1" + "0" * 400, "9" * 5000)),
        *(("loss", value) for value in ("null", '"x"', "true", "{}", "1" + "0" * 400, "[" * 100_000)),
        *(("terms", value) for value in ("null", "[]", '{"main": null}', '{"main": {"loss": {}}}')),
        ("empty", "1"),
        ("skipped", "1"),
        ("unknown", "1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_field_of_another_kind_is_refused(name: str, value: str) -> None:
    others = {key: each for key, each in json.loads(to_json_line(step_record(3))).items() if key != name}
    fields = ", ".join(f'"{key}": {json.dumps(each)}' for key, each in others.items())
    line = "{" + fields + f', "{name}": {value}' + "}"
    with pytest.raises(DataError, match="not a record"):
        from_json_line(line)

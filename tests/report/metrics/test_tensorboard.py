"""TensorBoard reads what was written, without the steps that a resumed run repeats."""

from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtrain.report.metrics.record import Record, TermRecord
from mtrain.report.metrics.sinks import TensorBoardSink
from tests.report.metrics.records import step_record, valid_record, with_side_terms


def write(folder: Path, resume_step: int, *records: Record) -> None:
    sink = TensorBoardSink(folder, resume_step)
    for record in records:
        sink.write(record)
    sink.close()


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_resumed_run_hides_the_steps_it_does_again(tmp_path: Path) -> None:
    write(tmp_path, 0, valid_record(0, 4.0), *(step_record(step, float(step)) for step in range(1, 5)))
    write(tmp_path, 2, step_record(3, 30.0), valid_record(3, 1.5))
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert curve(tmp_path, "terms/main") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert curve(tmp_path, "valid/loss") == [(0, 4.0), (3, 1.5)]


def test_an_empty_step_has_no_loss(tmp_path: Path) -> None:
    write(tmp_path, 0, step_record(1, 2.0), step_record(2, 0.0, empty=True))
    assert curve(tmp_path, "train/loss") == [(1, 2.0)]
    assert [step for step, _ in curve(tmp_path, "train/lr")] == [1, 2]


def test_every_term_has_a_curve_where_it_had_something_to_learn(tmp_path: Path) -> None:
    by_source = replace(step_record(1), sources={"web": TermRecord(loss=3.0, numerator=6.0, denominator=2.0)})
    write(tmp_path, 0, with_side_terms(by_source), with_side_terms(valid_record(1)))
    assert curve(tmp_path, "train/loss/web") == [(1, 3.0)]
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {tag for tag in tags if "terms" in tag} == {"terms/main", "terms/kl", "valid_terms/kl"}
    ((step, value),) = curve(tmp_path, "valid_terms/kl")
    assert step == 1
    assert value == pytest.approx(0.0123456)


def test_text_padding_and_loss_tokens_have_curves_where_they_are_known(tmp_path: Path) -> None:
    write(tmp_path, 0, step_record(1), replace(step_record(2), padding_tokens=10, loss_tokens=900))
    assert curve(tmp_path, "tokens/text") == [(1, 1024.0), (2, 1024.0)]
    assert curve(tmp_path, "tokens/padding") == [(2, 10.0)]
    assert curve(tmp_path, "tokens/loss") == [(2, 900.0)]


def test_the_configuration_stands_on_the_page_of_texts(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, 3, {"config": "train.lr: 0.5\nrun.name: x"}).close()
    TensorBoardSink(tmp_path, 5, {"config": "train.lr: 0.25"}).write(step_record(6))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Tensors("config/text_summary")[-1:]
    assert event.tensor_proto.string_val[0] == b"    train.lr: 0.25"
    assert read.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"

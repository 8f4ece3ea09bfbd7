"""Runs of several terms through the command line: a teacher from another run, metrics of every term, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.warm import completed, program_environment

MODEL = "num_layers: 2, hidden_size: {hidden}, ffn_hidden_size: 48, num_attention_heads: 4, vocab_multiple: 8"
BASE = """
train: {global_batch_size: 4, micro_batch_size: 2, num_steps: 2, precision: fp32}
optimizer: {lr: 1.0e-2, schedule: constant}
data: {kind: mock, seq_length: 16}
metrics: {tensorboard: false}
"""
LOSSES = """
import torch

from mtrain.core.loss.pair import LossPair


def unlikely_tokens(inputs, below):
    entropy = inputs.logits.cross_entropy(inputs.labels)
    kept = (torch.exp(-entropy.detach()) < below) & (inputs.weights != 0)
    return LossPair(torch.where(kept, entropy, 0.0).sum(), kept.sum(dtype=torch.float64))
"""
DISTILLATION = "distillation"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the directory of configurations, runs and a module of losses."""
    path = tmp_path_factory.mktemp("terms")
    for name, hidden in (("student", 32), ("teacher", 48)):
        (path / f"{name}.yaml").write_text(f"model: {{{MODEL.format(hidden=hidden)}, vocab_size: 60}}\n{BASE}")
    (path / "my_losses.py").write_text(LOSSES)
    return path


@pytest.fixture(scope="module")
def run(pool: Pool, folder: Path) -> Run:
    """Returns a function that runs to the end and gives exit code, standard output, standard error."""

    def begin(config: str, name: str, *arguments: str, ranks: int = 1) -> tuple[int, str, str]:
        verb = ["train"] if ranks == 1 else ["launch", "local", "-n", str(ranks)]
        command = [sys.executable, "-m", "mtrain", *verb, str(folder / f"{config}.yaml"), f"run.dir={folder / name}"]
        done = completed([*command, *arguments], folder, program_environment(folder), timeout=600)
        return done.returncode, done.stdout, done.stderr

    return begin


@pytest.fixture(scope="module")
def teacher(run: Run, folder: Path) -> Path:
    """Makes a run of a wider model over two tensor-parallel ranks, whose vocabulary is padded differently."""
    code, _, errors = run("teacher", "teacher", "layout.tp=2", "model.vocab_multiple=5", "train.num_steps=1", ranks=2)
    assert code == 0, errors
    return folder / "teacher"


def records(folder: Path, name: str, kind: str = "step") -> list[dict[str, Any]]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def assert_the_same_terms(folder: Path, one: str, two: str, kind: str = "step") -> None:
    """Compares two runs: denominators exactly, losses but for rounding."""
    for first, second in zip(records(folder, one, kind), records(folder, two, kind), strict=True):
        assert list(first["terms"]) == list(second["terms"])
        for name, term in first["terms"].items():
            assert second["terms"][name]["denominator"] == term["denominator"]
            assert second["terms"][name]["loss"] == pytest.approx(term["loss"], rel=1e-5)


@pytest.mark.nightly  # tests/parity/objectives/test_distillation.py; a teacher of a run: faults/test_changed_inputs.py
def test_a_teacher_of_another_layout_and_shape_is_the_same_under_every_layout(
    run: Run, folder: Path, teacher: Path
) -> None:
    terms = {
        "kl": {"function": DISTILLATION, "options": {"temperature": 2.0}, "coefficient": 0.5},
        "entropy": {"function": "entropy", "coefficient": -0.1, "aggregation": "sum"},
    }
    options = [
        f"loss.teacher.checkpoint={teacher}",
        f"loss.side_terms={json.dumps(terms)}",
        "loss.options={label_smoothing: 0.1}",
        "valid.at_end=true",
        "valid.max_samples=5",
    ]
    code, output, errors = run("student", "one", *options)
    assert code == 0, errors
    assert "  kl " in output
    assert "  entropy " in output
    code, _, errors = run("student", "two", *options, "layout.pp=2", ranks=2)
    assert code == 0, errors
    for kind in ("step", "valid"):
        assert_the_same_terms(folder, "one", "two", kind)
        for record in records(folder, "one", kind):
            assert list(record["terms"]) == ["main", "kl", "entropy"]
            for term in record["terms"].values():
                assert term["loss"] == pytest.approx(term["numerator"] / term["denominator"], rel=1e-12)
    first = records(folder, "one")[0]
    means = {name: term["loss"] for name, term in first["terms"].items()}
    assert first["objective"] == pytest.approx(means["main"] + 0.5 * means["kl"] - 0.1 * means["entropy"], rel=1e-12)
    assert records(folder, "one", "valid")[0]["terms"]["main"]["denominator"] == 80
    assert not list((folder / "one" / "checkpoints").glob("**/*teacher*"))


DEPTHS = ["model.mtp_depths=2", "loss.mtp_coefficient=0.3", "valid.at_end=true", "valid.max_samples=5"]


@pytest.fixture(scope="module")
def ahead(run: Run) -> str:
    """Returns the output of a run with two depths."""
    code, output, errors = run("student", "ahead", *DEPTHS)
    assert code == 0, errors
    return output


def test_every_depth_is_logged_as_sum_over_sum(folder: Path, ahead: str) -> None:
    assert "  mtp_2 " in ahead
    rows = {"step": 4, "valid": 5}
    for kind in rows:
        for one in records(folder, "ahead", kind):
            expected = {"main": 16, "mtp_1": 15, "mtp_2": 14}  # the last tokens of a row have none ahead
            assert {name: term["denominator"] / rows[kind] for name, term in one["terms"].items()} == expected
            for term in one["terms"].values():
                assert term["loss"] == pytest.approx(term["numerator"] / term["denominator"], rel=1e-12)
    first = records(folder, "ahead")[0]
    means = [term["loss"] for term in first["terms"].values()]
    assert first["objective"] == pytest.approx(means[0] + 0.15 * (means[1] + means[2]), rel=1e-12)


@pytest.mark.nightly  # tests/parity covers depths on layouts, the test of a teacher covers terms logged by a pipeline
def test_every_depth_is_logged_alike_under_every_layout(run: Run, folder: Path, ahead: str) -> None:
    code, _, errors = run("student", "ahead2", *DEPTHS, "layout.pp=2", ranks=2)
    assert code == 0, errors
    for kind in ("step", "valid"):
        assert_the_same_terms(folder, "ahead", "ahead2", kind)


ROUTED = (
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden_size: 16, score: sigmoid, expert_bias: true, "
    "bias_update_rate: 0.1}",
    "loss.router={z_coefficient: 0.1, sequence_balance_coefficient: 0.1, microbatch_balance_coefficient: 0.1}",
    "loss.allow_layout_dependent=true",
    "valid.at_end=true",
    "valid.max_samples=3",
)


@pytest.fixture(scope="module")
def balanced(run: Run) -> str:
    """Returns the output of a run with losses of routers."""
    code, output, errors = run("student", "balanced", *ROUTED)
    assert code == 0, errors
    return output


def test_losses_of_routers_are_logged_in_training_and_what_only_one_layout_gives_says_so(
    folder: Path, balanced: str
) -> None:
    assert "note: loss.allow_layout_dependent=true" in balanced
    assert all("(of this layout only)" in line for line in balanced.splitlines() if line.startswith("step "))
    (valid,) = records(folder, "balanced", "valid")
    assert list(valid["terms"]) == ["main"]
    assert valid["layout_dependent"]
    for step in records(folder, "balanced"):
        assert step["layout_dependent"]
        terms = step["terms"]
        assert [terms[f"router_{name}"]["denominator"] for name in ("z", "sequence_balance")] == [64.0, 4.0]
        weighted = [terms["main"]["loss"], *(0.1 * terms[name]["loss"] for name in terms if name != "main")]
        assert step["objective"] == pytest.approx(sum(weighted), rel=1e-6)


@pytest.mark.nightly  # tests/parity covers these losses on layouts
def test_losses_of_routers_are_logged_alike_where_layouts_cut_the_batch_alike(
    run: Run, folder: Path, balanced: str
) -> None:
    code, _, errors = run("student", "apart", *ROUTED, "layout={tp: 2, sp: true, ep: 2}", ranks=2)
    assert code == 0, errors
    for kind in ("step", "valid"):
        assert_the_same_terms(folder, "balanced", "apart", kind)
    ((valid,), (other_valid,)) = (records(folder, name, "valid") for name in ("balanced", "apart"))
    assert other_valid["valid_loss"] == pytest.approx(valid["valid_loss"], rel=1e-5)


def test_a_run_that_starts_as_its_own_teacher_does_not_diverge_from_it(run: Run, folder: Path, teacher: Path) -> None:
    """The way leads through the checkpoint: the weights that come back are the saved ones."""
    (entry,) = (teacher / "checkpoints").glob("step_*")
    options = [f"loss.teacher.checkpoint={entry}", f"checkpoint.initialize_from={teacher}"]
    code, _, errors = run("teacher", "same", *options, f"loss.function={DISTILLATION}", "train.num_steps=1")
    assert code == 0, errors
    (record,) = records(folder, "same")
    assert abs(record["loss"]) < 1e-6
    assert record["grad_norm"] < 1e-5


MEASURED = ["loss.function=my_losses:unlikely_tokens", "loss.options={below: 0.0166}", "loss.denominator=measured"]


@pytest.fixture(scope="module")
def measured(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Returns the steps of a run whose loss itself reports how many tokens count."""
    code, _, errors = run("student", "measured", *MEASURED)
    assert code == 0, errors
    return records(folder, "measured")


def test_a_mask_that_the_model_decides_works_alone(measured: list[dict[str, Any]]) -> None:
    assert all(0 < record["denominator"] < 64 for record in measured)


@pytest.mark.nightly  # tests/parity/objectives/test_terms.py
def test_a_mask_that_the_model_decides_is_the_same_on_two_ranks(
    run: Run, folder: Path, measured: list[dict[str, Any]]
) -> None:
    code, _, errors = run("student", "measured2", *MEASURED, "layout.cp=2", ranks=2)
    assert code == 0, errors
    two = records(folder, "measured2")
    assert [record["denominator"] for record in measured] == [record["denominator"] for record in two]
    for name in ("loss", "grad_norm"):
        assert [each[name] for each in two] == pytest.approx([each[name] for each in measured], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["loss.denominator=measured", "loss.side_terms={z: {function: 'z_loss'}}"], 2, ["z"]),
        (["loss.options={label_smoothing: 1.0}"], 2, ["label_smoothing=1.0", "below 1"]),
        ([f"loss.function={DISTILLATION}", "loss.options={direction: sideways}"], 2, ["sideways", "reverse"]),
        ([f"loss.function={DISTILLATION}"], 2, ["loss.teacher", "term 'main'"]),
        (["loss.teacher.checkpoint={teacher}"], 2, ["no loss function asks"]),
        ([f"loss.function={DISTILLATION}", "loss.teacher.checkpoint=nowhere"], 3, ["nowhere"]),
        (
            [f"loss.function={DISTILLATION}", "loss.teacher.checkpoint={teacher}", "model.vocab_size=50"],
            2,
            ["60 tokens", "model.vocab_size=50"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else str(value),
)
def test_refusals_say_what_to_change(
    run: Run, teacher: Path, arguments: list[str], code: int, words: list[str]
) -> None:
    found, _, errors = run("student", "refused", *(text.replace("{teacher}", str(teacher)) for text in arguments))
    assert found == code, errors
    assert "Traceback" not in errors
    assert errors.count("error:") == 1
    assert all(word in errors for word in words), errors

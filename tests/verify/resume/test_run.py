"""Correct runs resume as the check expects, and every known fault of resuming is found and named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.data import IndexedSection
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.verify.core.layouts import Prepared
from mtrain.verify.core.result import LayoutResult, ResumeReport, diagnosed
from mtrain.verify.parity import Request
from mtrain.verify.planted.inject import RESUME_FAULTS, TESTS
from mtrain.verify.report.print import write_report
from mtrain.verify.report.text import RESUME, TITLES
from mtrain.verify.resume.run import CRASH, ResumeCheck, ResumePlan, planned, verify_resume
from tests.config.samples import config, content
from tests.elements import assert_is_accessible, assert_is_self_contained, read_html
from tests.messages import refuses
from tests.pool import Pool
from tests.verify.kept import KeptPool
from tests.verify.reports import read_back
from tests.verify.resume.faults import PLANTS, FaultyPool
from tests.verify.resume.planted_ranks import is_drawn_again
from tests.warm import completed

EMBEDDING = "embedding.word_embeddings.weight"

EXPECTED: dict[str, tuple[str, int, str, str]] = {
    "run-step-off-by-one": ("every layout", 3, "counters", "step"),
    "samples-restarted": ("every layout", 4, "samples", "samples"),
    "learning-rate-restarted": ("every layout", 4, "lr", "lr"),
    "moments-not-restored": ("every layout", 3, "exp_avg", EMBEDDING),
    "adam-step-off-by-one": ("every layout", 3, "counters", "adam_step"),
    "adam-step-shared": ("every layout", 4, "counters", "adam_step"),
    "main-weights-rounded": ("every layout", 3, "param", EMBEDDING),
    "stale-shard": ("every layout", 3, "weights", EMBEDDING),
    "loss-scale-restarted": ("every layout", 3, "counters", "loss_scaler.growth_tracker"),
    "random-states-not-restored": ("every layout", 3, "random", "cpu"),
    "records-kept": (CRASH, 5, "records", "steps"),
}
"""Fault -> axis, step, kind and name of the first deviation."""


def lively_config(**changes: Any) -> Config:
    """Configures fp16, dropout, a learning rate that changes, and two axes in addition to data parallelism."""
    defaults: dict[str, Any] = {
        "model__num_layers": 2,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
        "layout__tp": 2,
        "layout__sp": True,
        "train__precision": "fp16",
        "optimizer__schedule": "cosine",
    }
    return config(**(defaults | changes))


def resumed(pool: Pool, user: Config, layouts: str | None, max_ranks: int) -> ResumeReport:
    """Returns the report on three steps of a run stopped after two."""
    reported: list[str] = []
    request = Request(layouts, 3, max_ranks, None, "mtrain verify resume", 2)
    report = verify_resume(user, request, reported.append, pool)
    assert sorted(line.split(":")[0] for line in reported) == sorted(case.name for case in report.layouts)
    return report


def gone_on(
    pool: Pool, folder: Path, user: Config, layouts: str, max_ranks: int
) -> tuple[ResumeCheck, list[LayoutResult]]:
    """Resumes on the layout that saved and on others, for one step; any other save's files reveal a crash."""
    plan = planned(user, Request(layouts, 3, max_ranks, None, "", 2), max_ranks)
    check = ResumeCheck(plan, 2, folder, pool)
    check.prepare()
    results = [check.on_same_layout(None), *(check.on_other_layout(trial, None) for trial in plan.other_layouts)]
    assert len(results) > 1
    assert all(case.passed for case in results), [(case.name, case.error, case.first_failure()) for case in results]
    return check, results


SHIPPED = [fault.name for fault in RESUME_FAULTS]


class Faulty:
    """Straight and stopped run, to be resumed with faults."""

    def __init__(self, plan: ResumePlan, at: int, folder: Path, pool: KeptPool) -> None:
        self._pool, self.plan = FaultyPool(pool), plan
        self._check = ResumeCheck(plan, at, folder, self._pool)  # type: ignore[arg-type]
        self._check.prepare()

    def resumed(self, fault: str, on: Prepared | None = None) -> LayoutResult:
        """Resumes where the fault shows, or on another layout."""
        check, shipped = self._check, fault if fault in SHIPPED else None
        self._pool.fault = None if shipped else fault
        try:
            if on is not None:
                return check.on_other_layout(on, shipped)
            return check.after_crash(shipped) if EXPECTED[fault][0] == CRASH else check.on_same_layout(shipped)
        finally:
            self._pool.fault = None


@pytest.fixture(scope="module")
def faulty(kept: KeptPool, tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """Makes a straight run and a stopped one."""
    user = lively_config(layout__tp=1, layout__sp=False)
    plan = planned(user, Request("mbs1", 5, 2, None, "", 3), 2)
    return Faulty(plan, 3, tmp_path_factory.mktemp("resume"), kept)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_fault_of_resuming_is_found_and_named(faulty: Faulty, name: str) -> None:
    axis, step, kind, quantity = EXPECTED[name]
    result = faulty.resumed(name)
    assert result.error is None
    assert not result.passed
    found = diagnosed([result], lambda result, step: None, RESUME)
    assert found is not None
    assert (found.axis, found.step, found.kind, found.name) == (axis, step, kind, quantity)
    assert axis == CRASH or "even on the layout that saved" in found.lines[0]


def test_every_fault_has_a_plant_and_a_test() -> None:
    assert {*PLANTS, *SHIPPED} == EXPECTED.keys()
    named = TESTS["resume/test_run.py::test_every_fault_of_resuming_is_found_and_named"]
    assert set(named.split()) == PLANTS.keys()


COMPARED = set(TITLES) - {"collective", "layer_output", "input_gradient", "rounding", "log_prob"}
"""Kinds of quantities of runs; the others are those of layers alone (tests/verify/backend) and of `verify hf`."""


@pytest.mark.parametrize(
    ("layouts", "ranks"),
    [
        ("pp2", [2, 2, 2]),
        pytest.param("mbs4,tp4dp1,pp2", [4, 4, 1, 4, 2], marks=pytest.mark.nightly),  # saved on tp2 x dp2
    ],
)
def test_sound_runs_pass_bit_for_bit_with_dropout_and_to_rounding_elsewhere(
    kept: KeptPool, tmp_path: Path, layouts: str, ranks: list[int]
) -> None:
    """All ranks are kept; a test below runs the command, in processes of its own."""
    report = resumed(kept, lively_config(), layouts, ranks[0])
    assert report.passed, [(case.name, case.error, case.first_failure()) for case in report.layouts]
    alike, crashed, *others = report.layouts
    assert [case.num_ranks for case in report.layouts] == ranks
    for case in (alike, crashed):
        assert {each.kind for each in case.deviations} == COMPARED - {"gradient", "update", "files"}
        assert all(each.value == 0 for each in case.deviations)
        assert case.steps == report.reference.steps[2:]
    for case in others:
        assert {each.kind for each in case.deviations} == COMPARED - {"random", "files"}
        assert max(each.value for each in case.deviations if each.kind == "gradient") > 0
        loaded = [each for each in case.deviations if each.kind in ("weights", "param", "exp_avg", "exp_avg_sq")]
        assert [each.name for each in loaded if each.kind == "param"] == list(report.tensors)
        assert {each.step for each in loaded} == {2}
    assert read_back(ResumeReport, report.to_json()) == report
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "resume.json").read_text())["num_steps"] == 3
    page = read_html((tmp_path / "resume.html").read_text())
    assert_is_self_contained(page)
    assert_is_accessible(page)
    assert page.all("h1")[0].text.startswith(f"✓ PASS All {len(ranks)} resumed runs are the run that never stopped.")


@pytest.mark.parametrize(
    ("user", "layouts", "max_ranks"),
    [
        (config, "tp2", 2),
        pytest.param(lively_config, "tp4dp1,pp2", 4, marks=pytest.mark.nightly),  # by day above: fp16 and dropout
    ],
)
@pytest.mark.nightly  # momenta are divided as planned: tests/core/engine/test_muon.py
def test_momenta_of_muon_are_resumed_on_any_layout(
    kept: KeptPool, tmp_path: Path, user: Callable[..., Config], layouts: str, max_ranks: int
) -> None:
    """Resuming is bit for bit on the saving layout; elsewhere the files' bits are loaded, then a step is exact."""
    check, results = gone_on(kept, tmp_path, user(optimizer__kind="muon"), layouts, max_ranks)
    matrices = {name for name in check.tensors if "norm" not in name and ".layers." in name}
    for case in results:
        compared = {kind: {each.name for each in case.deviations if each.kind == kind} for kind in TITLES}
        assert compared["exp_avg"] == set(check.tensors)
        assert compared["exp_avg_sq"] == set(check.tensors) - matrices


@pytest.mark.nightly  # tests/data/runs/test_curriculum_of_runs.py goes over two of them
def test_a_curriculum_goes_on_over_a_border_after_the_stop(kept: KeptPool, tmp_path: Path) -> None:
    """Samples of every step are compared with the definition of their order, also in the resumed run."""
    for number, name in enumerate(("first", "late")):
        with writing_corpus(str(tmp_path / name), vocab_size=64) as writer:
            for document in range(40):
                writer.add((np.arange(50) * (7 + number) + document) % 64)
    sources = {name: [{"path": str(tmp_path / name)}] for name in ("first", "late")}
    curriculum = [{"from_step": 700, "sources": sources["late"]}]
    data = {"kind": "indexed", "seq_length": 64, "train": sources["first"], "curriculum": curriculum}
    user = config(data=data, model__vocab_size=64, model__num_layers=1, train__num_steps=1000)
    plan = planned(user, Request("mbs4", 4, 1, None, "", 2), 1)
    assert isinstance(plan.base.config.data, IndexedSection)
    assert [blend.from_step for blend in plan.base.config.data.curriculum] == [3], "stopped after 2 of 4 steps"
    pool: Any = FaultyPool(kept)
    check = ResumeCheck(plan, 2, tmp_path, pool)
    check.prepare()
    result = check.on_same_layout(None)
    assert result.passed, (result.error, result.first_failure())
    pool.fault = "samples-restarted"
    assert not check.on_same_layout(None).passed


@pytest.mark.nightly  # by day these faults on the layout that saved, above
def test_other_layouts_are_held_to_the_files_and_to_exact_steps(kept: KeptPool, tmp_path: Path) -> None:
    plan = planned(config(), Request("dp2", 3, 2, None, "", 2), 2)
    faulty = Faulty(plan, 2, tmp_path, kept)
    for name, kind in (("moments-not-restored", "exp_avg"), ("stale-shard", "weights"), ("adam-step-shared", "update")):
        result = faulty.resumed(name, on=plan.other_layouts[0])
        first = result.first_failure()
        assert result.error is None
        assert first is not None
        assert first.kind == kind


def test_a_stale_shard_has_its_initial_weights(pool: Pool) -> None:
    assert pool.run(is_drawn_again, Layout(), config(model__num_layers=1)) == [True]


@pytest.mark.parametrize("at", [0, 6])
def test_a_stop_that_leaves_nothing_to_do_is_refused(at: int) -> None:
    with refuses(ConfigError, f"--at {at}", "--steps 6"):
        verify_resume(config(), Request(None, 6, 2, None, "", at), print)


def test_a_fault_that_is_a_test_is_refused() -> None:
    with refuses(ConfigError, "--inject loss-scale-restarted", "tests/verify/resume/test_run.py"):
        verify_resume(config(), Request(None, 6, 2, "loss-scale-restarted", "", 3), print)


@pytest.mark.nightly  # parity/test_run.py has such a command by day; the report: above
def test_the_command_writes_a_report_and_its_exit_code_is_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(content(run__dir=str(tmp_path / "run"), train__device="cpu")))
    command = [sys.executable, "-m", "mtrain", "verify", "resume", path]
    small = ["--max-ranks", "1", "--steps", "3", "--at", "2"]
    ended = completed([*command, *small, "--inject", "moments-not-restored"])
    assert ended.returncode == 1, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-3].startswith("first deviation: first moment of embedding.word_embeddings.weight by 1.0e+00")
    assert lines[-1].startswith("FAIL: 3 of 3 resumed runs are not the straight run with the planted fault")
    saved = read_back(ResumeReport, (tmp_path / "run" / "resume" / "resume.json").read_text())
    assert saved.injected == "moments-not-restored"
    listed = completed([*command[:5], "--list-injections"])
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.split() == SHIPPED

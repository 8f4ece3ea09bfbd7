"""Exit codes 0 and 1 of `mtrain verify` are verdicts: whatever fails is a sentence with another code."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mtrain.base.errors import MtrainError
from mtrain.cli.main import app
from mtrain.verify.backend.run import verify_backend
from tests.config.samples import content
from tests.hf.folders import save
from tests.pool import Pool
from tests.verify import reports
from tests.verify.backend.stand_ins import STAND_IN
from tests.verify.raising import ERRORS, Raising

RANKS = {
    "parity": ("parity.run_layout", "parity.exact_run", "parity.exact_steps"),
    "resume": ("resume.run.run_start",),
    "hf": ("hf.run_from_hf",),
    "backend": ("backend.run.compare",),
}
"""Functions of ranks below `mtrain.verify`, by verb."""
JUDGES = {
    "parity": ("parity.shrink", "parity.texts_of", "parity.compared", "parity.diagnosed"),
    "resume": ("resume.run.planned", "resume.run.records_of"),
    "preempt": ("preempt.small_run", "preempt.launcher", "preempt.run_to_end"),
    "hf": ("hf.comparable", "hf.texts_of", "hf.transformers_steps", "hf.diagnosed"),
    "machine": ("machine.run.load_config", "machine.run.collective_layouts"),
    "backend": ("backend.run.few_layers", "backend.run.tolerances", "backend.run.layers_of"),
    "rollout": ("rollout.run.read_rollouts", "rollout.run.verify_rollout"),
}
"""What the verbs call in their own process."""
PAGES = ("report.page.report_page", "report.print.print_report", "core.result.Report.to_json")
PLACES = [
    *((verb, place) for places in (RANKS, JUDGES) for verb, all_of in places.items() for place in all_of),
    *(("page", place) for place in PAGES),
]


def arguments(verb: str, folder: Path) -> list[str]:
    """Returns the command that checks a small run."""
    if verb == "machine":
        return ["verify", verb, "--device", "cpu", "--quick", "--output", str(folder / "run" / verb)]
    path = folder / "run.yaml"
    few = {"train__global_batch_size": 4, "model__num_layers": 2, "run__dir": str(folder / "run")}
    if verb == "rollout":
        (folder / "rollouts.jsonl").touch()
        return ["verify", verb, str(folder), "--rollouts", str(folder / "rollouts.jsonl")]
    if verb == "hf":
        save("qwen2", folder / "hf")
        own = {key: each for key, each in content(**few).items() if key != "model"}
        path.write_text(yaml.safe_dump(own))
        return ["verify", verb, str(path), "--hf", str(folder / "hf"), "--steps", "1", "train.device=cpu"]
    path.write_text(yaml.safe_dump(content(**few)))
    steps = [] if verb in ("backend", "preempt", "resume") else ["--steps", "1", "--layouts", "mbs4"]
    return ["verify", verb, str(path), *steps, "train.device=cpu"]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Callable[[str, str, str], tuple[int, str]]:
    """Gives a function that plants an error in a place, calls the verb, and returns exit code and output."""

    def call(verb: str, place: str, name: str) -> tuple[int, str]:
        monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path / "certificates"))
        for module in ("parity", "resume.run", "hf", "backend.run", "machine.run", "rollout.run"):
            monkeypatch.setattr(f"mtrain.verify.{module}.Pool", lambda *given, **options: pool)
        monkeypatch.setattr(verify_backend, "__defaults__", (None, (STAND_IN,)))
        if verb == "page":
            monkeypatch.setattr("mtrain.verify.parity.verify_parity", lambda *given: reports.report())
            verb = "parity"
        monkeypatch.setattr(f"mtrain.verify.{place}", Raising(name))
        done = CliRunner().invoke(app, arguments(verb, tmp_path))
        return done.exit_code, done.output

    return call


def is_foreseen(error: BaseException) -> bool:
    return isinstance(error, MtrainError) and error.exit_code > 1


BY_NIGHT = (
    *("parity.exact_steps", "parity.compared", "resume.run.run_start", "resume.run.records_of"),
    *("hf.run_from_hf", "hf.diagnosed", "backend.run.layers_of", "backend.run.tolerances"),
)
"""Places where a verb has worked for long; others of each verb, and of each part, are by day."""


@pytest.mark.parametrize(
    ("verb", "place"),
    [pytest.param(*row, marks=[pytest.mark.nightly] if row[1] in BY_NIGHT else [], id=row[1]) for row in PLACES],
)
def test_a_failure_is_no_verdict(
    verb: str, place: str, tmp_path: Path, ended: Callable[[str, str, str], tuple[int, str]]
) -> None:
    name = random.Random(place).choice(list(ERRORS))
    check(ended(verb, place, name), ERRORS[name](), tmp_path)


@pytest.mark.parametrize("name", ERRORS)
def test_no_kind_of_failure_is_a_verdict(
    name: str, tmp_path: Path, ended: Callable[[str, str, str], tuple[int, str]]
) -> None:
    check(ended("page", "report.page.report_page", name), ERRORS[name](), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(("verb", "place"), PLACES, ids=[place for _, place in PLACES])
def test_no_failure_in_any_place_is_a_verdict(
    verb: str, place: str, name: str, tmp_path: Path, ended: Callable[[str, str, str], tuple[int, str]]
) -> None:
    check(ended(verb, place, name), ERRORS[name](), tmp_path)


def check(done: tuple[int, str], error: Any, folder: Path) -> None:
    """Requires a sentence, the error's code or 8, and a file with the traceback of what nobody foresaw."""
    code, output = done
    assert code == (error.exit_code if is_foreseen(error) else 8), output
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, output
    assert "Traceback" not in output
    if not is_foreseen(error):
        kept = [*folder.rglob("*-traceback.txt"), *folder.rglob("run/*/*.json")]
        assert any(type(error).__name__ in path.read_text() for path in kept), output
        assert any(str(path) in said[0] for path in kept), said

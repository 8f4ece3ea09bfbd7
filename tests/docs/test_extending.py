"""Code in the guides works as it stands there."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtrain.launch.local import free_port
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.paths import ROOT
from tests.tools.sources import Module, modules
from tests.warm import completed, program_environment

GUIDES = ROOT / "docs" / "extending"
WRONG = """

def mean_of_the_call(inputs: TermInputs) -> LossPair:
    pair = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(pair.numerator / inputs.weights.sum().clamp(min=1), pair.denominator)
"""


def blocks_of(guide: str, language: str) -> list[str]:
    """Returns the blocks of code of a guide."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)
    return found


def changed_program(guide: str, folder: Path) -> dict[str, str]:
    """Copies the program, makes the changes of a guide to it, and returns an environment in which it is imported.

    A block of changes begins with the name of a file; lines with `-` and ` ` have to stand there once, one after the
    other.
    """
    shutil.copytree(ROOT / "mtrain", folder / "mtrain", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks_of(guide, "diff"):
        name, _, changes = block.partition("\n")
        path = folder / name.removeprefix("+++ ")
        for change in changes.split("@@\n"):
            lines = change.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in marks)[:-1] for marks in ("- ", "+ "))
            assert path.read_text().count(old) == 1, f"{path.name} has changed: {old}"
            path.write_text(path.read_text().replace(old, new))
    return {**program_environment(), "PYTHONPATH": f"{folder}:{ROOT}"}


def run_python(program: str, folder: Path, environment: dict[str, str]) -> Any:
    """Runs a program and returns the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def write_package(folder: Path) -> None:
    """Writes the functions of the guide, and a wrong one, as a package of a user's own."""
    blocks = blocks_of("loss", "python")
    assert len(blocks) == 3
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "losses.py").write_text("\n\n".join(blocks) + WRONG)


@pytest.mark.parametrize(
    ("function", "changes", "layouts", "exit_code"),
    [
        ("focal_loss", {"loss__options": {"gamma": 1.5}, "loss__chunk_tokens": 20}, "tp2", 0),
        pytest.param(
            "preference", {"loss__aggregation": "seq-mean-token-sum"}, "tp2,cp2", 0, marks=pytest.mark.nightly
        ),
        # by day tests/verify/parity/test_run.py names such a loss
        pytest.param("mean_of_the_call", {}, "cp2", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_loss_of_a_users_package_is_the_same_on_two_layouts(
    tmp_path: Path, function: str, changes: dict[str, Any], layouts: str, exit_code: int
) -> None:
    """One process in float64 is the oracle; a loss that averages by itself is found by the same command."""
    write_package(tmp_path)
    name = f"my_package.losses:{function}"
    config = write(tmp_path / "config.yaml", content(run__dir="run", loss__function=name, **changes))
    command = [sys.executable, "-m", "mtrain", "verify", "parity", str(config), "--layouts", layouts, "--steps", "1"]
    done = completed(command, tmp_path, program_environment(tmp_path), timeout=600)
    assert (done.returncode, done.stderr) == (exit_code, ""), done.stdout
    assert all(each in done.stdout for each in layouts.split(","))
    if exit_code:
        assert name in done.stdout, "the report names the function"


RATES = """
import json, mtrain
from mtrain.config.schema.train import AdamWSection
from mtrain.arch.lr import learning_rate
from mtrain.verify.reference.schedule import published_rate
optimizer = AdamWSection(lr=1.0, min_lr=0.0, schedule="wsd_sqrt", warmup_steps=2, decay_steps=16)
rates = [[rate(step, optimizer, 20) for step in (0, 1, 2, 4, 5, 8, 13)] for rate in (learning_rate, published_rate)]
print(json.dumps([mtrain.__file__, *rates]))
"""


def test_the_schedule_of_the_guide_has_the_rates_that_follow_from_its_formula(tmp_path: Path) -> None:
    place, *rates = run_python(RATES, tmp_path, changed_program("schedule", tmp_path))
    assert place == str(tmp_path / "mtrain" / "__init__.py")
    for found in rates:  # the fall begins after 4 updates; 1, 4 and 9 of 16 have square roots of 1/4, 1/2 and 3/4
        assert found == pytest.approx([0, 0.5, 1, 1, 0.75, 0.5, 0.25], abs=1e-15)


STARTS = """
import json, sqlite3
from pathlib import Path
from mtrain.config import Config
from mtrain.report.metrics.trackers.open import refuse_missing, tracked_run, tracker_sink
from mtrain.launch.local import free_port
from tests.config.samples import content
from tests.report.metrics.records import step_record
config = Config.model_validate(content(metrics__trackers=["sqlite3"]))
refuse_missing(config.metrics.trackers)
for steps in (range(1, 4), range(3, 6)):
    sink = tracker_sink("sqlite3", tracked_run(Path.cwd(), "a project", config.run, {}, {}), patience_s=120)
    for step in steps:
        sink.write(step_record(step, loss=steps.start + step))
    sink.write_text("samples", "said", 5)
    sink.close()
rows = "select step, value from numbers where name = 'train/loss' order by step"
print(json.dumps([*sqlite3.connect("numbers.sqlite").execute("select distinct run from numbers").fetchall(), *(
    sqlite3.connect("numbers.sqlite").execute(rows).fetchall())]))
"""


def test_the_tracker_of_the_guide_has_one_run_for_two_starts(tmp_path: Path) -> None:
    environment = changed_program("tracker", tmp_path)
    (run_id,), *losses = run_python(STARTS, tmp_path, environment)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"sqlite3": run_id}
    assert losses == [[1, 2.0], [2, 3.0], [3, 6.0], [4, 7.0], [5, 8.0]], "step 3 was made again"


MPIRUN = """#!/usr/bin/env bash
while [[ $1 != -n ]]; do shift 2; done
num_ranks=$2; shift 2
export OMPI_COMM_WORLD_SIZE=$num_ranks OMPI_COMM_WORLD_LOCAL_SIZE=$num_ranks
for ((rank = 1; rank < num_ranks; rank++)); do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &
done
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" || exit
wait
"""


@pytest.mark.nightly  # the program's own launchers keep the same contract by day: tests/launch
def test_the_launcher_of_the_guide_trains_and_asks_again_after_a_stop(tmp_path: Path) -> None:
    for block in blocks_of("launcher", "python"):
        (tmp_path / block.split()[1].removesuffix(":")).write_text(block)
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    write(tmp_path / "config.yaml", content(run__dir="run", model__num_layers=2, train__num_steps=2, layout__tp=2))
    meeting = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = program_environment() | meeting

    def called(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)

    refused = called(sys.executable, "my_launcher.py", "3", "config.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    made = called(sys.executable, "my_launcher.py", "2", "config.yaml")
    assert (made.returncode, made.stderr) == (0, "")
    (tmp_path / "job.sh").write_text(made.stdout)
    done = called("bash", "job.sh")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "grad_norm" in record] == [1, 2]
    (tmp_path / "run" / "REQUEUE").touch()
    (tmp_path / "mpirun").write_text("exit 0")  # ranks that were stopped leave the marker
    assert called("bash", "job.sh").returncode == 75
    (tmp_path / "mpirun").write_text("exit 3")
    assert called("bash", "job.sh").returncode == 3


def names_a_ring(module: Module) -> bool:
    """Says whether the code of a file, not its comments and docstrings, names the ring."""
    return any("ring" in text and "ring" in re.split(r"[^a-z]+", text) for text in words_of(module.nodes))


def words_of(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the names and texts of a program."""
    docstrings = {each.value for each in nodes if isinstance(each, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                yield name


def test_the_guide_of_layouts_names_every_file_that_knows_the_ring() -> None:
    names = {module.path.relative_to(ROOT).as_posix() for module in modules() if names_a_ring(module)}
    files = {name for name in names if name.startswith("mtrain/")}
    rows = [line for line in (GUIDES / "layout.md").read_text().splitlines() if line.startswith("| `mtrain/")]
    assert {file for row in rows for file in re.findall(r"`(mtrain/\S+\.py)`", row)} == files

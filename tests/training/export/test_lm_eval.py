"""`mtrain eval` and `eval.tasks` with lm-eval, which this test installs, against its own model of transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.hf.configuration import load_config
from tests.hf.folders import save
from tests.paths import ROOT
from tests.tools.wheels import python_with
from tests.training.tasks.test_requests import letter_tokenizer

TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "{{label}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
            {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
        ],
    },
}
QUESTIONS = ["ab", "a b c", "cc a", "d ab", "b d d", "c", "fed fed", "abc abc"]
CHOICES = [" a", " b", " d", "cd"]
EXPECTED = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
folder, tasks = sys.argv[1:]
results = lm_eval.simple_evaluate(model="hf", model_args={"pretrained": folder, "dtype": "float32"},
    tasks=["choices", "text", "answers"], device="cpu", bootstrap_iters=0, task_manager=TaskManager(include_path=tasks))
print(json.dumps(results["results"], default=str))
"""
RUN = """
model: {{hf: {hf}}}
run: {{dir: {run}}}
train: {{global_batch_size: 4, num_steps: 2, precision: fp32, device: cpu}}
optimizer: {{lr: 1.0e-3, schedule: constant}}
data: {{kind: mock, seq_length: 24, tokenizer: {hf}}}
layout: {layout}
metrics: {{tensorboard: false}}
"""


@pytest.fixture(scope="module")
def python_with_lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a Python that sees this one's packages, and lm-eval."""
    return python_with(tmp_path_factory.mktemp("lm-eval"), "lm-eval[hf]>=0.4.13,<0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model in `hf`, tasks in `tasks`, and their data."""
    path = tmp_path_factory.mktemp("evaluation")
    save(
        "llama",
        path / "hf",
        dtype=torch.float32,
        vocab_size=14,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=24,
    )
    letter_tokenizer(path / "hf")
    lines = [
        {
            "question": question,
            "choices": CHOICES,
            "label": number % 4,
            "answer": "ab" * (number % 2),
            "long": question * 9,
        }
        for number, question in enumerate(QUESTIONS)
    ]
    (path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "tasks").mkdir()
    files = {"test": str(path / "questions.jsonl")}
    for name, task in TASKS.items():
        shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps(shared | task))
    return path


def run(python: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [str(argument) for argument in (python, *arguments)]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def expected(python_with_lm_eval: Path, folder: Path) -> dict[str, float]:
    """Returns the metrics of lm-eval's own model of transformers."""
    found = run(python_with_lm_eval, folder, "-c", EXPECTED, folder / "hf", folder / "tasks")
    assert found.returncode == 0, found.stderr
    return metrics(json.loads(found.stdout.splitlines()[-1]))


def metrics(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}/{key.removesuffix(',none')}": value
        for task, values in results.items()
        for key, value in values.items()
        if key.endswith(",none") and "stderr" not in key
    }


def configured(folder: Path, name: str, layout: str, *overrides: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RUN.format(hf=folder / "hf", run=folder / name, layout=layout))
    load_config([path], overrides)
    return path


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # installs a program of many packages


def test_a_folder_is_evaluated_as_lm_eval_evaluates_it(
    python_with_lm_eval: Path, folder: Path, expected: dict[str, float]
) -> None:
    """The requests on other layouts are those of tests/training/tasks/test_requests.py."""
    verb = [
        "-m",
        "mtrain",
        "eval",
        folder / "hf",
        "--tasks",
        "choices,text,answers",
        "--include-path",
        folder / "tasks",
    ]
    found = run(python_with_lm_eval, folder, *verb, "--output", folder / "found.json")
    assert found.returncode == 0, found.stderr
    results = json.loads((folder / "found.json").read_text())["results"]
    assert len(expected) == 5
    assert metrics(results) == pytest.approx(expected, abs=1e-5)
    assert 0 < expected["choices/acc"] < 1
    assert "bits_per_byte" in found.stdout


@pytest.mark.parametrize("layout", ["{tp: 2, sp: true}", "{pp: 2}", "{cp: 2}", "{}"])
def test_a_run_is_evaluated_while_it_trains_on_any_layout(
    python_with_lm_eval: Path, folder: Path, expected: dict[str, float], layout: str
) -> None:
    """Metrics before the first step are those of the folder, losses those of a run without tasks; the command evaluates
    the finished run with the metrics of its last step, which the checkpoint has."""
    name = "run_" + "".join(filter(str.isalnum, layout))
    tasks = ["eval.tasks=[choices,text,answers]", f"eval.include_path={folder / 'tasks'}", "valid.at_start=true"]
    tasks += ["valid.at_end=true", "valid.metric=text/bits_per_byte", "checkpoint.keep_best=1"]
    asked, silent = configured(folder, name, layout, *tasks), configured(folder, f"{name}_silent", layout)
    launch = ["-m", "mtrain", "launch", "local", "-n", 2]
    for line in ([*launch, asked, *tasks], [*launch, silent]):
        found = run(python_with_lm_eval, folder, *line)
        assert found.returncode == 0, found.stderr
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    first, last = (record["tasks"] for record in records if record["kind"] == "tasks")
    assert first == pytest.approx(expected, abs=1e-5)
    others = [json.loads(line) for line in (folder / f"{name}_silent" / "metrics.jsonl").read_text().splitlines()]
    losses = [[record["loss"] for record in lines if record["kind"] == "step"] for lines in (records, others)]
    assert losses[0] == losses[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={29_000 + os.getpid() % 1000}"]
    verb = ["-m", "mtrain", "eval", folder / name, "--tasks", "choices,text,answers"]
    verb += ["--include-path", folder / "tasks", "--output", folder / f"{name}.json"]
    found = run(python_with_lm_eval, folder, *torchrun, *verb)
    assert found.returncode == 0, found.stderr
    assert metrics(json.loads((folder / f"{name}.json").read_text())["results"]) == pytest.approx(last, abs=1e-5)
    manifest = json.loads((folder / name / "checkpoints" / "step_00000002" / "mtrain.json").read_text())
    assert manifest["task_metric"] == {
        "name": "text/bits_per_byte",
        "value": last["text/bits_per_byte"],
        "is_better_if_higher": False,
    }


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (["eval.tasks=[quiz]"], "quiz"),
        (["eval.tasks=[choices]", "valid.metric=choices/f1"], "choices/acc_norm"),
        (["eval.tasks=[broken]"], "missing.jsonl"),
    ],
)
def test_tasks_that_cannot_be_evaluated_end_a_run_before_its_first_step(
    python_with_lm_eval: Path, folder: Path, overrides: list[str], fact: str
) -> None:
    task = {**TASKS["choices"], "task": "broken", "dataset_path": "json", "test_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": str(folder / "missing.jsonl")}}
    (folder / "tasks" / "broken.yaml").write_text(json.dumps(task))
    options = [f"eval.include_path={folder / 'tasks'}", "valid.at_end=true", *overrides]
    path = configured(folder, "refused", "{}", *options)
    found = run(python_with_lm_eval, folder, "-m", "mtrain", "launch", "local", "-n", 2, path, *options)
    assert found.returncode in (2, 3), found.stderr
    assert fact in found.stderr
    assert "Traceback" not in found.stderr
    assert not (folder / "refused" / "metrics.jsonl").exists()

"""`mtrain eval` and `eval.tasks` with lm-eval, which this test installs, against its own model of transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
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
tasks, arguments, *options = map(json.loads, sys.argv[1:])
for given in options:
    results = lm_eval.simple_evaluate(model="hf", model_args={"dtype": "float32", **arguments}, device="cpu",
        tasks=["choices", "text", "answers"], bootstrap_iters=0, task_manager=TaskManager(include_path=tasks), **given)
    print(json.dumps(results["results"], default=str))
"""
CHAT = "{{ bos_token }}{% for m in messages %}{{ {'user': 'ab ', 'assistant': 'cd ', 'system': 'f '}[m.role] }}"
CHAT += "{{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}cd {% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
RUN = """
model: {{hf: {hf}}}
run: {{dir: {run}}}
train: {{global_batch_size: 4, num_steps: 2, precision: fp32, device: cpu}}
optimizer: {{lr: 1.0e-3, schedule: constant}}
data: {{kind: mock, seq_length: 24, tokenizer: {hf}}}
layout: {layout}
metrics: {{tensorboard: false}}
{more}
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
        shared |= {"fewshot_split": "test", "description": "bad "}
        (path / "tasks" / f"{name}.yaml").write_text(json.dumps(shared | task))
    return path


def run(python: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [str(argument) for argument in (python, *arguments)]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment})


def of_lm_eval(
    python: Path, folder: Path, arguments: dict[str, str], *options: dict[str, Any]
) -> list[dict[str, float]]:
    """Returns the metrics of lm-eval's own model of transformers, with each of the options."""
    words = map(json.dumps, (str(folder / "tasks"), arguments, *options))
    found = run(python, folder, "-c", EXPECTED, *words)
    assert found.returncode == 0, found.stderr
    return [metrics(json.loads(line)) for line in found.stdout.splitlines()[-len(options) :]]


def of_mtrain(python: Path, folder: Path, model: Path, *words: object, ranks: int = 1) -> dict[str, float]:
    """Returns the metrics of `mtrain eval`."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={29_000 + os.getpid() % 1000}"]
    verb = ["-m", "mtrain", "eval", model, "--tasks", "choices,text,answers", "--include-path", folder / "tasks"]
    output = folder / "found.json"
    found = run(python, folder, *(start if ranks > 1 else []), *verb, "--output", output, *words)
    assert found.returncode == 0, found.stderr
    assert "bits_per_byte" in found.stdout
    return metrics(json.loads(output.read_text())["results"])


@pytest.fixture(scope="module")
def expected(python_with_lm_eval: Path, folder: Path) -> dict[str, float]:
    return of_lm_eval(python_with_lm_eval, folder, {"pretrained": str(folder / "hf")}, {})[0]


def metrics(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}/{key.removesuffix(',none')}": value
        for task, values in results.items()
        for key, value in values.items()
        if key.endswith(",none") and "stderr" not in key
    }


def configured(folder: Path, name: str, layout: str, *overrides: str, more: str = "") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RUN.format(hf=folder / "hf", run=folder / name, layout=layout, more=more))
    load_config([path], overrides)
    return path


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # installs a program of many packages


def test_a_folder_is_evaluated_as_lm_eval_evaluates_it(
    python_with_lm_eval: Path, folder: Path, expected: dict[str, float]
) -> None:
    """The requests on other layouts are those of tests/training/tasks/test_requests.py."""
    assert len(expected) == 5
    assert of_mtrain(python_with_lm_eval, folder, folder / "hf") == pytest.approx(expected, abs=1e-5)
    assert 0 < expected["choices/acc"] < 1


@pytest.mark.parametrize("template", [CHAT, NO_SYSTEM], ids=["system", "no system"])
def test_conversations_are_those_of_lm_eval(python_with_lm_eval: Path, folder: Path, template: str) -> None:
    """Solved examples are turns or part of the question; a template without a system's message gets none."""
    chat = folder / ("chat" if template == CHAT else "strict")
    shutil.copytree(folder / "hf", chat)
    settings = json.loads((chat / "tokenizer_config.json").read_text())
    (chat / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    ways: dict[str, dict[str, Any]] = {
        "": {},
        "--num-fewshot 2": {"num_fewshot": 2},
        "--num-fewshot 2 --no-fewshot-as-multiturn": {"num_fewshot": 2, "fewshot_as_multiturn": False},
        "--num-fewshot 1 --system-instruction fab": {"num_fewshot": 1, "system_instruction": "fab"},
    }
    options = [{"apply_chat_template": True, **given} for given in ways.values()]
    expected = of_lm_eval(python_with_lm_eval, folder, {"pretrained": str(chat)}, *options)
    assert len({json.dumps(each) for each in expected}) >= 3, "the options make a difference"
    for words, each in zip(ways, expected, strict=True):
        found = of_mtrain(python_with_lm_eval, folder, chat, "--apply-chat-template", *words.split())
        assert found == pytest.approx(each, abs=1e-5), words


def test_a_run_of_adapters_is_evaluated_as_its_export(python_with_lm_eval: Path, folder: Path) -> None:
    """lm-eval reads the frozen model and PEFT's folder; the run is evaluated on one rank and on two."""
    adapter = "adapter: {kind: lora, rank: 4, alpha: 64, targets: [all-linear]}"
    path = configured(folder, "adapted", "{}", more=adapter)
    python = python_with_lm_eval
    for words in (
        ["launch", "local", "-n", 1, path, "optimizer.lr=0.1"],
        ["convert", "export", "--checkpoint", folder / "adapted", "--out", folder / "peft", "--adapter"],
    ):
        found = run(python, folder, "-m", "mtrain", *words)
        assert found.returncode == 0, found.stderr
    arguments = {"pretrained": str(folder / "hf"), "peft": str(folder / "peft")}
    expected, frozen = (
        of_lm_eval(python, folder, arguments, {})[0],
        of_lm_eval(python, folder, {"pretrained": str(folder / "hf")}, {})[0],
    )
    assert expected != pytest.approx(frozen, abs=1e-3), "the adapter makes a difference"
    for ranks in (1, 2):
        assert of_mtrain(python, folder, folder / "adapted", ranks=ranks) == pytest.approx(expected, abs=1e-5)


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
        # neither a bar for each task nor git's complaint that the folder is no repository
        assert not {"it/s", "fatal"} & set(re.findall(r"it/s|fatal", found.stderr))
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    first, last = (record["tasks"] for record in records if record["kind"] == "tasks")
    assert first == pytest.approx(expected, abs=1e-5)
    others = [json.loads(line) for line in (folder / f"{name}_silent" / "metrics.jsonl").read_text().splitlines()]
    losses = [[record["loss"] for record in lines if record["kind"] == "step"] for lines in (records, others)]
    assert losses[0] == losses[1]
    assert of_mtrain(python_with_lm_eval, folder, folder / name, ranks=2) == pytest.approx(last, abs=1e-5)
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

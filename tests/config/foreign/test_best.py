"""Early stopping, the best checkpoints and the projects of trackers, as in the programs.

Sources: transformers' own EarlyStoppingCallback and TrainingArguments; LLaMA-Factory 0.9.5, train/tuner.py; axolotl
0.19.0, core/builders; ms-swift 4.6.0, callbacks/early_stop.py.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from mtrain.config.foreign.translation import Translation
from mtrain.config.schema.train import ValidSection
from mtrain.hf.configuration import resolved
from mtrain.training.best import Metric, Patience
from tests.config.foreign.programs import PROGRAMS, head
from tests.config.foreign.test_same_run import of_axolotl, of_command

_OF_HF = {"eval_strategy": "steps", "eval_steps": 5, "max_steps": 50}
WAYS: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "LLaMA-Factory": (
        PROGRAMS["LLaMA-Factory"].translate,
        {**PROGRAMS["LLaMA-Factory"].base, **_OF_HF, "val_size": 0.1},
        "early_stopping_steps",
    ),
    "axolotl": (
        of_axolotl,
        {"base_model": "M", "datasets": "a", "learning_rate": 1e-4, "val_set_size": 0.1, "eval_steps": 5},
        "early_stopping_patience",
    ),
    "swift sft": (
        of_command("swift", "sft"),
        {"model": "M", "dataset": "a", "val_dataset": "b", "max_length": 64, "eval_steps": 5, "save_steps": 5},
        "early_stop_interval",
    ),
    "trl sft": (PROGRAMS["trl sft"].translate, {**PROGRAMS["trl sft"].base, **_OF_HF}, None),
}
"""Program -> its translation, arguments of a run that validates every 5 steps, and the setting of early stopping."""


def of(program: str, given: Mapping[str, Any], folder: Path) -> Translation:
    translate, base, _ = WAYS[program]
    found: Translation = translate({**base, **given}, folder)
    return found.checked(resolved)


def stop_of_transformers(patience: int, losses: list[float]) -> int | None:
    """Returns the number of the validation after which transformers' callback stops a run."""
    callback = transformers.EarlyStoppingCallback(patience)
    arguments = transformers.TrainingArguments(
        output_dir="unused", eval_strategy="steps", eval_steps=1, save_strategy="steps", load_best_model_at_end=True
    )
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    callback.on_train_begin(arguments, state, control)
    for number, loss in enumerate(losses):
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return number
        if state.best_metric is None or loss < state.best_metric:  # as the Trainer does after the callbacks
            state.best_metric = loss
    return None


def stop_here(section: ValidSection, losses: list[float]) -> int | None:
    patience = Patience(Metric(section.metric), section)
    for number, loss in enumerate(losses):
        patience.add(number, loss)
        if patience.is_over:
            return number
    return None


@pytest.mark.parametrize("program", [name for name, (_, _, patience) in WAYS.items() if patience is not None])
def test_a_run_stops_where_transformers_stops_it(program: str, tmp_path: Path) -> None:
    source = random.Random(program)
    name = str(WAYS[program][2])
    for _ in range(8):
        given: dict[str, Any] = {name: source.choice((1, 2, "3", 5)), "load_best_model_at_end": True}
        given |= source.choice(({}, {"metric_for_best_model": "eval_loss"}, {"metric_for_best_model": "loss"}))
        found = of(program, given, tmp_path)
        section = ValidSection.model_validate(found.get("valid"))
        assert section.interval_steps == 5
        assert found.get("checkpoint.keep_best") == 1
        assert [key for key in given if key not in head(found)] == []
        for _ in range(20):
            losses = [source.choice((1.0, 2.0, 3.0, source.random())) for _ in range(12)]
            assert stop_here(section, losses) == stop_of_transformers(int(given[name]), losses), (given, losses)


@pytest.mark.parametrize("program", WAYS)
def test_what_decides_the_best_checkpoint_is_named(program: str, tmp_path: Path) -> None:
    """Another metric, or a higher loss, is not ours; off and 0 set nothing."""
    name = WAYS[program][2]
    for given, lost in (
        ({"metric_for_best_model": "accuracy"}, {"metric_for_best_model"}),
        ({"greater_is_better": True}, {"greater_is_better"}),
        ({"greater_is_better": False, "load_best_model_at_end": False}, set()),
        ({} if name is None else {name: 0}, set()),
    ):
        found = of(program, given, tmp_path)
        assert {line.split("=")[0] for line in found.lost} & {"metric_for_best_model", "greater_is_better"} == lost
        assert (found.get("checkpoint.keep_best"), found.get("valid.patience")) == (None, None)
        assert [key for key in given if key not in head(found)] == []
    if name is None:  # its validation set is a split of a dataset, which is named in the written file
        assert any(
            line.startswith("load_best") for line in of(program, {"load_best_model_at_end": True}, tmp_path).lost
        )
    elif program != "swift sft":
        strategy = {"eval_strategy": "epoch"} | ({"eval_steps": ""} if program == "axolotl" else {})
        found = of(program, {name: 3, **strategy}, tmp_path)
        assert found.get("valid.patience") is None
        assert any(line.startswith(f"{name}=3") for line in found.lost)


@pytest.mark.parametrize(
    ("program", "given", "trackers", "project", "name"),
    [
        ("LLaMA-Factory", {"use_swanlab": True}, ["swanlab"], "llamafactory", None),
        (
            "LLaMA-Factory",
            {"use_swanlab": True, "swanlab_project": "p", "swanlab_run_name": "n"},
            ["swanlab"],
            "p",
            "n",
        ),
        ("LLaMA-Factory", {"use_swanlab": True, "report_to": ["wandb"]}, ["wandb", "swanlab"], "llamafactory", None),
        ("LLaMA-Factory", {"use_swanlab": False, "swanlab_project": "p"}, None, None, None),
        ("swift sft", {"report_to": "swanlab", "swanlab_project": "p", "swanlab_exp_name": "n"}, ["swanlab"], "p", "n"),
        ("axolotl", {"use_swanlab": True, "swanlab_project": "p"}, ["swanlab"], "p", None),
        ("axolotl", {"use_comet": True, "comet_project_name": "p"}, ["comet_ml"], "p", None),
        ("axolotl", {"use_mlflow": True, "mlflow_run_name": "n"}, ["mlflow"], None, "n"),
    ],
)
def test_projects_of_trackers(
    program: str, given: Mapping[str, Any], trackers: Any, project: Any, name: Any, tmp_path: Path
) -> None:
    found = of(program, given, tmp_path)
    assert (found.get("metrics.trackers"), found.get("metrics.project"), found.get("run.name")) == (
        trackers,
        project,
        name,
    )
    assert [key for key in given if key not in head(found)] == []
    assert not any(line.startswith(tuple(given)) for line in found.lost)

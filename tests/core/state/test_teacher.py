"""The configuration under which a teacher is built: its architecture, the run's everything else."""

from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError, DataError
from mtrain.checkpoint.state.teacher import teacher_config
from mtrain.config.load import config_yaml
from tests.config.samples import config
from tests.config.test_vision import GEMMA3, VISION
from tests.messages import refuses


def saved(folder: Path, **changes: Any) -> Path:
    """Writes the checkpoint directory of a run with this configuration."""
    (folder / "config.yaml").write_text(config_yaml(config(**changes)))
    checkpoint = folder / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    return checkpoint


def test_the_architecture_is_the_teachers_and_the_rest_the_runs(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, model__hidden_size=96, model__vocab_multiple=7, train__seed=5, train__precision="fp32")
    run = config(layout={"tp": 2, "pp": 2, "stage_layers": [3, 5]}, train__precision="fp16", model__vocab_multiple=3)
    found = teacher_config(run, checkpoint)
    assert (found.model.hidden_size, found.model.vocab_multiple) == (96, 3)
    assert (found.layout, found.train, found.data) == (run.layout, run.train, run.data)


def test_a_tower_of_a_teacher_is_frozen_and_left_out_of_a_run_on_text(tmp_path: Path) -> None:
    trained = {"freeze_tower": False, "freeze_projector": False, "freeze_language_model": True}
    checkpoint = saved(tmp_path, model__vision=VISION | trained | {"num_layers": 5})
    run = config(model__vision=VISION | trained, optimizer={"kind": "adamw", "lr": 1e-3, "tower_lr": 1e-4})
    found = teacher_config(run, checkpoint).model.vision
    assert found is not None
    assert found.is_frozen
    assert found.num_layers == 5
    assert teacher_config(config(), checkpoint).model.vision is None


def test_layers_of_another_number_are_divided_evenly(tmp_path: Path) -> None:
    run = config(layout={"pp": 2, "first_stage_layers": 3})
    found = teacher_config(run, saved(tmp_path, model__num_layers=12))
    assert found.layout == config(layout={"pp": 2}).layout


@pytest.mark.parametrize(
    ("run", "teacher", "words"),
    [
        ({}, {"model__vocab_size": 999}, ["999 tokens", "model.vocab_size=1000", "same tokenizer"]),
        ({"layout__tp": 4}, {"model__num_query_groups": 2}, ["model.num_query_groups=2", "layout.tp=4"]),
        ({"layout__pp": 4}, {"model__num_layers": 6}, ["model.num_layers=6", "layout.pp=4"]),
        ({"model__vision": VISION}, {}, ["reads no images", "model.vision", "--vision"]),
        ({"model__vision": VISION}, {"model__vision": VISION | {"patch_size": 2}}, ["patch_elements=24", "96"]),
        ({"model__vision": VISION}, {"model__vision": GEMMA3}, ["kind=gemma3", "qwen3_vl"]),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, run: dict[str, Any], teacher: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        teacher_config(config(**run), saved(tmp_path, **teacher))
    assert all(word in str(caught.value) for word in [*words, "loss.teacher.checkpoint", "config.yaml"])


def test_an_import_says_its_model_itself(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(config_yaml(config(model__hidden_size=96)))
    assert teacher_config(config(), tmp_path).model.hidden_size == 96
    (tmp_path / "model.yaml").write_text("model: {num_layers: many}")
    with refuses(DataError, "model.yaml"):
        teacher_config(config(), tmp_path)


def test_a_checkpoint_outside_a_run_folder_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "config.yaml"):
        teacher_config(config(), tmp_path / "checkpoints" / "step_00000010")

"""data.curriculum: blends from steps on."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.derived import data_phases, phase_number
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from mtrain.plan.summary import plan_lines
from tests.config.samples import INDEXED, content
from tests.config.yaml_files import write
from tests.messages import refuses

A, B, C = {"path": "a"}, {"path": "b", "weight": 3.0}, {"path": "c"}
LATER = [{"from_step": 10, "sources": [C, B]}, {"from_step": 20, "sources": [A]}]


def loaded(tmp_path: Path, curriculum: Any, **data: Any) -> Config:
    """Loads a file with this curriculum."""
    path = write(tmp_path / "c.yaml", content(data={**INDEXED, "train": [A, B], **data}))
    return load_config([path], [f"data.curriculum={json.dumps(curriculum)}"])


def test_sources_have_numbers_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    config = loaded(tmp_path, LATER)
    assert [source.path for source in config.data.all_sources] == ["a", "b", "c"]  # type: ignore[union-attr]
    (tmp_path / "again.yaml").write_text(config_yaml(config))
    assert load_config([tmp_path / "again.yaml"]) == config
    phases = data_phases(config.data)
    assert [(phase.from_step, phase.shares) for phase in phases] == [
        (0, {"a": 0.25, "b": 0.75}),
        (10, {"c": 0.25, "b": 0.75}),
        (20, {"a": 1.0}),
    ]
    assert [phase_number(phases, step) for step in (1, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
    assert data_phases(loaded(tmp_path, []).data) == ()


def test_the_plan_of_a_run_has_its_phases(tmp_path: Path) -> None:
    lines = plan_lines(loaded(tmp_path, LATER), world_size=1)
    assert "data, phase 1     from step 1 on: 0.25 a + 0.75 b" in lines
    assert "data, phase 2     from step 11 on: 0.25 c + 0.75 b" in lines


@pytest.mark.parametrize(
    ("curriculum", "data", "fact"),
    [
        (
            [LATER[1], LATER[0]],
            {},
            "data.curriculum[1].from_step=10",
        ),
        ([{"from_step": 5, "sources": [A, B, A]}], {}, "data.curriculum[0].sources"),
        (LATER, {"train": [A, A]}, "data.train"),
        ([{"from_step": 0, "sources": [A]}], {}, "data.curriculum[0].from_step"),
        ([{"from_step": 5, "sources": []}], {}, "data.curriculum[0].sources"),
        ([{"from_step": 5, "source": [A]}], {}, "data.curriculum[0].source"),
        ([{"sources": [A]}], {}, "data.curriculum[0].from_step"),
        (
            LATER,
            {"kind": "sft", "tokenizer": "t", "packing": {"batch": "rows"}},
            "data.curriculum",
        ),
    ],
    ids=str,
)
def test_wrong_curricula_are_named(tmp_path: Path, curriculum: Any, data: Any, fact: str) -> None:
    with refuses(ConfigError, fact):
        loaded(tmp_path, curriculum, **data)


def test_the_same_path_may_come_twice_where_there_is_no_curriculum(tmp_path: Path) -> None:
    assert len(loaded(tmp_path, [], train=[A, A]).data.all_sources) == 2  # type: ignore[union-attr]

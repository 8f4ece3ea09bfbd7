"""data.valid: one set as a list, several by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from tests.config.samples import INDEXED, content
from tests.config.yaml_files import write
from tests.messages import refuses

SOURCE = {"path": "x"}


def loaded(tmp_path: Path, valid: Any, **data: Any) -> Any:
    """Returns the data section of a file with these validation sets."""
    path = write(tmp_path / "c.yaml", content(data={**INDEXED, **data}))
    config = load_config([path], [f"data.valid={json.dumps(valid)}"])
    (tmp_path / "again.yaml").write_text(config_yaml(config))
    assert config_yaml(load_config([tmp_path / "again.yaml"], [])) == config_yaml(config)
    return config.data


def test_a_list_is_one_set_and_a_mapping_is_several(tmp_path: Path) -> None:
    assert list(loaded(tmp_path, [SOURCE, SOURCE]).valid_sets) == ["valid"]
    assert loaded(tmp_path, []).valid_sets == {}
    several = loaded(tmp_path, {"code": [SOURCE], "a-b.c": [SOURCE, SOURCE]}).valid_sets
    assert {name: len(sources) for name, sources in several.items()} == {"code": 1, "a-b.c": 2}
    assert next(iter(several)) == "code", "in the order of the file"


@pytest.mark.parametrize(
    ("valid", "fact"),
    [
        ({"code": []}, "data.valid.code"),
        ({"my code": [SOURCE]}, "'my code'"),
        (
            {"code": [{"pth": "x", **SOURCE}]},
            "data.valid.code",
        ),
        ([{"pth": "x", **SOURCE}], "data.valid"),
        ([{"name": "code", **SOURCE}], "data.valid: {NAME: [{path: ...}]}"),
        ({"code": [{"weight": 1}]}, "data.valid.code"),
        (3, "data.valid"),
    ],
    ids=str,
)
def test_wrong_sets_are_named_as_they_were_written(tmp_path: Path, valid: Any, fact: str) -> None:
    with refuses(ConfigError, fact):
        loaded(tmp_path, valid)


def test_a_later_form_replaces_an_earlier_one(tmp_path: Path) -> None:
    one, named = [{"path": "y"}], {"code": [{"path": "z"}], "chat": [{"path": "z"}]}
    for earlier, later, expected in ((one, {"code": [SOURCE]}, {"code": "x"}), (named, [SOURCE], {"valid": "x"})):
        base = write(tmp_path / "base.yaml", content(data={**INDEXED, "valid": earlier}))
        data: Any = load_config([base, {"data": {"valid": later}}], []).data
        assert {name: sources[0].path for name, sources in data.valid_sets.items()} == expected


def test_a_split_replaces_named_sets_too(tmp_path: Path) -> None:
    with refuses(ConfigError):
        loaded(tmp_path, {"code": [SOURCE]}, split=[0.9, 0.1, 0])

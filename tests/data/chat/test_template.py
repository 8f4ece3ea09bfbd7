"""Choice of the template, and its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.data.chat.template import (
    chosen_templates,
    named_templates,
    put_templates,
    template_files,
)
from tests.fault_table import Notice
from tests.messages import refuses

PLACES = {
    "a file": ("chat_template.jinja", "T"),
    "a file of a processor": ("chat_template.json", '{"chat_template": "T"}'),
    "settings": ("tokenizer_config.json", '{"chat_template": "T"}'),
    "named ones in settings": ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "T"}]}'),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_found(place: str, tmp_path: Path) -> None:
    name, content = PLACES[place]
    (tmp_path / name).write_text(content)
    found = chosen_templates("auto", tmp_path / "tokenizer.json")
    assert found is not None
    assert (found.default.text, found.with_tools.text, found.default.origin) == ("T", "T", tmp_path / name)


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)


def test_one_of_several_is_chosen_by_name(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    write(tmp_path, "chat_template.jinja", "D")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "T")
    write(tmp_path, "additional_chat_templates/rag.jinja", "R")
    auto, rag = chosen_templates("auto", tokenizer), chosen_templates("rag", tokenizer)
    assert auto is not None
    assert rag is not None
    assert (auto.default.text, auto.with_tools.text) == ("D", "T"), "as transformers chooses where there are tools"
    assert (rag.default.text, rag.with_tools.text) == ("R", "R")
    write(tmp_path, "own.jinja", "O")
    own = chosen_templates(str(tmp_path / "own.jinja"), tokenizer)
    assert own is not None
    assert own.default.text == "O"


def test_files_go_before_settings(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.jinja", "D")
    write(tmp_path, "tokenizer_config.json", '{"chat_template": "S"}')
    assert named_templates(tmp_path / "tokenizer.json")["default"].text == "D"


@pytest.mark.parametrize("settings", ["{}", '{"chat_template": null}', '{"chat_template": ""}'])
def test_there_may_be_none(settings: str, tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", settings)
    assert chosen_templates("auto", tmp_path / "tokenizer.json") is None


@pytest.mark.fault(
    "folders",
    "a chat template that is missing, not text, or named in damaged settings",
    happens="refused with the file, and the names that there are",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("file", "content", "choice", "fact"),
    [
        ("chat_template.jinja", "D", "rag", "'rag'"),
        ("x", "", "rag", "'rag'"),
        ("x", "", "missing/own.jinja", "missing/own.jinja"),
        (
            "additional_chat_templates/rag.jinja",
            "R",
            "auto",
            "data.chat_template",
        ),
        ("tokenizer_config.json", '{"chat_template": 3}', "auto", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "auto", "tokenizer_config.json"),
        ("tokenizer_config.json", "{", "auto", "tokenizer_config.json"),
    ],
)
def test_a_damaged_choice_is_named(
    file: str, content: str, choice: str, fact: str, tmp_path: Path, notice: Notice
) -> None:
    write(tmp_path, file, content)
    with notice, refuses(DataError, fact) as caught:
        chosen_templates(choice, tmp_path / "tokenizer.json")
    assert caught.value.exit_code == notice.exit_code


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with refuses(DataError):
        chosen_templates("auto", tmp_path / "tokenizer.json")


def test_templates_that_a_folder_has_are_left_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", '{"chat_template":   "T"}')
    put_templates({"chat_template.jinja": "T"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]
    assert (tmp_path / "tokenizer_config.json").read_text() == '{"chat_template":   "T"}'


def test_other_templates_of_a_folder_are_replaced_in_all_places(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", '{"chat_template": "S", "eos_token": "</s>"}')
    write(tmp_path, "chat_template.json", '{"chat_template": "P"}')
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "U")
    put_templates({"chat_template.jinja": "T"}, tmp_path)
    assert {name: each.text for name, each in named_templates(tmp_path / "tokenizer.json").items()} == {"default": "T"}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert not (tmp_path / "chat_template.json").exists()
    two = {"chat_template.jinja": "T", "additional_chat_templates/tool_use.jinja": "W"}
    put_templates(two, tmp_path)
    found = chosen_templates("auto", tmp_path / "tokenizer.json")
    assert found is not None
    assert template_files(found) == two

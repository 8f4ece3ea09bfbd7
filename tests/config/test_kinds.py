"""Sections chosen by `kind`: messages about kinds and their keys, and keys of other kinds in files and in 0.1.0."""

from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.renamed import RenamedKeyWarning
from mtrain.hf.configuration import load_config
from tests.config.samples import INDEXED, config, content
from tests.config.yaml_files import write
from tests.fault_table import Notice
from tests.messages import check_message, refuses

JSONL: dict[str, Any] = {"kind": "sft", "seq_length": 64, "train": [{"path": "x"}], "tokenizer": "t"}


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "jsnl", "seq_length": 64},
        {"kind": None, "seq_length": 64},
        {"kind": [1], "seq_length": 64},
        3,
        {**INDEXED, "too_long": "drop"},
        {**JSONL, "isolate_documents": True},
        {**INDEXED, "kind": "mock"},
        {**JSONL, "to_long": 1},
        {**JSONL, "train": [{"pth": 1, "path": "x"}]},
        {"kind": "sft", "seq_length": 64, "tokenizer": "t"},
        {"kind": "mock"},
        None,
    ],
    ids=str,
)
@pytest.mark.fault(
    "input", "a kind of data that does not exist, or keys of another kind", happens="refused", exit_code=2
)
def test_a_wrong_kind_and_keys_of_another_are_named(data: Any, tmp_path: Path, notice: Notice) -> None:
    path = write(tmp_path / "c.yaml", content(data=data))
    with notice, pytest.raises(ConfigError) as error:
        load_config([path], [])
    assert error.value.exit_code == notice.exit_code
    (line,) = str(error.value).splitlines()
    check_message(line)


def test_a_missing_section_names_what_its_first_kind_needs(tmp_path: Path) -> None:
    sections = content()
    del sections["data"]
    with refuses(ConfigError, "data.seq_length"):
        load_config([write(tmp_path / "c.yaml", sections)], [])


def test_data_without_a_kind_is_indexed() -> None:
    assert config(data={key: value for key, value in INDEXED.items() if key != "kind"}) == config(data=INDEXED)


def test_a_later_source_of_another_kind_leaves_the_keys_of_the_old_one_behind(tmp_path: Path) -> None:
    finetuning = write(tmp_path / "finetune.yaml", content(data={**JSONL, "too_long": "drop", "prefetch_steps": 7}))
    tried = load_config([finetuning], ["data.kind=mock"]).data
    assert (tried.kind, tried.seq_length, tried.tokenizer, tried.prefetch_steps) == ("mock", 64, "t", 7)
    indexed = write(tmp_path / "indexed.yaml", {"data": {"kind": "indexed", "train": [{"path": "corpus"}]}})
    assert load_config([finetuning, indexed], []) == config(
        data={"seq_length": 64, "train": [{"path": "corpus"}], "tokenizer": "t", "prefetch_steps": 7}
    )


@pytest.mark.parametrize("overrides", [["data.kind=sft"], ["data.kind=mock", "data.too_long=drop"]], ids=str)
def test_keys_that_no_later_kind_left_behind_are_refused(overrides: list[str], tmp_path: Path) -> None:
    odd = write(tmp_path / "c.yaml", content(data={**JSONL, "isolate_documents": True}))
    with refuses(ConfigError, "data.kind"):
        load_config([odd], overrides)


@pytest.mark.parametrize("kind", ["mock", "indexed", "jsonl"])
def test_a_saved_configuration_of_0_1_0_holds_keys_of_all_kinds(kind: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "kind": kind,
        "seq_length": 64,
        "train": [{"path": "x", "weight": 1.0}],
        "valid": [],
        "test": [],
        "split": None,
        "tokenizer": "t",
        "isolate_documents": kind == "mock",
        "too_long": "drop" if kind == "jsonl" else "truncate",
        "prefetch_steps": 2,
    }
    with pytest.warns(RenamedKeyWarning):
        read = load_config([write(tmp_path / "config.yaml", content(data=data))], []).data
    data |= {"kind": "sft" if kind == "jsonl" else kind, "too_long": "end" if kind == "mock" else "drop"}
    own = read.model_dump(mode="json")
    assert {key: value for key, value in data.items() if key in own} == {key: own[key] for key in data if key in own}


def test_editors_get_a_schema_with_one_section_a_kind() -> None:
    schema = Config.model_json_schema()
    choices = [schema["$defs"][each["$ref"].rpartition("/")[2]] for each in schema["properties"]["data"]["oneOf"]]
    assert [each["properties"]["kind"]["const"] for each in choices] == ["indexed", "sft", "mock"]
    assert ["kind" in each["required"] for each in choices] == [False, True, True], "one section fits without a kind"
    assert all(each["additionalProperties"] is False for each in choices)

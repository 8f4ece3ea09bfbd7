"""Conversations give the same samples from every form of file, whatever keys a table has filled in with nulls."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.sample import SampleEncoder
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.formats.record_files import chunks, record_files
from mtrain.hf.tokenizer.tokenizer import load_tokenizer

datasets.disable_progress_bars()
WORDS = st.sampled_from(["a", "Zürich", "null", "1", "true", '{"x": 1}', "", " é "])
NAMES = ("content", "city", "role", "name", "unit")
"""Names of parameters, and keys of messages; always in this order, which a table has for all of its rows."""
TYPES = {
    "content": WORDS,
    "city": WORDS,
    "role": st.none() | WORDS,
    "name": st.integers(0, 3),
    "unit": st.none() | st.booleans(),
}


def some(draw: st.DrawFn, values: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    return {name: draw(values[name]) for name in values if draw(st.booleans())}


def schemas(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    one: dict[str, st.SearchStrategy[Any]] = {"type": WORDS, "default": st.none(), "enum": st.lists(WORDS, max_size=2)}
    found = {name: some(draw, one) for name in NAMES if draw(st.booleans())}
    if depth and draw(st.booleans()):
        found["nested"] = {"type": "object", "properties": schemas(draw, depth - 1)}
    return found


@st.composite
def records(draw: st.DrawFn, as_text: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(WORDS) + "?"}]
    if draw(st.booleans()):
        calls = []
        for _ in range(draw(st.integers(1, 2))):
            arguments: Any = some(draw, TYPES)
            function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
            calls.append({"type": "function", **({"id": "x"} if draw(st.booleans()) else {}), "function": function})
        content: dict[str, Any] = draw(st.sampled_from([{"content": None}, {"content": ""}, {}]))
        messages.append({"role": "assistant", **content, "tool_calls": calls})
        messages.append({"role": "tool", "content": draw(WORDS), **({"name": "f"} if draw(st.booleans()) else {})})
    reasoning = {"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}
    messages.append({"role": "assistant", "content": draw(WORDS) + ".", **reasoning})
    found: dict[str, Any] = {"messages": messages}
    if draw(st.booleans()):
        parameters = {"type": "object", "properties": schemas(draw)}
        found["tools"] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    if draw(st.booleans()):
        found["chat_template_kwargs"] = {"enable_thinking": draw(st.none() | st.booleans())}
    # weights of few digits, as `to_json` of `datasets` keeps ten
    if draw(st.booleans()):
        found["weight"] = draw(st.none() | st.sampled_from([0.0, 0.5, 1.25, 2.0]))
    return found


def with_all_keys(as_text: bool) -> dict[str, Any]:
    """Returns the first record, which gives a table its keys in their order."""
    filled = {name: {"type": "a", "default": None, "enum": ["a"]} for name in NAMES}
    properties = {**filled, "nested": {"type": "object", "properties": filled}}
    arguments = {"content": "a", "city": "a", "role": "a", "name": 1, "unit": True}
    function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"type": "function", "id": "x", "function": function}
    answer = {"role": "assistant", "content": "a", "tool_calls": [call], "reasoning_content": "b"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    return {
        "messages": [
            {"role": "user", "content": "a"},
            answer,
            {"role": "tool", "content": "a", "name": "f"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": True},
        "weight": 1.0,
    }


def as_lines(found: list[dict[str, Any]], folder: Path) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return str(folder / "a.jsonl")


def as_parquet(found: list[dict[str, Any]], folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(found), folder / "a.parquet")
    return str(folder / "a.parquet")


def as_arrow(found: list[dict[str, Any]], folder: Path) -> str:
    table = pa.Table.from_pylist(found)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(folder / "a.arrow")


def as_dataset(found: list[dict[str, Any]], folder: Path) -> str:
    datasets.Dataset.from_list(found).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def as_lines_of_a_dataset(found: list[dict[str, Any]], folder: Path) -> str:
    datasets.Dataset.from_list(found).to_json(str(folder / "b.jsonl"))
    return str(folder / "b.jsonl")


def json_columns(found: list[dict[str, Any]]) -> datasets.Dataset:
    of_json = datasets.Features(
        {
            "messages": datasets.List(
                {
                    "role": datasets.Value("string"),
                    "content": datasets.Json(),
                    "tool_calls": datasets.List(datasets.Json()),
                    "name": datasets.Value("string"),
                    "reasoning_content": datasets.Value("string"),
                }
            ),
            "tools": datasets.Json(),
            "chat_template_kwargs": datasets.Json(),
            "weight": datasets.Value("float64"),
        }
    )
    return datasets.Dataset.from_list(found, features=of_json)


def as_json_columns(found: list[dict[str, Any]], folder: Path) -> str:
    json_columns(found).save_to_disk(str(folder / "json"))
    return str(folder / "json")


def as_json_columns_of_parquet(found: list[dict[str, Any]], folder: Path) -> str:
    json_columns(found).to_parquet(str(folder / "json.parquet"))
    return str(folder / "json.parquet")


def as_whole_messages_of_json(found: list[dict[str, Any]], folder: Path) -> str:
    of_json = datasets.Features(
        {
            "messages": datasets.List(datasets.Json()),
            "tools": datasets.List(datasets.Json()),
            "chat_template_kwargs": datasets.Json(),
            "weight": datasets.Value("float64"),
        }
    )
    datasets.Dataset.from_list(found, features=of_json).to_parquet(str(folder / "c.parquet"))
    return str(folder / "c.parquet")


def as_text_of_tools(found: list[dict[str, Any]], folder: Path) -> str:
    return as_lines(
        [{**each, "tools": json.dumps(each["tools"])} if "tools" in each else each for each in found], folder
    )


FORMS: dict[str, Callable[[list[dict[str, Any]], Path], str]] = {
    form.__name__: form
    for form in (
        as_parquet,
        as_arrow,
        as_dataset,
        as_lines_of_a_dataset,
        as_json_columns,
        as_json_columns_of_parquet,
        as_whole_messages_of_json,
        as_text_of_tools,
    )
}
TEMPLATE = (
    "{{ tools | tojson if tools is defined and tools else 'none' }}{{ enable_thinking | default('unset') | string }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is defined else 'nothing' }}"
    "{{ m.reasoning_content | default('') }}{% for call in m.tool_calls | default([]) %}{{ call.function.name }}"
    "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}{{ call.id | default('-') }}"
    "{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> SampleEncoder:
    from tests.data.chat.cases import write_folder

    folder = tmp_path_factory.mktemp("tables")
    write_folder(folder, TEMPLATE)
    section = {"kind": "sft", "seq_length": 9, "tokenizer": str(folder), "train": [{"path": "unused"}]}
    return RecordEncoder(SftSection.model_validate(section), load_tokenizer(folder))


def samples(path: str, encoder: SampleEncoder) -> Iterator[Any]:
    """Yields ids, weights and the weight of the whole; or the error."""
    for chunk in chunks(record_files(path)):
        for index in range(len(chunk)):
            try:
                sample = encoder.encode(chunk.record(index))
            except DataError as fault:
                yield str(fault)
            else:
                assert not isinstance(sample, tuple)
                yield sample.ids.tolist(), sample.loss_weights.tolist(), sample.weight


def same_samples(form: str, as_text: bool, data: st.DataObject, encoder: SampleEncoder) -> None:
    """Checks that the drawn records give the same samples in this form as in JSON lines."""
    found = [with_all_keys(as_text), *data.draw(st.lists(records(as_text), min_size=1, max_size=3))]
    with tempfile.TemporaryDirectory() as folder:
        expected = list(samples(as_lines(found, Path(folder)), encoder))
        assert not isinstance(expected[0], str), expected[0]
        assert list(samples(FORMS[form](found, Path(folder)), encoder)) == expected


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_the_samples_are_those_of_json_lines(
    form: str, as_text: bool, data: st.DataObject, encoder: SampleEncoder
) -> None:
    same_samples(form, as_text, data, encoder)


@pytest.mark.nightly  # more of the same draws
@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_samples_of_many_records_are_those_of_json_lines(
    form: str, as_text: bool, data: st.DataObject, encoder: SampleEncoder
) -> None:
    same_samples(form, as_text, data, encoder)

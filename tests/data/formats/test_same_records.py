"""The same records give the same samples from every container, spelling of JSON and `data.format`."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mtrain.base.errors import DataError
from mtrain.config.schema.data import SftSection
from mtrain.core.batch.sample import SampleEncoder, TokenizedSample
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.opening import Progress, build_entry
from mtrain.data.encoding.compared import source_encoder
from mtrain.data.formats.recognise import FileKind
from mtrain.data.formats.record_files import RecordFile, chunks, record_files
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import write_folder

RESERVED = "<|" + "".join(map(chr, range(0xF0000, 0xF0010)))
"""Beginning of special tokens, and the characters that mark places in a rendering, which are refused."""
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=RESERVED), min_size=1, max_size=12)
"""Any text, with line breaks of all kinds, quotes, NUL and the mark of byte order."""
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.reasoning_content | default('') }}{{ m.content | default('') }}"
    "{% for call in m.tool_calls | default([]) %}{{ call | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Record = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Samples = list[list[tuple[list[int], list[float], float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_folder(folder, TEMPLATE)
    return folder


@cache
def encoder(folder: Path, compares: Any, section: str) -> SampleEncoder:
    """Builds an encoder once, since templates are rendered by a process of their own."""
    given = {"kind": "sft", "seq_length": 9, "tokenizer": str(folder), "train": [{"path": "unused"}]}
    made = SftSection.model_validate({**given, **json.loads(section)})
    return source_encoder(made, load_tokenizer(folder), compares)


def samples(file: Path, folder: Path, compares: Any = None, **section: Any) -> Samples:
    """Reads a file as a run does; returns ids, weights of the tokens and weight of each sequence of each record."""
    encoded_by = encoder(folder, compares, json.dumps(section))
    found = []
    for chunk in chunks(record_files(str(file))):
        for index in range(len(chunk)):
            encoded = encoded_by.encode(chunk.record(index))
            sequences = (encoded,) if isinstance(encoded, TokenizedSample) else encoded
            found.append([(each.ids.tolist(), each.loss_weights.tolist(), each.weight) for each in sequences])
    return found


def shuffled(value: Any, order: random.Random) -> Any:
    """Returns a value with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = order.sample(list(value), len(value))
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(each, order) for each in value] if isinstance(value, list) else value


def spelled(draw: Draw, record: Record) -> str:
    """Writes a record as JSON in one of the ways in which programs do."""
    order = random.Random(draw(st.integers(0, 99)))
    gap = draw(st.sampled_from(["", " ", "\t"]))
    text = json.dumps(shuffled(record, order), ensure_ascii=draw(st.booleans()), separators=(f",{gap}", f"{gap}:{gap}"))
    return f"{gap}{text}{gap}"


def lines(draw: Draw, records: list[Record]) -> bytes:
    newline: str = draw(st.sampled_from(["\n", "\r\n"]))
    end: str = draw(st.sampled_from(["", newline, newline * 3, f"{newline} \t{newline}"]))
    return _mark(draw) + (newline.join(spelled(draw, each) for each in records) + end).encode()


def _mark(draw: Draw) -> bytes:
    return bytes(draw(st.sampled_from([b"", codecs.BOM_UTF8])))


def one_list(draw: Draw, records: list[Record]) -> bytes:
    blank = draw(st.sampled_from(["", " ", "\n", "\r\n\r\n  "]))
    inner = f"{blank},{blank}".join(spelled(draw, each) for each in records)
    return _mark(draw) + f"{blank}[{blank}{inner}{blank}]{blank}".encode()


def indented(draw: Draw, records: list[Record]) -> bytes:
    text = json.dumps(records, indent=draw(st.integers(0, 4)), ensure_ascii=draw(st.booleans()))
    return _mark(draw) + text.replace("\n", draw(st.sampled_from(["\n", "\r\n"]))).encode()


def in_gzip(draw: Draw, records: list[Record]) -> bytes:
    """Packs lines, in one or in several members, as `cat a.gz b.gz` writes them."""
    written = lines(draw, records)
    cut = draw(st.integers(0, len(written)))
    return gzip.compress(written[:cut]) + gzip.compress(written[cut:])


def in_zstd(draw: Draw, records: list[Record]) -> bytes:
    packed: bytes = pa.compress(lines(draw, records), codec="zstd", asbytes=True)
    return packed


def table(draw: Draw, records: list[Record]) -> bytes:
    columns = draw(st.permutations(sorted({key for each in records for key in each})))
    rows = [{key: each.get(key) for key in columns} for each in records]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=draw(st.integers(1, 3)))
    return bytes(sink.getvalue())


CONTAINERS: dict[str, Callable[[Draw, list[Record]], bytes]] = {
    each.__name__: each for each in (lines, one_list, indented, in_gzip, in_zstd, table)
}


@st.composite
def conversations(draw: st.DrawFn) -> Record:
    """Draws a conversation; its last message is an answer."""
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages += [{"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": draw(TEXTS)}]
    return {"messages": messages, **draw(st.sampled_from([{}, {"weight": 2.0}, {"weight": None}]))}


@st.composite
def texts(draw: st.DrawFn) -> Record:
    return {"prompt": draw(TEXTS), draw(st.sampled_from(["response", "completion"])): draw(TEXTS)}


@st.composite
def preferences(draw: st.DrawFn) -> Record:
    if draw(st.booleans()):
        return {"prompt": draw(TEXTS), "chosen": draw(TEXTS), "rejected": draw(TEXTS)}
    found: Record = {name: [{"role": "assistant", "content": draw(TEXTS)}] for name in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": draw(TEXTS)}], **found}


def of_one_kind(records: list[Record], key: str) -> list[Record]:
    """Returns the records whose value has the type of the first one: a column of a table has one type."""
    return [each for each in records if type(each[key]) is type(records[0][key])]


def judged_alike(container: str, data: st.DataObject, folder: Path) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(["conversations", "texts", "preferences"]))
    strategy = {"conversations": conversations(), "texts": texts(), "preferences": preferences()}[kind]
    records = draw(st.lists(strategy, min_size=1, max_size=4))
    compares, section = None, dict[str, Any]()
    if kind == "preferences":
        records, compares, section = of_one_kind(records, "prompt"), "pairs", {"format": "preference"}
    with tempfile.TemporaryDirectory() as place:
        plain, other = Path(place, "plain.jsonl"), Path(place, "other")
        plain.write_text("".join(json.dumps(each) + "\n" for each in records))
        other.write_bytes(CONTAINERS[container](draw, records))
        expected = samples(plain, folder, compares, **section)
        assert len(expected) == len(records)
        assert samples(other, folder, compares, **section) == expected


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_container_holds_the_same_samples(container: str, data: st.DataObject, folder: Path) -> None:
    judged_alike(container, data, folder)


@pytest.mark.nightly  # more of the same draws
@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_container_holds_the_same_samples_of_many(container: str, data: st.DataObject, folder: Path) -> None:
    judged_alike(container, data, folder)


def as_sharegpt(record: Record) -> tuple[Record, dict[str, Any]]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[each["role"]], "value": each["content"]} for each in record["messages"]]
    rest = {key: value for key, value in record.items() if key != "messages"}
    if turns[0]["from"] == "system":
        rest["system"] = turns.pop(0)["value"]
    return {"conversations": turns, **rest}, {"format": "sharegpt"}


def as_alpaca(record: Record) -> tuple[Record, dict[str, Any]]:
    messages = list(record["messages"])
    system = {"system": messages.pop(0)["content"]} if messages[0]["role"] == "system" else {}
    pairs = [[messages[at]["content"], messages[at + 1]["content"]] for at in range(0, len(messages), 2)]
    (instruction, output), history = pairs[-1], pairs[:-1]
    rest = {key: value for key, value in record.items() if key != "messages"}
    return {"instruction": instruction, "output": output, "history": history, "input": None, **system, **rest}, {
        "format": "alpaca"
    }


def as_renamed(record: Record) -> tuple[Record, dict[str, Any]]:
    renamed = {"chat" if key == "messages" else key: value for key, value in record.items()}
    return renamed, {"columns": {"chat": "messages"}}


def as_wide(record: Record) -> tuple[Record, dict[str, Any]]:
    """Adds columns and keys of messages that are ignored, and those that are null."""
    messages = [{"id": 3, **each, "tool_calls": None, "name": None} for each in record["messages"]]
    return {"id": "x", **record, "messages": messages, "tools": None, "source": {"a": [1]}}, {
        "ignore_keys": ["id", "source"]
    }


def as_parts(record: Record) -> tuple[Record, dict[str, Any]]:
    messages = [
        {"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in record["messages"]
    ]
    return {**record, "messages": messages}, {}


FORMS = {each.__name__: each for each in (as_sharegpt, as_alpaca, as_renamed, as_wide, as_parts)}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(record=conversations())
def test_every_form_of_a_conversation_is_the_same_sample(form: str, record: Record, folder: Path) -> None:
    """Ids, and which of them are answers, are those that transformers gives."""
    other, section = FORMS[form](record)
    with tempfile.TemporaryDirectory() as place:
        for name, each in (("a", record), ("b", other)):
            Path(place, name).write_text(json.dumps(each))
        (expected,) = samples(Path(place, "a"), folder)
        assert samples(Path(place, "b"), folder, **section) == [expected]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = tokenizer.apply_chat_template(
        record["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ((ids, weights, weight),) = expected
    assert ids == theirs["input_ids"]
    assert weights == [float(each) for each in theirs["assistant_masks"]]
    assert weight == (record.get("weight") or 1.0)


@settings(max_examples=15, deadline=None)
@given(record=conversations())
def test_a_prompt_of_messages_counts_nothing(record: Record, folder: Path) -> None:
    """A completion of messages is the conversation's last answer; `chosen` may repeat the prompt or follow it."""
    *before, last = record["messages"]
    split = {**record, "prompt": before, "completion": [last]}
    del split["messages"]
    worse = {"role": "assistant", "content": last["content"] + "!"}
    pair = {"prompt": before, "chosen": [last], "rejected": [worse]}
    whole = {"chosen": [*before, last], "rejected": [*before, worse]}
    with tempfile.TemporaryDirectory() as place:
        for name, each in (("a", record), ("b", split), ("c", pair), ("d", whole)):
            Path(place, name).write_text(json.dumps(each))
        expected = samples(Path(place, "a"), folder, loss_on="last_answer")
        assert samples(Path(place, "b"), folder) == expected
        pairs = samples(Path(place, "c"), folder, "pairs", format="preference")
        assert samples(Path(place, "d"), folder, "pairs", format="preference") == pairs
        assert pairs[0][0][:2] == expected[0][0][:2]


def test_a_list_after_a_mark_of_byte_order_is_a_list(tmp_path: Path, folder: Path) -> None:
    record = {"prompt": "a", "response": "b"}
    for name, text in (("list", json.dumps([record])), ("lines", json.dumps(record))):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert samples(tmp_path / "list", folder) == samples(tmp_path / "lines", folder)


WRONG: st.SearchStrategy[Any] = st.sampled_from(
    [None, 3, -1.5, True, "", [], {}, [None], ["a"], [[]], {"a": None}, [{"role": 1}], "\ud800"]
)
"""Values of other types, and texts that are none."""
FORMATS: dict[str, tuple[Record, Any]] = {
    "messages": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "content": "c", "tool_call_id": "x", "name": "f"},
                {"role": "assistant", "content": "d", "reasoning_content": "e", "train": True, "weight": 1},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "chat_template_kwargs": {"a": 1},
            "weight": 1,
        },
        None,
    ),
    "prompt_response": ({"prompt": "a", "response": "b", "weight": 1}, None),
    "text": ({"text": "a", "weight": 1}, None),
    "tokens": ({"input_ids": [5, 6], "loss_mask": [0, 1], "weight": 1}, None),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "c"},
                {"from": "gpt", "value": "b", "weight": 1, "train": True},
            ],
            "system": "s",
            "tools": '[{"type": "function", "function": {"name": "f"}}]',
            "weight": 1,
        },
        None,
    ),
    "alpaca": (
        {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["d", "e"]], "weight": 1},
        None,
    ),
    "preference": (
        {
            "prompt": [{"role": "user", "content": "a"}],
            "chosen": [{"role": "assistant", "content": "b"}],
            "rejected": [{"role": "assistant", "content": "c"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "weight": 1,
        },
        "pairs",
    ),
    "unpaired_preference": ({"prompt": "a", "completion": "b", "label": True, "weight": 1}, "answers"),
}
"""A record with every key for each `data.format`, and how answers are compared."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the paths of all values inside a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key, each in inner for found in places(each, (*path, key)))]


def spoilt(draw: Draw, record: Record) -> Record:
    """Replaces or removes values of a record, or adds a key."""
    found: Record = json.loads(json.dumps(record))
    for _ in range(draw(st.integers(1, 2))):
        *parents, last = draw(st.sampled_from(places(found)))
        holder: Any = found
        for part in parents:
            holder = holder[part]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                holder[last] = deepcopy(draw(WRONG))
            case "remove" if len(found) > 1 or parents:
                del holder[last]
            case _ if isinstance(holder, dict):
                holder["other"] = deepcopy(draw(WRONG))
    return found


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_record_that_is_wrong_is_a_sample_or_is_refused_with_its_place(
    form: str, data: st.DataObject, folder: Path
) -> None:
    good, compares = FORMATS[form]
    bad = spoilt(data.draw, good)
    with tempfile.TemporaryDirectory() as place:
        path, staging = Path(place, "a.jsonl"), Path(place, "entry")
        path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
        staging.mkdir()
        encoders = partial(encoder, folder, compares, json.dumps({"format": form}))
        job = EncodingJob((RecordFile(path, FileKind.LINES),), encoders)
        try:
            build_entry(staging, job, 1, stops_at_bad=True, progress=Progress(1, path, print))
        except DataError as fault:
            (line,) = str(fault).splitlines()
            assert line.startswith(f"{path} line 2: ")
            assert len(line) < 1000

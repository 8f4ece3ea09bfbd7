"""Questions and answers: the tokens in the loss, by hand."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.samples.sft import RowLimit, SftDataset, TooLong
from mtrain.data.sft_caches import SftCaches
from mtrain.data.sources import Sources
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.config.samples import config
from tests.fault_table import Notice
from tests.messages import refuses

WriteJsonl = Callable[[Sequence[dict[str, Any]]], Path]


def conversations(
    path: Path,
    tokenizer: Path,
    seq_length: int,
    too_long: TooLong = "end",
    numbers: range | None = None,
    **more: Any,
) -> SftDataset:
    source = {"kind": "sft", "seq_length": seq_length, "tokenizer": str(tokenizer), "train": [{"path": str(path)}]}
    more = {"chat_template": "plain", **more}
    model = load_tokenizer(tokenizer)
    cache = SftCaches(SftSection.model_validate({**source, **more}), model, config().model).open(str(path))
    part = range(len(cache)) if numbers is None else numbers
    return SftDataset(cache, part, RowLimit(seq_length, too_long))


def test_only_the_answer_and_its_end_are_in_the_loss(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    """The sample is a b -> c d e, with <s> = 1, </s> = 2, <pad> = 3, a = 4, b = 5, ..."""
    rows = conversations(write_jsonl([{"prompt": "a b", "response": "c d e", "weight": 0.5}]), word_tokenizer, 8)
    row = rows.sample(0, 0)
    assert row.tokens.tolist() == [1, 4, 5, 6, 7, 8]
    assert row.labels.tolist() == [4, 5, 6, 7, 8, 2]
    assert row.mask.tolist() == [0, 0, 1, 1, 1, 1]
    assert row.weight == 0.5
    assert row.document_starts is None
    assert [row.width] == rows.widths(np.array([0])).tolist() == [6]


def test_only_the_assistants_messages_are_in_the_loss(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    """The ids are ### = 14, user = 15, assistant = 16, system = 17."""
    messages = [
        {"role": "system", "content": "j"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    row = conversations(write_jsonl([{"messages": messages}]), word_tokenizer, 20).sample(0, 0)
    assert row.tokens.tolist() == [1, 14, 17, 13, 14, 15, 4, 14, 16, 5, 6, 2, 14, 15, 7, 14, 16, 8]
    assert row.labels.tolist() == [14, 17, 13, 14, 15, 4, 14, 16, 5, 6, 2, 14, 15, 7, 14, 16, 8, 2]
    assert row.mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert row.weight == 1.0


@pytest.mark.parametrize(
    ("seq_length", "mask"),
    [
        (7, [0, 0, 1, 1, 1, 1]),
        (6, [0, 0, 1, 1, 1, 1]),  # the end is the last label
        (5, [0, 0, 1, 1, 1]),
        (3, [0, 0, 1]),
        (2, [0, 0]),  # no token is left to train
    ],
)
def test_truncation_keeps_the_mask_on_the_answer(
    write_jsonl: WriteJsonl, word_tokenizer: Path, seq_length: int, mask: list[float]
) -> None:
    rows = conversations(write_jsonl([{"prompt": "a b", "response": "c d e"}]), word_tokenizer, seq_length)
    assert rows.sample(0, 0).mask.tolist() == mask
    assert rows.sample(0, 0).tokens.tolist() == [1, 4, 5, 6, 7, 8][:seq_length]


def test_long_samples_are_dropped_or_refused_as_asked(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl(
        [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b c"}, {"prompt": "c", "response": "d"}]
    )
    kept = conversations(path, word_tokenizer, 3, "drop")
    assert (len(kept), kept.too_long.samples) == (2, 1)
    assert [kept.sample(0, index).tokens.tolist() for index in range(2)] == [[1, 4, 5], [1, 6, 7]]
    assert list(kept.notes()) == [f"{path}: 1 of 3 samples has more than 4 tokens: left out, with 5 tokens"]
    assert list(conversations(path, word_tokenizer, 4, "drop").notes()) == []
    with refuses(DataError, "line 2", "samples.jsonl", "data.seq_length=3"):
        conversations(path, word_tokenizer, 3, "refuse")
    with refuses(DataError):
        conversations(path, word_tokenizer, 2, "drop")


def test_a_part_of_the_lines_is_read_alone(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl([{"prompt": "a", "response": word} for word in "bcde"])
    rows = conversations(path, word_tokenizer, 4, numbers=range(2, 4))
    assert [rows.sample(0, index).labels.tolist() for index in range(len(rows))] == [[4, 7, 2], [4, 8, 2]]


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ({"prompt": "a"}, "'response'"),
        ({"response": "a"}, "'prompt'"),
        ({"prompt": 3, "response": "a"}, "'prompt'"),
        (
            {"prompt": "a", "response": None},
            "'response'",
        ),
        ({"prompt": "a", "response": ""}, "'response'"),
        ({"prompt": "a", "response": "\ud800"}, "line 1"),
        ({"prompt": "a", "response": "b", "messages": []}, "line 1"),
        ({"messages": []}, "'messages'"),
        ({"messages": ["a"]}, "messages[0]"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "'bot'",
        ),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}]}, "'messages'"),
        ({"prompt": "a", "response": "b", "weight": -1}, "'weight'"),
        ({"prompt": "a", "response": "b", "weight": True}, "'weight'"),
        ({"prompt": "a", "response": "b", "weight": float("nan")}, "line 1"),
    ],
)
def test_a_bad_sample_is_named(write_jsonl: WriteJsonl, word_tokenizer: Path, line: dict[str, Any], fact: str) -> None:
    with refuses(DataError, fact):
        conversations(write_jsonl([line]), word_tokenizer, 8)


def test_a_run_reads_what_it_opened_though_the_file_changes(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    path = write_jsonl([{"prompt": "a", "response": "b"}])
    rows = conversations(path, word_tokenizer, 4)
    path.write_text("")
    assert rows.sample(0, 0).tokens.tolist() == [1, 4, 5]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.fault(
    "input",
    "messages in the plain form with tools, tool_calls, a question's weight, unknown keys or content: null",
    happens="refused with file and line; data.ignore_keys names what may be dropped",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ({"messages": CHAT, "tools": [{}]}, "'tools'"),
        ({"messages": [*CHAT, CALL]}, "messages[2]"),
        ({"messages": [{**CHAT[0], "weight": 1}, CHAT[1]]}, "messages[0]"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": False}]}, "assistant"),
        ({"messages": [{**CHAT[0], "name": "x"}, CHAT[1]]}, "messages[0]"),
        ({"messages": [*CHAT, {**CALL, "content": None}]}, "messages[2].content"),
        ({"messages": CHAT, "id": 7}, "'id'"),
        ({"prompt": "a", "response": "b", "source": "x"}, "'source'"),
    ],
)
def test_what_would_be_dropped_is_refused(
    write_jsonl: WriteJsonl, word_tokenizer: Path, line: dict[str, Any], fact: str, notice: Notice
) -> None:
    good = {"prompt": "a", "response": "b"}
    with notice, refuses(DataError, fact) as caught:
        conversations(write_jsonl([good, line]), word_tokenizer, 8)
    assert caught.value.exit_code == notice.exit_code


def test_named_keys_are_dropped_on_purpose(write_jsonl: WriteJsonl, word_tokenizer: Path) -> None:
    full = {"messages": [{**CHAT[0], "name": "x"}, CHAT[1]], "id": 1, "weight": 0.5}
    path = write_jsonl([full, {"messages": CHAT}])
    rows = conversations(path, word_tokenizer, 8, ignore_keys=["id", "name", "weight"])
    assert rows.sample(0, 0).tokens.tolist() == rows.sample(0, 1).tokens.tolist()
    assert rows.sample(0, 0).weight == 0.5, "a key of the form is never dropped"


def test_a_chat_template_next_to_the_tokenizer_is_applied(
    tmp_path: Path, write_jsonl: WriteJsonl, word_tokenizer: Path, make_config: Callable[..., Config]
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(word_tokenizer, folder)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    data = {"kind": "sft", "train": [{"path": str(write_jsonl([{"messages": CHAT}]))}], "seq_length": 8}
    row = Sources(make_config({**data, "tokenizer": str(folder)})).training().sample(0)
    assert row.tokens.tolist() == [1, 15, 4, 2, 16, 5]
    assert row.labels.tolist() == [15, 4, 2, 16, 5, 2]
    assert row.mask.tolist() == [0, 0, 0, 0, 1, 1]
    plain = Sources(make_config({**data, "tokenizer": str(folder), "chat_template": "plain"})).training()
    assert plain.sample(0).tokens.tolist() == [1, 14, 15, 4, 14, 16, 5]

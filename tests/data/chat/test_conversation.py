"""Records with messages: what they may hold."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.data.chat.conversation import conversation_of
from tests.data.chat.cases import CALL, TOOL, assistant, user
from tests.fault_table import Notice
from tests.messages import refuses

CHAT = [user("a"), assistant("b")]


def test_what_a_template_reads() -> None:
    assert (
        conversation_of({"messages": [CHAT[0], {**CHAT[1], "tool_calls": []}]}, frozenset(), "all_answers").messages
        == CHAT
    )
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why", "weight": 2, "name": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    found = conversation_of({"messages": [parts, call], "tools": [TOOL], "weight": 0.5}, frozenset(), "all_answers")
    assert found.messages == [
        parts,
        {"role": "assistant", "reasoning_content": "why", "thinking": "why", "tool_calls": [CALL]},
    ]
    assert (found.tools, found.answer_weights, found.weight) == ([TOOL], {1: 2.0}, 0.5)


def test_calls_may_be_numbered_as_answers_of_servers_are() -> None:
    calls = [{**CALL, "index": 0}, {**CALL, "index": 1}]
    record: dict[str, Any] = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert conversation_of(record, frozenset(), "all_answers").messages[1]["tool_calls"] == calls


def test_tools_may_be_json_in_a_text_as_in_a_column_of_parquet() -> None:
    record: dict[str, Any] = {"messages": CHAT, "tools": '[{"name": "f"}]'}
    assert conversation_of(record, frozenset(), "all_answers").tools == [{"name": "f"}]
    nothing: list[Any] = [None, [], "[]"]
    for tools in nothing:
        assert conversation_of({**record, "tools": tools}, frozenset(), "all_answers").tools is None


@pytest.mark.fault(
    "input",
    "a conversation with unknown keys or roles, weights on questions, parts that are no text, or calls without a name",
    happens="refused with file, line and message; data.ignore_keys names keys that may be dropped",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ({"messages": CHAT, "id": 1}, "'id'"),
        ({"messages": []}, "'messages'"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{**CHAT[0], "role": "asistant"}]}, "messages[0]"),
        ({"messages": [{**CHAT[0], "mood": "good"}, CHAT[1]]}, "messages[0]"),
        ({"messages": [{"role": "user"}, CHAT[1]]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}, CHAT[1]]}, "messages[0].content"),
        ({"messages": [user("\ud800"), CHAT[1]]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, CHAT[1]]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{**CHAT[0], "train": True}, CHAT[1]]},
            "messages[0]",
        ),
        ({"messages": [{**CHAT[0], "weight": 1}, CHAT[1]]}, "messages[0]"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": -1}]}, "messages[1].weight"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": 1}]}, "messages[1].train"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": False}]}, "assistant"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "assistant"),
        ({"messages": [CHAT[0], assistant("")]}, "learn"),
        ({"messages": [CHAT[0], {**CHAT[1], "thinking": "a", "reasoning": "b"}]}, "thinking"),
        ({"messages": [{**CHAT[0], "reasoning_content": "x"}, CHAT[1]]}, "messages[0]"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": {}}]}, "tool_calls"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"id": "x"}]}]}, "tool_calls[0]"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{**CALL, "index": "first"}]}]},
            "tool_calls[0]",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"name": "f", "arguments": 3}]}]},
            "tool_calls[0]",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"function": {"name": "f", "strict": 1}}]}]},
            "tool_calls[0].function",
        ),
        ({"messages": CHAT, "tools": "f"}, "'tools'"),
        ({"messages": CHAT, "tools": ["f"]}, "'tools'"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs'"),
        ({"messages": CHAT, "weight": float("inf")}, "'weight'"),
        ({"messages": CHAT, "images": ["x.png"]}, "'images'"),
        ({"messages": [{**CHAT[0], "image": "x.png"}, CHAT[1]]}, "'image'"),
    ],
)
def test_a_bad_conversation_is_named(record: dict[str, Any], fact: str, notice: Notice) -> None:
    with notice, refuses(DataError, fact) as caught:
        conversation_of(record, frozenset(), "all_answers")
    assert caught.value.exit_code == notice.exit_code


def test_keys_may_be_dropped_on_purpose_but_not_those_that_the_model_should_read() -> None:
    record = {"messages": [{**CHAT[0], "mood": 1}, CHAT[1]], "id": 1, "tools": [TOOL]}
    found = conversation_of(record, frozenset({"mood", "id"}), "all_answers")
    assert found.messages == CHAT
    with refuses(DataError, "'tools'", "data.ignore_keys"):
        conversation_of(record, frozenset({"mood", "id", "tools"}), "all_answers")

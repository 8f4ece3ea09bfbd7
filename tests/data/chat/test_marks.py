"""Assignment of `{% generation %}` marks to answers: by one rendering, or by as many as there are answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mtrain.data.chat.answers import marks_of
from mtrain.data.chat.sandbox import Cut, NotRendered, Rendered, Renderer, RenderLimits, Sandbox
from tests.data.chat.cases import CALL, assistant, trained_texts, user
from tests.data.chat.conftest import MakeEncoder

TEXT = st.text('ab <>{}"\n🙂', min_size=1, max_size=6).filter(lambda text: text.strip() != "")
MESSAGE = st.one_of(
    st.builds(user, TEXT),
    st.builds(assistant, TEXT),
    st.builds(lambda text: assistant("", reasoning_content=text), TEXT),
    st.just({"role": "assistant", "tool_calls": [CALL]}),
)
BODIES = [
    "{% generation %}{{ text }}<e>{% endgeneration %}",
    "{{ text }}{% generation %}<e>{% endgeneration %}",
    "{% generation %}<s>{% endgeneration %}{{ text }}",
    "{% generation %}{{ text }}{% endgeneration %}-{% generation %}<e>{% endgeneration %}",
    "{% if text %}{% generation %}{{ text | trim }}{% endgeneration %}{% endif %}",
    "{% generation %}{{ text | upper | replace('A', 'aa') }}{% endgeneration %}",
    "{% generation %}{{ text | tojson(ensure_ascii=true) }}{% endgeneration %}",
]
TEMPLATE = (
    "{% for m in messages %}[{% set text = m.reasoning_content or m.content or m.tool_calls[0].function.name %}"
    "{% if m.role == 'assistant' %}BODY{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)


@functools.cache
def of(template: str) -> Sandbox:
    return Sandbox(template, "T", None, RenderLimits())


@dataclass(frozen=True)
class Watched(Renderer):
    """Notes the beginnings of the conversation that are rendered."""

    asked: list[tuple[Sequence[Mapping[str, Any]], Cut]] = field(default_factory=list)

    def compare(self, cuts: Sequence[Cut]) -> list[Rendered | NotRendered]:
        self.asked.extend((self.messages, cut) for cut in cuts)
        return super().compare(cuts)


def marks(template: str, messages: list[dict[str, Any]]) -> tuple[dict[int, list[tuple[int, int]]], list[Cut]]:
    """Returns what `marks_of` finds, and the beginnings of the conversation that it renders."""
    renderer = Watched(of(template), messages, None, {})
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    _, found = marks_of(answers, renderer)
    return found, [cut for rendered, cut in renderer.asked if rendered is messages]


@pytest.mark.parametrize("body", BODIES)
@settings(max_examples=15, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=6))
def test_each_answer_has_the_marks_that_appear_with_it(body: str, messages: list[dict[str, Any]]) -> None:
    template = TEMPLATE.replace("BODY", body)
    found, _ = marks(template, messages)
    expected: dict[int, list[tuple[int, int]]] = {}
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            # these templates print one message after the other
            before = Renderer(of(template), messages, None, {}).render(Cut(number, False))
            (alone,) = marks(template, [message])[0].values()
            expected[number] = [(len(str(before)) + start, len(str(before)) + end) for start, end in alone]
    assert found == expected


@pytest.mark.parametrize("body", BODIES[:4])
def test_no_beginning_is_rendered_where_one_rendering_says_it(body: str) -> None:
    messages = [message for number in range(4) for message in (user(f"q{number}"), assistant(f"a{number}"))]
    _, asked = marks(TEMPLATE.replace("BODY", body), messages)
    assert asked == [Cut(8, False)]


@pytest.mark.nightly  # by day test_hostile.py renders one with marks
@pytest.mark.parametrize("turns", [200, 400])
def test_a_long_conversation_is_in_the_loss(turns: int, chat_encoder: MakeEncoder, chat_tokenizer: Path) -> None:
    """Turns have 1.7 KB; the renderings of all beginnings together would be up to 272 million characters."""
    messages = [
        message
        for number in range(turns)
        for message in (user(f"{number} " + "q" * 850), assistant(f"{number} " + "a" * 850))
    ]
    for name in ("chatml_marked", "chatml"):
        found = trained_texts(
            chat_encoder(name).encode({"messages": messages}), Tokenizer.from_file(str(chat_tokenizer))
        )
        assert found == [f"{message['content']}<|im_end|>" for message in messages[1::2]]

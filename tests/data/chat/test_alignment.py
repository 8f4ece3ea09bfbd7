"""Empty thoughts that a template writes only in some places are no difference; everything else that differs is one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mtrain.base.errors import DataError
from mtrain.data.chat.spans import gaps
from tests.data.chat.cases import assistant, trained_texts, user
from tests.data.chat.conftest import MakeEncoder
from tests.messages import refuses

PAIRS = [
    *(
        "<think></think>",
        "<reasoning>\n\n</reasoning>",
        "<seed:think>\n</seed:think>",
        "<|x|> </|x|>",
        "[THINK][/THINK]",
    ),
    *("<|channel>thought\n<channel|>", "<|channel><channel|>", "<unused94>thought\n<unused95>", "◁think▷◁/think▷"),
    *(
        "<|START_THINKING|><|END_THINKING|>",
        "<|begin_of_thought|>\n\n<|end_of_thought|>",
        "<|think_start|><|think_end|>",
    ),
]
NO_PAIRS = [
    *("<|im_start|><|im_end|>", "<|im_start|>assistant\n<|im_end|>", "<|im_start|>thought\n<|im_end|>"),
    *("<start_of_turn>model\n<end_of_turn>", "<|turn>model\n<turn|>", "<|im_end|>\n<|im_end|>", "<b><i>", "</b></b>"),
    *("<|start_header_id|>thought<|end_header_id|>", "<think>so</think>", "<|channel>thought\nso<channel|>"),
    *("<|assistant|>thought<|end|>", "<unused94>\n<unused95>", "<think></thought>", "<|channel>final<channel|>"),
]
CONTENT = st.text("aé🙂 \n<>|th", min_size=1, max_size=12).filter(lambda text: text.strip() != "")


@pytest.mark.parametrize("pair", PAIRS)
def test_an_empty_thought_is_known_in_any_words(pair: str) -> None:
    ((start, end, first, last, _),) = gaps(f"a \n{pair}\n\nb")
    assert (start, end, first, last) == (1, 5 + len(pair), 3, 3 + len(pair))
    ((start, end, *_),) = gaps(f"<|im_start|>{pair}{pair} <|im_end|>")
    assert (start, end) == (12, 13 + 2 * len(pair))


@pytest.mark.parametrize("text", NO_PAIRS)
def test_what_else_stands_side_by_side_is_none(text: str) -> None:
    assert gaps(f"a{text}b") == []


class Habits(NamedTuple):
    """Places where a template writes an empty thought."""

    pair: str
    in_prompt: bool
    last_messages: int
    """Number of last messages whose answers have it, or are the only ones without it."""
    in_last: bool

    def writes(self, number: int, num_messages: int) -> bool:
        return (num_messages - 1 - number < self.last_messages) == self.in_last

    @property
    def template(self) -> str:
        operator = "<" if self.in_last else ">="
        return (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.revindex0 "
            f"{operator} {self.last_messages} %}}{{{{ {self.pair!r} }}}}{{% endif %}}"
            "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            f"{{{{ {self.pair if self.in_prompt else ''!r} }}}}{{% endif %}}"
        )


HABITS = st.builds(
    Habits,
    pair=st.tuples(st.sampled_from(PAIRS), st.sampled_from(["", "\n", "\n\n", " "])).map("".join),
    in_prompt=st.booleans(),
    last_messages=st.integers(0, 8),
    in_last=st.booleans(),
)


CONTENTS = st.lists(CONTENT, min_size=1, max_size=4)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(habits=HABITS, contents=CONTENTS)
def test_an_empty_thought_here_and_there_is_no_difference(
    habits: Habits, contents: list[str], encoder_of_text: MakeEncoder, chat_tokenizer: Path
) -> None:
    check_thoughts(habits, contents, encoder_of_text, chat_tokenizer)


@pytest.mark.nightly  # more of the same draws
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(habits=HABITS, contents=CONTENTS)
def test_an_empty_thought_in_many_places_is_no_difference(
    habits: Habits, contents: list[str], encoder_of_text: MakeEncoder, chat_tokenizer: Path
) -> None:
    check_thoughts(habits, contents, encoder_of_text, chat_tokenizer)


def check_thoughts(habits: Habits, contents: list[str], encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    """Checks what is learned from turns of these contents."""
    messages = [message for content in contents for message in (user("q"), assistant(content))]
    sample = encoder_of_text(habits.template).encode({"messages": messages})
    # the model writes the text that follows its prompt in the whole
    expected = "".join(
        (habits.pair if habits.writes(2 * turn + 1, len(messages)) and not habits.in_prompt else "")
        + f"{content}<|im_end|>"
        for turn, content in enumerate(contents)
    )
    assert "".join(trained_texts(sample, Tokenizer.from_file(str(chat_tokenizer)))) == expected


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=st.sampled_from(PAIRS), space=st.sampled_from(["", "\n"]))
def test_a_thought_after_the_tag_that_the_prompt_closes_is_refused(
    pair: str, space: str, encoder_of_text: MakeEncoder
) -> None:
    """The model sees the closed tag, and would have to open it again."""
    (gap,) = gaps(pair)
    label = "thought\n" if "thought\n" in pair else ""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{{{{ {gap.opened + label!r} }}}}{{{{ m.reasoning_content }}}}{{{{ {pair!r} }}}}{{% endif %}}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        f"{{{{ {pair + space!r} }}}}{{% endif %}}"
    )
    thought = [user("a"), assistant("b", reasoning_content="so")]
    with pytest.raises(DataError, match="it does not begin as add_generation_prompt does"):
        encoder_of_text(text).encode({"messages": thought})


def test_a_thought_that_a_template_empties_is_refused(encoder_of_text: MakeEncoder) -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<|channel>thought\n"
        "{{ m.reasoning_content if loop.last }}<channel|>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [user("a"), assistant("b", reasoning_content="so"), user("c"), assistant("d", reasoning_content="oh")]
    with refuses(DataError, "messages[1]"):
        encoder_of_text(text).encode({"messages": messages})
    encoder_of_text(text, loss_on="last_answer").encode({"messages": messages})

"""Tokens in the loss: the answers and the tokens at which they stop, and nothing else, or a refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mtrain.base.errors import DataError
from mtrain.data.chat.encoder import ChatEncoder, token_weights
from mtrain.data.chat.ends import Weighed
from mtrain.hf.tokenizer.tokenizer import EncodedText
from tests.data.chat.cases import TOOL, assistant, trained_texts, user
from tests.data.chat.conftest import MakeEncoder
from tests.fault_table import Notice
from tests.messages import refuses
from tests.paths import DOCS

TEXT = st.text("aé🙂 \n<>|{}\"'\\&%#\tim_end", min_size=1, max_size=20).filter(lambda text: text.strip() != "")
STOPS = {
    "chatml": "<|im_end|>",
    "chatml_marked": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",  # noqa: RUF001
}
TRIMS = ("llama3", "gemma", "mistral")
"""Templates that cut the white space around an answer."""


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, str, bool]]:
    """Draws question, answer, and whether the answer is in the loss; at least one answer is."""
    turns = draw(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4))
    return [*turns[:-1], (*turns[-1][:2], True)]


@pytest.mark.parametrize("name", STOPS)
@settings(max_examples=15, deadline=None)
@given(turns=conversations())
def test_the_loss_holds_the_answers_and_their_stops(
    name: str, turns: list[tuple[str, str, bool]], chat_encoder: MakeEncoder, chat_tokenizer: Path
) -> None:
    messages = [
        message
        for question, answer, train in turns
        for message in (user(question), {**assistant(answer), "train": train})
    ]
    sample = chat_encoder(name).encode({"messages": messages})
    answers = [answer.strip() if name in TRIMS else answer for _, answer, train in turns if train]
    space = " " if name == "mistral" else ""
    expected = "".join(f"{space}{answer}{STOPS[name]}" for answer in answers)
    assert "".join(trained_texts(sample, Tokenizer.from_file(str(chat_tokenizer)))) == expected


def trained(encoder: ChatEncoder, tokenizer: Path, messages: list[dict[str, Any]], **record: Any) -> list[str]:
    sample = encoder.encode({"messages": messages, **record})
    return trained_texts(sample, Tokenizer.from_file(str(tokenizer)))


TWO = [user("a"), assistant("b"), user("c"), assistant("d")]


def test_the_last_answer_alone(chat_encoder: MakeEncoder, chat_tokenizer: Path) -> None:
    for name in ("chatml", "chatml_marked"):
        assert trained(chat_encoder(name, loss_on="last_answer"), chat_tokenizer, TWO) == ["d<|im_end|>"]


def test_each_answer_has_its_weight(chat_encoder: MakeEncoder) -> None:
    messages = [user("a"), {**assistant("b"), "weight": 0.5}, user("c"), {**assistant("d"), "weight": 2}]
    for name in ("chatml", "chatml_marked"):
        sample = chat_encoder(name).encode({"messages": messages, "weight": 3})
        assert [weight for weight in sample.loss_weights.tolist() if weight] == [0.5, 0.5, 2, 2]
        assert sample.weight == 3


REASONED = [user("a"), assistant("b", reasoning_content="why"), user("c"), assistant("d", reasoning_content="so")]


@pytest.mark.fault(
    "input",
    "a chat template that drops or changes earlier answers once later messages follow",
    happens="refused: the model would learn another answer than it has to give; the last answer alone can be trained",
    exit_code=3,
)
def test_reasoning_that_a_template_drops_is_refused_and_the_last_answer_can_be_trained(
    chat_encoder: MakeEncoder, chat_tokenizer: Path, notice: Notice
) -> None:
    with (
        notice,
        refuses(DataError, "messages[1]", "data.loss_on=last_answer") as caught,
    ):
        chat_encoder("qwen3").encode({"messages": REASONED})
    assert caught.value.exit_code == notice.exit_code
    last = ["<think>\nso\n</think>\n\nd<|im_end|>"]
    assert trained(chat_encoder("qwen3", loss_on="last_answer"), chat_tokenizer, REASONED) == last
    skipped = [REASONED[0], {**REASONED[1], "train": False}, *REASONED[2:]]
    assert trained(chat_encoder("qwen3"), chat_tokenizer, skipped) == last


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and thinks is not false and "
    "(loop.last or keeps) %}<think>\n{{ m.reasoning_content or '...' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes a thought before the last answer alone, unless a switch says otherwise."""


@pytest.mark.parametrize(("messages", "ways"), [(TWO, ("keeps: true", "thinks: false")), (REASONED, ("keeps: true",))])
def test_a_refusal_names_the_switches_that_help(
    messages: list[dict[str, Any]], ways: tuple[str, ...], encoder_of_text: MakeEncoder
) -> None:
    named = [f"data.chat_template_kwargs={{{way}}}" for way in ways]
    with refuses(DataError, "messages[1]", *named, "data.loss_on=last_answer") as caught:
        encoder_of_text(SWITCHED).encode({"messages": messages})
    assert str(caught.value).count("data.chat_template_kwargs") == len(ways), "what does not help is not named"
    for way in ways:
        name, value = way.split(": ")
        encoder_of_text(SWITCHED, variables={name: value == "true"}).encode({"messages": messages})
    counted = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with refuses(DataError, "messages[1]") as caught:
        encoder_of_text(counted).encode({"messages": messages})
    assert "data.loss_on" not in str(caught.value), "it does not help"


def test_reasoning_inside_the_text_of_an_answer_that_a_template_drops_is_refused(chat_encoder: MakeEncoder) -> None:
    messages = [user("a"), assistant("<think>why</think>b")]
    with refuses(DataError, "messages[1].content"):
        chat_encoder("deepseek").encode({"messages": messages})


def test_a_switch_of_the_template_moves_the_beginning_of_the_answer(
    chat_encoder: MakeEncoder, chat_tokenizer: Path
) -> None:
    """The empty tags are part of the question without thinking; in the middle they do not occur at all."""
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    assert trained(chat_encoder("qwen3"), chat_tokenizer, TWO, **switch) == ["b<|im_end|>", "d<|im_end|>"]
    tag = [user("a"), assistant("<th"), user("c"), assistant("d")]
    assert trained(chat_encoder("qwen3"), chat_tokenizer, tag, **switch) == ["<th<|im_end|>", "d<|im_end|>"]


def test_switches_of_the_configuration_are_those_of_every_record(encoder_of_text: MakeEncoder) -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ tone }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ tone }}\n{% endif %}"
    )
    own = [{"messages": TWO, "chat_template_kwargs": {"tone": tone}} for tone in ("kind", "curt")]
    plain, kind = encoder_of_text(text), encoder_of_text(text, variables={"tone": "kind"})
    assert kind.encode({"messages": TWO}).ids.tolist() == plain.encode(own[0]).ids.tolist()
    assert kind.encode(own[1]).ids.tolist() == plain.encode(own[1]).ids.tolist() != plain.encode(own[0]).ids.tolist()
    assert kind.prompt({"messages": TWO[:1]}) == plain.prompt({**own[0], "messages": TWO[:1]})
    assert kind.fingerprint != plain.fingerprint
    with refuses(DataError, "data.chat_template_kwargs"):
        encoder_of_text(text, variables={"tone": "\U000f0003"})


def test_an_open_tag_at_the_beginning_of_an_answer_is_part_of_what_the_model_sees(
    encoder_of_text: MakeEncoder,
) -> None:
    """DeepSeek-R1's template does this: the model always begins with its reasoning, and never gives an answer without
    it."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with refuses(DataError, "add_generation_prompt"):
        encoder_of_text(text).encode({"messages": TWO})
    reasoned = [user("a"), assistant("<think>\nwhy</think>b")]
    encoder_of_text(text).encode({"messages": reasoned})


def test_a_stop_token_that_is_not_special_ends_an_answer(encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    text = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}</tool_call>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    encoder = encoder_of_text(text, eos="</tool_call>")
    assert trained(encoder, chat_tokenizer, TWO) == ["b</tool_call>", "d</tool_call>"]


def test_an_answer_that_ends_with_the_text_of_a_special_token_and_nothing_else_is_refused(
    encoder_of_text: MakeEncoder,
) -> None:
    text = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with refuses(DataError):
        encoder_of_text(text).encode({"messages": [user("a"), assistant("b<|im_end|>")]})


def test_a_template_that_shows_the_number_of_messages_is_refused(encoder_of_text: MakeEncoder) -> None:
    text = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with refuses(DataError, "messages[1]"):
        encoder_of_text(text).encode({"messages": TWO})


def test_a_header_never_comes_into_the_loss(encoder_of_text: MakeEncoder) -> None:
    """The template does not know add_generation_prompt."""
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with refuses(DataError, "add_generation_prompt"):
        encoder_of_text(text).encode({"messages": TWO})


def test_a_template_without_stop_tokens_ends_the_last_answer_alone(
    encoder_of_text: MakeEncoder, chat_tokenizer: Path
) -> None:
    text = (
        "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    with refuses(DataError, "messages[1]", "data.loss_on=last_answer"):
        encoder_of_text(text).encode({"messages": TWO})
    # the space is the answer's token, too, where the tokenizer joins it
    (found,) = trained(encoder_of_text(text, loss_on="last_answer"), chat_tokenizer, TWO)
    assert found.strip(" ") == "d\n\n<|im_end|>"


def test_a_template_that_writes_an_answer_twice_or_nowhere_is_refused(encoder_of_text: MakeEncoder) -> None:
    header = "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with refuses(DataError, "messages[1]"):
        encoder_of_text(silent).encode({"messages": TWO})
    with refuses(DataError, "messages[1]"):
        encoder_of_text(silent + header).encode({"messages": TWO})


GENERATION = (
    "{% for m in messages %}[{% if m.role == 'assistant' %}BODY{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}{% generation %}{% endgeneration %}",
        "{% generation %}{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}",
        "{% set x %}{% generation %}ab{{ m.content }}{% endgeneration %}{% endset %}{{ x[:4] }}",
        "{{ m.content }}",
    ],
)
def test_marks_that_say_nothing_clear_are_refused(encoder_of_text: MakeEncoder, body: str) -> None:
    text = GENERATION.replace("BODY", body) + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with refuses(DataError):
        encoder_of_text(text).encode({"messages": TWO})


def test_an_answer_may_be_marked_in_several_pieces(encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    body = "({% generation %}{{ m.content }}{% endgeneration %}-{% generation %}!<|im_end|> {% endgeneration %})"
    encoder = encoder_of_text(GENERATION.replace("BODY", body))
    assert trained(encoder, chat_tokenizer, TWO) == ["b", "!<|im_end|>", "d", "!<|im_end|>"]
    skipped = [TWO[0], {**TWO[1], "train": False}, *TWO[2:]]
    assert trained(encoder, chat_tokenizer, skipped) == ["d", "!<|im_end|>"]


def test_marks_without_a_stop_take_the_one_that_follows(encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    body = "{% generation %}{{ m.content }}{% endgeneration %}"
    ended = encoder_of_text(GENERATION.replace("BODY", f"{body}<|im_end|>"))
    assert trained(ended, chat_tokenizer, TWO) == ["b<|im_end|>", "d<|im_end|>"]
    with refuses(DataError, "messages[1]"):
        encoder_of_text(GENERATION.replace("BODY", body)).encode({"messages": TWO})


@pytest.mark.fault(
    "input",
    "a conversation with tools, reasoning or a message that the chat template does not show to the model",
    happens="refused with file, line and the part: nothing is dropped without a word",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ({"messages": TWO, "tools": [TOOL]}, "tools[0]"),
        ({"messages": [user("a"), assistant("b", reasoning_content="c")]}, "messages[1].reasoning_content"),
        # the name stands in a text, but not because the template shows the tool
        ({"messages": [user("get_weather"), assistant("b")], "tools": [TOOL]}, "tools[0]"),
        ({"messages": [{"role": "tool", "content": "x"}, *TWO]}, "messages[0].content"),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    encoder_of_text: MakeEncoder, record: dict[str, Any], fact: str, notice: Notice
) -> None:
    text = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with notice, refuses(DataError, fact) as caught:
        encoder_of_text(text).encode(record)
    assert caught.value.exit_code == notice.exit_code


def test_a_text_that_the_template_writes_otherwise_is_shown(encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert trained(encoder_of_text(text), chat_tokenizer, TWO) == ["B<|im_end|>", "D<|im_end|>"]


def test_a_token_half_in_an_answer_is_in_the_loss() -> None:
    encoded = EncodedText([1, 2, 3, 4, 5], [(0, 2), (2, 5), (5, 5), (5, 7), (7, 9)])
    spans = [Weighed(3, 6, 0.5), Weighed(6, 7, 2.0)]
    assert token_weights(encoded, spans).tolist() == [0, 0.5, 0.5, 2.0, 0]
    with refuses(DataError):
        token_weights(encoded, [Weighed(9, 10, 1.0)])


def test_the_date_of_today_is_the_one_of_the_configuration(chat_encoder: MakeEncoder, template_folder: Any) -> None:
    with refuses(DataError, "data.chat_date"):
        chat_encoder("llama3", date=None).encode({"messages": TWO})
    named = {"messages": TWO, "chat_template_kwargs": {"date_string": "09 Mar 2025"}}
    by_record = chat_encoder("llama3", date=None).encode(named)
    assert by_record.ids.tolist() == chat_encoder("llama3").encode({"messages": TWO}).ids.tolist()


def test_the_fingerprint_follows_what_decides_the_ids(chat_encoder: MakeEncoder) -> None:
    names = {chat_encoder(name).fingerprint for name in ("chatml", "llama3", "qwen3")}
    options: list[dict[str, Any]] = [
        {"loss_on": "last_answer"},
        {"special_tokens_in_text": True},
        {"date": "2025-01-01"},
    ]
    others = {chat_encoder("chatml", **each).fingerprint for each in options}
    assert len(names | others) == 6
    assert chat_encoder("chatml", ignored=frozenset({"id"})).fingerprint in names


def test_a_prompt_is_what_stands_before_an_answer(chat_encoder: MakeEncoder) -> None:
    encoder = chat_encoder("chatml")
    whole = encoder.encode({"messages": TWO[:2]}).ids.tolist()
    prompt = encoder.prompt({"messages": TWO[:1]}).ids
    assert whole[: len(prompt)] == prompt
    assert len(whole) == len(prompt) + 3  # b, the stop, a line break


def test_the_record_of_the_page_on_finetuning_trains_the_call_and_the_answer(
    chat_encoder: MakeEncoder, chat_tokenizer: Path
) -> None:
    page = (DOCS / "start" / "finetune.md").read_text().partition("## Tools, reasoning")[2]
    record = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    sample = chat_encoder("qwen3").encode(record)
    call, answer = trained_texts(sample, Tokenizer.from_file(str(chat_tokenizer)))
    assert '{"name": "find_order", "arguments": {"id": "7"}}' in call
    assert "<think>\nIt left on Monday.\n</think>\n\nIt left on Monday." in answer
    assert call.endswith("<|im_end|>")
    assert answer.endswith("<|im_end|>")

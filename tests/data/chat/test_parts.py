"""Contents that are lists of parts: read as transformers hands them to the template, or joined where it reads texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mtrain.base.errors import DataError
from tests.data.chat.cases import assistant, trained_texts
from tests.data.chat.conftest import MakeEncoder
from tests.messages import refuses

LISTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}BODY{% endfor %}{% endif %}"
READS = {
    "each trimmed": LISTS.replace("BODY", "{{ p.text | trim }}"),
    "by type": LISTS.replace("BODY", "{% if p['type'] == 'text' %}{{ p['text'] }}|{% endif %}"),
    "upper": LISTS.replace("BODY", "{{ p.text | upper }}"),
    "lists alone": "{% for p in m.content %}{{ p.text }}/{% endfor %}",
}
"""How a template reads lists."""
READS_NOT = {
    "as it is": "{{ m.content }}",
    "added": "{{ m.content + '' }}",
    "JSON": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}",
    "nothing": "{{ m.content if m.content is string else '' }}",
}
"""How a template reads texts alone."""
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role in ROLES %}LIST{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(role: str, *texts: str) -> dict[str, Any]:
    """Returns a message of parts."""
    return {"role": role, "content": [{"type": "text", "text": each} for each in texts]}


def joined(messages: list[dict[str, Any]], roles: list[str]) -> list[dict[str, Any]]:
    """Joins the parts of messages of other roles."""
    return [
        {**each, "content": "".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list) and each["role"] not in roles
        else each
        for each in messages
    ]


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "assistant"],
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (["user"], ["system", "user", "assistant"])),
    ],
)
def test_lists_are_handed_on_where_the_template_reads_them(
    roles: list[str], encoder_of_text: MakeEncoder, chat_tokenizer: Path
) -> None:
    messages = [said("system", "Be ", "brief."), said("user", "One ", " two. "), said("assistant", "Three ", "four.")]
    messages += [said("user", "five"), said("assistant", "six")]
    for name, form in {**READS, **READS_NOT}.items():
        text = TURNS.replace("LIST", form).replace("ROLES", str(roles))
        encoder = encoder_of_text(text)
        judge = PreTrainedTokenizerFast(tokenizer_file=str(chat_tokenizer), chat_template=text)
        given = joined(messages, roles if name in READS else [])
        expected = judge.apply_chat_template(given, return_dict=False)
        assert encoder.encode({"messages": messages}).ids.tolist() == expected, name
        asked = judge.apply_chat_template(given[:2], add_generation_prompt=True, return_dict=False)
        assert encoder.prompt({"messages": messages[:2]}).ids == asked, name


def test_answers_in_parts_are_in_the_loss(encoder_of_text: MakeEncoder, chat_tokenizer: Path) -> None:
    text = TURNS.replace("LIST", READS["each trimmed"]).replace("ROLES", "['user', 'assistant']")
    sample = encoder_of_text(text).encode({"messages": [said("user", "a"), said("assistant", "One ", "two.")]})
    assert trained_texts(sample, Tokenizer.from_file(str(chat_tokenizer))) == ["Onetwo.<|im_end|>"]


def test_a_part_that_the_template_leaves_out_is_refused(encoder_of_text: MakeEncoder) -> None:
    text = TURNS.replace("LIST", "{{ m.content[0].text }}").replace("ROLES", "['user']")
    with refuses(DataError, "messages[0].content[1]"):
        encoder_of_text(text).encode({"messages": [said("user", "One ", "two."), assistant("b")]})

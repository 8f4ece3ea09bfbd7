"""A model that has learned a conversation gives each of its answers and stops, under templates of many habits."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.convert.endings import put_ending
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import chosen_templates
from mtrain.hf.schema.files import declared_ends
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import TOOL, assistant, folder_of, user
from tests.data.chat.memorised import faults

NUM_CONVERSATIONS = 16
MODEL = ModelSection(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=8, vocab_size=1000)


class Habits(NamedTuple):
    """How a template writes messages."""

    close: str
    """What ends each message; empty where the next one's first token does."""
    call_close: str
    """What ends an answer that calls a tool."""
    last_close: str
    """What ends the last answer of a conversation in place of the others; empty where nothing else does."""
    footer: str
    """What follows the last message."""
    thought: str
    """Whether thoughts are kept, dropped before a later question, or a message of their own."""
    repeats_opener: bool
    """Whether every further call of an answer begins as an answer does."""
    marks: str
    """What is marked by generation: nothing, answers, or answers without their ends."""

    @property
    def template(self) -> str:
        """The template itself."""
        begin, end = ("{% generation %}", "{% endgeneration %}") if self.marks != "nothing" else ("", "")
        inner, outer = ("", end) if self.marks == "answers" else (end, "")
        kept = "loop.index0 > last.question" if self.thought == "dropped" else "true"
        thought = (
            "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
            if self.thought == "a message"
            else "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        )
        between = "<|assistant|>" if self.repeats_opener else "\n"
        close = f"{{{{ {self.close!r} }}}}"
        ends = f"{{% if m.tool_calls %}}{{{{ {self.call_close!r} }}}}{{% else %}}{close}{{% endif %}}"
        if self.last_close:
            is_last = "loop.last and not add_generation_prompt"
            ends = f"{{% if {is_last} %}}{{{{ {self.last_close!r} }}}}{{% else %}}{ends}{{% endif %}}"
        return (
            "{% set last = namespace(question=-1) %}{% for m in messages if m.role == 'user' %}"
            "{% set last.question = messages.index(m) %}{% endfor %}"
            "{% for t in tools or [] %}<|system|>\n{{ t | tojson }}{% endfor %}"
            "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
            "{% if m.role == 'assistant' %}"
            f"{begin}{{% if m.reasoning_content and {kept} %}}{thought}{{% endif %}}{{{{ m.content or '' }}}}"
            "{% for c in m.tool_calls or [] %}"
            f"{{% if not loop.first %}}{{{{ {between!r} }}}}{{% endif %}}"
            f"{{{{ c.function | tojson }}}}{{% endfor %}}{inner}{ends}{outer}"
            f"{{% else %}}{{{{ m.content }}}}{close}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}<|assistant|>\n{{% else %}}{{{{ {self.footer!r} }}}}{{% endif %}}"
        )

    def takes(self, record: dict[str, Any]) -> bool:
        """Says whether answers of this conversation can be learned as they are asked for; not of every habit."""
        answers = [each for each in record["messages"] if each["role"] == "assistant"]
        in_row = any(one["role"] == other["role"] for one, other in zip(record["messages"], record["messages"][1:]))
        is_empty = any(not (each.get("content") or "tool_calls" in each) for each in answers)
        reasons = any("reasoning_content" in each for each in answers)
        is_followed = any(each is not record["messages"][-1] for each in answers)
        calls, unmarked = any("tool_calls" in each for each in answers), self.marks == "answers without their ends"
        return not (
            (is_followed and (self.last_close or (not self.close and self.footer.strip())))
            or (reasons and self.thought != "kept")
            or (self.repeats_opener and in_row)
            or (is_empty and (not self.close or unmarked))
            or (calls and unmarked and self.call_close.startswith("</tool_call>"))
        )


def habits(draw: random.Random) -> Habits:
    """Draws the habits of a template."""
    close = draw.choice(["<|im_end|>\n", "<|end|>\n", "<|end|>", ""])
    return Habits(
        close,
        draw.choice([close, "<|call|>", "</tool_call><|call|>", "<|eot_id|>\n"]),
        draw.choice(["", "", "", "<|return|>"]),
        draw.choice(["", "", "<|endoftext|>", "\n"]),
        draw.choice(["kept", "dropped", "a message"]),
        draw.random() < 0.3,
        draw.choice(["nothing", "nothing", "answers", "answers without their ends"]),
    )


def text(draw: random.Random) -> str:
    """Draws a text that begins and ends with a letter."""
    return draw.choice(string.ascii_letters) + "".join(draw.choices("ab \n.,<>{}é🙂", k=draw.randint(0, 6))) + "z"


def conversation(draw: random.Random) -> dict[str, Any]:
    """Draws turns, calls with and without results, thoughts, empty answers, and several answers in a row."""
    has_tools, reasons, is_odd = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.4
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(draw)}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        messages.append(user(text(draw)))
        thought = {"reasoning_content": text(draw)} if reasons and draw.random() < 0.7 else {}
        if has_tools and draw.random() < 0.7:
            calls = [
                {"id": f"call0000{number}", "type": "function", "function": {"name": "get_weather", "arguments": {}}}
                for number in range(draw.choice([1, 1, 2]))
            ]
            content = {"content": draw.choice(["", None, text(draw)])}
            messages.append({"role": "assistant", **content, "tool_calls": calls, **thought})
            if is_odd and draw.random() < 0.3:
                continue
            results = ({"role": "tool", "tool_call_id": call["id"], "name": "get_weather"} for call in calls)
            messages += [{**result, "content": text(draw)} for result in results]
        messages.append(assistant("" if is_odd and draw.random() < 0.3 else text(draw), **thought))
        if is_odd and draw.random() < 0.4:
            messages.append(assistant(text(draw)))
    if draw.random() < 0.2:
        messages.append(user(text(draw)))
    return {"messages": messages, **({"tools": [TOOL]} if has_tools else {})}


BY_DAY = (0, 1, 3, 11, 23, 25, 30, 39, 42, 67)
"""Seeds that together draw every value of every habit."""


def test_the_day_draws_every_habit() -> None:
    def drawn(seeds: Iterable[int]) -> list[set[Any]]:
        return [set(values) for values in zip(*(habits(random.Random(seed)) for seed in seeds), strict=True)]

    assert drawn(BY_DAY) == drawn(range(130))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in BY_DAY else [pytest.mark.nightly]) for seed in range(130)]
)
def test_each_answer_is_given_and_ends(seed: int, tmp_path: Path, chat_tokenizer: Path) -> None:
    draw = random.Random(seed)
    drawn = habits(draw)
    folder = folder_of("chatml", chat_tokenizer, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(drawn.template)
    eos = draw.choice(["<|im_end|>", "<|endoftext|>", "</s>"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = load_tokenizer(folder)
    templates = chosen_templates("auto", tokenizer.path)
    assert templates is not None
    encoder = ChatEncoder(templates, tokenizer, ChatOptions())
    judge = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer.path),
        eos_token=eos,
        chat_template=drawn.template,
        clean_up_tokenization_spaces=False,
    )
    put_ending(folder, None, MODEL)
    stops = set(declared_ends(folder)) | {tokenizer.eos_id}
    assert stops == encoder.stop_ids(), "an export ends where the run does"
    for _ in range(NUM_CONVERSATIONS):
        record = conversation(draw)
        try:
            sample = encoder.encode(record)
        except DataError as refusal:
            wrong = [str(refusal)] if drawn.takes(record) and "nothing to learn" not in str(refusal) else []
        else:
            wrong = faults(sample, record, judge, stops)
        assert wrong == [], (drawn, record)

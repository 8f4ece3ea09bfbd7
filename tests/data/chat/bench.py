"""Published chat templates times drawn conversations: which agree with transformers, and which are refused and why.

python -m tests.data.chat.bench    writes the counts again, which `test_bench` compares
"""

# ruff: noqa: RUF001 - DeepSeek writes its tokens with another bar than the others
from __future__ import annotations

import datetime
import json
import random
import re
import string
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from mtrain.base.errors import DataError
from mtrain.data.chat.encoder import ChatEncoder, ChatOptions
from mtrain.data.chat.template import chosen_templates
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import DAY, TEMPLATES, TOOL, assistant, user
from tests.data.chat.memorised import faults

COUNTS = Path(__file__).with_name("bench.json")
"""Template -> outcome -> number of conversations."""
NUM_CONVERSATIONS = 48
_SPECIAL = re.compile(
    r"<[|｜][^\s<>'\"{}%+]+[|｜]>|<[|｜]?(?:start_of|end_of|turn|s|/s|bos|eos)\w*[|｜]?>|<turn\|>|\[/?[A-Z_]{3,}\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>"
)
_STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|end|>"),
    *("<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
)
_NUMBER = re.compile(r"\[\d+\]")


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Day:
        return cls.fromisoformat(DAY)


def templates() -> dict[str, str]:
    """Returns the templates of TRL, and our own after the published formats, by name."""
    theirs = Path(trl.__file__).parent / "chat_templates"
    files = {f"trl/{path.stem}": path for path in theirs.glob("*.jinja")}
    files |= {path.stem: path for path in TEMPLATES.glob("*.jinja")}
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(files.items())}


def conversations() -> list[dict[str, Any]]:
    """Draws conversations once: turns, system messages, tools and their results, reasoning, and thinking switched
    off."""
    draw = random.Random(8)
    return [_conversation(draw) for _ in range(NUM_CONVERSATIONS)]


def _conversation(draw: random.Random) -> dict[str, Any]:
    record: dict[str, Any] = {"messages": []}
    has_tools, reasons = draw.random() < 0.4, draw.random() < 0.4
    if draw.random() < 0.3:
        record["messages"].append({"role": "system", "content": _text(draw)})
    if has_tools:
        record["tools"] = [TOOL]
    for _ in range(draw.randint(1, 4)):
        record["messages"].append(user(_text(draw)))
        if has_tools and draw.random() < 0.6:
            function = {"name": "get_weather", "arguments": {"city": _text(draw)}}
            call: dict[str, Any] = {"id": "a1b2c3d4e", "type": "function", "function": function}
            call |= {"index": 0} if draw.random() < 0.5 else {}  # the form of servers' answers
            record["messages"] += [
                assistant("", tool_calls=[call]),
                {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": _text(draw)},
            ]
        reasoning = {"reasoning_content": _text(draw)} if reasons and draw.random() < 0.8 else {}
        record["messages"].append(assistant(_text(draw), **reasoning))
    if not reasons and draw.random() < 0.5:
        record["chat_template_kwargs"] = {"enable_thinking": False}
    return record


def _text(draw: random.Random) -> str:
    letters = string.ascii_letters + " \n.,<>{}\"'é🙂"
    return "".join(draw.choices(letters, k=draw.randint(1, 24))).strip() or "x"


def write_tokenizer(folder: Path, found: dict[str, str]) -> None:
    """Writes a tokenizer of bytes, and of the special tokens that the templates name."""
    special = sorted({match for text in found.values() for match in _SPECIAL.findall(text)} | set(_STOPS) | {"<bos>"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    model.decoder = decoders.ByteLevel()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    model.save(str(folder / "tokenizer.json"))


def outcomes(name: str, text: str, folder: Path) -> Iterator[str]:
    """Yields the outcome of each conversation under a template.

    Args:
        name: Name of the template.
        text: Text of the template.
        folder: Folder with tokenizer.json.
    """
    stop = next(each for each in _STOPS if each in text or each == _STOPS[-1])
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": stop}))
    tokenizer = load_tokenizer(folder)
    found = chosen_templates("auto", tokenizer.path)
    assert found is not None, name
    encoder = ChatEncoder(found, tokenizer, ChatOptions(date=DAY))
    judge = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token=stop, chat_template=text
    )
    for record in conversations():
        yield _outcome(encoder, judge, record, "{%- generation" in text or "{% generation" in text)


def _outcome(encoder: ChatEncoder, judge: Any, record: dict[str, Any], is_marked: bool) -> str:
    try:
        expected = judge.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=is_marked,
            **record.get("chat_template_kwargs", {}),
        )
    except (jinja2.TemplateError, TypeError, AttributeError):
        expected = None
    try:
        sample = encoder.encode(record)
    except DataError as fault:
        reason = _NUMBER.sub("[n]", str(fault)).partition(";")[0].partition(" (")[0]
        reason = "the template refuses the conversation" if "refuses the conversation" in reason else reason
        return f"refused: {reason}" if expected is not None else "refused by both"
    if expected is None:
        return "taken, though transformers refuses it"
    ids, counts = sample.ids.tolist(), (sample.loss_weights > 0).tolist()
    if ids[:-1] == expected["input_ids"] and ids[-1] == judge.eos_token_id:
        ids, counts = ids[:-1], counts[:-1]  # this template leaves the stop of the last answer to the text after it
    if ids != expected["input_ids"]:
        return "other ids"
    if is_marked and counts != _up_to_stops(ids, expected["assistant_masks"], encoder.stop_ids()):
        return "other marks"
    if not is_marked and faults(sample, record, judge, encoder.stop_ids()):
        return "an answer is not given, or does not end"
    return "ids and marks agree" if is_marked else "ids agree"


def _up_to_stops(ids: list[int], marks: list[int], stops: frozenset[int]) -> list[bool]:
    """Removes text after a stop from the marks, and adds a stop that follows them."""
    found, is_open = [], False
    is_before = 0
    for id_, mark in zip(ids, marks):
        is_open = (mark == 1 and (is_open or not is_before)) or (is_open and id_ in stops)
        found.append(is_open)
        is_open, is_before = is_open and id_ not in stops, mark
    return found


def counts() -> dict[str, dict[str, int]]:
    """Returns the number of conversations by template and outcome."""
    found = templates()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), found)
        day, chat_template_utils.datetime = chat_template_utils.datetime, _Day
        try:
            return {
                name: dict(sorted(Counter(outcomes(name, text, Path(folder))).items())) for name, text in found.items()
            }
        finally:
            chat_template_utils.datetime = day


if __name__ == "__main__":
    COUNTS.write_text(json.dumps(counts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

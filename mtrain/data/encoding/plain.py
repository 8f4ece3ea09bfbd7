"""Encodes forms that need no chat template; converts the forms of other programs to messages.

    prompt/response:  begin + prompt + response + eos             in the loss: response, eos
    text:             begin + text + eos                          in the loss: text, eos
    messages:         begin + for each message header + content   in the loss: content and eos of every assistant
                      + (eos if it is the assistant's)            message

`begin` is what the tokenizer itself adds before a text: a bos, or nothing. The header is the plain text "### role\\n",
with "\\n\\n" before it from the second message on. Each piece (prompt, response, header, content) is tokenised by
itself, so no token is partly in the loss; if answers are compared or scored, the text is tokenised whole (`joined`).
"""

import json
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.chat.conversation import ANSWERS, LossOn, answers_in_loss
from mtrain.data.chat.spans import num_common
from mtrain.data.encoding.checks import IMAGE_KEYS, check_keys, check_text, check_weight
from mtrain.hf.tokenizer.tokenizer import Tokenizer

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '\\n\\n' if not loop.first else '' }}### {{ message.role }}\n"
    "{{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n' if messages else '' }}### assistant\n{{ '' }}{% endif %}"
)
"""Template that writes the text of plain messages. Tokens may differ: samples tokenise each piece separately, and here
a tokenizer may join them."""
ROLES = ("system", "user", "assistant", "tool")
_PAIR_KEYS = frozenset({"prompt", "response", "weight"})
_TEXT_KEYS = frozenset({"text", "weight"})
_CHAT_KEYS = frozenset({"messages", "weight"})
_MESSAGE_KEYS = frozenset({"role", "content", "weight", "train"})


class TextPart(NamedTuple):
    """Text that is tokenised separately."""

    text: str
    weight: float = 0.0
    ends: bool = False
    """Whether eos follows, with the weight of the text."""


def with_response(record: dict[str, Any]) -> dict[str, Any]:
    """Renames TRL's `completion` to `response`."""
    if "completion" not in record or "response" in record:
        return record
    return {"response" if key == "completion" else key: value for key, value in record.items()}


def pair_parts(record: dict[str, Any], ignored: Set[str]) -> list[TextPart]:
    record = with_response(record)
    for key in ("prompt", "response"):
        if key not in record:
            raise DataError(
                f"has no {key!r}; a line needs prompt and response, or messages, but its keys are "
                f"{', '.join(record) or 'none'}: name another data.format, or rename keys by data.columns"
            )
        check_text(record[key], f"{key!r}")
    if not record["response"]:
        raise DataError("'response' is empty, so there is nothing to learn; remove the line or answer")
    check_keys(record, _PAIR_KEYS, ignored)
    return [TextPart(record["prompt"]), TextPart(record["response"], 1.0, ends=True)]


def text_parts(record: dict[str, Any], ignored: Set[str]) -> list[TextPart]:
    check_keys(record, _TEXT_KEYS, ignored)
    if not check_text(record.get("text"), "'text'"):
        raise DataError("'text' is empty, so there is nothing to learn; remove the line")
    return [TextPart(record["text"], 1.0, ends=True)]


def chat_parts(record: dict[str, Any], ignored: Set[str], loss_on: LossOn) -> list[TextPart]:
    messages = _checked_messages(record["messages"])
    for number, message in enumerate(messages):
        check_keys(message, _MESSAGE_KEYS, ignored, f"messages[{number}] ")
    check_keys(record, _CHAT_KEYS, ignored)
    weights = answers_in_loss(messages, loss_on)
    parts: list[TextPart] = []
    for number, message in enumerate(messages):
        parts.append(TextPart(("\n\n" if number else "") + f"### {message['role']}\n"))
        parts.append(TextPart(message["content"], weights.get(number, 0.0), ends=message["role"] == ANSWERS))
    return parts


def tokenized(
    parts: Iterable[TextPart], tokenizer: Tokenizer, weight: object, special_tokens: bool = False
) -> TokenizedSample:
    """Tokenises the parts and joins them. With `special_tokens`, texts of special tokens become tokens, and a bos or
    eos that the text already has is not added again."""
    ids: list[int] = []
    counts: list[float] = []
    for part in parts:
        new = _ids(part.text, tokenizer, special_tokens, part.ends)
        ids += new
        counts += [part.weight] * len(new)
    begin = _missing_begin(ids, tokenizer, special_tokens)
    ids, counts = [*begin, *ids], [*[0.0] * len(begin), *counts]
    return TokenizedSample(np.array(ids, np.int32), np.array(counts, np.float32), check_weight(weight))


def asked(text: str, tokenizer: Tokenizer, special_tokens: bool = False) -> list[int]:
    """Returns the ids of a prompt as they precede its response in a sample; arguments as for `tokenized`."""
    ids = _ids(text, tokenizer, special_tokens, ends=False)
    return [*_missing_begin(ids, tokenizer, special_tokens), *ids]


def joined(
    prompt: str, answers: Iterable[str], tokenizer: Tokenizer, weight: object, special_tokens: bool = False
) -> list[TokenizedSample]:
    """Builds a sample from the prompt and each answer, tokenised as one text; eos is added.

    The loss begins at the first token at which any sample differs from the prompt alone, the same in all samples: a
    token may straddle prompt and answer.

    Args:
        special_tokens: Whether texts of special tokens become tokens, as for `tokenized`.

    Source: trl 1.10, dpo_trainer.py and kto_trainer.py, tokenize_fn.
    """
    alone = asked(prompt, tokenizer, special_tokens)
    wholes = [
        tokenized([TextPart(prompt + answer, 1.0, ends=True)], tokenizer, weight, special_tokens) for answer in answers
    ]
    start = min(num_common(alone, whole.ids.tolist()) for whole in wholes)
    return [
        replace(whole, loss_weights=np.where(np.arange(len(whole.ids)) < start, 0.0, 1.0).astype(np.float32))
        for whole in wholes
    ]


def _ids(text: str, tokenizer: Tokenizer, special_tokens: bool, ends: bool) -> list[int]:
    ids = tokenizer.encode_with_offsets(text, special_tokens=True).ids if special_tokens else tokenizer.encode(text)
    return [*ids, tokenizer.eos_id] if ends and not (special_tokens and ids[-1:] == [tokenizer.eos_id]) else ids


def _missing_begin(ids: list[int], tokenizer: Tokenizer, special_tokens: bool) -> list[int]:
    begin = list(tokenizer.begin_ids)
    return [] if special_tokens and ids[: len(begin)] == begin else begin


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise DataError("'messages' must be a list of at least one message; fix it")
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{path} needs an object with role and content; fix it")
        if message["role"] not in ROLES:
            raise DataError(
                f"{path} has the role {message['role']!r}, but must be one of {', '.join(ROLES)}; change it"
            )
        check_text(message["content"], f"{path}.content")
    return messages


_ALPACA_KEYS = frozenset({"instruction", "input", "output", "system", "history", "weight", *IMAGE_KEYS})
_SHAREGPT_KEYS = frozenset({"conversations", "system", "tools", "weight", *IMAGE_KEYS})
_TURN_KEYS = frozenset({"from", "value", "weight", "train"})
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
"""Role of each value of `from`."""
_TOKENS_KEYS = frozenset({"input_ids", "loss_mask", "weight"})


def alpaca_as_messages(record: dict[str, Any], ignored: Set[str]) -> dict[str, Any]:
    """Converts instruction, input and output to a question and its answer, after system and history."""
    check_keys(record, _ALPACA_KEYS, ignored)
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": check_text(record["system"], "'system'")})
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError("'history' must be a list of pairs of question and answer; fix it")
    for number, (question, answer) in enumerate(history):
        messages.append({"role": "user", "content": check_text(question, f"history[{number}][0]")})
        messages.append({"role": "assistant", "content": check_text(answer, f"history[{number}][1]")})
    question = check_text(record.get("instruction"), "'instruction'")
    if record.get("input"):
        question += "\n" + check_text(record["input"], "'input'")
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": check_text(record.get("output"), "'output'")})
    return {"messages": messages, "weight": record.get("weight", 1.0), **_images_of(record)}


def sharegpt_as_messages(record: dict[str, Any], ignored: Set[str]) -> dict[str, Any]:
    """Converts `conversations` of `from` and `value` to messages."""
    check_keys(record, _SHAREGPT_KEYS, ignored)
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise DataError("'conversations' must be a list of at least one turn; fix it")
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": check_text(record["system"], "'system'")})
    messages += [_message_of_turn(turn, ignored, f"conversations[{number}]") for number, turn in enumerate(turns)]
    # without tools, their JSON is an empty text
    known = {key: record[key] for key in ("tools", "weight") if record.get(key) not in (None, "")}
    return {"messages": messages, **known, **_images_of(record)}


def _images_of(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in IMAGE_KEYS if key in record}


def _message_of_turn(turn: object, ignored: Set[str], path: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise DataError(f"{path} needs an object with from and value; fix it")
    check_keys(turn, _TURN_KEYS, ignored, f"{path} ")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise DataError(f"{path} is from {speaker!r}, but must be from one of {', '.join(_SHAREGPT_ROLES)}; change it")
    text = check_text(turn.get("value"), f"{path}.value")
    options = {key: turn[key] for key in ("weight", "train") if key in turn}
    if speaker != "function_call":
        return {"role": _SHAREGPT_ROLES[speaker], "content": text, **options}
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path} is a function_call, but its value is not JSON ({fault}); fix it") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls], **options}


def tokens_sample(record: dict[str, Any], ignored: Set[str], vocab_size: int) -> TokenizedSample:
    """Uses `input_ids` and `loss_mask` unchanged: no bos or eos is added."""
    check_keys(record, _TOKENS_KEYS, ignored)
    for key in ("input_ids", "loss_mask"):
        if not isinstance(record.get(key), list):
            raise DataError(f"{key!r} must be a list with one number per token; give input_ids and loss_mask")
    ids, mask = record["input_ids"], record["loss_mask"]
    if len(ids) != len(mask) or not ids:
        raise DataError(
            f"has {len(ids)} numbers in input_ids and {len(mask)} in loss_mask; give as many in both, at least one"
        )
    for index, id_ in enumerate(ids):
        if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < vocab_size:
            raise DataError(
                f"input_ids[{index}] is {id_!r}, but must be a token of the tokenizer, 0 to {vocab_size - 1}"
            )
    weights = [float(flag) if isinstance(flag, bool) else check_weight(flag, "a value of 'loss_mask'") for flag in mask]
    if not any(weights[1:]):
        raise DataError("'loss_mask' selects no token after the first, so there is nothing to learn; remove the line")
    return TokenizedSample(
        np.array(ids, np.int32), np.array(weights, np.float32), check_weight(record.get("weight", 1.0))
    )

"""Records of other forms: converted to `messages`, or tokens already."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import numpy as np

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.encoding.checks import check_keys, check_text, check_weight

_ALPACA_KEYS = frozenset({"instruction", "input", "output", "system", "history", "weight"})
_SHAREGPT_KEYS = frozenset({"conversations", "system", "tools", "weight"})
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
    return {"messages": messages, "weight": record.get("weight", 1.0)}


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
    return {"messages": messages, **known}


def _message_of_turn(turn: object, ignored: Set[str], place: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise DataError(f"{place} needs an object with from and value; fix it")
    check_keys(turn, _TURN_KEYS, ignored, f"{place} ")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise DataError(f"{place} is from {speaker!r}, but must be from one of {', '.join(_SHAREGPT_ROLES)}; change it")
    text = check_text(turn.get("value"), f"{place}.value")
    rest = {key: turn[key] for key in ("weight", "train") if key in turn}
    if speaker != "function_call":
        return {"role": _SHAREGPT_ROLES[speaker], "content": text, **rest}
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{place} is a function_call, but its value is not JSON ({fault}); fix it") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}


def tokens_sample(record: dict[str, Any], ignored: Set[str], vocab_size: int) -> TokenizedSample:
    """Takes `input_ids` and `loss_mask` as they are: no bos or eos is added."""
    check_keys(record, _TOKENS_KEYS, ignored)
    for key in ("input_ids", "loss_mask"):
        if not isinstance(record.get(key), list):
            raise DataError(f"{key!r} must be a list with one number per token; give input_ids and loss_mask")
    ids, mask = record["input_ids"], record["loss_mask"]
    if len(ids) != len(mask) or not ids:
        raise DataError(
            f"has {len(ids)} input_ids and {len(mask)} of loss_mask, but needs as many, at least one; fix it"
        )
    for place, id_ in enumerate(ids):
        if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < vocab_size:
            raise DataError(
                f"input_ids[{place}] is {id_!r}, but must be a token of the tokenizer, 0 to {vocab_size - 1}"
            )
    weights = [float(each) if isinstance(each, bool) else check_weight(each, "a value of 'loss_mask'") for each in mask]
    if not any(weights[1:]):
        raise DataError("'loss_mask' has no token in the loss that another comes before; remove the line")
    return TokenizedSample(
        np.array(ids, np.int32), np.array(weights, np.float32), check_weight(record.get("weight", 1.0))
    )

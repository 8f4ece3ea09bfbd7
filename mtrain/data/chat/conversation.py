"""A conversation of a record: the template's input, and the weight of each answer in the loss."""

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from mtrain.base.errors import DataError
from mtrain.core.batch.numbers import whole_number
from mtrain.core.batch.sample import EncodedImage
from mtrain.data.encoding.checks import IMAGES_NEED, check_keys, check_text, check_weight
from mtrain.data.encoding.images import IMAGE_TYPES, ReadImage
from mtrain.data.formats.record_files import without_nulls

LossOn = Literal["all_answers", "last_answer"]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
ANSWERS = "assistant"
_RECORD_KEYS = frozenset({"messages", "tools", "chat_template_kwargs", "weight"})
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MESSAGE_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", "weight", "train", *_REASONING_KEYS}
)
_CALL_KEYS = frozenset({"id", "index", "type", "function", "name", "arguments"})
_FUNCTION_KEYS = frozenset({"name", "arguments"})
_SHOWN_KEYS = frozenset({"tools", "chat_template_kwargs", "tool_calls", "tool_call_id", "name", *_REASONING_KEYS})
"""Keys that change what the model reads, so they must not be dropped."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that are not switches."""


@dataclass(frozen=True)
class Conversation:
    """A checked record of messages."""

    messages: list[dict[str, Any]]
    """Messages for the template, without nulls and weights. A content is a text or a list of parts: texts, and images
    without their content."""
    tools: list[Any] | None
    variables: dict[str, Any]
    """Switches of the template, such as enable_thinking."""
    answer_weights: dict[int, float]
    """Message number -> weight of each of its tokens; only messages with a weight above 0."""
    weight: float
    images: tuple[EncodedImage, ...] = ()
    """Images of all contents, in their order."""


def conversation_of(
    record: dict[str, Any], ignored: Set[str], loss_on: LossOn | None, read_image: ReadImage | None = None
) -> Conversation:
    """Checks a record with `messages`; errors say what is wrong, not where.

    Args:
        loss_on: Answers that count; None for a prompt, which needs no answer.
        read_image: Reader of the images of contents; None refuses them.
    """
    check_keys(record, _RECORD_KEYS, ignored)
    _refuse_dropped(record, ignored, "")
    raw_messages = record.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        raise DataError("'messages' must be a list of at least one message; fix it")
    messages, present = [], []
    images: list[EncodedImage] = []
    for number, message in enumerate(raw_messages):
        path = f"messages[{number}]"
        if not isinstance(message, dict):
            raise DataError(f"{path} needs an object with role and content; fix it")
        check_keys(message, _MESSAGE_KEYS, ignored, f"{path} ")
        _refuse_dropped(message, ignored, f"{path} ")
        present.append(_present(message))
        messages.append(_message(present[-1], path, read_image, images))
    return Conversation(
        messages,
        _tools(record.get("tools")),
        _variables(record.get("chat_template_kwargs")),
        {} if loss_on is None else answers_in_loss(present, loss_on),
        check_weight(record.get("weight", 1.0)),
        tuple(images),
    )


def _present(message: dict[str, Any]) -> dict[str, Any]:
    """Drops keys without a value: in a parquet column, null and an empty list of calls mean an absent key."""
    known = {key: value for key, value in message.items() if key in _MESSAGE_KEYS and value is not None}
    return {key: value for key, value in known.items() if (key, value) != ("tool_calls", [])}


def _message(
    present: dict[str, Any], path: str, read_image: ReadImage | None, images: list[EncodedImage]
) -> dict[str, Any]:
    """Returns a message as a template reads it; appends the images of its content to `images`."""
    if present.get("role") not in ROLES:
        raise DataError(
            f"{path} has the role {present.get('role')!r}, but must be one of {', '.join(ROLES)}; change it"
        )
    message = {key: value for key, value in present.items() if key in ("role", "tool_call_id", "name")}
    for key in ("tool_call_id", "name"):
        if key in message:
            check_text(message[key], f"{path}.{key}")
    reasoning = _reasoning(present, path)
    if "content" in present:
        message["content"] = _content(present["content"], path, read_image, images)
    if reasoning is not None:
        # under both names that templates read, as in transformers
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    if "tool_calls" in present:
        message["tool_calls"] = _tool_calls(present["tool_calls"], f"{path}.tool_calls")
    if present["role"] != ANSWERS and ("tool_calls" in message or reasoning is not None):
        raise DataError(f"{path} has tool_calls or reasoning, which only the role {ANSWERS} may have; fix the role")
    if "content" not in message and "tool_calls" not in message and reasoning is None:
        raise DataError(f"{path} has no content; write it, or remove the line")
    return message


def _refuse_dropped(record: dict[str, Any], ignored: Set[str], prefix: str) -> None:
    named = next((key for key in record if key in _SHOWN_KEYS and key in ignored), None)
    if named is not None:
        raise DataError(
            f"{prefix}has the key {named!r}, which a chat template reads, but data.ignore_keys names it; remove it "
            "from one of the two"
        )


def _content(
    content: object, path: str, read_image: ReadImage | None, images: list[EncodedImage]
) -> str | list[dict[str, str]]:
    if not isinstance(content, list):
        return check_text(content, f"{path}.content")
    parts = []
    for number, part in enumerate(content):
        name = f"{path}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if read_image is not None and kind in IMAGE_TYPES:
            images.append(read_image(part, name))
            parts.append({"type": "image"})
            continue
        if isinstance(kind, str) and kind != "text":
            why = IMAGES_NEED if kind in IMAGE_TYPES else "only texts and images are read"
            raise DataError(f"{name} is of type {kind!r:.40}, but {why}; leave the record out, or remove the part")
        if not isinstance(part, dict) or kind != "text" or part.keys() - {"type", "text"}:
            raise DataError(f'{name} must be {{"type": "text", "text": ...}}, without other keys; correct it')
        parts.append({"type": "text", "text": check_text(part.get("text"), f"{name}.text")})
    return parts


def texts_of(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _reasoning(present: dict[str, Any], path: str) -> str | None:
    keys = [key for key in _REASONING_KEYS if key in present]
    if len(keys) > 1:
        raise DataError(f"{path} has both {keys[0]} and {keys[1]}, two names for the same thing; keep one")
    return check_text(present[keys[0]], f"{path}.{keys[0]}") if keys else None


def _tool_calls(value: object, path: str) -> list[dict[str, Any]]:
    calls = without_nulls(value)
    if not isinstance(calls, list) or not calls:
        raise DataError(f"{path} must be a list of at least one call; fix it, or remove it")
    for number, call in enumerate(calls):
        name = f"{path}[{number}]"
        if not isinstance(call, dict):
            raise DataError(f"{name} must be an object with the name and arguments of a function; fix it")
        check_keys(call, _CALL_KEYS, frozenset(), f"{name} ")
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(f"{name} names no function; give it a name and arguments")
        if function is not call:
            check_keys(function, _FUNCTION_KEYS, frozenset(), f"{name}.function ")
        if not isinstance(function.get("arguments", {}), dict | str):
            raise DataError(f"{name} has arguments that are neither an object nor a string; fix them")
        if whole_number(call.get("index", 0)) is None:
            raise DataError(f"{name} has the index {call['index']!r:.40}, but must be a whole number; fix it")
    return calls


def _tools(tools: object) -> list[Any] | None:
    """Returns the tools; in parquet, whose rows share their keys, they are JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as fault:
            raise DataError(f"'tools' is a string, but not JSON ({fault}); write a list of descriptions") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("'tools' must be a list of objects, each the description of a function; fix it")
    return list(map(without_nulls, tools))


def _variables(variables: object) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, dict) or variables.keys() & RESERVED:
        raise DataError(
            f"'chat_template_kwargs' must be an object of switches of the template, none of them called "
            f"{', '.join(sorted(RESERVED))}; fix it"
        )
    return {key: value for key, value in variables.items() if value is not None}


def untrained(message: object) -> object:
    """Takes an assistant's message in a prompt out of the loss."""
    is_answer = isinstance(message, dict) and message.get("role") == ANSWERS
    return {**message, "train": False} if isinstance(message, dict) and is_answer else message


def _answer_weight(present: dict[str, Any], path: str) -> float:
    """Returns the weight of each token of a message; 0 unless it is an answer."""
    weight = check_weight(present.get("weight", 1.0), f"{path}.weight")
    train = present.get("train", True)
    if not isinstance(train, bool):
        raise DataError(f"{path}.train is {train!r}, but must be true or false; change it")
    if present.get("role") == ANSWERS:
        return weight if train else 0.0
    if ("weight" in present and weight) or ("train" in present and train):
        raise DataError(
            f"{path} asks to be in the loss, but only answers of the role {ANSWERS} can be; set its train to false"
        )
    return 0.0


def answers_in_loss(messages: Sequence[dict[str, Any]], loss_on: LossOn) -> dict[int, float]:
    """Returns message number -> weight of each token, for the answers in the loss; `weight` and `train` of a message
    override `loss_on`."""
    weights = [_answer_weight(message, f"messages[{number}]") for number, message in enumerate(messages)]
    answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    match loss_on:
        case "all_answers":
            pass
        case "last_answer":
            answers = answers[-1:]
        case _:
            assert_never(loss_on)
    counted = {number: weights[number] for number in answers if weights[number] > 0}
    texts = ("content", "tool_calls", *_REASONING_KEYS)
    if not any(messages[number].get(key) for number in counted for key in texts):
        raise DataError(
            f"'messages' has no answer of the role {ANSWERS} in the loss, so there is nothing to learn; remove the line"
        )
    return counted

"""Rollouts in a file: one JSON object a line, in our format or as vLLM and SGLang write their outputs.

docs/training/verify-rollout.md describes our keys.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.data.formats.jsonl import objects

_PROMPTS = ("prompt", "messages")
_OF_PROMPTS = (*_PROMPTS, "tools", "prompt_token_ids", "temperature")
"""Our keys of a prompt that an engine's record may have or the user may add."""
_OF_ANSWERS = ("mask", "routed_experts", "hidden_states")
"""The same for an answer."""
_KEYS = frozenset({*_OF_PROMPTS, *_OF_ANSWERS, "token_ids", "log_probs", "finish_reason", "likeliest"})
_MOST_LOG_PROB = 1e-3
"""Largest log-probability that rounding makes of 0."""
_COLDEST = 1e-6
"""Lowest temperature; below 1e-5 vLLM takes the likeliest token."""
_NEEDED = (
    "a line needs prompt_token_ids, token_ids and log_probs, or the output of vLLM (prompt_token_ids, outputs) or "
    "SGLang (output_ids, meta_info)"
)


@dataclass(frozen=True)
class Rollout:
    """One answer of the inference engine."""

    source: str
    """File and line, for messages."""
    prompt_ids: list[int]
    """Ids before the answer, at least one."""
    ids: list[int]
    """Ids of the answer, at least one."""
    log_probs: list[float]
    mask: list[bool]
    """Whether the model drew each answer token; results of tools are not compared."""
    temperature: float = 1.0
    """Temperature of the draw and of the log-probabilities in a loss."""
    prompt: str | dict[str, Any] | None = None
    routes: list[list[list[int]]] | None = None
    """The engine's experts, [tokens, layers, k]: a row for each token that it read (prompt and answer without the last
    token), and all layers; layers without experts are ignored, -1 is unknown."""
    hidden_states: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Outputs of `embedding`, `layer N` or `final_layernorm`, [tokens, hidden], for the same tokens."""

    @property
    def num_read(self) -> int:
        """Returns the number of tokens that the engine read."""
        return len(self.prompt_ids) + len(self.ids) - 1


def read_rollouts(path: Path) -> list[Rollout]:
    """Reads a file of rollouts; the DataError for a bad one names its line."""
    if not path.is_file():
        raise DataError(f"{path} with rollouts cannot be read: there is no such file; name a file of JSON lines")
    rollouts = []
    for number, record in objects(path):
        source = f"{path} line {number}"
        try:
            is_of_sglang = "meta_info" in record
            answers = _of_vllm(record) if "outputs" in record else [_of_sglang(record) if is_of_sglang else record]
            rollouts += [_checked(rollout, source) for rollout in answers]
        except DataError as fault:
            raise DataError(f"{source}: {fault}") from None
    if not rollouts:
        raise DataError(f"{path} holds no rollout; {_NEEDED}")
    return rollouts


def repeated_sources(rollouts: Sequence[Rollout]) -> list[str]:
    """Returns the sources of each rollout that occurs more than once, joined by commas."""
    rows: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for rollout in rollouts:
        rows.setdefault((tuple(rollout.prompt_ids), tuple(rollout.ids), tuple(rollout.log_probs)), []).append(
            rollout.source
        )
    return [", ".join(sources) for sources in rows.values() if len(sources) > 1]


def _of_vllm(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the answers of a vLLM RequestOutput; in JSON, the token ids in `logprobs` are strings.

    Source: vLLM 0.32, outputs.py
    """
    outputs = record["outputs"]
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise DataError("outputs must be a list of objects with token_ids and logprobs, as vLLM gives them; fix it")
    shared = {key: record[key] for key in _OF_PROMPTS if record.get(key) is not None}
    for key in _OF_ANSWERS:
        if record.get(key) is not None:
            raise DataError(f"{key} must be in each of outputs, as answers differ in it; move it there")
    for output in outputs:
        ids, candidates = output.get("token_ids"), output.get("logprobs")
        if not isinstance(candidates, list) or not isinstance(ids, list) or len(candidates) != len(ids):
            raise DataError(
                "an output lacks logprobs for each token; draw with SamplingParams(logprobs=0), which costs nothing"
            )
        try:
            log_probs = [by_token[str(token)]["logprob"] for token, by_token in zip(ids, candidates, strict=True)]
        except (KeyError, TypeError) as fault:
            raise DataError(
                f'logprobs must hold {{"TOKEN ID": {{"logprob": NUMBER}}}} for each token, but lacks {fault}; write '
                "them as docs/training/verify-rollout.md shows"
            ) from None
        fields = {key: output[key] for key in _OF_ANSWERS if output.get(key) is not None}
        yield {**shared, **fields, "token_ids": ids, "log_probs": log_probs}


def _of_sglang(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of SGLang's /generate or `Engine.generate`, with return_logprob.

    Source: SGLang 0.5, managers/tokenizer_manager.py: lists of [log-probability, token id, text].
    """
    info = record["meta_info"]
    entries = info.get("output_token_logprobs") if isinstance(info, dict) else None
    try:
        log_probs, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]  # type: ignore[union-attr]
        prompt_ids = [entry[1] for entry in info.get("input_token_logprobs") or ()]
    except (KeyError, TypeError, IndexError):
        raise DataError(
            "meta_info has no output_token_logprobs of [log-probability, token id, text]; ask SGLang with "
            "return_logprob=true"
        ) from None
    fields = {key: record[key] for key in _OF_PROMPTS + _OF_ANSWERS if record.get(key) is not None}
    if info.get("routed_experts") is not None:
        fields["routed_experts"] = info["routed_experts"]
    return {"prompt_token_ids": prompt_ids, **fields, "token_ids": ids, "log_probs": log_probs}


def _checked(record: dict[str, Any], source: str) -> Rollout:
    for key in ("prompt_token_ids", "token_ids", "log_probs"):
        if key not in record:
            raise DataError(f"has no {key!r}, but its keys are {', '.join(record) or 'none'}; {_NEEDED}")
    if unknown := [key for key in record if key not in _KEYS]:
        raise DataError(f"has the key {unknown[0]!r}, which is not known; the keys are {', '.join(sorted(_KEYS))}")
    prompt_ids, ids = (_ids(record[key], key) for key in ("prompt_token_ids", "token_ids"))
    log_probs = _numbers(record["log_probs"], "log_probs")
    if len(log_probs) != len(ids):
        raise DataError(
            f"has {len(ids)} token_ids, but {len(log_probs)} log_probs; give one for each token of the answer "
            "and none for the prompt"
        )
    if (most := max(log_probs)) > _MOST_LOG_PROB:
        raise DataError(f"has the log-probability {most:g}, but none is above 0; give natural logarithms")
    temperature = record.get("temperature", 1.0)
    # dividing logits by it must not overflow: a difference of infinite numbers would not be seen
    if not _is_number(temperature) or temperature < _COLDEST:
        raise DataError(
            f"has the temperature {str(temperature)[:20]}, but needs a number above 0, at least {_COLDEST:g}; "
            "for greedy sampling (temperature 0) write 1"
        )
    states = record.get("hidden_states") or {}
    if not isinstance(states, dict):
        raise DataError("hidden_states must be an object of modules with [tokens, hidden] each; fix it")
    mask, routes = _mask(record.get("mask"), len(ids)), record.get("routed_experts")
    rollout = Rollout(source, prompt_ids, ids, log_probs, mask, float(temperature), _prompt(record), routes, states)
    _check_shapes(rollout)
    return rollout


def _prompt(record: dict[str, Any]) -> str | dict[str, Any] | None:
    keys = [key for key in _PROMPTS if record.get(key) is not None]
    if len(keys) == 2:
        raise DataError("has prompt and messages, but one of them is the prompt; remove the other")
    if keys == ["messages"] or (keys and not isinstance(record["prompt"], str)):
        return {"messages": record[keys[0]], **({"tools": record["tools"]} if record.get("tools") else {})}
    return record["prompt"] if keys else None


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise DataError(f"{name} must be a list of at least one token id, whole numbers from 0; fix it")
    return value


def _numbers(value: object, name: str) -> list[float]:
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise DataError(f"{name} must be a list of finite numbers; fix it")
    return [float(number) for number in value]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _mask(value: object, length: int) -> list[bool]:
    if value is None:
        return [True] * length
    if not isinstance(value, list) or len(value) != length or not all(bit in (0, 1) for bit in value):
        raise DataError(f"mask must be a list of {length} numbers 0 or 1, one for each of token_ids; fix it")
    if not any(value):
        raise DataError("mask is 0 for all tokens, so nothing was drawn; remove the line")
    return [bool(bit) for bit in value]


def _check_shapes(rollout: Rollout) -> None:
    """Refuses routes and hidden states without one row per token read; one more for the last drawn token is fine."""
    lengths = (rollout.num_read, rollout.num_read + 1)
    if rollout.routes is not None:
        if isinstance(rollout.routes, str):
            raise DataError(
                "routed_experts is a text, SGLang's base64 of int32; decode it, and give lists [tokens, layers, k]"
            )
        routes = _array(rollout.routes)
        if routes.size and (routes.dtype.kind != "i" or routes.min() < -1 or routes.max() >= 2**31):
            raise DataError("routed_experts must hold the numbers of experts, whole numbers from 0, or -1; fix it")
        if routes.ndim != 3 or routes.shape[0] not in lengths:
            raise DataError(
                f"routed_experts has the shape {list(routes.shape)}, but needs [tokens, layers, k] with a row for each "
                f"of the {counted(lengths[0], 'token')} read (prompt and answer without the last token); fix it"
            )
    for name, rows in rollout.hidden_states.items():
        states = _array(rows)
        shape = states.shape if states.dtype.kind in "if" and np.isfinite(states).all() else ()
        if len(shape) != 2 or shape[0] not in lengths:
            raise DataError(
                f"hidden_states[{name!r}] has the shape {list(shape)}, but needs [tokens, hidden] with a row for each "
                f"of the {counted(lengths[0], 'token')} read; fix it"
            )


def _array(nested: Any) -> NDArray[Any]:
    """Converts nested lists to an array: of objects if numbers are too large, without axes if the lists are ragged."""
    try:
        return np.array(nested)
    except ValueError:
        return np.zeros((), np.int64)

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

    place: str
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
    """Reads a file of rollouts; raises DataError, with the line, if it is none."""
    if not path.is_file():
        raise DataError(f"{path} with rollouts cannot be read: there is no such file; name a file of JSON lines")
    found = []
    for number, record in objects(path):
        place = f"{path} line {number}"
        try:
            is_of_sglang = "meta_info" in record
            ours = _of_vllm(record) if "outputs" in record else [_of_sglang(record) if is_of_sglang else record]
            found += [_checked(rollout, place) for rollout in ours]
        except DataError as fault:
            raise DataError(f"{place}: {fault}") from None
    if not found:
        raise DataError(f"{path} holds no rollout; {_NEEDED}")
    return found


def repeated_places(rollouts: Sequence[Rollout]) -> list[str]:
    """Returns the places of each rollout that occurs more than once."""
    rows: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for rollout in rollouts:
        rows.setdefault((tuple(rollout.prompt_ids), tuple(rollout.ids), tuple(rollout.log_probs)), []).append(
            rollout.place
        )
    return [", ".join(places) for places in rows.values() if len(places) > 1]


def _of_vllm(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the answers of a vLLM RequestOutput; JSON makes texts of the token ids in `logprobs`.

    Source: vLLM 0.32, outputs.py
    """
    outputs = record["outputs"]
    if not isinstance(outputs, list) or not all(isinstance(each, dict) for each in outputs):
        raise DataError("outputs must be a list of objects with token_ids and logprobs, as vLLM gives them; fix it")
    shared = {key: record[key] for key in _OF_PROMPTS if record.get(key) is not None}
    for key in _OF_ANSWERS:
        if record.get(key) is not None:
            raise DataError(f"{key} must be in each of outputs, as answers differ in it; move it there")
    for output in outputs:
        ids, places = output.get("token_ids"), output.get("logprobs")
        if not isinstance(places, list) or not isinstance(ids, list) or len(places) != len(ids):
            raise DataError(
                "an output has no logprobs, one a token; draw with SamplingParams(logprobs=0), which costs nothing"
            )
        try:
            log_probs = [place[str(token)]["logprob"] for token, place in zip(ids, places, strict=True)]
        except (KeyError, TypeError) as fault:
            raise DataError(
                f'logprobs must hold {{"TOKEN ID": {{"logprob": NUMBER}}}} for each token, but lacks {fault}; write '
                "them as docs/training/verify-rollout.md shows"
            ) from None
        own = {key: output[key] for key in _OF_ANSWERS if output.get(key) is not None}
        yield {**shared, **own, "token_ids": ids, "log_probs": log_probs}


def _of_sglang(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of SGLang's /generate or `Engine.generate`, with return_logprob.

    Source: SGLang 0.5, managers/tokenizer_manager.py: lists of [log-probability, token id, text].
    """
    info = record["meta_info"]
    said = info.get("output_token_logprobs") if isinstance(info, dict) else None
    try:
        log_probs, ids = [each[0] for each in said], [each[1] for each in said]  # type: ignore[union-attr]
        read = [each[1] for each in info.get("input_token_logprobs") or ()]
    except (KeyError, TypeError, IndexError):
        raise DataError(
            "meta_info has no output_token_logprobs of [log-probability, token id, text]; ask SGLang with "
            "return_logprob=true"
        ) from None
    kept = {key: record[key] for key in _OF_PROMPTS + _OF_ANSWERS if record.get(key) is not None}
    if info.get("routed_experts") is not None:
        kept["routed_experts"] = info["routed_experts"]
    return {"prompt_token_ids": read, **kept, "token_ids": ids, "log_probs": log_probs}


def _checked(record: dict[str, Any], place: str) -> Rollout:
    for key in ("prompt_token_ids", "token_ids", "log_probs"):
        if key not in record:
            raise DataError(f"has no {key!r}, but its keys are {', '.join(record) or 'none'}; {_NEEDED}")
    if unknown := [key for key in record if key not in _KEYS]:
        raise DataError(f"has the key {unknown[0]!r}, which is not known; the keys are {', '.join(sorted(_KEYS))}")
    prompt_ids, ids = (_ids(record[key], key) for key in ("prompt_token_ids", "token_ids"))
    log_probs = _numbers(record["log_probs"], "log_probs")
    if len(log_probs) != len(ids):
        raise DataError(
            f"has {len(ids)} token_ids, but {len(log_probs)} log_probs; give that of each token of the answer, and "
            "none for the prompt"
        )
    if (most := max(log_probs)) > _MOST_LOG_PROB:
        raise DataError(f"has the log-probability {most:g}, but none is above 0; give natural logarithms")
    temperature = record.get("temperature", 1.0)
    # no logit divided by it may be infinite: a difference of infinite numbers would not be seen
    if not _is_number(temperature) or temperature < _COLDEST:
        raise DataError(
            f"has the temperature {str(temperature)[:20]}, but needs a number above 0, at least {_COLDEST:g}; "
            "log-probabilities of the likeliest tokens (temperature 0) are those at 1"
        )
    states = record.get("hidden_states") or {}
    if not isinstance(states, dict):
        raise DataError("hidden_states must be an object of modules with [tokens, hidden] each; fix it")
    mask, routes = _mask(record.get("mask"), len(ids)), record.get("routed_experts")
    rollout = Rollout(place, prompt_ids, ids, log_probs, mask, float(temperature), _prompt(record), routes, states)
    _check_shapes(rollout)
    return rollout


def _prompt(record: dict[str, Any]) -> str | dict[str, Any] | None:
    given = [key for key in _PROMPTS if record.get(key) is not None]
    if len(given) == 2:
        raise DataError("has prompt and messages, but one of them is the prompt; remove the other")
    if given == ["messages"] or (given and not isinstance(record["prompt"], str)):
        return {"messages": record[given[0]], **({"tools": record["tools"]} if record.get("tools") else {})}
    return record["prompt"] if given else None


def _ids(given: object, name: str) -> list[int]:
    if not isinstance(given, list) or not given or not all(type(each) is int and each >= 0 for each in given):
        raise DataError(f"{name} must be a list of at least one token id, whole numbers from 0; fix it")
    return given


def _numbers(given: object, name: str) -> list[float]:
    if not isinstance(given, list) or not all(map(_is_number, given)):
        raise DataError(f"{name} must be a list of finite numbers; fix it")
    return [float(each) for each in given]


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= sys.float_info.max


def _mask(given: object, length: int) -> list[bool]:
    if given is None:
        return [True] * length
    if not isinstance(given, list) or len(given) != length or not all(each in (0, 1) for each in given):
        raise DataError(f"mask must be a list of {length} numbers 0 or 1, one for each of token_ids; fix it")
    if not any(given):
        raise DataError("mask is 0 for all tokens, so nothing was drawn; remove the line")
    return [bool(each) for each in given]


def _check_shapes(rollout: Rollout) -> None:
    """Refuses routes and hidden states without one row per read token; the last, drawn one may be included."""
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
                f"of the {lengths[0]} tokens read (prompt and answer without the last token); fix it"
            )
    for name, given in rollout.hidden_states.items():
        states = _array(given)
        shape = states.shape if states.dtype.kind in "if" and np.isfinite(states).all() else ()
        if len(shape) != 2 or shape[0] not in lengths:
            raise DataError(
                f"hidden_states[{name!r}] has the shape {list(shape)}, but needs [tokens, hidden] with a row for each "
                f"of the {lengths[0]} tokens read; fix it"
            )


def _array(given: Any) -> NDArray[Any]:
    """Returns nested lists as an array, of objects if numbers are too large, and without axes if they are ragged."""
    try:
        return np.array(given)
    except ValueError:
        return np.zeros((), np.int64)

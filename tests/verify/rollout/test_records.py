"""Files of rollouts: our own form, outputs of vLLM and SGLang, and lines that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.verify.rollout.records import Rollout, read_rollouts
from tests.messages import refuses

GOOD = {"prompt_token_ids": [1, 5], "token_ids": [7, 8], "log_probs": [-0.5, -1.25]}

SGLANG: dict[str, Any] = {
    "text": "c d",
    "output_ids": [7, 8],
    "meta_info": {
        "input_token_logprobs": [[None, 1, None], [-3.0, 5, None]],
        "output_token_logprobs": [[-0.5, 7, None], [-1.25, 8, None]],
    },
}


def read(folder: Path, *records: Any) -> list[Rollout]:
    file = folder / "rollouts.jsonl"
    file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return read_rollouts(file)


def test_a_line_is_a_rollout(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    routes = [[[0, 1]]] * 3
    (found,) = read(
        tmp_path, {**GOOD, "messages": messages, "temperature": 0.7, "mask": [1, 0], "routed_experts": routes}
    )
    assert (found.prompt_ids, found.ids, found.log_probs) == ([1, 5], [7, 8], [-0.5, -1.25])
    assert (found.mask, found.temperature, found.prompt) == ([True, False], 0.7, {"messages": messages})
    assert (found.num_read, found.routes) == (3, routes)


def test_outputs_of_vllm_are_rollouts(tmp_path: Path) -> None:
    one, other = (
        {
            "token_ids": [7, 8],
            "logprobs": [{"7": {"logprob": -0.5, "rank": 1}}, {"9": {"logprob": 0}, "8": each}],
            "mask": [1, 0],
        }
        for each in ({"logprob": -1.25}, {"logprob": -2.5})
    )
    found = read(tmp_path, {"prompt": "a b", "prompt_token_ids": [1, 5], "outputs": [one, other]})
    assert [each.log_probs for each in found] == [[-0.5, -1.25], [-0.5, -2.5]]
    assert [each.mask for each in found] == [[True, False]] * 2
    assert [(each.prompt, each.prompt_ids, each.ids) for each in found] == [("a b", [1, 5], [7, 8])] * 2


def test_outputs_of_sglang_are_rollouts(tmp_path: Path) -> None:
    found, masked = read(tmp_path, SGLANG, {**SGLANG, "mask": [0, 1]})
    assert (masked.mask, found.mask) == ([False, True], [True, True])
    assert (found.prompt_ids, found.ids, found.log_probs) == ([1, 5], [7, 8], [-0.5, -1.25])


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"log_probs": [-0.5]}, "2 token_ids, but 1"),
        ({"log_probs": [-0.5, 0.7]}, "0.7"),
        ({"log_probs": [-0.5, "x"]}, "log_probs"),
        ({"token_ids": []}, "token_ids"),
        ({"prompt_token_ids": [1, -5]}, "prompt_token_ids"),
        ({"temperature": 0}, "temperature"),
        ({"mask": [1]}, "mask"),
        ({"mask": [0, 0]}, "mask"),
        ({"prompt": "a", "messages": []}, "prompt and messages"),
        ({"routed_experts": [[[0, 1]]]}, "routed_experts"),
        ({"hidden_states": {"layer 0": [[0.5], [0.5, 1.0], [0.5]]}}, "layer 0"),
        ({"logprobs": [1]}, "logprobs"),
        # a whole number that no float64 holds, and a temperature by which logits become infinite
        ({"log_probs": [-0.5, -(10**400)]}, "finite"),
        ({"temperature": 1e-320}, "1e-320"),
        ({"hidden_states": True}, "hidden_states"),
        ({"hidden_states": {"layer 0": [[10**400]] * 3}}, "layer 0"),
        ({"routed_experts": [[[0.5, 1]]] * 3}, "whole numbers"),
        ({"routed_experts": [[[10**30, 1]]] * 3}, "whole numbers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_line_is_refused(tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
    with refuses(DataError, "rollouts.jsonl line 2", fact):
        read(tmp_path, GOOD, {**GOOD, **changes})


@pytest.mark.parametrize(
    "record",
    [
        "no json",
        {"token_ids": [1], "log_probs": [-1.0]},
        {"prompt_token_ids": [1], "outputs": [{"token_ids": [7], "logprobs": None}]},
        {"prompt_token_ids": [1], "outputs": [{"token_ids": [7], "logprobs": [{"8": {"logprob": -1}}]}]},
        {"prompt_token_ids": [1], "outputs": 3},
        {"output_ids": [7], "meta_info": {}},
        {"prompt_token_ids": [1], "mask": [0], "outputs": [{"token_ids": [7], "logprobs": [{"7": {"logprob": -1}}]}]},
        {**SGLANG, "mask": [1]},
        {**SGLANG, "meta_info": {**SGLANG["meta_info"], "routed_experts": "AAAAAAEAAAA="}},
    ],
    ids=["no-json", "no-prompt", "vllm-without", "vllm-other-token", "vllm-no-list", "sglang-without", "vllm-mask",
         "sglang-mask", "sglang-routes"],
)  # fmt: skip
def test_a_line_of_another_form_is_refused(tmp_path: Path, record: Any) -> None:
    with refuses(DataError, "rollouts.jsonl line 1"):
        read(tmp_path, record)


def test_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with refuses(DataError, "rollouts.jsonl"):
        read(tmp_path)
    with refuses(DataError, "missing.jsonl"):
        read_rollouts(tmp_path / "missing.jsonl")

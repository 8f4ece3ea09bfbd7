"""Checks that replay no experts say so where the user's data name some; `mtrain verify parity` replays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.verify.hf import verify_hf
from mtrain.verify.parity import Progress, Request
from mtrain.verify.preempt import verify_preempt
from mtrain.verify.resume.run import verify_resume
from tests.config.samples import config


class _StartedError(Exception):
    """Raised where a check would start its ranks."""


class _NoRanks:
    device = "cpu"

    def run(self, *job: Any, **how: Any) -> Any:
        raise _StartedError


def _no_program(*command: Any) -> Any:
    raise _StartedError


def _hf(user: Config, progress: Progress) -> None:
    ranks: Any = _NoRanks()
    # there are no weights to read: a layout that is not known ends the check before
    verify_hf(user, Request("unknown", 1, 1, None, ""), progress, ranks)


def _resume(user: Config, progress: Progress) -> None:
    ranks: Any = _NoRanks()
    verify_resume(user, Request("dp1", 3, 1, None, "", 2), progress, ranks)


def _preempt(user: Config, progress: Progress) -> None:
    verify_preempt(user, Request(None, 6, 1, None, ""), progress, _no_program)


@pytest.mark.parametrize("check", [_hf, _resume, _preempt])
@pytest.mark.parametrize("has_routes", [True, False])
def test_a_check_without_a_replay_says_so(check: Callable[[Config, Progress], None], has_routes: bool) -> None:
    extras = ["advantages", *["routed_experts:2x2"] * has_routes]
    data = {"kind": "sft", "seq_length": 64, "train": [{"path": "rollouts.jsonl"}], "tokenizer": "tokenizer"}
    experts = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
    said: list[str] = []
    with pytest.raises((_StartedError, ConfigError), match=r"unknown|^$"):
        check(config(model__num_layers=2, model__experts=experts, data=data | {"extras": extras}), said.append)
    expected = ["data.extras: routed_experts are not replayed in this check, every router chooses"]
    assert [line.split(";")[0] for line in said] == expected * has_routes

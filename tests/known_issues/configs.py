"""Configurations of the tests on known issues, and the place of the installed megatron-core."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mtrain.config import Config
from tests.config.samples import config

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 24,
        "ffn_hidden_size": 40,
        "num_attention_heads": 2,
        "vocab_size": 101,
        "vocab_multiple": 1,
    },
    "data": {"kind": "mock", "seq_length": 16},
    "train": {"global_batch_size": 2, "num_steps": 10, "precision": "fp32"},
}
"""Changes that give a model whose tensors leave padding in gradient buckets."""


def small(**changes: Any) -> Config:
    """Makes the small configuration with changes, as `small(model__hidden_dropout=0.1)`."""
    return config(**{**{name: dict(section) for name, section in SMALL.items()}, **changes})


def assert_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"megatron\."):
        config(model__megatron=fields)


def megatron_core() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))

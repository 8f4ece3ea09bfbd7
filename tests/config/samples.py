"""A small legal configuration, and changes to it by dotted key."""

from typing import Any

from mtrain.config import Config

INDEXED: dict[str, Any] = {"kind": "indexed", "seq_length": 64, "train": [{"path": "corpus"}]}


def content(**changes: Any) -> dict[str, Any]:
    """Returns the sections of a legal configuration; `layout__tp=2` sets layout.tp."""
    sections: dict[str, Any] = {
        "run": {"dir": "runs/sample"},
        "model": {
            "num_layers": 8,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "vocab_size": 1000,
        },
        "train": {"global_batch_size": 16, "num_steps": 10},
        "optimizer": {"lr": 1e-3},
        "data": {"kind": "mock", "seq_length": 64},
    }
    for key, value in changes.items():
        *parents, name = key.split("__")
        place = sections
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return sections


def config(**changes: Any) -> Config:
    """Builds the configuration of `content`."""
    return Config.model_validate(content(**changes))

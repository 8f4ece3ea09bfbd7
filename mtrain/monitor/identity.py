"""What a run is: its model, its data and the devices that it runs on, in a line each, from its own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from mtrain.monitor.history import RunHistory
from mtrain.runs.changes import flat_keys

_MOST_PATHS = 3


def identity_of(run: RunHistory) -> dict[str, str]:
    """Returns what the head of the page says of a run; what its files do not tell is left out."""
    keys = flat_keys(run.config) if run.config else {}
    found = {"model": _model(keys), "data": _data(keys), "devices": _devices(run.environment)}
    return {name: text for name, text in found.items() if text}


def _model(keys: Mapping[str, Any]) -> str:
    origin = keys.get("model.hf") or keys.get("checkpoint.initialize_from")
    layers, width, words = (keys.get(f"model.{name}") for name in ("num_layers", "hidden_size", "vocab_size"))
    parts = [f"from {origin}"] if origin else []
    if layers and width and words:
        parts.append(f"{layers} layers of width {width:,}, {words:,} tokens in the vocabulary")
    if keys.get("model.experts.num_experts"):
        parts.append(f"{keys['model.experts.num_experts']} experts, {keys.get('model.experts.top_k')} for a token")
    if keys.get("adapter.rank"):
        parts.append(f"{keys.get('adapter.kind')} of rank {keys['adapter.rank']}")
    return "; ".join(parts)


def _data(keys: Mapping[str, Any]) -> str:
    if "data.kind" not in keys:
        return ""
    paths = [str(source["path"]) for source in keys.get("data.train") or [] if "path" in source]
    parts = [str(keys["data.kind"])]
    if paths:
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        parts.append(", ".join(PurePath(path).name for path in paths[:_MOST_PATHS]) + more)
    if keys.get("data.seq_length") and keys.get("train.global_batch_size"):
        unit = "packed rows" if keys.get("data.packing.batch") == "rows" else "samples"
        parts.append(f"{keys['train.global_batch_size']:,} {unit} of up to {keys['data.seq_length']:,} tokens a step")
    return "; ".join(parts)


def _devices(environment: Mapping[str, str]) -> str:
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return ""
    processor = environment.get("gpu", "").removeprefix("none, ")
    kind = f"CPU ({processor})" if device == "cpu" else processor or device
    layout = environment.get("layout")
    return f"{ranks} x {kind}" + (f", {layout}" if layout else "")

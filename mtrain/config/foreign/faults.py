"""Faults of a translated configuration: wrong keys, and keys that the user still has to add."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.base.errors import MtrainError
from mtrain.config.kinds import merged
from mtrain.config.load import MergedContent, Resolve
from mtrain.config.schema.root import Config

_MAX_ROUNDS = 40
"""Limit of the search for faults that hide each other, far above the need of real files."""
_KEY = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_FOLDER = "model.hf"
_STAND_INS: Mapping[str, Any] = {
    "run": {"dir": "run"},
    "train": {"global_batch_size": 1, "num_steps": 1_000_000},
    "optimizer": {"lr": 1.0},
    "data": {"seq_length": 65536, "tokenizer": "tokenizer", "train": [{"path": "corpus"}]},
    "loss": {"norm_length": 1024},
}
"""Values for keys that the user may still have to add, so that all others can be checked."""


class Faults(NamedTuple):
    missing: list[str]
    """Messages about keys without a value, and about a model that is not on this machine."""
    wrong: list[str]


def find_faults(content: Mapping[str, Any], resolve: Resolve) -> Faults:
    """Finds all faults of a configuration, by repairing a copy until no fault hides another.

    Args:
        content: Sections with their keys; not changed.
        resolve: Fills in keys from the folders that keys name.
    """
    sections: dict[str, Any] = copy.deepcopy(dict(content))
    faults = Faults([], [])
    known: set[str] = set()
    is_stand_in = False
    for _ in range(_MAX_ROUNDS):
        try:
            MergedContent(sections, ()).config(resolve)
            break
        except MtrainError as error:
            lines = str(error).splitlines()
        keys = [_key_of(line) for line in lines]
        for key, line in zip(keys, lines):
            is_known = not known.isdisjoint((key, *keys_in(line)))
            if not is_known and not (is_stand_in and _names_stand_in(content, line)):
                _record(sections, key, line, faults)
        is_stand_in |= _FOLDER in keys
        repaired = [_repair(sections, key, line) for key, line in zip(keys, lines)]
        if not any(repaired):
            break
        known.update(keys)
    return faults


def keys_in(line: str) -> list[str]:
    """Returns the dotted keys that a message names."""
    return [key for key in _KEY.findall(line) if key.partition(".")[0] in Config.model_fields]


def _key_of(line: str) -> str:
    """Returns the key at the beginning of a message; `model.hf` if the message begins with a file of that folder."""
    match = _KEY.match(line)
    return match[0] if match is not None and match[0] in keys_in(line) else _FOLDER


def _names_stand_in(content: Mapping[str, Any], line: str) -> bool:
    """Says whether a message names a size of the model that only a stand-in gives."""
    return any(key.startswith("model.") and value_at(content, key) is None for key in keys_in(line))


def _is_missing(sections: Mapping[str, Any], key: str) -> bool:
    if key == _FOLDER:
        return not Path(str(value_at(sections, key))).exists()
    return value_at(sections, key) is None and _stand_in(sections, key) is not None


def _record(sections: Mapping[str, Any], key: str, line: str, faults: Faults) -> None:
    lines = faults.missing if _is_missing(sections, key) else faults.wrong
    if line not in lines:
        lines.append(line)


def _repair(sections: dict[str, Any], key: str, line: str) -> bool:
    if key == _FOLDER:
        model = {name: value for name, value in sections.get("model", {}).items() if name != "hf"}
        is_new = model != sections.get("model")
        sections["model"] = merged(_model_for(sections), model)
        return is_new
    if _is_missing(sections, key):
        return _fill(sections, key)
    candidates = [key, *(other for other in keys_in(line) if "." in other)]
    return any(_remove(sections, candidate) for candidate in candidates)


def value_at(sections: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key, or None."""
    value: Any = sections
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _stand_in(sections: Mapping[str, Any], key: str) -> Any:
    return value_at({**_STAND_INS, "model": _model_for(sections)}, key)


def _fill(sections: dict[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    stand_in = copy.deepcopy(_stand_in(sections, key))
    sections[section] = {**sections.get(section, {}), name: stand_in} if name else stand_in
    return True


def _remove(sections: dict[str, Any], key: str) -> bool:
    *parents, name = key.split(".")
    section = value_at(sections, ".".join(parents)) if parents else sections
    if not isinstance(section, dict) or section.pop(name, None) is None:
        return False
    if parents[:1] == ["model"] and "hf" not in sections["model"]:
        sections["model"] = merged(_model_for(sections), sections["model"])
    return True


def _model_for(sections: Mapping[str, Any]) -> dict[str, Any]:
    layout = sections.get("layout", {})
    tp, pp, vpp, cp, ep, etp = (_size(layout.get(name)) for name in ("tp", "pp", "vpp", "cp", "ep", "etp"))
    ends = [_size(layout[name]) for name in ("first_stage_layers", "last_stage_layers") if layout.get(name)]
    heads = 8 * tp * cp
    model: dict[str, Any] = {
        "num_layers": sum(ends) + 8 * max(0, pp * vpp - len(ends)),
        "hidden_size": 64 * heads,
        "ffn_hidden_size": 128 * heads,
        "num_attention_heads": heads,
        "vocab_size": 100_000,
    }
    has_experts = ep > 1 or etp > 1 or "router" in sections.get("loss", {})
    if has_experts or "experts" in sections.get("model", {}):
        sizes = {"ffn_hidden_size": 64 * etp, "shared_ffn_hidden_size": 64 * tp}
        model["experts"] = {"num_experts": 8 * ep, "top_k": 2, "first_dense_layers": 1, **sizes}
    return model


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1

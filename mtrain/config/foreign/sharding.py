"""Translation of DeepSpeed's ZeRO and torch's FSDP to `layout.shard`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.config.foreign.translation import Settings, Translation
from mtrain.config.foreign.values import boolean, is_same, listed, number, scalar
from mtrain.config.load import read_mapping

_STAGE = re.compile(r"(?<![a-z])(?:zero|z|stage)[-_]?(?:stage)?[-_]?([0-3])(?!\d)")
"""Stage in names such as zero3, zero3_bf16.json and ds_z3_config.json."""
_WHOLE = ("full_shard", "hybrid_shard", "1", "4")
"""FSDP strategies that shard weights as well, by name and number; hybrid ones keep a copy on each node."""
_PARTLY = ("shard_grad_op", "no_shard", "hybrid_shard_zero2", "2", "3", "5")
_OTHER_WORDS = ("auto_wrap", "offload", "fsdp", "fsdp2")
_FILES = (".json", ".yaml", ".yml")


def zero_stage(value: Any) -> int | None:
    """Returns the stage of ZeRO; None for a missing file whose name has no stage.

    Args:
        value: A configuration of DeepSpeed, its JSON text, the path of its file, or a name such as zero3.

    Raises:
        ValueError: The value is not a configuration of DeepSpeed.
        ConfigError: The file cannot be read.
    """
    content = _content(value)
    if isinstance(content, Mapping):
        return int(number((content.get("zero_optimization") or content).get("stage", 0)))
    match = _STAGE.search(Path(content).name)
    if match is None and not _is_absent(content):
        raise ValueError(f"{value!r} has no stage of ZeRO")
    return None if match is None else int(match[1])


def fsdp_options(value: Any) -> dict[str, Any] | None:
    """Returns FSDP's options without the prefix `fsdp_`; None if FSDP is off or its file is missing.

    Args:
        value: Options, their JSON text, the path of their file, a switch, or words such as full_shard.

    Raises:
        ValueError: The value is nothing of this kind.
        ConfigError: The file cannot be read.
    """
    content = _content(value)
    if isinstance(content, Mapping):
        options = {key.removeprefix("fsdp_"): option for key, option in content.items()}
        words, inner = options.pop("fsdp", None), options.pop("config", None)  # in a file of ms-swift
        return {**(fsdp_options(words) or {}), **options, **(fsdp_options(inner) or {})}
    if content is None or _is_absent(content):
        return None
    words = " ".join(map(str, listed(content))).lower().split()
    if not set(words) <= {*_WHOLE, *_PARTLY, *_OTHER_WORDS}:
        return {} if boolean(" ".join(words)) else None
    strategies = [word for word in words if word not in _OTHER_WORDS]
    return {"reshard_after_forward": strategies[0]} if strategies else {}


def put_sharding(config: Translation, run: Settings, *, needs_switch: bool = True) -> None:
    """Sets `layout.shard` from the settings deepspeed, fsdp and fsdp_config.

    Args:
        needs_switch: Whether fsdp_config has an effect only with fsdp, as in transformers.
    """
    given = {name: run[name] for name in ("deepspeed", "fsdp", "fsdp_config") if run[name] is not None}
    if needs_switch and "fsdp" not in given:
        given.pop("fsdp_config", None)
    stage = zero_stage(given["deepspeed"]) if "deepspeed" in given else None
    if stage is not None:
        put_shard(config, f"{run.origin('deepspeed')}, ZeRO-{stage}", is_whole=stage == 3)
        return
    for name in (name for name, value in given.items() if _is_absent(value)):
        config.lost.append(
            f"{name}={given[name]}: this file is not on this machine; set layout.shard=weights if it shards weights"
        )
    switch, options = (fsdp_options(given.get(name)) for name in ("fsdp", "fsdp_config"))
    if switch is None and (options is None or "fsdp" in given):
        return
    options, names = {**(switch or {}), **(options or {})}, run.origin("fsdp", "fsdp_config")
    strategy = options.get("reshard_after_forward", options.get("sharding_strategy", True))
    put_shard(config, names, is_whole=is_same(strategy, True) or str(strategy).lower() in _WHOLE)
    if is_same(options.get("activation_checkpointing"), True):
        config.drop("train.recompute", is_named=False)
        config.put("train.recompute", "full", f"{names}: activation_checkpointing")


def put_shard(config: Translation, origin: str, *, is_whole: bool) -> None:
    """Sets `layout.shard`; sharded weights (`is_whole`) always overlap, so the keys for overlap are dropped."""
    config.put("layout.shard", "weights" if is_whole else "optimizer", origin)
    if is_whole:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            config.drop(f"train.{name}")


def _content(value: Any) -> Any:
    """Returns the mapping in a JSON text or a file; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return scalar(value)
    is_file = isinstance(value, str) and value.endswith(_FILES) and not _is_absent(value)
    return read_mapping(Path(value)) if is_file else value


def _is_absent(value: Any) -> bool:
    """Says whether a value is the path of a missing file."""
    return isinstance(value, str) and value.endswith(_FILES) and not Path(value).is_file()


CHECKS: Mapping[str, Callable[[Any], Any]] = {"zero_stage": zero_stage, "fsdp_options": fsdp_options}
"""Name in the tables of several programs -> function that refuses an illegal value."""

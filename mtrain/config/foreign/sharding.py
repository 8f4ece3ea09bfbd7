"""What data-parallel ranks divide, from keys of DeepSpeed's ZeRO and torch's FSDP in other programs."""

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
"""Strategies of FSDP that divide the weights too, by their names and numbers; hybrid ones copy them between nodes."""
_PARTLY = ("shard_grad_op", "no_shard", "hybrid_shard_zero2", "2", "3", "5")
_OTHER_WORDS = ("auto_wrap", "offload", "fsdp", "fsdp2")
_FILES = (".json", ".yaml", ".yml")


def zero_stage(value: Any) -> int | None:
    """Returns the stage of ZeRO; None for a file that is not here and whose name has none.

    Args:
        value: A configuration of DeepSpeed, its JSON text, the path of its file, or a name such as zero3.

    Raises:
        ValueError: The value is not a configuration of DeepSpeed.
        ConfigError: The file cannot be read.
    """
    given = _content(value)
    if isinstance(given, Mapping):
        return int(number((given.get("zero_optimization") or given).get("stage", 0)))
    found = _STAGE.search(Path(given).name)
    if found is None and not _is_absent(given):
        raise ValueError(f"{value!r} has no stage of ZeRO")
    return None if found is None else int(found[1])


def fsdp_options(value: Any) -> dict[str, Any] | None:
    """Returns FSDP's options without the prefix `fsdp_`; None if it is off or its file is not here.

    Args:
        value: Options, their JSON text, the path of their file, a switch, or words such as full_shard.

    Raises:
        ValueError: The value is nothing of this kind.
        ConfigError: The file cannot be read.
    """
    given = _content(value)
    if isinstance(given, Mapping):
        options = {key.removeprefix("fsdp_"): option for key, option in given.items()}
        words, inner = options.pop("fsdp", None), options.pop("config", None)  # in a file of ms-swift
        return {**(fsdp_options(words) or {}), **options, **(fsdp_options(inner) or {})}
    if given is None or _is_absent(given):
        return None
    words = " ".join(map(str, listed(given))).lower().split()
    if not set(words) <= {*_WHOLE, *_PARTLY, *_OTHER_WORDS}:
        return {} if boolean(" ".join(words)) else None
    strategies = [word for word in words if word not in _OTHER_WORDS]
    return {"reshard_after_forward": strategies[0]} if strategies else {}


def put_sharding(config: Translation, run: Settings, *, needs_switch: bool = True) -> None:
    """Sets what ranks divide from the settings deepspeed, fsdp and fsdp_config.

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
        config.lost.append(f"{name}={given[name]}: no such file is here; set layout.shard=weights if it shards weights")
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
    """Sets what ranks divide: if `is_whole` weights too, without the switches of overlaps, which they always have."""
    config.put("layout.shard", "weights" if is_whole else "optimizer", origin)
    if is_whole:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            config.drop(f"train.{name}")


def _content(value: Any) -> Any:
    """Returns the mapping that a text or a file has; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return scalar(value)
    is_file = isinstance(value, str) and value.endswith(_FILES) and not _is_absent(value)
    return read_mapping(Path(value)) if is_file else value


def _is_absent(value: Any) -> bool:
    """Says whether a value is the path of a file that is not here."""
    return isinstance(value, str) and value.endswith(_FILES) and not Path(value).is_file()


CHECKS: Mapping[str, Callable[[Any], Any]] = {"zero_stage": zero_stage, "fsdp_options": fsdp_options}
"""Name in the tables of several programs -> function that refuses an illegal value."""

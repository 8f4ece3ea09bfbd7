"""A PEFT folder: adapter_config.json, adapter_model.safetensors, and conversion of its tensors."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.config.messages import readable
from mtrain.config.schema.adapter import PARTS, AdapterSection, AnyAdapter, LoraSection, Target
from mtrain.config.schema.model import ModelSection
from mtrain.hf.io.safetensors import SafetensorsFile, shown_names
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import inside, read_json
from mtrain.hf.schema.peft import (
    CONFIG_NAME,
    TENSORS_NAME,
    PeftTensor,
    differences,
    path_in_model,
    rank_and_alpha,
    saved_modules,
    tensors,
)

_FROZEN = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""Endings of frozen tables that PEFT saves with their adapters."""


class PeftFolder:
    """An opened folder that holds exactly the adapter of a run."""

    def __init__(self, path: Path, family: Family, model: ModelSection, adapter: AdapterSection) -> None:
        """Reads and checks names, shapes and settings; reads no tensor."""
        config = read_json(inside(path, CONFIG_NAME))
        if faults := differences(config, family, model, adapter):
            raise DataError(f"{path / CONFIG_NAME} is another adapter than the run's: {'; '.join(faults)}; change one")
        self._file = SafetensorsFile(inside(path, TENSORS_NAME))
        self._names: dict[str, tuple[PeftTensor, str]] = {}
        wanted: set[str] = set()
        for each in tensors(family, model, adapter):
            # older versions wrote the magnitudes as weights of modules
            name = next((name for name in (each.name, f"{each.name}.weight") if name in self._file.entries), each.name)
            self._names[each.key] = each, name
            wanted.add(name)
        self._check(path, wanted)

    def _check(self, path: Path, wanted: set[str]) -> None:
        # copies of frozen tables: the run has them from the model that it loads
        there = {name for name in self._file.entries if not name.endswith(_FROZEN)}
        faults = [f"it lacks {shown_names(sorted(wanted - there))}"] if wanted - there else []
        faults += [f"it holds {shown_names(sorted(there - wanted))}"] if there - wanted else []
        faults += [
            f"{name} has shape {list(self._file.entries[name].shape)} instead of {list(each.shape)}"
            for each, name in self._names.values()
            if name in self._file.entries and self._file.entries[name].shape != each.shape
        ]
        if faults:
            raise DataError(
                f"{path} does not fit adapter.targets and model.*: {'; '.join(faults[:4])}; name what it adapts in "
                "adapter.targets"
            )

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor in float32 by our global name."""
        for key, (each, theirs) in self._names.items():
            if key == name:
                return from_peft(each, self._file.tensor(theirs).float())
            # PEFT has one tensor for all experts, this program a name for each
            head, _, tail = key.partition("{E}")
            if tail and name.startswith(head) and name.endswith(tail):
                expert = int(name.removeprefix(head).removesuffix(tail))
                return from_peft(each, self._file.tensor(theirs).float())[expert]
        raise AssertionError(name)


def adapter_of(path: Path, family: Family, model: ModelSection) -> AdapterSection:
    """Derives the section `adapter` from a PEFT folder."""
    config = read_json(inside(path, CONFIG_NAME))
    there = SafetensorsFile(inside(path, TENSORS_NAME)).entries.keys()
    settings: dict[str, Any] = {
        "kind": "dora" if config.get("use_dora") else "lora",
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "scaling": "rslora" if config.get("use_rslora") else "standard",
        "targets": [part for part in PARTS if _is_adapted(part, there, family, model)],
        "modules_to_save": _saved_whole(config, model),
    }
    settings |= _patterns(
        path, config, [each for part in settings["targets"] for each in _tensors_of(part, family, model)]
    )
    try:
        return TypeAdapter[AdapterSection](AnyAdapter).validate_python(settings)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise DataError(f"{path / CONFIG_NAME} is no adapter of this model: {reasons}; name another folder") from None


def _patterns(path: Path, config: dict[str, Any], named: Sequence[PeftTensor]) -> dict[str, dict[str, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for each in named if config.get("rank_pattern") or config.get("alpha_pattern") else ():
        numbers = rank_and_alpha(config, path_in_model(each))
        if found.setdefault(each.matrix.part, numbers) != numbers:
            raise DataError(
                f"{path / CONFIG_NAME} gives {each.matrix.part} other ranks or alphas in some layers (rank_pattern, "
                "alpha_pattern), but all layers have the same here; merge it into the model"
            )
    return {
        "rank_pattern": {part: rank for part, (rank, _) in found.items()},
        "alpha_pattern": {part: alpha for part, (_, alpha) in found.items()},
    }


def _saved_whole(config: dict[str, Any], model: ModelSection) -> list[str]:
    named = saved_modules(config)
    if model.output.is_new:
        named -= {"head"}  # learns whole without being named
    # PEFT's file of a tied table that stays tied may have either name
    is_one = (
        model.output.is_tied and config.get("ensure_weight_tying") and not named.isdisjoint(("embedding", "output"))
    )
    return sorted(named | {"embedding"} if is_one else named)


def _tensors_of(part: Target, family: Family, model: ModelSection) -> list[PeftTensor]:
    return [each for each in tensors(family, model, LoraSection(targets=(part,))) if each.kind == "lora_a"]


def _is_adapted(part: Target, there: Set[str], family: Family, model: ModelSection) -> bool:
    try:
        named = [each.name for each in _tensors_of(part, family, model)]
    except DataError:  # PEFT has no form for it in this family
        return False
    return not there.isdisjoint(named)


def to_peft(each: PeftTensor, own: Tensor) -> Tensor:
    """Returns a tensor [rank, inputs], [outputs, rank] or [outputs] in the layout of PEFT; experts add a first axis."""
    if each.matrix.num_experts:
        if each.kind == "lora_a":
            # [experts, rank, inputs]: the rows of one expert after those of another
            return own.reshape(each.shape)
        if each.is_interleaved:  # all gates, then all ups -> alternating
            own = own.reshape(len(own), 2, -1, own.shape[-1]).transpose(1, 2).flatten(1, 2)
        # [outputs, rank, experts]: in B the expert is the fastest axis, unlike in A
        return own.permute(1, 2, 0).reshape(each.shape)
    if each.matrix.part == "embedding" and each.kind == "lora_a":
        # PEFT's A of an embedding is [rank, vocabulary]; ours has the layout of the table
        return own.T.contiguous()
    if each.order is not None:
        own = each.order.on_disk(own.reshape(len(own), -1)).reshape(each.shape)
    return own.contiguous()


def from_peft(each: PeftTensor, theirs: Tensor) -> Tensor:
    """Returns a tensor of PEFT in our layout: the inverse of `to_peft`."""
    count = each.matrix.num_experts
    if count:
        if each.kind == "lora_a":
            return theirs.reshape(count, -1, theirs.shape[-1])
        own = theirs.reshape(len(theirs), -1, count).permute(2, 0, 1)
        if each.is_interleaved:
            own = own.reshape(count, -1, 2, own.shape[-1]).transpose(1, 2).flatten(1, 2)
        return own.contiguous()
    if each.matrix.part == "embedding" and each.kind == "lora_a":
        return theirs.T.contiguous()
    if each.order is not None:
        return each.order.arranged(theirs.reshape(len(theirs), -1)).reshape(theirs.shape)
    return theirs

"""Opens a PEFT folder (adapter_config.json and adapter_model.safetensors), and converts its tensors."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.config.messages import readable
from mtrain.config.schema.adapter import PARTS, AdapterSection, AnyAdapter, LoraSection, Target, names_in_tower
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
    """An opened folder with exactly the adapter of a run."""

    def __init__(self, path: Path, family: Family, model: ModelSection, adapter: AdapterSection) -> None:
        """Reads and checks names, shapes and settings; reads no tensor."""
        config = read_json(inside(path, CONFIG_NAME))
        if faults := differences(config, family, model, adapter):
            raise DataError(f"{path / CONFIG_NAME} differs from the run's adapter: {'; '.join(faults)}; change one")
        self._file = SafetensorsFile(inside(path, TENSORS_NAME))
        self._names: dict[str, tuple[PeftTensor, str]] = {}
        expected: set[str] = set()
        for tensor in tensors(family, model, adapter):
            # older versions of PEFT stored magnitudes as the weights of modules
            name = next(
                (name for name in (tensor.name, f"{tensor.name}.weight") if name in self._file.entries), tensor.name
            )
            self._names[tensor.key] = tensor, name
            expected.add(name)
        self._check(path, expected)

    def _check(self, path: Path, expected: set[str]) -> None:
        # without copies of frozen tables, which the run loads with its model
        stored = {name for name in self._file.entries if not name.endswith(_FROZEN)}
        if adapted := [name for name in names_in_tower(sorted(stored - expected)) if ".lora_" in name]:
            raise DataError(
                f"{path} adapts modules of the vision tower, such as {adapted[0]}, but adapters here are on the "
                "language model; merge it into the model with PEFT's merge_and_unload, and start from that model"
            )
        faults = [f"it lacks {shown_names(sorted(expected - stored))}"] if expected - stored else []
        faults += [f"it has unexpected {shown_names(sorted(stored - expected))}"] if stored - expected else []
        faults += [
            f"{name} has shape {list(self._file.entries[name].shape)} instead of {list(tensor.shape)}"
            for tensor, name in self._names.values()
            if name in self._file.entries and self._file.entries[name].shape != tensor.shape
        ]
        if faults:
            raise DataError(
                f"{path} does not fit adapter.targets and model.*: {'; '.join(faults[:4])}; set adapter.targets to the "
                "modules that it adapts"
            )

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor, in float32 and in our layout, by our global name."""
        for key, (tensor, stored_name) in self._names.items():
            if key == name:
                return from_peft(tensor, self._file.tensor(stored_name).float())
            # PEFT has one tensor for all experts; we have a name for each
            head, _, tail = key.partition("{E}")
            if tail and name.startswith(head) and name.endswith(tail):
                expert = int(name.removeprefix(head).removesuffix(tail))
                return from_peft(tensor, self._file.tensor(stored_name).float())[expert]
        raise AssertionError(name)


def adapter_of(path: Path, family: Family, model: ModelSection) -> AdapterSection:
    """Derives the section `adapter` from a PEFT folder."""
    config = read_json(inside(path, CONFIG_NAME))
    stored = SafetensorsFile(inside(path, TENSORS_NAME)).entries.keys()
    settings: dict[str, Any] = {
        "kind": "dora" if config.get("use_dora") else "lora",
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "scaling": "rslora" if config.get("use_rslora") else "standard",
        "targets": [part for part in PARTS if _is_adapted(part, stored, family, model)],
        "modules_to_save": _saved_whole(config, family, model),
    }
    settings |= _patterns(
        path, config, [tensor for part in settings["targets"] for tensor in _tensors_of(part, family, model)]
    )
    try:
        return TypeAdapter[AdapterSection](AnyAdapter).validate_python(settings)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise DataError(
            f"{path / CONFIG_NAME} is not an adapter of this model: {reasons}; name another folder"
        ) from None


def _patterns(path: Path, config: dict[str, Any], named: Sequence[PeftTensor]) -> dict[str, dict[str, Any]]:
    numbers_of_part: dict[str, tuple[Any, Any]] = {}
    for tensor in named if config.get("rank_pattern") or config.get("alpha_pattern") else ():
        numbers = rank_and_alpha(config, path_in_model(tensor))
        if numbers_of_part.setdefault(tensor.matrix.part, numbers) != numbers:
            raise DataError(
                f"{path / CONFIG_NAME} gives {tensor.matrix.part} different ranks or alphas in different layers "
                "(rank_pattern, alpha_pattern), but mtrain needs the same in all layers; merge it into the model"
            )
    return {
        "rank_pattern": {part: rank for part, (rank, _) in numbers_of_part.items()},
        "alpha_pattern": {part: alpha for part, (_, alpha) in numbers_of_part.items()},
    }


def _saved_whole(config: dict[str, Any], family: Family, model: ModelSection) -> list[str]:
    named = saved_modules(config, family, model)
    if model.output.is_new:
        named -= {"head"}  # a new head is always trained whole
    # PEFT may save a table that stays tied under either name
    is_one = (
        model.output.is_tied and config.get("ensure_weight_tying") and not named.isdisjoint(("embedding", "output"))
    )
    return sorted(named | {"embedding"} if is_one else named)


def _tensors_of(part: Target, family: Family, model: ModelSection) -> list[PeftTensor]:
    return [tensor for tensor in tensors(family, model, LoraSection(targets=(part,))) if tensor.kind == "lora_a"]


def _is_adapted(part: Target, stored: Set[str], family: Family, model: ModelSection) -> bool:
    try:
        named = [tensor.name for tensor in _tensors_of(part, family, model)]
    except DataError:  # PEFT cannot express it in this family
        return False
    return not stored.isdisjoint(named)


def to_peft(target: PeftTensor, values: Tensor) -> Tensor:
    """Converts a tensor [rank, inputs], [outputs, rank] or [outputs] to PEFT's layout; experts add a first axis."""
    if target.matrix.num_experts:
        if target.kind == "lora_a":
            # [experts, rank, inputs]: stacks the rows of experts
            return values.reshape(target.shape)
        if target.is_interleaved:  # from all gates, then all ups, to alternating rows
            values = values.reshape(len(values), 2, -1, values.shape[-1]).transpose(1, 2).flatten(1, 2)
        # [outputs, rank, experts]: the expert is the last axis of B, unlike in A
        return values.permute(1, 2, 0).reshape(target.shape)
    if target.matrix.part == "embedding" and target.kind == "lora_a":
        # PEFT's A of an embedding is [rank, vocabulary]; ours is laid out like the table
        return values.T.contiguous()
    if target.order is not None:
        values = target.order.on_disk(values.reshape(len(values), -1)).reshape(target.shape)
    return values.contiguous()


def from_peft(source: PeftTensor, stored: Tensor) -> Tensor:
    """Converts a PEFT tensor to our layout; the inverse of `to_peft`."""
    count = source.matrix.num_experts
    if count:
        if source.kind == "lora_a":
            return stored.reshape(count, -1, stored.shape[-1])
        values = stored.reshape(len(stored), -1, count).permute(2, 0, 1)
        if source.is_interleaved:
            values = values.reshape(count, -1, 2, values.shape[-1]).transpose(1, 2).flatten(1, 2)
        return values.contiguous()
    if source.matrix.part == "embedding" and source.kind == "lora_a":
        return stored.T.contiguous()
    if source.order is not None:
        return source.order.arranged(stored.reshape(len(stored), -1)).reshape(stored.shape)
    return stored

"""Adapters from their definition: a layer multiplies by W + scale B A.

Sources: LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1. rsLoRA: Kalajdzievski 2023, arXiv 2312.03732. DoRA: Liu et
al. 2024, arXiv 2402.09353, equation 5, with a constant norm (section 4.3).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection, AnyAdapter
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of
from mtrain.verify.reference.model.attention import KINDS, kind_of
from mtrain.verify.reference.model.attention_kind import Shape
from mtrain.verify.reference.model.images import PROJECTOR, TOWER
from mtrain.verify.reference.model.shapes import EMBEDDING, OUTPUT, layers, shapes_of


class Adapted(NamedTuple):
    """Frozen matrix with the adapted parts of its rows."""

    weight: str
    pairs: Mapping[str, Tensor]
    """Row numbers of each part, ascending; a part has one pair A and B."""


def all_shapes(config: Config) -> dict[str, Shape]:
    """Returns the shapes of all tensors by name in forward order; a tensor's adapters follow it."""
    frozen, section = shapes_of(config.model), config.adapter
    adapted = {} if section is None else {matrix.weight: matrix for matrix in _adapted(config.model, section)}
    shapes: dict[str, Shape] = {}
    for name, shape in frozen.items():
        shapes[name] = shape
        if section is not None and name in adapted:
            shapes |= _adapter_shapes(adapted[name], shape[1], section)
    return shapes


def _adapter_shapes(adapted: Adapted, columns: int, section: AnyAdapter) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for part, rows in adapted.pairs.items():
        name = _prefix(adapted.weight, part)
        rank = int(_value_of(part, section.rank_pattern, section.rank))
        if part == "embedding":  # a row of A for each token, which B projects to the hidden size
            shapes |= {f"{name}lora_a": (len(rows), rank), f"{name}lora_b": (columns, rank)}
            continue
        shapes |= {f"{name}lora_a": (rank, columns), f"{name}lora_b": (len(rows), rank)}
        if section.kind == "dora":
            shapes[f"{name}magnitude"] = (len(rows),)
    return shapes


def is_trained(name: str, adapter: AnyAdapter | None, vision: VisionSection | None = None) -> bool:
    """Says whether a tensor is trained: with adapters, only they and `modules_to_save` are; a frozen tower or
    language model is not."""
    if name.startswith(TOWER):
        assert vision is not None, name
        is_constant = name.removeprefix(TOWER) in description_of(vision).constants
        return not is_constant and not (vision.freeze_projector if name.startswith(PROJECTOR) else vision.freeze_tower)
    if adapter is None:
        return vision is None or not vision.freeze_language_model
    if "_adapter." in name:
        return True
    if "norm" in name:
        return "norms" in adapter.modules_to_save and not name.startswith("mtp.")
    return {EMBEDDING: "embedding", OUTPUT: "output"}.get(name) in adapter.modules_to_save


def as_held(name: str, values: Tensor, adapter: AnyAdapter | None) -> Tensor:
    """Rounds frozen projections and tables to `adapter.base_dtype`; routers, norms and biases keep their precision."""
    if adapter is None or adapter.base_dtype != "bf16" or name.startswith(TOWER) or is_trained(name, adapter):
        return values
    is_matrix = values.dim() == 2 and ".router." not in name
    return values.to(torch.bfloat16).to(values.dtype) if is_matrix else values


def merged(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the equivalent model without adapters; gradients flow to `tensors`."""
    weights = dict(tensors)
    section = config.adapter
    if section is None:
        return weights
    for adapted in _adapted(config.model, section):
        whole = tensors[adapted.weight].clone()
        for part, rows in adapted.pairs.items():
            name = _prefix(adapted.weight, part)
            rank = _value_of(part, section.rank_pattern, section.rank)
            alpha = _value_of(part, section.alpha_pattern, section.alpha)
            scale = alpha / {"standard": float(rank), "rslora": math.sqrt(rank)}[section.scaling]
            a, b = tensors[f"{name}lora_a"], tensors[f"{name}lora_b"]
            product = a @ b.T if part == "embedding" else b @ a
            new = tensors[adapted.weight][rows] + scale * product
            if section.kind == "dora":
                length = torch.sqrt((new.detach() ** 2).sum(1, keepdim=True))
                new = tensors[f"{name}magnitude"][:, None] * new / length
            whole = whole.index_put((rows,), new)
        weights[adapted.weight] = whole
        if adapted.weight == EMBEDDING and config.model.tied_embeddings:
            weights[OUTPUT] = tensors[
                EMBEDDING
            ]  # the output uses the frozen table; the adapter affects the lookup only
    return weights


def _prefix(weight: str, part: str) -> str:
    """Returns the name prefix of a pair; an expert's projection has only one pair, so its name has no part."""
    module = weight.removesuffix(".weight")
    return f"{module}_adapter." if part == "experts" else f"{module}_adapter.{part}_"


def _adapted(model: ModelSection, section: AdapterSection) -> Iterator[Adapted]:
    shapes, targets = shapes_of(model), {part for target in section.targets for part in _parts(target)}
    for layer, number in layers(model).items():
        if layer.startswith("mtp."):
            continue  # MTP depths stay frozen
        for weight in (name for name in shapes if name.startswith(f"{layer}.") and name.endswith(".weight")):
            rows = _joined(_rows(weight, shapes[weight][0], number, model), targets)
            pairs = {part: row_numbers for part, row_numbers in rows.items() if part in targets}
            if pairs:
                yield Adapted(weight, pairs)
    for table, part in (("embedding.word_embeddings.weight", "embedding"), ("output_layer.weight", "output")):
        if part in targets:
            yield Adapted(table, {part: torch.arange(shapes[table][0])})


_ONE_PAIR = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Target that adapts several parts as one matrix -> the parts."""


def _joined(rows: Mapping[str, Tensor], targets: set[str]) -> dict[str, Tensor]:
    """Joins the rows of parts that share a pair."""
    joined = dict(rows)
    for target in targets & _ONE_PAIR.keys():
        if parts := [joined.pop(part) for part in _ONE_PAIR[target] if part in joined]:
            joined[target] = torch.cat(parts).sort().values
    return joined


def _parts(target: str) -> tuple[str, ...]:
    groups = {"fc1": ("gate_proj", "up_proj")}
    for kind in KINDS:
        groups[kind.group] = (*groups.get(kind.group, ()), *kind.inputs)
    return groups.get(target, (target,))


def _value_of(part: str, pattern: Mapping[Any, float], default: float) -> float:
    """Returns the value for a part in a pattern: under the part's name, otherwise its group's."""
    of_groups = [value for target, value in pattern.items() if target != part and part in _parts(target)]
    if part in pattern:
        return pattern[part]
    return of_groups[0] if of_groups else default


def _rows(weight: str, count: int, layer: int, model: ModelSection) -> Mapping[str, Tensor]:
    """Returns the rows of each part of a layer's matrix; empty if the matrix cannot have an adapter."""
    every, linear = torch.arange(count), weight.split(".")[-2]
    kind = kind_of(model, layer)
    if kind is not None and (parts := kind.adapted(linear, every, model)) is not None:
        return parts
    if not linear.startswith("linear_fc"):
        return {}
    if ".mlp.experts." in weight:
        return {"experts": every}
    if linear == "linear_fc1":
        half = count // 2
        return {"gate_proj": every[:half], "up_proj": every[half:]} if model.is_gated else {"up_proj": every}
    return {"fc2": every}

"""Matrices that have adapters, and the sizes of the adapters."""

from __future__ import annotations

from dataclasses import replace

from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.features import LAYER_PARTS, present, segments
from mtrain.plan.features.feature import EMBEDDING, AdaptedMatrix, Parameters, RankParameters
from mtrain.plan.layout import Layout
from mtrain.plan.parameters import head_elements, padded_vocab_size

OUTPUT = "output_layer"
HEAD = f"{OUTPUT}.weight"
"""Global name of the head's weight in a model that judges sequences."""


def in_layer(model: ModelSection, adapter: AdapterSection, layer: int) -> list[AdaptedMatrix]:
    """Returns the adapted matrices of layer `layer`, counted from 0, in the order of the forward pass."""
    found: dict[tuple[str, str], AdaptedMatrix] = {}
    for part in (part for part in LAYER_PARTS if part.is_in(model, layer)):
        for each in part.adapted(model):
            name = adapter.pair_of(each.part)
            before = found.get((each.linear, name))
            if name in adapter.parts:
                rows = each.rows + (0 if before is None else before.rows)
                found[each.linear, name] = replace(each, part=name, rows=rows)
    return list(found.values())


def tables(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """Returns the adapted matrices outside of layers."""
    both = (
        AdaptedMatrix(EMBEDDING, "embedding", model.hidden_size, model.vocab_size, is_row_parallel=True),
        AdaptedMatrix(OUTPUT, "output", model.vocab_size, model.hidden_size),
    )
    return [each for each in both if each.part in adapter.parts]


def all_matrices(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """Returns all adapted matrices of the model, each as often as it occurs."""
    layers = (each for layer in range(model.num_layers) for each in in_layer(model, adapter, layer))
    return [*layers, *tables(model, adapter)]


def learned_whole(model: ModelSection) -> frozenset[str]:
    """Returns the global names of tensors that are trained as a whole next to adapters: a head, which begins at
    random."""
    return frozenset() if model.head is None else frozenset((HEAD,))


def num_adapter_parameters(model: ModelSection, adapter: AdapterSection) -> int:
    """Counts the trained parameters of the whole model, without padding of the vocabulary; a head counts whole."""
    return sum(each.parameters(adapter).total for each in all_matrices(model, adapter)) + head_elements(model)


def adapter_parameters_on_rank(
    model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int
) -> RankParameters:
    """Counts the trained parameters on a rank of pipeline rank `pp_rank`, vocabulary padded; a head counts whole."""
    layers = (layer for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, pp_rank, chunk))
    head = Parameters(replicated=head_elements(model) if pp_rank == layout.pp - 1 else 0)
    held = [each for layer in layers for each in in_layer(model, adapter, layer)]
    ends = {EMBEDDING: 0, OUTPUT: layout.pp - 1}
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, layout.tp)})
    held += [each for each in tables(padded, adapter) if ends[each.linear] == pp_rank]
    return sum((each.parameters(adapter) for each in held), start=head).on_rank(layout)


def holds_narrow(config: Config) -> bool:
    """Says whether matrices and tables of the frozen model have less precision than the run."""
    return config.adapter is not None and config.adapter.base_dtype is not None and config.train.precision == "fp32"


def is_matrix(name: str, num_axes: int) -> bool:
    """Says whether a tensor of the model is the matrix of a projection, or a table.

    Args:
        name: Global name of the tensor.
        num_axes: Number of axes of the tensor, without those that number layers and experts.
    """
    return num_axes > 1 and ".router." not in name


def fused_parts(model: ModelSection, adapter: AdapterSection, linear: str) -> tuple[str, ...]:
    """Returns the parts of a linear module of a layer that have a pair each, in the order of its outputs within each
    query group; empty where it may have no adapter."""
    return tuple(dict.fromkeys(map(adapter.pair_of, model_parts(model, linear))))


def fused_rows(model: ModelSection, adapter: AdapterSection, linear: str, num_rows: int) -> tuple[int, ...]:
    """Returns the rows of each of `fused_parts` in the block that the rows of a module repeat.

    Args:
        model: Section of the model.
        adapter: Section that says which parts have a pair together.
        linear: Name of the module.
        num_rows: Number of rows of the module's weight, on a rank or in the whole model.
    """
    parts = fused_parts(model, adapter, linear)
    if len(parts) < 2:
        return (num_rows,)
    single = model_parts(model, linear)
    rows = dict(zip(single, segments(model, linear.rpartition(".")[2], num_rows), strict=True))
    return tuple(sum(rows[each] for each in single if adapter.pair_of(each) == part) for part in parts)


def model_parts(model: ModelSection, linear: str) -> tuple[str, ...]:
    """Returns the smallest parts of a linear module of a layer, in the order of its outputs."""
    own = linear.rpartition(".")[2]
    found = (each for part in present(model) for each in part.adapted(model) if not each.num_experts)
    return tuple(dict.fromkeys(each.part for each in found if each.linear.rpartition(".")[2] == own))

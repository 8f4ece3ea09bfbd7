"""Matrices that have adapters, and the sizes of the adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mtrain.arch.features import LAYER_PARTS, present, segments
from mtrain.arch.features.feature import EMBEDDING, AdaptedMatrix, Parameters, RankParameters, norm_elements
from mtrain.arch.layout import Layout
from mtrain.arch.parameters import head_elements, padded_vocab_size, tables_on_stage
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection

OUTPUT = "output_layer"
HEAD = f"{OUTPUT}.weight"
"""Global name of the head's weight in a model that judges sequences."""
_NAMES = {"embedding": f"{EMBEDDING}.weight", "output": HEAD}
"""Table of the vocabulary -> global name of its weight."""
_NORM = re.compile(r"norm[._](q_|k_)?(weight|bias)$")
"""End of the names of a norm's parameters, also where megatron-core fuses it into the projection after it."""


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


def learned_matrices(model: ModelSection, adapter: AdapterSection) -> frozenset[str]:
    """Returns the global names of matrices that are trained as a whole next to adapters: a head, which begins at
    random, and the tables that `adapter.modules_to_save` names."""
    found = {HEAD} if model.output.is_new else set()
    return frozenset(found | {_NAMES[table] for table in _learned_tables(model, adapter)})


def is_learned_whole(model: ModelSection, adapter: AdapterSection, name: str) -> bool:
    """Says whether a tensor of the model is trained as a whole next to adapters.

    Args:
        model: Section of the model.
        adapter: Section of the adapters.
        name: Global name of the tensor, or its key in a checkpoint, where layers may be stacked.
    """
    return name in learned_matrices(model, adapter) or ("norms" in adapter.modules_to_save and is_norm(name))


def is_norm(name: str) -> bool:
    """Says whether a tensor of the model is a weight or bias of a norm, but of none in a depth that predicts ahead."""
    return _NORM.search(name) is not None and not name.startswith("mtp.")


def learns_output(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether the matrix of the last product is trained as a whole: a head, a table of its own or a tied one."""
    table = "embedding" if model.output.is_tied else "output"
    return model.output.is_new or table in adapter.modules_to_save


def num_adapter_parameters(model: ModelSection, adapter: AdapterSection) -> int:
    """Counts the trained parameters of the whole model, without padding of the vocabulary; what learns whole counts
    whole."""
    learned = head_elements(model) + len(_learned_tables(model, adapter)) * model.vocab_size * model.hidden_size
    learned += _learned_norms(model, adapter, range(model.num_layers), is_last=True).total
    return sum(each.parameters(adapter).total for each in all_matrices(model, adapter)) + learned


def learned_table_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements on a rank of tables that are trained as a whole, vocabulary padded."""
    held = tables_on_stage(model, layout, pp_rank) & _learned_tables(model, adapter)
    return len(held) * padded_vocab_size(model, layout.tp) * model.hidden_size // layout.tp


def learned_norm_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements on a rank of norms that are trained."""
    layers = [each for chunk in range(layout.vpp) for each in layout.layers(model.num_layers, pp_rank, chunk)]
    return _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1).on_rank(layout).total


def _learned_norms(model: ModelSection, adapter: AdapterSection, layers: Iterable[int], is_last: bool) -> Parameters:
    if "norms" not in adapter.modules_to_save:
        return Parameters()
    final = Parameters(replicated=norm_elements(model, model.hidden_size) if is_last else 0)
    held = (part.norms(model) for layer in layers for part in LAYER_PARTS if part.is_in(model, layer))
    return sum(held, start=final)


def _learned_tables(model: ModelSection, adapter: AdapterSection) -> set[str]:
    # a tied output layer has no table of its own
    named = _NAMES.keys() & {*adapter.modules_to_save}
    return named - {"output"} if model.tied_embeddings else named


def adapter_parameters_on_rank(
    model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int
) -> RankParameters:
    """Counts the trained parameters on a rank of pipeline rank `pp_rank`, vocabulary padded; what learns whole counts
    whole."""
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, pp_rank, chunk)]
    head = Parameters(replicated=head_elements(model) if pp_rank == layout.pp - 1 else 0)
    head += _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1)
    held = [each for layer in layers for each in in_layer(model, adapter, layer)]
    ends = {EMBEDDING: 0, OUTPUT: layout.pp - 1}
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, layout.tp)})
    held += [each for each in tables(padded, adapter) if ends[each.linear] == pp_rank]
    tabled = Parameters(divided=learned_table_elements(model, adapter, layout, pp_rank) * layout.tp)
    return sum((each.parameters(adapter) for each in held), start=head + tabled).on_rank(layout)


def holds_narrow(adapter: AdapterSection | None, precision: str) -> bool:
    """Says whether matrices and tables of the frozen model have less precision than the run."""
    return adapter is not None and adapter.base_dtype is not None and precision == "fp32"


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

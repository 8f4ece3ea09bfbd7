"""Matrices with adapters, and the sizes of the adapters."""

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
"""End of a norm's parameter names, including norms that megatron-core fuses into the next projection."""


def in_layer(model: ModelSection, adapter: AdapterSection, layer: int) -> list[AdaptedMatrix]:
    """Returns the adapted matrices of a layer, counted from 0, in the order of the forward pass."""
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
    """Returns every occurrence of an adapted matrix in the model."""
    layers = (each for layer in range(model.num_layers) for each in in_layer(model, adapter, layer))
    return [*layers, *tables(model, adapter)]


def learned_matrices(model: ModelSection, adapter: AdapterSection) -> frozenset[str]:
    """Returns the global names of matrices that are fully trained next to adapters: a head, which starts random, and
    the tables in `adapter.modules_to_save`."""
    found = {HEAD} if model.output.is_new else set()
    return frozenset(found | {_NAMES[table] for table in _learned_tables(model, adapter)})


def is_learned_whole(model: ModelSection, adapter: AdapterSection, name: str) -> bool:
    """Says whether a tensor is fully trained next to adapters.

    Args:
        name: Global name of the tensor, or its key in a checkpoint, where layers may be stacked.
    """
    return name in learned_matrices(model, adapter) or ("norms" in adapter.modules_to_save and is_norm(name))


def is_norm(name: str) -> bool:
    """Says whether a tensor is a weight or bias of a norm outside MTP depths."""
    return _NORM.search(name) is not None and not name.startswith("mtp.")


def learns_output(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether the matrix of the last product is fully trained: a head, its own table or a tied one."""
    table = "embedding" if model.output.is_tied else "output"
    return model.output.is_new or table in adapter.modules_to_save


def num_adapter_parameters(model: ModelSection, adapter: AdapterSection) -> int:
    """Counts the trained parameters of the model, including fully trained ones, without vocabulary padding."""
    learned = head_elements(model) + len(_learned_tables(model, adapter)) * model.vocab_size * model.hidden_size
    learned += _learned_norms(model, adapter, range(model.num_layers), is_last=True).total
    return sum(each.parameters(adapter).total for each in all_matrices(model, adapter)) + learned


def learned_table_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements on a rank of fully trained tables, with vocabulary padding."""
    held = tables_on_stage(model, layout, pp_rank) & _learned_tables(model, adapter)
    return len(held) * padded_vocab_size(model, layout.tp) * model.hidden_size // layout.tp


def learned_norm_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements on a rank of trained norms."""
    layers = layout.layers_of_rank(model.num_layers, pp_rank)
    return _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1).on_rank(layout).total


def _learned_norms(model: ModelSection, adapter: AdapterSection, layers: Iterable[int], is_last: bool) -> Parameters:
    if "norms" not in adapter.modules_to_save:
        return Parameters()
    final = Parameters(replicated=norm_elements(model, model.hidden_size) if is_last else 0)
    held = (part.norms(model) for layer in layers for part in LAYER_PARTS if part.is_in(model, layer))
    return sum(held, start=final)


def _learned_tables(model: ModelSection, adapter: AdapterSection) -> set[str]:
    # a tied output layer has no own table
    named = _NAMES.keys() & {*adapter.modules_to_save}
    return named - {"output"} if model.tied_embeddings else named


def adapter_parameters_on_rank(
    model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int
) -> RankParameters:
    """Counts the trained parameters on a rank of pipeline rank `pp_rank`, including fully trained ones, with vocabulary
    padding."""
    layers = layout.layers_of_rank(model.num_layers, pp_rank)
    head = Parameters(replicated=head_elements(model) if pp_rank == layout.pp - 1 else 0)
    head += _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1)
    held = [each for layer in layers for each in in_layer(model, adapter, layer)]
    ends = {EMBEDDING: 0, OUTPUT: layout.pp - 1}
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, layout.tp)})
    held += [each for each in tables(padded, adapter) if ends[each.linear] == pp_rank]
    tabled = Parameters(divided=learned_table_elements(model, adapter, layout, pp_rank) * layout.tp)
    return sum((each.parameters(adapter) for each in held), start=head + tabled).on_rank(layout)


def holds_narrow(adapter: AdapterSection | None, precision: str) -> bool:
    """Says whether matrices and tables of the frozen model have lower precision than the run."""
    return adapter is not None and adapter.base_dtype is not None and precision == "fp32"


def is_matrix(name: str, num_axes: int) -> bool:
    """Says whether a tensor is a projection's matrix or a table.

    Args:
        name: Global name of the tensor.
        num_axes: Number of its axes, not counting those of layers and experts.
    """
    return num_axes > 1 and ".router." not in name


def fused_parts(model: ModelSection, adapter: AdapterSection, linear: str) -> tuple[str, ...]:
    """Returns the parts of a layer's linear module that have their own pair, in the order of its outputs within each
    query group; empty if it cannot have an adapter."""
    return tuple(dict.fromkeys(map(adapter.pair_of, model_parts(model, linear))))


def fused_rows(model: ModelSection, adapter: AdapterSection, linear: str, num_rows: int) -> tuple[int, ...]:
    """Returns the rows of each of `fused_parts` in the block that a module's rows repeat.

    Args:
        num_rows: Rows of the module's weight, on a rank or in the whole model.
    """
    parts = fused_parts(model, adapter, linear)
    if len(parts) < 2:
        return (num_rows,)
    single = model_parts(model, linear)
    rows = dict(zip(single, segments(model, linear.rpartition(".")[2], num_rows), strict=True))
    return tuple(sum(rows[each] for each in single if adapter.pair_of(each) == part) for part in parts)


def model_parts(model: ModelSection, linear: str) -> tuple[str, ...]:
    """Returns the smallest parts of a layer's linear module, in the order of its outputs."""
    own = linear.rpartition(".")[2]
    found = (each for part in present(model) for each in part.adapted(model) if not each.num_experts)
    return tuple(dict.fromkeys(each.part for each in found if each.linear.rpartition(".")[2] == own))

"""Adapted matrices of a model, and the sizes of their adapters."""

import re
from collections.abc import Iterable
from dataclasses import replace

from mtrain.arch.features import LAYER_PARTS, present, segments
from mtrain.arch.features.feature import EMBEDDING, AdaptedMatrix, Parameters, RankParameters, norm_elements
from mtrain.arch.features.outside import KEY, is_trained, trained_tower_sizes
from mtrain.arch.layout import Layout
from mtrain.arch.parameters import head_elements, padded_vocab_size, tables_on_stage
from mtrain.config.schema.adapter import AdapterSection, LoraSection
from mtrain.config.schema.model import ModelSection

OUTPUT = "output_layer"
HEAD = f"{OUTPUT}.weight"
"""Global name of the head's weight in a model that scores sequences."""
_NAMES = {"embedding": f"{EMBEDDING}.weight", "output": HEAD}
"""Vocabulary table -> global name of its weight."""
_NORM = re.compile(r"norm[._](q_|k_)?(weight|bias)$")
"""Pattern of the end of a norm's parameter name, including norms that megatron-core fuses into the next projection."""

_WITHOUT_PARTS = LoraSection.model_construct(targets=())


def trained_with_frozen(model: ModelSection, adapter: AdapterSection | None) -> AdapterSection | None:
    """Returns what is trained on a frozen language model: the adapter, or one without parts if only parts of the vision
    tower are; None if the language model itself is trained."""
    return _WITHOUT_PARTS if adapter is None and model.has_frozen_language_model else adapter


def in_layer(model: ModelSection, adapter: AdapterSection, layer: int) -> list[AdaptedMatrix]:
    """Returns the adapted matrices of a layer, counted from 0, in the order of the forward pass."""
    matrices: dict[tuple[str, str], AdaptedMatrix] = {}
    for part in (part for part in LAYER_PARTS if part.is_in(model, layer)):
        for matrix in part.adapted(model):
            name = adapter.pair_of(matrix.part)
            before = matrices.get((matrix.linear, name))
            if name in adapter.parts:
                rows = matrix.rows + (0 if before is None else before.rows)
                matrices[matrix.linear, name] = replace(matrix, part=name, rows=rows)
    return list(matrices.values())


def tables(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """Returns the adapted vocabulary tables."""
    both = (
        AdaptedMatrix(EMBEDDING, "embedding", model.hidden_size, model.vocab_size, is_row_parallel=True),
        AdaptedMatrix(OUTPUT, "output", model.vocab_size, model.hidden_size),
    )
    return [table for table in both if table.part in adapter.parts]


def all_matrices(model: ModelSection, adapter: AdapterSection) -> list[AdaptedMatrix]:
    """Returns the adapted matrices of all layers, and the adapted tables."""
    layers = (matrix for layer in range(model.num_layers) for matrix in in_layer(model, adapter, layer))
    return [*layers, *tables(model, adapter)]


def learned_matrices(model: ModelSection, adapter: AdapterSection) -> frozenset[str]:
    """Returns the global names of matrices that are fully trained alongside adapters: a new head, and the tables in
    `adapter.modules_to_save`."""
    heads = {HEAD} if model.output.is_new else set()
    return frozenset(heads | {_NAMES[table] for table in _learned_tables(model, adapter)})


def is_learned_whole(model: ModelSection, adapter: AdapterSection, name: str) -> bool:
    """Says whether a tensor is fully trained alongside adapters.

    Args:
        name: Global name of the tensor, or its key in a checkpoint, which may stack layers.
    """
    if model.vision is not None and name.startswith(KEY):
        return is_trained(model.vision, name.removeprefix(KEY))
    return name in learned_matrices(model, adapter) or ("norms" in adapter.modules_to_save and is_norm(name))


def keys_of_full_training(model: ModelSection, adapter: AdapterSection) -> list[str]:
    """Returns the keys, each with its value, by which parts of the model are fully trained alongside adapters."""
    saved, vision = adapter.modules_to_save, model.vision
    keys = [f"adapter.modules_to_save={', '.join(saved)}"] if saved else []
    parts = () if vision is None else ("freeze_tower", "freeze_projector")
    return [*keys, *(f"model.vision.{part}=false" for part in parts if not getattr(vision, part))]


def is_norm(name: str) -> bool:
    """Says whether a tensor is a weight or bias of a norm outside MTP depths and the vision tower."""
    return _NORM.search(name) is not None and not name.startswith(("mtp.", KEY))


def learns_output(model: ModelSection, adapter: AdapterSection) -> bool:
    """Says whether the output matrix is fully trained: a head, the output layer's table or the tied table."""
    table = "embedding" if model.output.is_tied else "output"
    return model.output.is_new or table in adapter.modules_to_save


def num_adapter_parameters(model: ModelSection, adapter: AdapterSection) -> int:
    """Counts trained parameters of a model with adapters, including fully trained ones, without vocabulary padding."""
    learned = head_elements(model) + len(_learned_tables(model, adapter)) * model.vocab_size * model.hidden_size
    learned += _learned_norms(model, adapter, range(model.num_layers), is_last=True).total
    learned += sum(trained_tower_sizes(model.vision, model.hidden_size))
    return sum(matrix.parameters(adapter).total for matrix in all_matrices(model, adapter)) + learned


def learned_table_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements of fully trained tables on a rank, with vocabulary padding."""
    tables = tables_on_stage(model, layout, pp_rank) & _learned_tables(model, adapter)
    return len(tables) * padded_vocab_size(model, layout.tp) * model.hidden_size // layout.tp


def learned_norm_elements(model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements of trained norms on a rank."""
    layers = layout.layers_of_rank(model.num_layers, pp_rank)
    return _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1).on_rank(layout).total


def _learned_norms(model: ModelSection, adapter: AdapterSection, layers: Iterable[int], is_last: bool) -> Parameters:
    if "norms" not in adapter.modules_to_save:
        return Parameters()
    final = Parameters(replicated=norm_elements(model, model.hidden_size) if is_last else 0)
    norms = (part.norms(model) for layer in layers for part in LAYER_PARTS if part.is_in(model, layer))
    return sum(norms, start=final)


def _learned_tables(model: ModelSection, adapter: AdapterSection) -> set[str]:
    # a tied output layer has no separate table
    named = _NAMES.keys() & {*adapter.modules_to_save}
    return named - {"output"} if model.tied_embeddings else named


def adapter_parameters_on_rank(
    model: ModelSection, adapter: AdapterSection, layout: Layout, pp_rank: int
) -> RankParameters:
    """Counts trained parameters on a rank of stage `pp_rank`, including fully trained ones, with vocabulary padding."""
    layers = layout.layers_of_rank(model.num_layers, pp_rank)
    head = Parameters(replicated=head_elements(model) if pp_rank == layout.pp - 1 else 0)
    head += _learned_norms(model, adapter, layers, pp_rank == layout.pp - 1)
    matrices = [matrix for layer in layers for matrix in in_layer(model, adapter, layer)]
    ends = {EMBEDDING: 0, OUTPUT: layout.pp - 1}
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, layout.tp)})
    matrices += [matrix for matrix in tables(padded, adapter) if ends[matrix.linear] == pp_rank]
    tabled = Parameters(divided=learned_table_elements(model, adapter, layout, pp_rank) * layout.tp)
    return sum((matrix.parameters(adapter) for matrix in matrices), start=head + tabled).on_rank(layout)


def holds_narrow(adapter: AdapterSection | None, precision: str) -> bool:
    """Says whether the frozen model's matrices and tables have lower precision than the run."""
    return adapter is not None and adapter.base_dtype is not None and precision == "fp32"


def is_matrix(name: str, num_axes: int) -> bool:
    """Says whether a tensor is a projection's matrix or a table of the language model.

    Args:
        name: Global name of the tensor.
        num_axes: Number of its axes, without those of layers and experts.
    """
    return num_axes > 1 and ".router." not in name and not name.startswith(KEY)


def fused_parts(model: ModelSection, adapter: AdapterSection, linear: str) -> tuple[str, ...]:
    """Returns the parts of a layer's linear module with a pair each, in the order of its outputs within a query group;
    empty if the module cannot have an adapter."""
    return tuple(dict.fromkeys(map(adapter.pair_of, model_parts(model, linear))))


def fused_rows(model: ModelSection, adapter: AdapterSection, linear: str, num_rows: int) -> tuple[int, ...]:
    """Returns the rows of each of `fused_parts` in the repeating block of a module's rows.

    Args:
        num_rows: Rows of the module's weight, on a rank or in the whole model.
    """
    parts = fused_parts(model, adapter, linear)
    if len(parts) < 2:
        return (num_rows,)
    single = model_parts(model, linear)
    rows = dict(zip(single, segments(model, linear.rpartition(".")[2], num_rows), strict=True))
    return tuple(sum(rows[name] for name in single if adapter.pair_of(name) == part) for part in parts)


def model_parts(model: ModelSection, linear: str) -> tuple[str, ...]:
    """Returns the smallest parts of a layer's linear module, in the order of its outputs."""
    module = linear.rpartition(".")[2]
    matrices = (matrix for part in present(model) for matrix in part.adapted(model) if not matrix.num_experts)
    return tuple(dict.fromkeys(matrix.part for matrix in matrices if matrix.linear.rpartition(".")[2] == module))

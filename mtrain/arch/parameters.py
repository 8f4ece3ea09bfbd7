"""Parameter counts of a model, of the parameters active for one token, and of a rank, and the bytes of an element.

Replicated parameters count once in a model's total, and once on each rank.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from mtrain.arch.features import LAYER_PARTS, alike
from mtrain.arch.features.feature import Parameters, RankParameters, norm_elements
from mtrain.arch.features.feed_forward import router_parameters
from mtrain.arch.features.outside import (
    joint_parameters,
    num_tower_parameters,
    num_trained_in_matrices,
    trained_tower_sizes,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput, TokenOutput
from mtrain.config.schema.train import TrainSection

FP32_BYTES, BF16_BYTES = 4, 2
PADDED_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per token and padding rows, whose number depends on tensor parallelism."""


def element_bytes(train: TrainSection) -> int:
    """Returns the bytes of an element of weights and activations."""
    match train.precision:
        case "fp32":
            return FP32_BYTES
        case "bf16" | "fp16":
            return BF16_BYTES
        case _:
            assert_never(train.precision)


def padded_vocab_size(model: ModelSection, tp: int) -> int:
    """Returns the rows of the embedding table: vocab_size rounded up to a multiple of vocab_multiple x tp."""
    multiple = model.vocab_multiple * tp
    return -(-model.vocab_size // multiple) * multiple


def output_columns(model: ModelSection, tp: int) -> int:
    """Returns the outputs per token on a TP rank: its part of the padded vocabulary, or all labels of a head."""
    match model.output:
        case TokenOutput():
            return padded_vocab_size(model, tp) // tp
        case HeadOutput(labels):
            return labels
        case _ as never:
            assert_never(never)


def num_parameters(model: ModelSection) -> int:
    """Counts the parameters of the model, without vocabulary padding; tied embeddings count once."""
    return _with_vocabulary(model, model.vocab_size)


def num_padded_parameters(model: ModelSection, tp: int) -> int:
    """Counts the parameters of the model, with vocabulary padding for `tp`; tied embeddings count once."""
    return _with_vocabulary(model, padded_vocab_size(model, tp))


def num_trained_parameters(model: ModelSection) -> int:
    """Counts the parameters that a run without adapters trains, without vocabulary padding."""
    tower = sum(trained_tower_sizes(model.vision, model.hidden_size))
    if model.has_frozen_language_model:
        return tower
    return num_parameters(model) - num_tower_parameters(model.vision, model.hidden_size) + tower


def num_active_parameters(model: ModelSection) -> int:
    """Counts the parameters that one token uses for the main logits, without padding, unchosen experts and MTP.

    Both tables count in full; some model cards omit the embedding table.
    """
    if model.experts is None:
        return num_parameters(model.model_copy(update={"mtp_depths": 0}))
    active = model.experts.model_copy(update={"num_experts": model.experts.top_k})
    active_model = model.model_copy(update={"experts": active, "mtp_depths": 0})
    inactive_rows = (
        router_parameters(model).total - router_parameters(active_model).total
    )  # every token uses all rows of a router
    num_routers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return num_parameters(active_model) + num_routers * inactive_rows


def layer_parameters(model: ModelSection, layer: int) -> Parameters:
    """Counts the parameters of layer `layer`, counted from 0."""
    return sum((part.parameters(model) for part in LAYER_PARTS if part.is_in(model, layer)), start=Parameters())


def _ahead(model: ModelSection) -> Parameters:
    """Counts the parameters of all MTP depths with their layers."""
    depths = (joint_parameters(model) + layer_parameters(model, layer) for layer in model.layers_ahead)
    return sum(depths, start=Parameters())


def layer_matrices(model: ModelSection, layer: int) -> Parameters:
    """Counts a layer's projection matrices, without biases, norms, sinks and the router."""
    return sum((part.matrices(model) for part in LAYER_PARTS if part.is_in(model, layer)), start=Parameters())


def _with_vocabulary(model: ModelSection, vocab_size: int) -> int:
    match model.output:
        case TokenOutput(is_tied=is_tied):
            rows = vocab_size if is_tied else 2 * vocab_size
        case HeadOutput(labels):
            rows = vocab_size + labels
        case _ as never:
            assert_never(never)
    layers = _of_layers(model, range(model.num_layers)) + _ahead(model)
    tower = num_tower_parameters(model.vision, model.hidden_size)
    return rows * model.hidden_size + layers.total + norm_elements(model, model.hidden_size) + tower


def parameters_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> RankParameters:
    """Counts the parameters on a rank of pipeline rank `pp_rank`, with vocabulary padding.

    In a pipeline, the first and the last stage each hold a copy of a table that both use: a tied table, or the
    embeddings with MTP.
    """
    parameters = _of_layers(model, layout.layers_of_rank(model.num_layers, pp_rank))
    if pp_rank == 0:
        parameters += Parameters(replicated=num_tower_parameters(model.vision, model.hidden_size))
    if pp_rank == layout.pp - 1:
        parameters += Parameters(replicated=norm_elements(model, model.hidden_size) + head_elements(model))
        parameters += _ahead(model)
    return (parameters + Parameters(divided=_table_elements(model, layout, pp_rank))).on_rank(layout)


def table_elements_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements of vocabulary tables on a rank."""
    return _table_elements(model, layout, pp_rank) // layout.tp


def _table_elements(model: ModelSection, layout: Layout, pp_rank: int) -> int:
    return len(tables_on_stage(model, layout, pp_rank)) * padded_vocab_size(model, layout.tp) * model.hidden_size


def tables_on_stage(model: ModelSection, layout: Layout, pp_rank: int) -> set[str]:
    """Returns the names of the vocabulary tables on a stage: embedding, output."""
    tables = {"embedding"} if pp_rank == 0 else set()
    if pp_rank == layout.pp - 1:
        tables |= {"embedding"} if model.layers_ahead or model.output.is_tied else set()
        tables |= {"output"} if model.output.has_table else set()
    return tables


def head_elements(model: ModelSection) -> int:
    """Counts the elements of the head on the last stage, which every TP rank holds whole; 0 without a head."""
    return model.output.head_rows * model.hidden_size


def matrices_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> RankParameters:
    """Counts the matrices of the layers on a rank, without tables, routers, norms, biases and sinks."""
    matrices = sum(
        (layer_matrices(model, layer) for layer in layout.layers_of_rank(model.num_layers, pp_rank)), start=Parameters()
    )
    if pp_rank == layout.pp - 1:
        projection = Parameters(divided=2 * model.hidden_size**2)
        matrices = sum((projection + layer_matrices(model, layer) for layer in model.layers_ahead), start=matrices)
    return matrices.on_rank(layout)


def trained_matrices_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> RankParameters:
    """Counts the elements of trained matrices on a rank, those of a vision tower included, which Muon updates."""
    trained = RankParameters(0, 0) if model.has_frozen_language_model else matrices_on_rank(model, layout, pp_rank)
    tower = num_trained_in_matrices(model.vision, model.hidden_size) if pp_rank == 0 else 0
    return replace(trained, dense=trained.dense + tower)


def _of_layers(model: ModelSection, layers: Iterable[int]) -> Parameters:
    counted = alike(model, layers).items()
    return sum((layer_parameters(model, layer) * count for layer, count in counted), start=Parameters())

"""Freezes a model and attaches adapters to the parts that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.arch import adapters as plan
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.adapters.adapter import LORA_A, LORA_B, MODULE, Adapter
from mtrain.core.layers.adapters.experts import ExpertAdapter, add_to_stack
from mtrain.core.layers.adapters.linear import (
    FrozenLinear,
    FusedParts,
    Fusion,
    LinearAdapter,
    WeightAdapter,
    adapted_names,
    add_to_linear,
    add_to_replicated,
    add_to_weight,
)
from mtrain.core.layers.attention.mla import KeyValueProjection, ReplicatedLinear
from mtrain.core.layers.moe.experts import Stack


class EmbeddingAdapter(Adapter):
    """Row of A for each token, [vocabulary, rank], and B [hidden, rank].

    A is divided like the table, its rows over TP, and is the transpose of PEFT's lora_embedding_A.
    """

    def __init__(
        self,
        section: AdapterSection,
        config: TransformerConfig,
        collection: ProcessGroupCollection,
        table: VocabParallelEmbedding,
    ) -> None:
        super().__init__(config, collection)
        self._section = section
        self._first, self._end = table.vocab_start_index, table.vocab_end_index
        self._scatters = table.reduce_scatter_embeddings
        (rows, hidden), rank = table.weight.shape, section.rank_of("embedding")
        self.add_parameter(f"embedding_{LORA_A}", (rows, rank), 0, may_be_padded=True)
        self.add_parameter(f"embedding_{LORA_B}", (hidden, rank), None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes what is added to embeddings of [batch, seq] tokens; one TP collective of `rank` numbers each."""
        is_here = (tokens >= self._first) & (tokens < self._end)
        local = torch.where(is_here, tokens - self._first, 0)
        table = self.get_parameter(f"embedding_{LORA_A}")
        # as in megatron-core's table: the gradient of functional.embedding adds rows in any order on a GPU
        is_ordered = torch.are_deterministic_algorithms_enabled()
        found = table[local] if is_ordered else functional.embedding(local, table)
        narrow = torch.where(is_here.unsqueeze(-1), found, 0.0) * self._section.scale_of("embedding")
        if self._scatters:
            # like the table's own output under sp: [seq_local, batch, ...]
            narrow = reduce_scatter_to_sequence_parallel_region(narrow.transpose(0, 1).contiguous(), group=self._tp)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self._tp)
        # no dropout, as in PEFT: A reads token ids
        return functional.linear(narrow, self.get_parameter(f"embedding_{LORA_B}"))


def add_to_table(adapter: EmbeddingAdapter) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """Returns a forward hook for the table that has this adapter."""

    def hook(table: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + adapter(inputs[0]) if adapter.is_on else output

    return hook


def attach(model: Any, section: ModelSection, adapter: AdapterSection, collection: ProcessGroupCollection) -> None:
    """Freezes every parameter except those that learn whole and adds the adapters, with B zero, to a stage of torch
    layers.

    Call it before anything lists parameters.
    """
    model.requires_grad_(False)
    is_first = not model.has_adapters
    model.has_adapters, model.learns_whole = True, partial(plan.is_learned_whole, section, adapter)
    for module in learned_modules(model, section, adapter):
        module.requires_grad_(True)
    for name, parameter in model.decoder.named_parameters():
        parameter.requires_grad_("norms" in adapter.modules_to_save and plan.is_norm(name))
    builder = _Builder(section, adapter, model.config, collection)
    if model.pre_process:
        # full recomputation and the pipeline follow gradients from the input on: after a frozen table the adapters
        # would get none (megatron-core, tensor_parallel/random.py)
        if is_first:
            model.embedding.register_forward_hook(_with_gradient)
        if "embedding" in adapter.parts:
            builder.adapt_table(model.embedding)
    for layer in model.decoder.layers:
        builder.inside(layer)
    if model.post_process and "output" in adapter.parts:
        builder.adapt_output(model)


def learned_modules(model: Any, section: ModelSection, adapter: AdapterSection) -> list[nn.Module]:
    """Returns the modules of a stage with matrices that learn whole; see `attach`."""
    found: list[nn.Module] = []
    # also the copy of the table on the last stage, where depths of multi-token prediction look up
    if "embedding" in adapter.modules_to_save and hasattr(model, "embedding"):
        found.append(model.embedding)
    if model.post_process and plan.learns_output(section, adapter):
        found.append(model.output_layer)
    return found


class _Builder:
    """Builds the adapters of one stage."""

    def __init__(
        self, section: ModelSection, adapter: AdapterSection, config: Any, collection: ProcessGroupCollection
    ) -> None:
        self._section, self._adapter, self._config, self._collection = section, adapter, config, collection

    def inside(self, layer: nn.Module) -> None:
        """Adapts the targets in one layer, shared and routed experts among them."""
        # a list, since adapters are added during the walk
        for holder in list(layer.modules()):
            for name, module in list(holder.named_children()):
                match module:
                    case ColumnParallelLinear() | RowParallelLinear() | ReplicatedLinear():
                        self._adapt_linear(holder, name, module)
                    case Stack() if "experts" in self._adapter.parts:
                        self._adapt_stack(holder, name, module)

    def adapt_table(self, embedding: Any) -> None:
        """Adapts the table of embeddings."""
        adapter = EmbeddingAdapter(self._adapter, self._config, self._collection, embedding.word_embeddings)
        adapter.hook = embedding.word_embeddings.register_forward_hook(add_to_table(adapter))
        embedding.add_module(f"word_embeddings{MODULE}", adapter)

    def adapt_output(self, model: Any) -> None:
        """Adapts the output layer."""
        fusion = Fusion(1, (model.output_layer.weight.shape[0],))
        self._attach_linear(
            model, "output_layer", model.output_layer, FusedParts(fusion, ("output",), frozenset(("output",)))
        )

    def _adapt_linear(self, holder: nn.Module, name: str, linear: FrozenLinear) -> None:
        names = plan.fused_parts(self._section, self._adapter, name)
        adapted = adapted_names(names, self._adapter)
        if adapted:
            self._attach_linear(holder, name, linear, FusedParts(self._fusion(name, linear), names, adapted))

    def _attach_linear(self, holder: nn.Module, name: str, linear: Any, parts: FusedParts) -> None:
        given = (self._adapter, self._config, self._collection, linear, parts)
        adapter: LinearAdapter
        if isinstance(linear, KeyValueProjection):
            adapter = WeightAdapter(*given)
            adapter.hook = linear.register_forward_hook(add_to_weight(adapter))
        else:
            adapter = LinearAdapter(*given)
            is_replicated = isinstance(linear, ReplicatedLinear)
            add = add_to_replicated(adapter) if is_replicated else add_to_linear(adapter)
            adapter.hook = linear.register_forward_hook(add)
        holder.add_module(f"{name}{MODULE}", adapter)

    def _adapt_stack(self, holder: Any, name: str, stack: Stack) -> None:
        adapter = ExpertAdapter(self._adapter, self._config, stack, holder.implementation)
        adapter.hook = stack.register_forward_hook(add_to_stack(adapter))
        holder.add_module(f"{name}{MODULE}", adapter)

    def _fusion(self, name: str, linear: FrozenLinear) -> Fusion:
        """Returns the fusion of a rank's outputs; query groups and their heads are never cut."""
        rows = linear.weight.shape[0]
        sizes = plan.fused_rows(self._section, self._adapter, name, rows)
        return Fusion(rows // sum(sizes), sizes)


def _with_gradient(embedding: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

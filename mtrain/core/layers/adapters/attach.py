"""Freezes a model and attaches adapters to the parts named in the configuration."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from mtrain.core.layers.adapters.linear import FrozenLinear, FusedParts, Fusion, LinearAdapter, WeightAdapter
from mtrain.core.layers.attention.mla import KeyValueProjection, ReplicatedLinear
from mtrain.core.layers.moe.experts import Stack
from mtrain.core.layers.moe.grouped_gemm import Implementation, chosen_product
from mtrain.core.layers.own_parameters import expert_parameter


class EmbeddingAdapter(Adapter):
    """Adapter of the embedding table: A with a row for each token, [vocabulary, rank], and B, [hidden, rank].

    TP divides the rows of A like those of the table; A is the transpose of PEFT's lora_embedding_A.
    """

    def __init__(
        self,
        section: AdapterSection,
        config: TransformerConfig,
        tp: dist.ProcessGroup,
        table: VocabParallelEmbedding,
    ) -> None:
        super().__init__(section, config, tp)
        self._first, self._end = table.vocab_start_index, table.vocab_end_index
        self._scatters = table.reduce_scatter_embeddings
        (rows, hidden), rank = table.weight.shape, section.rank_of("embedding")
        self.add_parameter(f"embedding_{LORA_A}", (rows, rank), 0, may_be_padded=True)
        self.add_parameter(f"embedding_{LORA_B}", (hidden, rank), None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the summand for embeddings of [batch, seq] tokens; one collective over TP of `rank` numbers each."""
        is_here = (tokens >= self._first) & (tokens < self._end)
        local = torch.where(is_here, tokens - self._first, 0)
        table = self.get_parameter(f"embedding_{LORA_A}")
        # as in megatron-core's table, since the backward of functional.embedding adds rows in no fixed order on a GPU
        is_ordered = torch.are_deterministic_algorithms_enabled()
        looked_up = table[local] if is_ordered else functional.embedding(local, table)
        narrow = torch.where(is_here.unsqueeze(-1), looked_up, 0.0) * self._section.scale_of("embedding")
        if self._scatters:
            # like the output of the table under sp, [seq_local, batch, ...]
            narrow = narrow.transpose(0, 1).contiguous()
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp_group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.tp_group)
        # without dropout, as in PEFT, since A reads token ids
        return functional.linear(narrow, self.get_parameter(f"embedding_{LORA_B}"))


class ExpertAdapter(Adapter):
    """Adapter of one of the two projections of all experts: A, [experts, rank, inputs], and B, [experts, outputs,
    rank].

    Gate and up share A, as in PEFT's adapters of transformers' fused experts. `Experts` describes the parameters for
    checkpoints, with an axis of all experts.
    """

    def __init__(
        self,
        section: AdapterSection,
        config: TransformerConfig,
        tp: dist.ProcessGroup,
        stack: Stack,
        implementation: Implementation,
    ) -> None:
        super().__init__(section, config, tp)
        rank = section.rank_of("experts")
        count, rows, columns = stack.weight.shape
        # rows of `rank` numbers may not be aligned for the grouped product
        self._implementation: Implementation = "auto" if implementation == "grouped" else implementation
        self._sizes = (rows, columns, rank)
        self.register_parameter(LORA_A, expert_parameter(config, torch.zeros(count, rank, columns)))
        self.register_parameter(LORA_B, expert_parameter(config, torch.zeros(count, rows, rank)))

    def added(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Any:
        """Adds the adapter's output to the projections of tokens, which are sorted by expert."""
        return output + self(*inputs[:2])

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Computes the summand for the projections of [count, columns] tokens, sorted by expert."""
        down, up = self.get_parameter(LORA_A), self.get_parameter(LORA_B)
        product = chosen_product(self._implementation, self._sizes, down)
        # a token is on only one rank here, so each rank draws dropout of its own
        drops = self._section.dropout > 0 and self.training
        dropped = functional.dropout(tokens, self._section.dropout) if drops else tokens
        return product(product(dropped, down, counts) * self._section.scale_of("experts"), up, counts)


def attach(model: Any, section: ModelSection, adapter: AdapterSection, collection: ProcessGroupCollection) -> None:
    """Freezes every parameter of a stage except the fully trained ones, and adds adapters, which start as zero.

    Call it before anything lists the parameters. Only for our layers on torch.
    """
    model.requires_grad_(False)
    is_first = not model.has_adapters
    model.has_adapters, model.learns_whole = True, partial(plan.is_learned_whole, section, adapter)
    for module in learned_modules(model, section, adapter):
        module.requires_grad_(True)
    if hasattr(model, "vision"):
        model.vision.freeze_parts()
    for name, parameter in model.decoder.named_parameters():
        parameter.requires_grad_("norms" in adapter.modules_to_save and plan.is_norm(name))
    builder = _Builder(section, adapter, model.config, collection.tp)
    if model.pre_process:
        # full recomputation and the pipeline need an input that requires a gradient; after a frozen table adapters
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
    """Returns the modules of a stage with fully trained matrices; see `attach`."""
    modules: list[nn.Module] = []
    # including the copy of the table for MTP depths on the last stage
    if "embedding" in adapter.modules_to_save and hasattr(model, "embedding"):
        modules.append(model.embedding)
    if model.post_process and plan.learns_output(section, adapter):
        modules.append(model.output_layer)
    return modules


@dataclass(frozen=True)
class _Builder:
    """Builds the adapters of one stage."""

    section: ModelSection
    adapter: AdapterSection
    config: TransformerConfig
    tp: dist.ProcessGroup

    def inside(self, layer: nn.Module) -> None:
        """Adapts the targets in one layer, including shared and routed experts."""
        # a list, since the loop adds adapters
        for holder in list(layer.modules()):
            for name, module in list(holder.named_children()):
                match module:
                    case ColumnParallelLinear() | RowParallelLinear() | ReplicatedLinear():
                        self._adapt_linear(holder, name, module)
                    case Stack() if "experts" in self.adapter.parts:
                        self._adapt_stack(holder, name, module)

    def adapt_table(self, embedding: Any) -> None:
        """Adapts the embedding table."""
        adapter = EmbeddingAdapter(self.adapter, self.config, self.tp, embedding.word_embeddings)
        adapter.follow(embedding.word_embeddings)
        embedding.add_module(f"word_embeddings{MODULE}", adapter)

    def adapt_output(self, model: Any) -> None:
        """Adapts the output layer."""
        fusion = Fusion(1, (model.output_layer.weight.shape[0],))
        self._attach_linear(
            model, "output_layer", model.output_layer, FusedParts(fusion, ("output",), frozenset(("output",)))
        )

    def _adapt_linear(self, holder: nn.Module, name: str, linear: FrozenLinear) -> None:
        names = plan.fused_parts(self.section, self.adapter, name)
        adapted = frozenset(self.adapter.parts.intersection(names))
        if adapted:
            # query groups and their heads are never divided
            rows = linear.weight.shape[0]
            sizes = plan.fused_rows(self.section, self.adapter, name, rows)
            fusion = Fusion(rows // sum(sizes), sizes)
            self._attach_linear(holder, name, linear, FusedParts(fusion, names, adapted))

    def _attach_linear(self, holder: nn.Module, name: str, linear: Any, parts: FusedParts) -> None:
        kind = WeightAdapter if isinstance(linear, KeyValueProjection) else LinearAdapter
        adapter = kind(self.adapter, self.config, self.tp, linear, parts)
        adapter.follow(linear)
        holder.add_module(f"{name}{MODULE}", adapter)

    def _adapt_stack(self, holder: Any, name: str, stack: Stack) -> None:
        adapter = ExpertAdapter(self.adapter, self.config, self.tp, stack, holder.implementation)
        adapter.follow(stack)
        holder.add_module(f"{name}{MODULE}", adapter)


def _with_gradient(embedding: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

"""Memory of a rank, by component."""

from dataclasses import dataclass, replace
from typing import assert_never

from mtrain.arch.activations import Activations
from mtrain.arch.adapters import (
    adapter_parameters_on_rank,
    all_matrices,
    holds_narrow,
    learned_norm_elements,
    learned_table_elements,
    trained_with_frozen,
)
from mtrain.arch.features import alike
from mtrain.arch.features.feature import RankParameters
from mtrain.arch.features.outside import num_frozen_parameters, num_tower_parameters, trained_tower_sizes
from mtrain.arch.layout import Layout
from mtrain.arch.parameters import (
    BF16_BYTES,
    FP32_BYTES,
    element_bytes,
    head_elements,
    layer_parameters,
    matrices_on_rank,
    padded_vocab_size,
    parameters_on_rank,
    table_elements_on_rank,
    tables_on_stage,
    trained_matrices_on_rank,
)
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection, MuonSection, TrainSection

_MOMENTS_BYTES = 2 * FP32_BYTES
MOMENTS_AT_ONCE_BYTES = 2**29
"""Largest size of the moments that an update with train.offload_optimizer moves together, unless one parameter's
moments are larger; PCIe takes about ten milliseconds for them."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank; activations and update are estimates, the others follow from the parameters."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Peak of activations while gradients are computed."""
    update_bytes: int
    """Peak of the optimizer's temporary memory, after activations are freed."""
    host_bytes: int = 0
    """Pinned host memory for offloaded activations and moments; not in the total."""
    adapter_bytes: int = 0
    """Part of weights, gradients and optimizer that belongs to the adapter; another of this shape needs as much."""

    @property
    def total_bytes(self) -> int:
        """Bytes at the heaviest moment, without fragmentation, libraries and communication buffers."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + max(self.activations_bytes, self.update_bytes)


def memory_per_rank(config: Config, layout: Layout, pp_rank: int, patches: int | None = None) -> MemoryEstimate:
    """Estimates the memory of a rank of pipeline rank `pp_rank`.

    `patches` is the largest number of patches of images in a microbatch that a rank encodes; None: as many as full rows
    of images have.

    Gradients are summed in fp32. The optimizer keeps fp32 moments, and fp32 main weights under bf16 and fp16; the
    distributed optimizer divides them over DP x CP, for experts over their replicas. A frozen model has only weights.
    With `layout.shard=weights` weights (in fp32) and gradients are divided as well, and layers that are gathered count
    with the activations.
    """
    trained = trained_parameters(config, layout, pp_rank)
    rank, activations = _StageRank(config, layout, pp_rank), Activations(config, layout, patches)
    state_numbers = rank.kept_numbers(trained)
    largest = rank.largest_trained()
    updated = own_shard(config.train, config.model, layout, trained)
    moved = _MOMENTS_BYTES * updated if config.train.offload_optimizer else 0
    learned_bytes, gradients_bytes = trained.total * element_bytes(config.train), trained.total * FP32_BYTES
    optimizer_bytes = FP32_BYTES * own_shard(config.train, config.model, layout, state_numbers) - moved
    frozen_bytes, peak_bytes = rank.frozen_bytes(), activations.most_bytes(pp_rank)
    if layout.shard == "weights":
        gathered = _Gathered(config.model, layout, pp_rank, element_bytes(config.train), config.adapter is None)
        freed = activations.largest_layer_bytes() if config.train.recompute == "none" else 0
        in_backward = (gathered.in_layers(freed), gathered.for_logits)
        peak_bytes = max(activations.most_bytes(pp_rank, *in_backward), gathered.after_layers)
        whole = parameters_on_rank(config.model, layout, pp_rank)
        frozen_bytes = frozen_bytes * own_shard(config.train, config.model, layout, whole) // whole.total
    if layout.shard == "weights" and config.adapter is None:
        learned_bytes = gradients_bytes = FP32_BYTES * updated
        # the weights are the main weights
        optimizer_bytes -= FP32_BYTES * updated * (element_bytes(config.train) < FP32_BYTES)
    return MemoryEstimate(
        weights_bytes=learned_bytes + frozen_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        activations_bytes=peak_bytes,
        update_bytes=_update_bytes(updated, largest) + _moments_at_once(moved, largest),
        host_bytes=activations.host_bytes(pp_rank) + moved,
        adapter_bytes=0 if config.adapter is None else learned_bytes + gradients_bytes + optimizer_bytes,
    )


def trained_parameters(config: Config, layout: Layout, pp_rank: int) -> RankParameters:
    """Counts the parameters with gradients on a rank: the model without its frozen parts, or adapters and fully trained
    tensors."""
    model = config.model
    adapter = trained_with_frozen(model, config.adapter)
    if adapter is not None:
        trained = adapter_parameters_on_rank(model, adapter, layout, pp_rank)
        return replace(trained, dense=trained.dense + sum(_trained_tower_on_rank(model, pp_rank)))
    whole = parameters_on_rank(model, layout, pp_rank)
    frozen = num_frozen_parameters(model.vision, model.hidden_size) if pp_rank == 0 else 0
    return replace(whole, dense=whole.dense - frozen)


def _trained_tower_on_rank(model: ModelSection, pp_rank: int) -> list[int]:
    return trained_tower_sizes(model.vision, model.hidden_size) if pp_rank == 0 else []


@dataclass(frozen=True)
class _StageRank:
    """A rank of a pipeline stage of a run."""

    config: Config
    layout: Layout
    pp_rank: int

    def frozen_bytes(self) -> int:
        """Returns the bytes of frozen weights."""
        config, layout, pp_rank = self.config, self.layout, self.pp_rank
        if config.adapter is None:
            trained = trained_parameters(config, layout, pp_rank).total
            return (parameters_on_rank(config.model, layout, pp_rank).total - trained) * element_bytes(config.train)
        tables = learned_table_elements(config.model, config.adapter, layout, pp_rank)
        learned = tables + (head_elements(config.model) if pp_rank == layout.pp - 1 else 0)
        learned += learned_norm_elements(config.model, config.adapter, layout, pp_rank)
        learned += sum(_trained_tower_on_rank(config.model, pp_rank))
        whole, narrow = parameters_on_rank(config.model, layout, pp_rank).total - learned, 0
        if holds_narrow(config.adapter, config.train.precision):
            narrow = matrices_on_rank(config.model, layout, pp_rank).total
            narrow += table_elements_on_rank(config.model, layout, pp_rank) - tables
        return whole * element_bytes(config.train) - narrow * (element_bytes(config.train) - BF16_BYTES)

    def largest_trained(self) -> int:
        """Returns the elements of the largest trained parameter on a rank."""
        model, adapter, layout = self.config.model, self.config.adapter, self.layout
        if adapter is None and model.has_frozen_language_model:
            return max(_trained_tower_on_rank(model, self.pp_rank), default=0)
        if adapter is None:
            return _table_elements(model, layout)
        sizes = (
            adapter.rank_of(matrix.part) * max(matrix.rows, matrix.columns) for matrix in all_matrices(model, adapter)
        )
        tables = learned_table_elements(model, adapter, layout, self.pp_rank)
        return max(*sizes, *_trained_tower_on_rank(model, self.pp_rank), head_elements(model), tables)

    def kept_numbers(self, trained: RankParameters) -> RankParameters:
        """Counts the fp32 numbers of the optimizer's state for a rank's parameters, before DP ranks divide them."""
        # both moments, and main weights in half precision
        per_parameter = 2 if element_bytes(self.config.train) == FP32_BYTES else 3
        match self.config.optimizer:
            case AdamWSection():
                spared = RankParameters(0, 0)
            case MuonSection():  # a momentum instead of two moments
                spared = trained_matrices_on_rank(self.config.model, self.layout, self.pp_rank)
            case _:
                assert_never(self.config.optimizer)
        return RankParameters(
            per_parameter * trained.dense - spared.dense, per_parameter * trained.experts - spared.experts
        )


def root_elements(model: ModelSection, layout: Layout, pp_rank: int) -> int:
    """Counts the elements that stay gathered from the forward to the backward pass with divided weights, since the loss
    multiplies by them: the output layer, or a tied embedding."""
    tables = tables_on_stage(model, layout, pp_rank)
    root = (
        _table_elements(model, layout) if "output" in tables or (model.output.is_tied and "embedding" in tables) else 0
    )
    return root + (head_elements(model) if pp_rank == layout.pp - 1 else 0)


def _table_elements(model: ModelSection, layout: Layout) -> int:
    return padded_vocab_size(model, layout.tp) // layout.tp * model.hidden_size


@dataclass(frozen=True)
class _Gathered:
    """Gathered weights and their gradients on a rank with divided weights; `size` is the bytes of an element."""

    model: ModelSection
    layout: Layout
    pp_rank: int
    size: int
    learns: bool
    """Whether the gathered weights have gradients; false with adapters."""

    @property
    def layer(self) -> int:
        """Elements of the largest layer, with its experts."""
        layers = alike(self.model, self.layout.layers_of_rank(self.model.num_layers, self.pp_rank))
        return max(layer_parameters(self.model, layer).on_rank(self.layout).total for layer in layers)

    @property
    def root(self) -> int:
        return root_elements(self.model, self.layout, self.pp_rank)

    @property
    def _embedding(self) -> int:
        """Elements of an embedding that is a unit of its own."""
        is_alone = "embedding" in tables_on_stage(self.model, self.layout, self.pp_rank)
        return _table_elements(self.model, self.layout) if is_alone and not self.model.output.is_tied else 0

    @property
    def _tower(self) -> int:
        """Elements of a vision tower, which is a unit of its own."""
        return num_tower_parameters(self.model.vision, self.model.hidden_size) if self.pp_rank == 0 else 0

    @property
    def for_logits(self) -> int:
        return self.size * self.root

    def in_layers(self, freed_bytes: int) -> int:
        """Returns the bytes in the backward pass of layers: the layer that computes, its gradient, and the next layer;
        the gradient of the previous layer, which is summed in float32; the root unit and its gradient.

        Args:
            freed_bytes: Activations of the previous layer, which are freed before its gradient is summed.
        """
        summed = max(0, FP32_BYTES * self.layer - freed_bytes)
        gradients = self.size * self.layer + summed + self._root_gradient
        return self.size * (self.root + 2 * self.layer) + (gradients if self.learns else 0)

    @property
    def _root_gradient(self) -> int:
        """Bytes of the root unit's gradient, which waits for the end of the backward pass."""
        return self.size * self.root if self.pp_rank == self.layout.pp - 1 else 0

    @property
    def after_layers(self) -> int:
        """Bytes at the end of the backward pass, when gradients of the vision tower, of the embedding and of the root
        unit are summed, one after another."""
        if not self.learns:
            return 0
        unit = max(self._embedding, self._tower)
        # the gradient, what is sent, and this rank's sum, which is added to those of earlier microbatches
        summed = FP32_BYTES * unit // (self.layout.dp * self.layout.cp)
        alone = (self.size + FP32_BYTES) * unit + summed + self._root_gradient
        return self.size * self.root + max(alone, (self.size + FP32_BYTES) * self.root)


def own_shard(train: TrainSection, model: ModelSection, layout: Layout, numbers: RankParameters) -> int:
    """Returns how many of `numbers` a rank's shard of the optimizer holds; the maximum over ranks if experts do not
    divide evenly."""
    if not train.distributed_optimizer:
        return numbers.total
    dense = numbers.dense // (layout.dp * layout.cp)
    if layout.shard == "weights" and model.experts is not None:  # an expert is a row
        local = model.experts.num_experts // layout.ep
        return dense + numbers.experts // local * -(-local // layout.edp)
    return dense + numbers.experts // layout.edp


def _moments_at_once(moved: int, largest: int) -> int:
    """Returns the bytes of moments on the device during an update: the current ones, the previous and the next.

    Args:
        moved: Bytes of all offloaded moments.
        largest: Elements of the largest parameter.
    """
    return min(moved, max(MOMENTS_AT_ONCE_BYTES, _MOMENTS_BYTES * largest) + 2 * MOMENTS_AT_ONCE_BYTES)


def _update_bytes(state_elements: int, largest: int) -> int:
    """Returns the bytes of a copy of one gradient, which some optimizers make (clipping and fused AdamW do not)."""
    return FP32_BYTES * min(largest, state_elements)

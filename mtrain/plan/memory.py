"""Memory of a rank, by component."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection, MuonSection
from mtrain.plan.counts import RankParameters
from mtrain.plan.features import LAYER_PARTS
from mtrain.plan.features.feature import hidden_local
from mtrain.plan.layout import Layout, most_microbatches
from mtrain.plan.parameters import matrices_on_rank, padded_vocab_size, parameters_on_rank

_FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank; activations are a rough figure, the rest follows from the parameters."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All components; temporary buffers and fragmentation come on top."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def memory_per_rank(config: Config, layout: Layout, pp_rank: int) -> MemoryEstimate:
    """Bytes on a rank of pipeline rank `pp_rank`.

    Gradients are summed in fp32. The optimizer keeps fp32 moments, and fp32 main weights under bf16 and fp16; the
    distributed optimizer divides them over DP x CP, those of experts over the replicas of an expert.
    """
    held = parameters_on_rank(config.model, layout, pp_rank)
    kept = _kept_numbers(config, layout, pp_rank, held)
    if config.train.distributed_optimizer:
        dense, experts = _FP32_BYTES * kept.dense, _FP32_BYTES * kept.experts
        state_bytes = dense // (layout.dp * layout.cp) + experts // layout.edp
    else:
        state_bytes = _FP32_BYTES * kept.total
    return MemoryEstimate(
        weights_bytes=held.total * _element_bytes(config),
        gradients_bytes=held.total * _FP32_BYTES,
        optimizer_bytes=state_bytes,
        activations_bytes=_activations_bytes(config, layout, pp_rank),
    )


def _kept_numbers(config: Config, layout: Layout, pp_rank: int, held: RankParameters) -> RankParameters:
    """Of the parameters that a rank holds, fp32 numbers that the optimizer keeps before they are divided."""
    each = 2 if config.train.precision == "fp32" else 3  # both moments, main weights
    match config.optimizer:
        case AdamWSection():
            spared = RankParameters(0, 0)
        case MuonSection():  # a momentum in the place of two moments
            spared = matrices_on_rank(config.model, layout, pp_rank)
        case _:
            assert_never(config.optimizer)
    return RankParameters(each * held.dense - spared.dense, each * held.experts - spared.experts)


def _element_bytes(config: Config) -> int:
    return _FP32_BYTES if config.train.precision == "fp32" else 2


def _activations_bytes(config: Config, layout: Layout, pp_rank: int) -> int:
    """What backward keeps of all microbatches in flight, and the logits of one on the last stage."""
    model, train = config.model, config.train
    tokens = train.micro_batch_size * config.row_width // layout.cp
    is_last = pp_rank == layout.pp - 1
    chunks = [_chunk_elements(config, layout, pp_rank, chunk) for chunk in range(layout.vpp)]
    elements = _chunks_in_flight(config, layout, pp_rank) * max(chunks)
    if train.recompute == "full":  # one layer at a time comes to life again
        elements += max(_layer_elements(model, layout, layer) for layer in range(model.num_layers))
    total = tokens * elements * _element_bytes(config)
    if is_last:
        vocab_local = padded_vocab_size(model, layout.tp) // layout.tp
        total += (1 + model.mtp_depths) * tokens * vocab_local * (_element_bytes(config) + _FP32_BYTES)
    return total


def _chunk_elements(config: Config, layout: Layout, pp_rank: int, chunk: int) -> int:
    """Elements a token that one forward pass of a virtual chunk keeps."""
    model = config.model
    layers = list(layout.layers(model.num_layers, pp_rank, chunk))
    if layout.stage(pp_rank, chunk) == layout.num_stages - 1:
        layers += [model.num_layers - 1] * model.mtp_depths
    if config.train.recompute == "full":
        return len(layers) * hidden_local(model, layout)
    return sum(_layer_elements(model, layout, layer) for layer in layers)


def _layer_elements(model: ModelSection, layout: Layout, layer: int) -> int:
    """Elements a token that backward needs of a whole layer with fused attention."""
    return sum(part.kept_elements(model, layout) for part in LAYER_PARTS if part.is_in(model, layer))


def _chunks_in_flight(config: Config, layout: Layout, pp_rank: int) -> int:
    """Forward passes of a virtual chunk whose backward has not run, at most: the schedule's warm-up and one more."""
    num = most_microbatches(config, layout)
    if layout.vpp == 1:
        return min(layout.pp - pp_rank, num)
    warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, num * layout.vpp)

"""What a run costs, known before it starts: parameters, arithmetic and memory.

H heads of d dimensions, G query groups, hidden size h, FFN size f, vocabulary V, sequence length s.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config import Config
from mtrain.config.model import ModelSection
from mtrain.layout import Layout

_FP32_BYTES = 4
_ADAM_BYTES = 2 * _FP32_BYTES
"""Both moments of a parameter."""


_PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI300X": 1307e12,
}


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer, by how tensor parallelism holds them."""

    divided: int
    """Over the ranks of a TP group."""
    replicated: int
    """Whole on every rank."""

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.divided + self.replicated


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


def padded_vocab_size(model: ModelSection, tp: int) -> int:
    """Rows of the embedding table: vocab_size rounded up to a multiple of vocab_multiple x tp."""
    multiple = model.vocab_multiple * tp
    return -(-model.vocab_size // multiple) * multiple


def layer_parameters(model: ModelSection) -> LayerParameters:
    """Parameters of one layer: four attention and two or three FFN matrices, their biases, and the norms."""
    query, key_value = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    qkv = query + 2 * key_value
    fc1 = model.ffn_hidden_size * (2 if model.is_gated else 1)
    divided = model.hidden_size * (qkv + query + fc1 + model.ffn_hidden_size)
    replicated = 2 * _norm(model, model.hidden_size)
    if model.qkv_bias or model.linear_bias:
        divided += qkv
    if model.linear_bias:
        divided += fc1
        replicated += 2 * model.hidden_size  # row-parallel outputs add their bias after the sum over TP
    if model.qk_norm:
        replicated += 2 * _norm(model, model.head_size)
    return LayerParameters(divided=divided, replicated=replicated)


def _norm(model: ModelSection, size: int) -> int:
    return size if model.norm == "rmsnorm" else 2 * size


def num_parameters(model: ModelSection) -> int:
    """Parameters of the whole model, without padding of the vocabulary; tied embeddings count once."""
    return _with_vocabulary(model, model.vocab_size)


def num_padded_parameters(model: ModelSection, tp: int) -> int:
    """Parameters of the whole model with the vocabulary padded for `tp`; tied embeddings count once."""
    return _with_vocabulary(model, padded_vocab_size(model, tp))


def _with_vocabulary(model: ModelSection, vocab_size: int) -> int:
    tables = 1 if model.tied_embeddings else 2
    layers = model.num_layers * layer_parameters(model).total
    return tables * vocab_size * model.hidden_size + layers + _norm(model, model.hidden_size)


def num_parameters_on_rank(model: ModelSection, layout: Layout, pp_rank: int) -> int:
    """Parameters that a rank of pipeline rank `pp_rank` holds, vocabulary padded.

    With tied embeddings and a pipeline, the first and the last stage hold a copy each.
    """
    counts = layout.layers_per_stage(model.num_layers)
    num_layers = sum(counts[layout.stage(pp_rank, chunk)] for chunk in range(layout.vpp))
    layer = layer_parameters(model)
    total = num_layers * (layer.divided // layout.tp + layer.replicated)
    table = padded_vocab_size(model, layout.tp) // layout.tp * model.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    if is_first:
        total += table
    if is_last:
        total += _norm(model, model.hidden_size)
        if not (model.tied_embeddings and is_first):
            total += table
    return total


def num_attended_pairs(seq_length: int, window: int | None) -> int:
    """Pairs (query, key) of a causal sequence; with a window, a token sees itself and window - 1 tokens before it."""
    width = seq_length if window is None else min(window, seq_length)
    return width * (width + 1) // 2 + (seq_length - width) * width


def flops_per_token(model: ModelSection, seq_length: int) -> float:
    """Floating-point operations that training needs for one token: forward, and backward at twice the forward.

    Forward, as 2 operations for each multiply-add:

        2 x L x (h (H + 2 G) d + H d h + 3 h f)    matrices of L layers; 2 h f without a gate
      + 4 x H d x sum over layers of pairs / s     scores and their product with the values, causal pairs only
      + 2 x h V                                    logits

    Recomputation, padding, norms, softmax and the optimizer do not count; documents isolated inside a sequence count
    as if they were not.
    """
    query, key_value = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    num_ffn_matrices = 3 if model.is_gated else 2
    weights = model.hidden_size * (2 * query + 2 * key_value + num_ffn_matrices * model.ffn_hidden_size)
    every = model.global_attention_every
    num_global = model.num_layers if model.sliding_window is None else model.num_layers // every if every else 0
    num_windowed = model.num_layers - num_global
    pairs = num_global * num_attended_pairs(seq_length, None)
    pairs += num_windowed * num_attended_pairs(seq_length, model.sliding_window)
    forward = 2 * model.num_layers * weights + 4 * query * pairs / seq_length + 2 * model.hidden_size * model.vocab_size
    return 3 * forward


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """Model-FLOPs utilisation: the share of `peak_flops` that the model's own arithmetic takes.

    Args:
        tokens_per_second: Of all devices together.
        flops_per_token: As `flops_per_token` gives.
        peak_flops: Operations per second of all devices together, in the precision that is used.
    """
    return tokens_per_second * flops_per_token / peak_flops


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a GPU in bf16 and fp16, FLOP/s; None where it is not known, or in fp32.

    Source: the makers' data sheets, without sparsity, SXM or OAM form.
    """
    if precision == "fp32":
        return None
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


def memory_per_rank(config: Config, layout: Layout, pp_rank: int) -> MemoryEstimate:
    """Bytes on a rank of pipeline rank `pp_rank`.

    Gradients are summed in fp32. The optimizer keeps two fp32 moments, and fp32 main weights under bf16 and fp16,
    divided over DP x CP by the distributed optimizer.
    """
    num = num_parameters_on_rank(config.model, layout, pp_rank)
    is_fp32 = config.train.precision == "fp32"
    state_bytes = num * (_ADAM_BYTES if is_fp32 else _ADAM_BYTES + _FP32_BYTES)
    if config.train.distributed_optimizer:
        state_bytes //= layout.dp * layout.cp
    return MemoryEstimate(
        weights_bytes=num * _element_bytes(config),
        gradients_bytes=num * _FP32_BYTES,
        optimizer_bytes=state_bytes,
        activations_bytes=_activations_bytes(config, layout, pp_rank),
    )


def _element_bytes(config: Config) -> int:
    return _FP32_BYTES if config.train.precision == "fp32" else 2


def _activations_bytes(config: Config, layout: Layout, pp_rank: int) -> int:
    """What backward keeps of all microbatches in flight, and the logits of one on the last stage."""
    model, train = config.model, config.train
    tokens = train.micro_batch_size * config.data.seq_length // layout.cp
    counts = layout.layers_per_stage(model.num_layers)
    largest = max(counts[layout.stage(pp_rank, chunk)] for chunk in range(layout.vpp))
    layer, layer_input = _layer_elements(model, layout)
    kept = layer_input if train.recompute == "full" else layer
    in_flight = _chunks_in_flight(config, layout, pp_rank)
    elements = in_flight * largest * kept + (layer if train.recompute == "full" else 0)
    total = tokens * elements * _element_bytes(config)
    if pp_rank == layout.pp - 1:
        vocab_local = padded_vocab_size(model, layout.tp) // layout.tp
        total += tokens * vocab_local * (_element_bytes(config) + _FP32_BYTES)
    return total


def _layer_elements(model: ModelSection, layout: Layout) -> tuple[int, int]:
    """Elements a token that backward needs: of a whole layer with fused attention, and of the layer's input alone.

    Inputs and outputs of both norms and the residual (5 h, divided by tp under sequence parallelism), queries, keys,
    values, the attention's output, and the FFN's hidden values before and after the activation (divided by tp).
    """
    hidden = model.hidden_size // layout.tp if layout.sp else model.hidden_size
    query, key_value = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    num_ffn = 3 if model.is_gated else 2
    return 5 * hidden + (2 * query + 2 * key_value + num_ffn * model.ffn_hidden_size) // layout.tp, hidden


def _chunks_in_flight(config: Config, layout: Layout, pp_rank: int) -> int:
    """Forward passes of a virtual chunk whose backward has not run, at most: the schedule's warm-up and one more."""
    num = layout.num_microbatches(config.train.global_batch_size, config.train.micro_batch_size)
    if layout.vpp == 1:
        return min(layout.pp - pp_rank, num)
    warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vpp - 1) * layout.pp
    return min(warm_up + 1, num * layout.vpp)

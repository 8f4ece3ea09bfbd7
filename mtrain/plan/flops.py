"""Floating-point operations of training, and the share of a machine's that they are.

H heads of d dimensions, G query groups, hidden size h, FFN size f, vocabulary V, sequence length s.
"""

from __future__ import annotations

from mtrain.config import Config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.adapters import all_matrices
from mtrain.plan.features import LAYER_PARTS

_PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI300X": 1307e12,
}


def num_attended_pairs(seq_length: int, window: int | None) -> int:
    """Pairs (query, key) of a causal sequence; with a window, a token sees itself and window - 1 tokens before it."""
    width = seq_length if window is None else min(window, seq_length)
    return width * (width + 1) // 2 + (seq_length - width) * width


def flops_per_token(model: ModelSection, seq_length: int) -> float:
    """Floating-point operations that training needs for one token: forward, and backward at twice the forward.

    Forward, as 2 operations for each multiply-add, summed over layers:

        2 x (h (H + 2 G) d + H d h + 3 h f)        matrices; 2 h f without a gate
      + 4 x H d x pairs / s                        scores and their product with the values, causal pairs only

    and 2 x h V for the logits. With experts, the router and the k experts of a token take the place of 3 h f, beside
    the shared ones; with latent attention, its projections that of the first two terms. Every token predicted ahead
    adds a layer, a projection of 2 x 2 h h, and logits.

    Recomputation, padding, norms, sinks, softmax and the optimizer do not count; documents isolated inside a sequence
    count as if they were not.
    """
    layers = [*range(model.num_layers), *[model.num_layers - 1] * model.mtp_depths]
    forward: float = sum(
        2 * part.matrix_elements(model) + 2 * part.pair_products(model) * _pairs(model, layer, seq_length) / seq_length
        for layer in layers
        for part in LAYER_PARTS
        if part.is_in(model, layer)
    )
    forward += 2 * (1 + model.mtp_depths) * model.hidden_size * model.vocab_size
    forward += 2 * model.mtp_depths * 2 * model.hidden_size**2
    return 3 * forward


def adapter_flops_per_token(model: ModelSection, adapter: AdapterSection, seq_length: int) -> float:
    """As `flops_per_token`, of a frozen model: its matrices have no gradients, which saves a third of their part, and
    those of the adapters come on top. What DoRA's norms cost, once a microbatch, does not count."""
    layers = range(model.num_layers)
    frozen = model.hidden_size * model.vocab_size + sum(
        part.matrix_elements(model) for layer in layers for part in LAYER_PARTS if part.is_in(model, layer)
    )
    top_k = 0 if model.experts is None else model.experts.top_k
    added = sum(each.multiplied(adapter, top_k) for each in all_matrices(model, adapter))
    return flops_per_token(model, seq_length) - 2 * frozen + 3 * 2 * added


def run_flops_per_token(config: Config) -> float:
    """Of what a run trains: all of the model, or its adapters."""
    model, seq_length = config.model, config.data.seq_length
    if config.adapter is None:
        return flops_per_token(model, seq_length)
    return adapter_flops_per_token(model, config.adapter, seq_length)


def _pairs(model: ModelSection, layer: int, seq_length: int) -> int:
    every = model.global_attention_every
    sees_everything = every is not None and (layer + 1) % every == 0
    return num_attended_pairs(seq_length, None if sees_everything else model.sliding_window)


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

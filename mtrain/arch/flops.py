"""Floating-point operations of training, and their share of a machine's peak.

H heads of d dimensions, G query groups, hidden size h, FFN size f, vocabulary V, sequence length s.
"""

from dataclasses import dataclass
from typing import assert_never

from mtrain.arch.adapters import OUTPUT, in_layer, learns_output, tables, trained_with_frozen
from mtrain.arch.features import LAYER_PARTS
from mtrain.arch.features.feature import EMBEDDING
from mtrain.arch.features.outside import patches_of_tokens
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Precision
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of

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
    """Counts the pairs (query, key) of a causal sequence; `window` includes the token itself."""
    width = seq_length if window is None else min(window, seq_length)
    return width * (width + 1) // 2 + (seq_length - width) * width


def flops_per_token(model: ModelSection, seq_length: int) -> float:
    """Counts the floating-point operations of training on one token: the forward pass, and twice as many backward.

    Forward, at 2 operations per multiply-add, summed over layers:

        2 x (h (H + 2 G) d + H d h + 3 h f)        matrices; 2 h f without a gate
      + 4 x H d x pairs / s                        scores and their product with the values, causal pairs only
      + 6 x heads x d x d'                         of a delta net instead: its state, read twice and corrected

    and 2 x h V for the logits. With experts, 3 h f becomes the router, a token's k experts and the shared experts; with
    latent attention, its projections replace the first two terms. Each MTP depth adds a layer, a projection of
    2 x 2 h h, and logits.

    Recomputation, padding, norms, sinks, softmax and the optimizer do not count; isolated documents count as one
    sequence.
    """
    layers = [*range(model.num_layers), *model.layers_ahead]
    forward: float = sum(
        2 * (part.matrix_elements(model) + part.state_products(model))
        + 2 * part.pair_products(model) * _pairs(model, layer, seq_length) / seq_length
        for layer in layers
        for part in LAYER_PARTS
        if part.is_in(model, layer)
    )
    forward += 2 * model.num_predictions * model.hidden_size * model.output.rows
    forward += 2 * len(model.layers_ahead) * 2 * model.hidden_size**2
    return 3 * forward


def run_flops_per_token(config: Sections) -> float:
    """Counts the operations per token as `flops_per_token` does, also for adapters on a frozen model, for losses that
    compare sequences, and for a vision tower if all tokens are of images."""
    model, seq = config.model, config.data.seq_length
    windowed = num_attended_pairs(seq, model.sliding_window)
    patches, of_image = patches_of_tokens(model.vision, config.data, seq)
    outputs = seq * model.num_predictions
    work = Work(seq, num_attended_pairs(seq, None), windowed, outputs, patches, patches * of_image)
    return flops_of_step(model, work, config.adapter, config.sequences_per_sample > 1) / seq


@dataclass(frozen=True)
class Work:
    """Work in a batch, which follows from its lengths and masks."""

    tokens: int
    """Positions with text."""
    pairs: int
    """Pairs (query, key) within documents, in layers without a window."""
    window_pairs: int
    """Pairs (query, key) within documents, in layers with a window."""
    outputs: int
    """Positions whose logits a loss term counts, plus those of MTP depths."""
    patches: int = 0
    """Patches of images."""
    patch_pairs: int = 0
    """Pairs of patches that attend to each other in the vision tower."""


def flops_of_step(
    model: ModelSection, work: Work, adapter: AdapterSection | None = None, is_scored: bool = False
) -> float:
    """Counts the floating-point operations of training on a batch.

    Unlike `flops_per_token`, it counts only what the batch contains: matrices for tokens with text, attention for pairs
    inside documents, logits that a term counts. A matrix has three products: forward, the gradient of its input and its
    own. A frozen matrix lacks the last, so it counts twice, and an adapter's pair three times. Embedding lookups do not
    count.

    Args:
        adapter: Section of the adapter on a frozen model; None if the whole model is trained.
        is_scored: Whether a forward pass without gradients precedes, as for losses that compare sequences.
    """
    adapter = trained_with_frozen(model, adapter)
    layers = [*range(model.num_layers), *model.layers_ahead]
    parts = [(part, layer) for layer in layers for part in LAYER_PARTS if part.is_in(model, layer)]
    matrices: float = sum(part.matrix_elements(model) for part, _ in parts)
    matrices += len(model.layers_ahead) * 2 * model.hidden_size**2
    attention = sum(
        part.pair_products(model) * (work.pairs if sees_everything(model, layer) else work.window_pairs)
        for part, layer in parts
    )
    attention += work.tokens * sum(part.state_products(model) for part, _ in parts)
    products = work.tokens * matrices + work.outputs * model.hidden_size * model.output.rows
    adapted: float = 0 if adapter is None else _adapter_products(model, adapter, work)
    if adapter is not None:  # a head or a fully trained output layer is trained alongside the adapter
        learned = work.outputs * model.hidden_size * model.output.rows if learns_output(model, adapter) else 0
        products, adapted = products - learned, adapted + learned
    once = products + attention + adapted if is_scored else 0
    tower = 0 if model.vision is None else _tower_products(model.vision, model.hidden_size, work)
    return 2.0 * ((3 if adapter is None else 2) * products + 3 * (attention + adapted) + once + tower)


def _tower_products(vision: VisionSection, hidden_size: int, work: Work) -> int:
    """Counts the multiply-adds of a vision tower, forward and backward.

    Gradients end at the first trained part, so a frozen tower has none, and its patches never do. Interpolated
    positions do not count.
    """
    tower, width, learns_tower = description_of(vision), vision.hidden_size, not vision.freeze_tower
    patches = work.patches * vision.patch_elements * width
    per_patch = sum(rows * columns for rows, columns in tower.layer_matrices(vision))
    blocks = work.patches * per_patch + work.patch_pairs * 2 * width
    per_feature = sum(rows * columns for rows, columns in tower.projections(vision, hidden_size))
    mergers = work.patches // vision.patches_per_feature * per_feature
    return (
        (1 + learns_tower) * patches
        + (1 + 2 * learns_tower) * vision.num_layers * blocks
        + merger_passes(vision) * mergers
    )


def merger_passes(vision: VisionSection) -> int:
    """Returns the number of products of a projection of the projector: forward, and of its weight and its input."""
    learns_tower, learns_projector = not vision.freeze_tower, not vision.freeze_projector
    return 1 + learns_projector + (learns_projector or learns_tower)


def _adapter_products(model: ModelSection, adapter: AdapterSection, work: Work) -> int:
    layers = (matrix for layer in range(model.num_layers) for matrix in in_layer(model, adapter, layer))
    per_token = sum(matrix.multiplied(adapter) for matrix in layers)
    per_table = {matrix.linear: matrix.multiplied(adapter) for matrix in tables(model, adapter)}
    per_token += per_table.get(EMBEDDING, 0)
    return work.tokens * per_token + work.outputs * per_table.get(OUTPUT, 0)


def sees_everything(model: ModelSection, layer: int) -> bool:
    """Says whether layer `layer`, counted from 0, has no window."""
    every = model.global_attention_every
    return model.sliding_window is None or (every is not None and (layer + 1) % every == 0)


def _pairs(model: ModelSection, layer: int, seq_length: int) -> int:
    return num_attended_pairs(seq_length, None if sees_everything(model, layer) else model.sliding_window)


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Computes the model-FLOPs utilisation, the model's share of the peak.

    Args:
        flops: Operations of a step, as `flops_of_step` counts them.
        seconds: Time of the step.
        peak_flops: Operations per second of all devices together, in the run's precision.
    """
    return flops / seconds / peak_flops


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Returns the dense peak of a GPU in bf16 and fp16, in FLOP/s; None if unknown, or in fp32.

    Source: the vendors' data sheets, without sparsity, SXM or OAM form.
    """
    match precision:
        case "fp32":
            return None
        case "bf16" | "fp16":
            return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)
        case _:
            assert_never(precision)

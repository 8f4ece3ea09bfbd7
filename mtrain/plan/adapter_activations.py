"""Activations of a layer whose weights are frozen: backward needs less than for trained weights, and adapters add some.

The input of a projection is kept for the gradient of its weight alone, so a frozen one keeps none; an adapter next to
it reads the same input, which is then kept for the gradient of A.
"""

from __future__ import annotations

from mtrain.config.schema.adapter import GROUPS, AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.plan.adapters import in_layer
from mtrain.plan.features.adapted import EMBEDDING, AdaptedMatrix
from mtrain.plan.features.feature import hidden_local
from mtrain.plan.layout import Layout

_BEHIND_INPUT_NORM = frozenset(GROUPS["qkv"]) - {"q_b_proj", "kv_b_proj"}  # these read latents


def spared_in_norms(model: ModelSection, adapter: AdapterSection, layout: Layout) -> int:
    """Counts, for a layer, the elements a token of outputs of norms that only frozen weights would have read."""
    if model.post_norm:
        return 0
    readers = (_BEHIND_INPUT_NORM, {*GROUPS["fc1"], "experts"})
    read = [bool(adapter.parts & names) for names in readers]
    return read.count(False) * hidden_local(model, layout)


def kept_in_attention(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements a token that adapters of attention keep."""
    own = [each for each in in_layer(model, adapter, layer) if "self_attention" in each.linear]
    return _kept(model, adapter, layout, own)


def kept_in_feed_forward(model: ModelSection, adapter: AdapterSection, layout: Layout, layer: int) -> int:
    """Counts the elements a token that adapters of the feed-forward part keep."""
    own = [each for each in in_layer(model, adapter, layer) if "self_attention" not in each.linear]
    return _kept(model, adapter, layout, own)


def _kept(model: ModelSection, adapter: AdapterSection, layout: Layout, matrices: list[AdaptedMatrix]) -> int:
    """Counts A x of each pair; for DoRA also both summands of every adapted module's output, for the gradient of its
    magnitudes."""
    found = 0
    for each in matrices:
        assert each.linear != EMBEDDING, "no part of a layer"
        copies = model.experts.top_k if each.num_experts and model.experts is not None else 1
        is_local = layout.sp and (each.is_row_parallel or bool(each.num_experts))
        found += copies * adapter.rank // (layout.tp if is_local else 1)
    if adapter.has_magnitudes:
        outputs = {each.linear: _outputs(model, layout, each) for each in matrices}
        found += 2 * sum(outputs.values())
    return found


def _outputs(model: ModelSection, layout: Layout, matrix: AdaptedMatrix) -> int:
    """Returns the outputs of the whole module, of which a part may have no adapter."""
    if matrix.is_row_parallel:
        return hidden_local(model, layout)
    if matrix.linear.endswith("linear_qkv"):
        return (model.num_attention_heads + 2 * model.query_groups) * model.head_size // layout.tp
    if "self_attention" in matrix.linear:  # projections of latents
        return matrix.rows // (1 if matrix.is_replicated else layout.tp)
    return (2 if model.is_gated else 1) * matrix.rows // layout.tp

"""Grouped-query attention and its options: head norms, sinks, windows."""

import math
from collections.abc import Iterator
from typing import Any, assert_never, final

from mtrain.arch.features.feature import (
    SMALL_HEAD_DIM,
    AdaptedMatrix,
    Feature,
    LayerPart,
    Parameters,
    SmallRun,
    norm_elements,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection

_SINK_WIDTH = 8
"""Dimensions that attention sinks add to a head (mtrain/core/layers/attention/core_attention.py)."""


@final
class GroupedQueryAttention(LayerPart):
    """Projections of queries, keys, values and output, with their biases."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped"

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        """Names rope.partial with yarn, whose factor of cos and sin then differs from a factor of the scores."""
        is_partial = model.rope.scaling == "yarn" and model.rope.partial != 1
        return "model.rope.partial with model.rope.scaling=yarn" if is_partial else None

    def parameters(self, model: ModelSection) -> Parameters:
        biases = Parameters(
            divided=_qkv_width(model) if model.qkv_bias or model.linear_bias else 0,
            replicated=model.hidden_size if model.linear_bias else 0,  # row-parallel: added after the sum over TP
        )
        return super().parameters(model) + biases

    def matrix_elements(self, model: ModelSection) -> int:
        return model.hidden_size * (_qkv_width(model) + model.num_attention_heads * model.head_size)

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        if not self.is_anywhere(model):
            return {}
        groups = None if model.num_query_groups is None else small.query_groups
        changed: dict[str, Any] = {"num_query_groups": groups, "head_dim": small.head_dim}
        if model.rope.partial != 1:
            pairs = max(1, round(model.rope.partial * SMALL_HEAD_DIM / 2))
            changed["rope"] = model.rope.model_dump() | {"partial": 2 * pairs / SMALL_HEAD_DIM}
        return changed

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        heads, size = model.num_attention_heads, model.head_size
        rows = {
            "q_proj": _query_rows(model) * size,
            "k_proj": model.query_groups * size,
            "v_proj": model.query_groups * size,
        }
        for part, num_rows in rows.items():
            yield AdaptedMatrix("self_attention.linear_qkv", part, num_rows, model.hidden_size)
        output = model.hidden_size, heads * size
        yield AdaptedMatrix("self_attention.linear_proj", "proj", *output, is_row_parallel=True)

    def spared_elements(self, model: ModelSection, layout: Layout, targets: frozenset[str], on_gpu: bool) -> int:
        """Counts elements that only a CPU frees: it writes queries, keys and values separately and frees their
        projection; the output projection reads a copy, which a frozen projection does not save."""
        if on_gpu or layout.cp > 1 or "proj" in targets:
            return 0
        return (model.num_attention_heads + model.query_groups) * model.head_size // layout.tp

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of queries (with gates), keys and values of one query group."""
        if linear != "linear_qkv":
            return ()
        return _query_rows(model) // model.query_groups * model.head_size, model.head_size, model.head_size

    def pair_products(self, model: ModelSection) -> int:
        return 2 * model.num_attention_heads * model.head_size

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts rotated queries and keys, the projection (the values are a view of it), and attention's output."""
        return 3 * (model.num_attention_heads + model.query_groups) * model.head_size // layout.tp

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the widths of queries and output; then of keys and projection, or of the projection's pieces if
        context parallelism gathers whole rows."""
        queries, keys = (
            number * model.head_size // layout.tp for number in (model.num_attention_heads, model.query_groups)
        )
        if layout.cp == 1 or layout.cp_comm == "ring":
            return queries, queries, keys, queries + 2 * keys
        return queries, queries, queries // 2, queries // 2

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        return 2 * length * model.query_groups * model.head_size // layout.tp, 0

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Counts, under context parallelism, the keys and values of whole rows, and a second copy of the output in
        pieces.

        They replace the rank's own keys and values, which are all that a ring saves. On a GPU, gathered keys and values
        are repeated for their query heads, for each of the rank's two blocks of queries.
        """
        heads, groups, cp = model.num_attention_heads, model.query_groups, layout.cp
        if cp == 1:
            return 0
        match layout.cp_comm:
            case "ulysses":
                repeated = groups * cp // math.gcd(groups, cp)
                return (2 * repeated - 3 * groups) * model.head_size // layout.tp
            case "allgather":
                repeated = heads * (2 * cp + 1) if on_gpu else 0
                return ((2 * cp - 3) * groups + repeated) * model.head_size // layout.tp
            case "ring":
                return 2 * heads // layout.tp  # log-sum-exps in float32 instead of rows
            case _:
                assert_never(layout.cp_comm)


def _query_rows(model: ModelSection) -> int:
    return model.num_attention_heads * (2 if model.attention_gate else 1)


def _qkv_width(model: ModelSection) -> int:
    return (_query_rows(model) + 2 * model.query_groups) * model.head_size


@final
class QkNorm(LayerPart):
    """One norm for all query heads and one for all key heads."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped" and model.qk_norm and model.qk_norm_width == "head"

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=2 * norm_elements(model, model.head_size))


@final
class FullWidthQkNorm(LayerPart):
    """One norm over all query heads together and one over all key heads, with a weight per element."""

    torch_only = "model.qk_norm_width=full"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped" and model.qk_norm and model.qk_norm_width == "full"

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(divided=(model.num_attention_heads + model.query_groups) * model.head_size)

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts queries and keys before the norm."""
        return (model.num_attention_heads + model.query_groups) * model.head_size // layout.tp


@final
class AttentionGate(LayerPart):
    """A gate for each element of attention's output; `GroupedQueryAttention` counts its rows."""

    torch_only = "model.attention_gate=true"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped" and model.attention_gate

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the gates (part of the projection), their sigmoid, and the gated output."""
        return 3 * model.num_attention_heads * model.head_size // layout.tp


@final
class AttentionTemperature(LayerPart):
    """A factor for each query that grows with its position."""

    torch_only = "model.rope.attention_temperature"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped" and model.rope.attention_temperature > 0

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Shortens the original context, so that short rows exceed it several times."""
        if not self.is_anywhere(model):
            return {}
        return {"rope": model.rope.model_dump() | {"original_max_positions": max(1, small.seq_length // 4)}}


@final
class AttentionSinks(LayerPart):
    """A learned logit for each head."""

    torch_only = "model.attention_sinks=true"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "grouped" and model.attention_sinks

    def parameters(self, model: ModelSection) -> Parameters:
        return Parameters(divided=model.num_attention_heads)

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the dimensions that the sink, an additional key, adds to the heads."""
        return 2 * (model.num_attention_heads + model.query_groups) * _SINK_WIDTH // layout.tp


@final
class SlidingWindow(Feature):
    """A window in all layers, or in all but every n-th layer."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        """Names the keys that scale the scores of layers with and without a window differently."""
        if model.rope.local_base is None or model.rope.scaling != "yarn":
            return None
        return "model.rope.local_base with model.rope.scaling=yarn"

    def num_layers_at_least(self, model: ModelSection) -> int:
        return 1 if model.global_attention_every is None else model.global_attention_every

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Keeps the window's share of the row; the window covers a whole row only if the user's did."""
        window, old, new = model.sliding_window, small.user_seq_length, small.seq_length
        if window is None:
            return {}
        most = new - 1 if window < old else new
        return {"sliding_window": max(2, min(round(new * window / old), most))}


@final
class UnrotatedLayers(Feature):
    """Layers without a rotary embedding."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        if model.rope.scaling != "yarn" or not model.megatron.get("no_rope_freq"):
            return None
        return "model.megatron.no_rope_freq with model.rope.scaling=yarn"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Chooses the unrotated layers among the few; at least one if the user's model has any."""
        no_rope = model.megatron.get("no_rope_freq")
        if no_rope is None:
            return {}
        if isinstance(no_rope, int):
            no_rope = [int((layer + 1) % no_rope == 0) for layer in range(model.num_layers)]
        small_pattern = no_rope[: small.num_layers]
        pattern = [*small_pattern[:-1], max(small_pattern[-1], max(no_rope) - max(small_pattern))]
        return {"megatron": {**model.megatron, "no_rope_freq": pattern}}

"""Attention with different heads in layers without a window, and other parts of Gemma 4."""

from collections.abc import Iterator
from typing import Any, final

from mtrain.arch.features.attention import GroupedQueryAttention
from mtrain.arch.features.feature import (
    SMALL_HEAD_DIM,
    AdaptedMatrix,
    LayerPart,
    Parameters,
    SmallRun,
    norm_elements,
    once_a_model,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection

_GROUPED = GroupedQueryAttention()


@final
class GlobalAttention(LayerPart):
    """Projections of queries and of keys, which also serve as values, norms of both, and the output projection."""

    torch_only = "model.global_attention"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "global"

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=2 * norm_elements(model, _wide(model).head_size) if model.qk_norm else 0)

    def matrix_elements(self, model: ModelSection) -> int:
        return _GROUPED.matrix_elements(_wide(model)) - model.hidden_size * _key_width(model)

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Letters: g key heads, D dimensions of a head, S heads in a group: its queries and its key."""
        wide = _wide(model)
        return {
            "g": wide.query_groups,
            "D": wide.head_size,
            "S": wide.num_attention_heads // wide.query_groups + 1,
        }

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        for matrix in _GROUPED.adapted(_wide(model)):
            match matrix.part:
                case "q_proj" | "k_proj":
                    yield AdaptedMatrix("self_attention.linear_qk", matrix.part, matrix.rows, matrix.columns)
                case "proj":
                    yield matrix

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of one group's queries and key."""
        return _GROUPED.segments(_wide(model), "linear_qkv", num_rows)[:-1] if linear == "linear_qk" else ()

    def pair_products(self, model: ModelSection) -> int:
        return _GROUPED.pair_products(_wide(model))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts as grouped-query attention does; the values are a copy of the key projection."""
        return _GROUPED.kept_elements(_wide(model), layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        return _GROUPED.narrow_tensors(_wide(model), layout)

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        return _GROUPED.remembered(_wide(model), layout, length)

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        return _GROUPED.core_elements(_wide(model), layout, on_gpu)

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Gives heads of the two kinds of layer different sizes, and different numbers if the user's differ."""
        if model.global_attention is None:
            return {}
        differs = model.global_attention.num_query_groups != model.query_groups and small.query_groups > small.tp
        groups = small.query_groups // 2 if differs and small.query_groups % (2 * small.tp) == 0 else small.query_groups
        heads = {"head_dim": 2 * SMALL_HEAD_DIM, "num_query_groups": groups}
        return {"global_attention": heads, "head_dim": SMALL_HEAD_DIM}


@once_a_model
def _wide(model: ModelSection) -> ModelSection:
    return model.with_global_heads()


def _key_width(model: ModelSection) -> int:
    wide = _wide(model)
    return wide.query_groups * wide.head_size


@final
class ValueNorm(LayerPart):
    """A norm of each value head, without weights."""

    torch_only = "model.value_norm=true"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.value_norm and model.attention(layer) in ("grouped", "global")

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the values after the norm, as if heads of both kinds of layer had the same width."""
        return model.query_groups * model.head_size // layout.tp


@final
class LayerScalar(LayerPart):
    """A number that multiplies the output of a layer; it is a buffer, not a parameter."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.layer_scalar

"""The gated delta net, which replaces attention."""

from collections.abc import Iterator
from typing import Any, final

from mtrain.arch.features.feature import SMALL_HEAD_DIM, AdaptedMatrix, LayerPart, Parameters, SmallRun, required
from mtrain.arch.layout import Layout
from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.config.schema.model import ModelSection

_CHUNK = 64
"""Tokens of a chunk of the delta rule (mtrain/core/layers/attention/delta_net.py)."""
_KEPT_OF_OUTPUT, _KEPT_OF_RATES = 6, 6
"""Numbers of tensors with the output's width, and with one element per value head, that the backward pass needs."""


@final
class GatedDeltaNet(LayerPart):
    """Projections, convolution, decays and gated norm of a delta net, and its output projection."""

    torch_only = "model.delta_net"

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "delta_net"

    def num_layers_at_least(self, model: ModelSection) -> int:
        return 1 if model.delta_net is None else model.delta_net.full_attention_every

    def parameters(self, model: ModelSection) -> Parameters:
        net = required(model.delta_net)
        kernels = (2 * net.key_width + net.value_width) * net.conv_kernel
        of_heads = 2 * net.num_value_heads  # decays and their biases
        return super().parameters(model) + Parameters(divided=kernels + of_heads)

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=required(model.delta_net).value_head_dim)

    def matrix_elements(self, model: ModelSection) -> int:
        net = required(model.delta_net)
        return model.hidden_size * (net.num_key_heads * sum(_rows_of_key_head(net)) + net.value_width)

    def state_products(self, model: ModelSection) -> int:
        """Counts the convolution, and three products with the state: read by the key, correction, read by the query."""
        net = required(model.delta_net)
        convolved = (2 * net.key_width + net.value_width) * net.conv_kernel
        return convolved + 3 * net.num_value_heads * net.key_head_dim * net.value_head_dim

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Letters: K key heads, r value heads per key head, p rows per key head in the projection, w rows among these
        that the convolution reads, i tokens of the convolution, x dimensions of a key head, y of a value head."""
        net = required(model.delta_net)
        rows = _rows_of_key_head(net)
        return {
            "K": net.num_key_heads,
            "r": net.num_value_heads // net.num_key_heads,
            "p": sum(rows),
            "w": rows[0],
            "i": net.conv_kernel,
            "x": net.key_head_dim,
            "y": net.value_head_dim,
        }

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        net = required(model.delta_net)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        for part, rows in zip(names, _rows_of_key_head(net), strict=True):
            yield AdaptedMatrix("self_attention.in_proj", part, net.num_key_heads * rows, model.hidden_size)
        output = model.hidden_size, net.value_width
        yield AdaptedMatrix("self_attention.out_proj", "out_proj", *output, is_row_parallel=True)

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of Qwen3.5's four matrices for one key head."""
        return _rows_of_key_head(required(model.delta_net)) if linear == "in_proj" else ()

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the gate, its SiLU, the heads before and after their norm, the output, steps and decays."""
        net = required(model.delta_net)
        return (_KEPT_OF_OUTPUT * net.value_width + _KEPT_OF_RATES * net.num_value_heads) // layout.tp

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        net = required(model.delta_net)
        inputs = (net.conv_kernel - 1) * (2 * net.key_width + net.value_width)
        return inputs // layout.tp, net.value_width * net.key_head_dim // layout.tp

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Counts the convolution's input with and without the tokens before the row, and its output before SiLU."""
        net = required(model.delta_net)
        return 3 * (2 * net.key_width + net.value_width) // layout.tp

    def wide_core_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements that the delta rule saves per chunk: products of token pairs, keys, values and
        corrections for each value head and key head, and the state at the chunk's start."""
        net = required(model.delta_net)
        keys, values = net.key_head_dim, net.value_head_dim
        per_value_head = 4 * _CHUNK + 3 * keys + 4 * values + 2 * keys * values // _CHUNK + 3
        per_key_head = 2 * _CHUNK + 8 * keys + 4
        return (net.num_value_heads * per_value_head + net.num_key_heads * per_key_head) // layout.tp

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Makes heads small, keys and values of different sizes; keeps the ratio of value to key heads, up to two."""
        if model.delta_net is None:
            return {}
        net = model.delta_net
        shared = min(2, net.num_value_heads // net.num_key_heads)
        sizes = {
            "num_key_heads": 2 * small.tp,
            "num_value_heads": 2 * small.tp * shared,
            "key_head_dim": SMALL_HEAD_DIM,
            "value_head_dim": SMALL_HEAD_DIM + 2,
        }
        return {"delta_net": net.model_dump() | sizes}


def _rows_of_key_head(net: DeltaNetSection) -> tuple[int, ...]:
    """Returns the projection's rows per key head: query, key and values; output gates; steps; decays."""
    shared = net.num_value_heads // net.num_key_heads
    values = shared * net.value_head_dim
    return 2 * net.key_head_dim + values, values, shared, shared

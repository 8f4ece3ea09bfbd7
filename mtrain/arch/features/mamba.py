"""Mamba-2, which replaces attention, and the pattern of sublayers."""

from collections.abc import Iterator
from typing import Any, final

from mtrain.arch.features.feature import (
    SMALL_HEAD_DIM,
    AdaptedMatrix,
    Feature,
    LayerPart,
    Parameters,
    SmallRun,
    required,
)
from mtrain.arch.layout import Layout
from mtrain.config.schema.mamba import MambaSection
from mtrain.config.schema.model import ModelSection

_CHUNK = 64
"""Tokens of a chunk (mtrain/core/layers/attention/recurrent/core.py)."""
_KEPT_OF_OUTPUT, _KEPT_OF_STEPS = 5, 5
"""Numbers of tensors with the output's width, and with one element per head, that the backward pass needs."""


@final
class Mamba(LayerPart):
    """Projections, convolution, steps and gated norm of Mamba-2."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) == "mamba"

    def parameters(self, model: ModelSection) -> Parameters:
        mamba = required(model.mamba)
        convolution = mamba.channels * (mamba.conv_kernel + mamba.conv_bias)
        of_heads = 3 * mamba.num_heads  # decays, biases of steps, and factors of the input
        return super().parameters(model) + Parameters(divided=convolution + of_heads)

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(divided=required(model.mamba).width)

    def matrix_elements(self, model: ModelSection) -> int:
        mamba = required(model.mamba)
        return model.hidden_size * (mamba.num_groups * sum(rows_of_group(mamba)) + mamba.width)

    def state_products(self, model: ModelSection) -> int:
        """Counts the convolution, and three products with the state: decay, write and read."""
        mamba = required(model.mamba)
        return mamba.channels * mamba.conv_kernel + 3 * mamba.width * mamba.state_dim

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Letters: K groups, r heads per group, p rows per group in the projection, w rows among these that the
        convolution reads, i tokens of the convolution, x dimensions of B and C, y of a head."""
        mamba = required(model.mamba)
        rows = rows_of_group(mamba)
        return {
            "K": mamba.num_groups,
            "r": mamba.num_heads // mamba.num_groups,
            "p": sum(rows),
            "w": rows[0],
            "i": mamba.conv_kernel,
            "x": mamba.state_dim,
            "y": mamba.head_dim,
        }

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        mamba = required(model.mamba)
        rows = mamba.num_groups * sum(rows_of_group(mamba))
        yield AdaptedMatrix("self_attention.in_proj", "in_proj_zxbcdt", rows, model.hidden_size)
        yield AdaptedMatrix("self_attention.out_proj", "out_proj", model.hidden_size, mamba.width, is_row_parallel=True)

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the gate, the gated heads before and after their norm, the output, steps and decays."""
        mamba = required(model.mamba)
        return (_KEPT_OF_OUTPUT * mamba.width + _KEPT_OF_STEPS * mamba.num_heads) // layout.tp

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        mixer = required(model.mamba)
        return (mixer.conv_kernel - 1) * mixer.channels // layout.tp, mixer.width * mixer.state_dim // layout.tp

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Counts the convolution's input with and without the tokens before the row, and its output before SiLU."""
        return 3 * required(model.mamba).channels // layout.tp

    def wide_core_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements saved per chunk: for each head, decays of token pairs, their products with B C, inputs,
        writes and reads of the state, and the state at the chunk's start."""
        mamba = required(model.mamba)
        size, heads = mamba.state_dim, mamba.head_dim
        per_head = 2 * _CHUNK + 2 * size + 4 * heads + 2 * size * heads // _CHUNK + 3
        per_group = _CHUNK + 4 * size
        return (mamba.num_heads * per_head + mamba.num_groups * per_group) // layout.tp

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Makes heads small, with another size of B and C; keeps the ratio of heads to groups, up to two."""
        if model.mamba is None:
            return {}
        mamba = model.mamba
        sizes = {
            "num_groups": 2 * small.tp,
            "num_heads": 2 * small.tp * min(2, mamba.num_heads // mamba.num_groups),
            "head_dim": SMALL_HEAD_DIM,
            "state_dim": SMALL_HEAD_DIM + 2,
        }
        return {"mamba": mamba.model_dump() | sizes}


@final
class OneSublayer(Feature):
    """Layers with one sublayer each, by a pattern."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return None if model.layer_pattern is None else "model.layer_pattern"

    def num_layers_at_least(self, model: ModelSection) -> int:
        return 1 if model.layer_pattern is None else len(set(model.layer_pattern))

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Keeps the beginning of the pattern; missing letters replace repeated ones, from the end."""
        pattern = model.layer_pattern
        if pattern is None:
            return {}
        small_pattern = (pattern * small.num_layers)[: small.num_layers]
        missing = [letter for letter in dict.fromkeys(pattern) if letter not in small_pattern]
        while missing:
            last = max(index for index, letter in enumerate(small_pattern) if small_pattern.count(letter) > 1)
            small_pattern = small_pattern[:last] + missing.pop() + small_pattern[last + 1 :]
        return {"layer_pattern": small_pattern}


def rows_of_group(mamba: MambaSection) -> tuple[int, ...]:
    """Returns the projection's rows per group: C, B and inputs; gates; steps."""
    shared = mamba.num_heads // mamba.num_groups
    return 2 * mamba.state_dim + shared * mamba.head_dim, shared * mamba.head_dim, shared

"""Rotary position embedding from explicit positions, and its frequencies with the scalings for long contexts.

megatron-core derives positions from the sequence length and supports llama3 scaling only with fixed constants. Here the
positions come with the batch (sliced like the tokens, restarting at documents). Layers with a sliding window may have
another base, as in Gemma-3.

Frequencies agree bit for bit in float32 with transformers 5.23 (`modeling_rope_utils.py`), since a converted model
needs exactly the angles it was trained with; the order of operations below matters for that.
"""

import math
from typing import Any, assert_never

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.attention import LatentAttentionSection
from mtrain.config.schema.rope import RopeSection
from mtrain.core.layers.attention.key_set import window_of


def inverse_frequencies(rope: RopeSection, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Returns the angle per position of each pair of dimensions, [head_dim / 2] radians on the CPU, and the factor of
    cos and sin, which is 1 except with yarn. `head_dim` counts the dimensions of a head that rotate."""
    if rope.scaling == "proportional":
        return _proportional(rope, head_dim, dtype), 1.0
    periods = rope.base ** (torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim)
    match rope.scaling:
        case "none":
            return 1.0 / periods, 1.0
        case "linear":
            return 1.0 / periods / rope.factor, 1.0  # two divisions, as transformers rounds
        case "llama3":
            return _llama3(rope, 1.0 / periods), 1.0
        case "yarn":
            return _yarn(rope, periods, head_dim), _yarn_attention_factor(rope)
        case _ as never:
            assert_never(never)


def local_frequencies(rope: RopeSection, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the frequencies of layers with a sliding window if `rope.local_base` is set; they are never scaled."""
    assert rope.local_base is not None
    return inverse_frequencies(RopeSection(base=rope.local_base), head_dim, dtype)[0]


def _proportional(rope: RopeSection, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the frequencies of a whole head for the first pairs of dimensions, and 0 for all others."""
    num_pairs = int(rope.partial * head_dim // 2)
    rotated = 1.0 / (rope.base ** (torch.arange(0, 2 * num_pairs, 2, dtype=dtype, device="cpu") / head_dim))
    # divided last, as transformers rounds
    return functional.pad(rotated, (0, head_dim // 2 - num_pairs)) / rope.factor


def _llama3(rope: RopeSection, frequencies: Tensor) -> Tensor:
    """Divides slow rotations by the factor, keeps fast ones, and interpolates between the two.

    Source: Llama 3.1 (Grattafiori et al. 2024), as released.
    """
    slow, fast = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_slow = wavelengths > rope.original_max_positions / slow
    is_fast = wavelengths < rope.original_max_positions / fast
    share = (rope.original_max_positions / wavelengths - slow) / (fast - slow)
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    # selected by wavelength, since `share` leaves [0, 1] outside of the band
    return torch.where(is_slow, frequencies / rope.factor, torch.where(is_fast, frequencies, between))


def _yarn(rope: RopeSection, periods: Tensor, head_dim: int) -> Tensor:
    """Mixes unscaled and scaled frequencies by a ramp over the dimensions.

    Source: YaRN (Peng et al. 2023), section 3.2.
    """
    low, high = (_dimension_of(rotations, rope, head_dim) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of width 0 would divide by 0
    ramp = ((torch.arange(head_dim // 2, dtype=periods.dtype, device="cpu") - low) / (high - low)).clamp(0, 1)
    unscaled_share = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - unscaled_share) + 1.0 / periods * unscaled_share


def _dimension_of(rotations: float, rope: RopeSection, head_dim: int) -> float:
    """Returns the (fractional) pair of dimensions that makes this many rotations over the original context."""
    positions_per_radian = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.base))


def latent_softmax_scale(latent: LatentAttentionSection, rope: RopeSection) -> float:
    """Returns the softmax scale of latent attention, 1 / sqrt(query_head_dim), times the squared magnitude of yarn with
    mscale_all_dim, since only the rotary part of a head has the factor. Source: DeepSeek-V3's released model."""
    magnitude = 1.0 if rope.mscale_all_dim is None else _yarn_magnitude(rope.factor, rope.mscale_all_dim)
    return magnitude**2 / math.sqrt(latent.query_head_dim)


def _yarn_attention_factor(rope: RopeSection) -> float:
    """Returns the configured factor, else DeepSeek's quotient of magnitudes, else the paper's 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return _yarn_magnitude(rope.factor, rope.mscale) / _yarn_magnitude(rope.factor, rope.mscale_all_dim)
    return _yarn_magnitude(rope.factor, 1.0)


def _yarn_magnitude(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rotary(nn.Module):
    """Angles by which tokens at given positions are rotated.

    The frequencies are not a buffer, which would be rounded to the dtype of a half-precision model and rotate a token
    at position 4095 by up to 7 radians too much.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        """Takes the frequencies, [head_dim / 2] in float32 or float64, the dtype of the angles."""
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles, [seq_local, batch or 1, 1, head_dim], for the positions of this context-parallel rank's
        tokens, [batch or 1, seq_local] int64."""
        return self._angles(positions.t().unsqueeze(-1))

    def _angles(self, positions: Tensor) -> Tensor:
        """Takes the position of each pair, [seq_local, batch or 1, head_dim / 2 or 1]."""
        # moved once, in the first forward pass
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        # [seq_local, batch or 1, head_dim / 2]
        angles = positions.to(self.inverse_frequencies.dtype) * self.inverse_frequencies
        # twice, since megatron-core rotates dimension i with i + head_dim / 2 (rope_utils.py)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


class ThreeAxesRotary(Rotary):
    """Angles for models of images: each pair of dimensions turns with time, height or width.

    Source: transformers 5.24, modeling_qwen3_5.py, `recomposition_frequencies`.
    """

    def __init__(self, inverse_frequencies: Tensor, sections: tuple[int, int, int]) -> None:
        """Takes the frequencies, [head_dim / 2], and the number of pairs that turn with each axis."""
        super().__init__(inverse_frequencies)
        pair = torch.arange(len(inverse_frequencies), device="cpu")
        # axes alternate; when the pairs of height and width are used up, all others turn with time
        height, width = (torch.where((pair % 3 == axis) & (pair < 3 * sections[axis]), axis, 0) for axis in (1, 2))
        self._axis_of_pair = height + width

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles like `Rotary`; of positions on three axes, [batch, seq_local, 3], each pair uses one axis."""
        if positions.dim() == 2:
            return super().forward(positions)
        self._axis_of_pair = self._axis_of_pair.to(positions.device)
        return self._angles(positions.transpose(0, 1)[..., self._axis_of_pair])


class TwoBaseRotary(Rotary):
    """Angles for layers with and without a window; each attention selects its own (`take_angles_by_layer`)."""

    def __init__(self, inverse_frequencies: Tensor, windowed: Tensor) -> None:
        """Takes the frequencies of layers without and with a window, [head_dim / 2] each."""
        super().__init__(inverse_frequencies)
        self.windowed = Rotary(windowed)
        self.num_global = 2 * len(inverse_frequencies)

    def forward(self, positions: Tensor) -> Tensor:
        """Returns the angles of layers without a window, followed by those of layers with one, which may have another
        head size: [seq_local, batch or 1, 1, both head_dims]."""
        # concatenated, since the block passes one tensor of angles to all layers
        return torch.cat((super().forward(positions), self.windowed(positions)), dim=-1)


class TemperedRotary(Rotary):
    """Angles, concatenated with the factors of queries, since the block passes one tensor to all layers.

    Source: transformers 5.24, modeling_ministral3.py, `get_llama_4_attn_scale`.
    """

    def __init__(self, inverse_frequencies: Tensor, rope: RopeSection) -> None:
        """Takes the frequencies, [head_dim / 2], and the section with the coefficient and the original length."""
        super().__init__(inverse_frequencies)
        self._coefficient, self._length = rope.attention_temperature, rope.original_max_positions

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles and a factor, [seq_local, batch or 1, 1, head_dim + 1], like `Rotary`."""
        # how many times the original length fits into the position, in integers, since a float32 quotient may round up
        passed = positions.t().div(self._length, rounding_mode="floor").to(self.inverse_frequencies.dtype)
        factor = 1 + self._coefficient * torch.log1p(passed)
        return torch.cat((super().forward(positions), factor[..., None, None]), dim=-1)


def take_angles_by_layer(model: nn.Module, rotary: TwoBaseRotary) -> None:
    """Makes every self-attention of a model select its part of the angles of a TwoBaseRotary."""

    def select_angles(
        attention: SelfAttention, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        windowed = window_of(attention.config, attention.layer_number) is not None
        parts = angle_parts(options["rotary_pos_emb"], rotary.num_global)
        return args, {**options, "rotary_pos_emb": parts[int(windowed)]}

    for module in model.modules():
        if isinstance(module, SelfAttention):
            # a hook of the module also runs when the layer is recomputed
            module.register_forward_pre_hook(select_angles, with_kwargs=True)


def angle_parts(angles: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the first `size` numbers of each position and all others; the same tensors for all layers of a
    microbatch, so that `rotations_of` can cache on them."""
    known: tuple[Tensor, Tensor] | None = getattr(angles, "known_parts", None)
    if known is None:
        known = angles[..., :size], angles[..., size:]
        angles.known_parts = known  # type: ignore[attr-defined]
    return known

"""`model.rope.*`: the rotary position embedding."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class RopeSection(Section):
    """Rotary position embedding; scalings are those of Hugging Face transformers."""

    base: float = Field(10000.0, gt=0)
    """Base of the rotation frequencies."""
    scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = "none"
    """How frequencies are scaled for longer contexts. proportional: like linear, but only the share `partial` of the
    pairs (i, i + head_dim / 2) is rotated, from the first, with the frequencies of a fully rotated head."""
    factor: float = Field(1.0, ge=1)
    """Factor by which the context is extended; 1 without scaling."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Bound of low frequencies: those with a wavelength above original_max_positions / low_freq_factor are divided by
    factor; llama3 only."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Bound of high frequencies: those with a wavelength below original_max_positions / high_freq_factor are unchanged;
    llama3 only."""
    original_max_positions: Annotated[int, bounds.POSITIONS] = Field(8192, gt=0)
    """Context length of the unscaled model, in tokens; llama3 and yarn only."""
    beta_fast: float = Field(32.0, gt=0)
    """Rotations within the original context above which a dimension is not scaled; yarn only."""
    beta_slow: float = Field(1.0, gt=0)
    """Rotations within the original context below which a dimension is fully scaled; yarn only."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor of cos and sin; null: 0.1 ln(factor) + 1; yarn only."""
    truncate: bool = True
    """Whether the correction range is rounded to whole dimensions; yarn only."""
    mscale: float | None = Field(None, gt=0)
    """Constant of the attention factor, which becomes (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) +
    1); yarn only, with mscale_all_dim."""
    mscale_all_dim: float | None = Field(None, gt=0)
    """Constant of the attention factor, see mscale; latent attention also multiplies its scores by (0.1 mscale_all_dim
    ln(factor) + 1)^2; yarn only."""
    interleaved: bool = False
    """Whether pairs are (0, 1), (2, 3), ... instead of (i, i + dim / 2); latent attention only."""
    partial: float = Field(1.0, gt=0, le=1)
    """Share of a head's dimensions that are rotated: the first int(partial x head_dim), an even number; the others
    carry no position. scaling=proportional chooses other dimensions."""
    attention_temperature: float = Field(0.0, ge=0)
    """Coefficient b of the growth of queries beyond the original context: every layer multiplies them by 1 + b ln(1 +
    floor(position / original_max_positions)); 0: no growth; yarn only."""
    local_base: float | None = Field(None, gt=0)
    """Base in layers with a sliding window, where no scaling applies; null: base, as in other layers."""

    def broken_rules(self) -> Iterator[str]:
        if self.factor != 1 and self.scaling == "none":
            yield f"factor={self.factor} has no effect with scaling=none; choose a scaling or remove the factor"
        if self.scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            yield (
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}; "
                "lower one or raise the other"
            )
        if self.scaling == "yarn":
            yield from self._broken_rules_of_yarn()
        if self.attention_temperature and (self.scaling != "yarn" or self.local_base is not None):
            yield (
                f"attention_temperature={self.attention_temperature} needs scaling=yarn without local_base, but "
                f"scaling={self.scaling} and local_base={self.local_base}; change them, or set it to 0"
            )
        magnitudes = [constant for constant in (self.mscale, self.mscale_all_dim) if constant is not None]
        if magnitudes and (self.scaling != "yarn" or len(magnitudes) == 1):
            yield (
                f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim} need each other and scaling=yarn, but "
                f"scaling={self.scaling}; set both with scaling=yarn, or remove both"
            )

    def _broken_rules_of_yarn(self) -> Iterator[str]:
        # they are equal in Kimi-K2: after rounding, the range between them is one dimension wide
        if self.beta_slow > self.beta_fast:
            yield (
                f"beta_slow={self.beta_slow} must not exceed beta_fast={self.beta_fast}; lower one or raise the other"
            )
        if self.base <= 1:
            yield f"base={self.base} must be above 1 with scaling=yarn, which divides by its logarithm; raise it"
        if self.partial != 1 and self.local_base is not None:
            yield (
                f"partial={self.partial} cannot be combined with scaling=yarn and local_base={self.local_base}: the "
                "attention factor would scale a part of each head in some layers only; remove one of them"
            )

"""Rotary frequencies match those of transformers bit for bit, and angles follow positions."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mtrain.config.schema.rope import RopeSection
from mtrain.core.layers.attention.rotary import Rotary, inverse_frequencies
from mtrain.verify.reference.model.rotary import frequency

SECTIONS = {
    "none": RopeSection(base=500000.0),
    "linear": RopeSection(scaling="linear", factor=3.0),
    "llama 3.1": RopeSection(base=500000.0, scaling="llama3", factor=8.0),
    "llama 3.2": RopeSection(base=500000.0, scaling="llama3", factor=32.0),
    "llama3, short context": RopeSection(
        scaling="llama3", factor=4.0, low_freq_factor=1.5, high_freq_factor=6.0, original_max_positions=64
    ),
    "proportional": RopeSection(base=1000000.0, scaling="proportional", partial=0.25),
    "proportional, factor": RopeSection(scaling="proportional", partial=0.7, factor=3.0),
    "yarn": RopeSection(base=1000000.0, scaling="yarn", factor=4.0, original_max_positions=32768),
    "yarn, no rounding": RopeSection(scaling="yarn", factor=40.0, original_max_positions=4096, truncate=False),
    "yarn, own betas": RopeSection(
        scaling="yarn", factor=2.5, beta_fast=16.0, beta_slow=2.0, original_max_positions=2048, attention_factor=1.3
    ),
    "yarn, DeepSeek": RopeSection(
        scaling="yarn", factor=40.0, original_max_positions=4096, mscale=0.707, mscale_all_dim=1.2
    ),
    "yarn, factor 1": RopeSection(scaling="yarn", factor=1.0, original_max_positions=512),
    "yarn, Kimi-K2": RopeSection(
        base=50000.0,
        scaling="yarn",
        factor=32.0,
        beta_fast=1.0,
        original_max_positions=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    "yarn, equal bands": RopeSection(
        scaling="yarn", factor=4.0, beta_fast=2.0, beta_slow=2.0, original_max_positions=512, truncate=False
    ),
    "yarn, ramp without width": RopeSection(
        scaling="yarn", factor=2.0, beta_fast=8.0, beta_slow=2.6, original_max_positions=16
    ),
}


def huggingface_parameters(rope: RopeSection) -> dict[str, object]:
    """Returns the `rope_parameters` of a transformers configuration."""
    parameters: dict[str, object] = {"rope_theta": rope.base, "factor": rope.factor}
    match rope.scaling:
        case "none":
            return {"rope_type": "default", "rope_theta": rope.base}
        case "linear":
            return parameters | {"rope_type": "linear"}
        case "llama3":
            return parameters | {
                "rope_type": "llama3",
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_positions,
            }
        case "proportional":
            return parameters | {"rope_type": "proportional", "partial_rotary_factor": rope.partial}
        case "yarn":
            return parameters | {
                "rope_type": "yarn",
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "truncate": rope.truncate,
                "attention_factor": rope.attention_factor,
                "mscale": rope.mscale,
                "mscale_all_dim": rope.mscale_all_dim,
                "original_max_position_embeddings": rope.original_max_positions,
            }


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 96])
def test_frequencies_are_bitwise_those_of_transformers(name: str, head_dim: int) -> None:
    rope = SECTIONS[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=huggingface_parameters(rope),
    )
    compute = (
        LlamaRotaryEmbedding.compute_default_rope_parameters
        if rope.scaling == "none"
        else ROPE_INIT_FUNCTIONS[rope.scaling]
    )
    expected, expected_factor = compute(config)
    frequencies, attention_factor = inverse_frequencies(rope, head_dim)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, expected)
    assert attention_factor == expected_factor


@pytest.mark.parametrize("name", SECTIONS)
def test_frequencies_in_float64_are_those_of_the_formulas(name: str) -> None:
    rope = SECTIONS[name]
    frequencies, _ = inverse_frequencies(rope, 96, torch.float64)
    expected = torch.tensor([frequency(rope, 96, pair) for pair in range(48)], dtype=torch.float64)
    torch.testing.assert_close(frequencies, expected, rtol=1e-13, atol=0)
    angles = Rotary(frequencies)(torch.tensor([[4095, 7]]))
    torch.testing.assert_close(angles[0, 0, 0], (4095 * expected).repeat(2), rtol=1e-13, atol=0)


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    rope = SECTIONS["yarn"]
    scaled, attention_factor = inverse_frequencies(rope, 128)
    plain, _ = inverse_frequencies(RopeSection(base=rope.base), 128)
    assert torch.equal(scaled[:5], plain[:5])
    torch.testing.assert_close(scaled[-5:], plain[-5:] / rope.factor, rtol=1e-6, atol=0)
    assert attention_factor == 0.1 * math.log(4.0) + 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_do_not_depend_on_the_precision_of_the_model(dtype: torch.dtype) -> None:
    frequencies, _ = inverse_frequencies(RopeSection(base=500000.0), 128)
    rotary = Rotary(frequencies)
    torch.nn.ModuleList([rotary]).to(dtype)
    angles = rotary(torch.tensor([[4095, 7]]))
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles[0, 0, 0], (4095.0 * frequencies).repeat(2), rtol=0, atol=0)

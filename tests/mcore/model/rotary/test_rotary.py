"""Angles of the rotary embedding."""

import pytest
import torch

from mtrain.config.schema.rope import RopeSection
from mtrain.mcore.model.attention.rotary import Rotary, inverse_frequencies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_do_not_depend_on_the_precision_of_the_model(dtype: torch.dtype) -> None:
    frequencies, _ = inverse_frequencies(RopeSection(base=500000.0), 128)
    rotary = Rotary(frequencies)
    torch.nn.ModuleList([rotary]).to(dtype)
    angles = rotary(torch.tensor([[4095, 7]]))
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles[0, 0, 0], (4095.0 * frequencies).repeat(2), rtol=0, atol=0)

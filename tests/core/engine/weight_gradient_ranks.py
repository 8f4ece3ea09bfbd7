"""The rank side of the tests of weight gradients that matrix products accumulate."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.kernels import add_product
from mtrain.core.layers import products
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from tests.core.state.checkpoint_ranks import build


class Fused(NamedTuple):
    """Weight gradients of one step."""

    shapes: list[tuple[int, ...]]
    """Shapes of the gradients that a product has added, one for each product."""
    gradients: list[list[float]]
    """Gradients of all parameters that learn."""


def step(groups: Groups, config: Config) -> Fused:
    """Runs forward and backward of the first step."""
    shapes: list[tuple[int, ...]] = []

    def noted(inputs: Tensor, output_gradients: Tensor, total: Tensor) -> None:
        shapes.append(tuple(total.shape))
        add_product(inputs, output_gradients, total)

    with mock.patch.object(products, "add_product", noted):
        parts = build(groups, config)
        parts.training.forward_backward(StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0))
    gradients = [gradient for _, gradient in parts.model.sharded.local_gradients()]
    assert all(each.dtype == torch.float32 for each in gradients)
    return Fused(shapes, [each.flatten().tolist() for each in gradients])

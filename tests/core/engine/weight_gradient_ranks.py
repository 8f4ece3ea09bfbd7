"""The rank side of the tests of weight gradients that are added where they are computed."""

from __future__ import annotations

import itertools
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.core.kernels import add_product
from mtrain.core.layers import products
from mtrain.core.layers.moe import grouped_gemm
from mtrain.core.loss.vocab_parallel import chunks
from mtrain.core.ranks.groups import Groups
from mtrain.core.step import loss
from mtrain.data.loader import StepLoader
from tests.core.state.checkpoint_ranks import build


class Fused(NamedTuple):
    """Weight gradients of one step."""

    shapes: list[tuple[int, ...]]
    """Shapes of the gradients that a product has added, one for each product."""
    added: set[str]
    """Names of parameters whose gradients autograd did not return."""
    gradients: dict[str, Tensor]
    """Gradients of all parameters that learn, before their reduction, by name."""


def step(groups: Groups, config: Config, alternates: bool = False) -> Fused:
    """Runs forward and backward of the first step; `alternates`: every other microbatch has whole logits."""
    shapes: list[tuple[int, ...]] = []

    def noted(inputs: Tensor, output_gradients: Tensor, total: Tensor) -> None:
        shapes.append(tuple(total.shape))
        add_product(inputs, output_gradients, total)

    is_whole = mock.Mock(side_effect=itertools.cycle((True, False)))
    with (
        mock.patch.object(products, "add_product", noted),
        mock.patch.object(chunks, "add_product", noted),
        mock.patch.object(grouped_gemm, "add_product", noted),
        mock.patch.object(loss, "_is_whole_as_good", is_whole if alternates else loss._is_whole_as_good),
    ):
        parts = build(groups, config)
        parts.training.forward_backward(StepLoader(config, groups.dp_rank, groups.layout.dp).batches(0))
    assert is_whole.call_count == (config.train.global_batch_size // config.train.micro_batch_size) * alternates
    names: dict[Tensor, str] = {
        parameter: name for chunk in parts.model.sharded.chunks for name, parameter in chunk.named_parameters()
    }
    gradients = {names[parameter]: each.clone() for parameter, each in parts.model.sharded.local_gradients()}
    assert all(each.dtype == torch.float32 for each in gradients.values())
    added = {name for parameter, name in names.items() if getattr(parameter, "grad_added_to_main_grad", False)}
    return Fused(shapes, added, gradients)

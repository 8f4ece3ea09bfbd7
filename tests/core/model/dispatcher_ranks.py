"""The rank side of the tests of dispatchers: steps with ours and with megatron-core's, and a layer without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call

from mtrain.config import Config
from mtrain.core.layers.build import build_chunks
from mtrain.core.layers.moe import layer as experts_layer
from mtrain.core.layers.moe.layer import ExpertsLayer
from mtrain.core.ranks.groups import Groups
from tests.core.fp8.fp8_ranks import Step, steps
from tests.parity.batches import GlobalBatch


def with_both(groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch) -> list[Step]:
    """Runs a step in float64 with our dispatcher and with megatron-core's."""
    ours = steps(groups, [(config, parameters, batch)])
    with mock.patch.object(experts_layer, "dispatcher_in_place_of", lambda theirs, *_: theirs):
        return ours + steps(groups, [(config, parameters, batch)])


def read_by_the_host(groups: Groups, config: Config) -> bool:
    """Says whether the first layer of experts, forward and backward, reads an element of a tensor on the host; its
    tensors have no elements."""
    _, (chunk,) = build_chunks(config, groups)
    layer = next(module for module in chunk.modules() if isinstance(module, ExpertsLayer))
    with FakeTensorMode():
        shapes = {name: (each.shape, each.dtype) for name, each in layer.named_parameters()}
        state = {name: torch.empty(shape, dtype=dtype, requires_grad=True) for name, (shape, dtype) in shapes.items()}
        sizes = config.data.seq_length, 2, config.model.hidden_size
        hidden = torch.empty(sizes, dtype=torch.bfloat16, requires_grad=True)
        try:
            output, _ = functional_call(layer, state, (hidden,))
            output.sum().backward()
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
    assert all(each.grad is not None and each.grad.shape == each.shape for each in (hidden, *state.values()))
    return False

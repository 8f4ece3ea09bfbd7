"""The rank side of the tests of fp8: codes, loss and gradients of a step in float64, and single linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from mtrain.checkpoint.state.gather import gradient_shards
from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel, build_model
from mtrain.core.layers import fp8
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.fp8 import Scaled
from mtrain.core.layers.own_parameters import input_projection, output_projection
from mtrain.core.layers.transformer_config import compute_in_float64, transformer_config
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.verify.core.worker import _NoUpdates
from tests.core.state.gathering import gather_whole
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Arrays, arrays, own_microbatches, set_parameters

PIECE = 16
"""Columns that no layout of these tests cuts."""


class Step(NamedTuple):
    """One step of all ranks, in float64."""

    loss: float
    gradients: Arrays | None
    """Gradients by global name, on rank 0."""
    codes: set[bytes]
    """Pieces of all operands on this rank: the codes of PIECE columns of a row, with their scale."""
    products: int


def steps(groups: Groups, runs: Sequence[tuple[Config, Mapping[str, Any], GlobalBatch]]) -> list[Step]:
    """Runs forward and backward of a step for each configuration."""
    return [_step(groups, *run) for run in runs]


def _step(groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch) -> Step:
    sharded = build_model(config, groups, weights_follow=True, in_float64=True)
    set_parameters(sharded.chunks, groups, parameters)
    model = RankModel(config, groups, sharded, _NoUpdates(sharded, groups))
    step = TrainingStep(model, replace(Objective.from_config(config.loss, config.model), choices=()))
    codes: set[bytes] = set()
    count = 0

    def noted(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
        nonlocal count
        count += 1
        codes.update(*map(_pieces, (a, b)))
        return multiplied(a, b, dtype)

    multiplied = fp8.multiplied
    with mock.patch.object(fp8, "multiplied", noted):
        totals = step.forward_backward(own_microbatches(batch, groups, config))
    return Step(totals.objective, arrays(gather_whole(gradient_shards(sharded, groups))), codes, count)


def _pieces(matrix: Scaled) -> set[bytes]:
    rows, columns = matrix.codes.shape
    scales = matrix.scales.repeat_interleave(rows // len(matrix.scales), 0)
    scales = scales.repeat_interleave(columns // scales.shape[1], 1)[:, ::PIECE]
    codes = matrix.codes.contiguous().view(torch.uint8).view(rows, -1, PIECE)
    both = torch.cat((codes, scales.contiguous().view(torch.uint8).view(rows, -1, 4)), -1)
    return {piece.numpy().tobytes() for piece in both[((codes & 0x7F) != 0).any(-1)]}


class Linears(NamedTuple):
    """Output, gradient of the input and of the weight of a column-parallel and of a row-parallel layer."""

    column: tuple[Any, Any, Any]
    row: tuple[Any, Any, Any]


def linears(groups: Groups, config: Config, tokens: Any, weight: Any, gradient: Any) -> Linears:
    """Applies both kinds of layers to tokens [count, 1, n] and a weight [m, n] in float64; results are whole."""
    translated = transformer_config(config, groups.layout, groups.device)
    compute_in_float64(translated)
    recipe = fp8.Recipe.of(config)
    assert recipe is not None
    x, w, dy = (torch.as_tensor(each) for each in (tokens, weight, gradient))
    tp, rank, count = groups.collection.tp, groups.tp_rank, groups.layout.tp
    column = input_projection(translated, w.shape[1], w.shape[0], tp)
    row = output_projection(translated, w.shape[1], tp)
    found = []
    for module, axis in ((column, 0), (row, 1)):
        with torch.no_grad():
            module.weight.copy_(w.chunk(count, axis)[rank])
        fp8.multiply_in_fp8(module, recipe)
        own_tokens = count > 1 and groups.layout.sp
        given = x.chunk(count, 0)[rank] if axis == 0 and own_tokens else x.chunk(count, 2)[rank] if axis else x
        given = given.clone().requires_grad_()
        output = module(given)[0]
        of_output = dy.chunk(count, 2)[rank] if axis == 0 else dy.chunk(count, 0)[rank] if own_tokens else dy
        gradients = torch.autograd.grad(output, [given, module.weight], of_output)
        found.append([output, *gradients])
    return Linears(*(tuple(each.detach().numpy() for each in one) for one in found))


def classes(groups: Groups, config: Config) -> dict[str, bool]:
    """Returns the parameter matrices of a chunk, and whether fp8 multiplies by them."""
    sharded = build_model(config, groups, weights_follow=True)
    return {
        name: getattr(getattr(module, "_forward_impl", None), "func", None) is fp8._applied
        for name, module in unwrap(sharded.chunks[0]).named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() > 1
    }

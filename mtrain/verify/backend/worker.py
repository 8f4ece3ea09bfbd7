"""Rank side of the check: a candidate, our torch layers and the reference on the same weights and inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import sharded_parameters, shards
from mtrain.core.layers.transformer_config import DTYPES
from mtrain.core.ranks.groups import Groups
from mtrain.verify.backend.candidates import Candidate, torch_layers
from mtrain.verify.backend.cases import NUM_ROWS, Case, rows_like, starts_of
from mtrain.verify.backend.errors import UNIT_ROUNDOFF, TensorError, compared
from mtrain.verify.core.weights import drawn, set_weights
from mtrain.verify.reference.model.adapters import is_trained, merged
from mtrain.verify.reference.model.experts import Routed, routed
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.text import Rows

_DRAWS = 8
_WARM_UP = 3


@dataclass(frozen=True)
class BackendJob:
    """Comparison of one candidate."""

    config: Config
    candidate: Candidate
    cases: Sequence[Case]
    timed_shape: tuple[int, int]
    """Rows and length of the timed passes."""
    repeats: int
    """Timed passes of each side."""


class CaseResult(NamedTuple):
    """One kind of layer on this rank."""

    errors: list[TensorError]
    ms: float
    own_ms: float


class _LayerInputs(NamedTuple):
    """Inputs of a layer; [batch, seq, hidden]."""

    rows: Rows
    hidden: Tensor
    gradient: Tensor
    """Gradient of the output."""


class _Tensors(NamedTuple):
    """Results of one pass: [seq_local, batch, hidden], and gradients by global name."""

    output: Tensor
    input_gradient: Tensor | None
    gradients: Mapping[str, Tensor]


def compare(groups: Groups, job: BackendJob) -> list[CaseResult] | str:
    """Compares all kinds of layers, or returns why the candidate cannot be built here. Collective over CP."""
    config = job.config
    if (absent := job.candidate.absent(config, groups.device)) is not None:
        return absent
    chunks = [build(config, groups) for build in (torch_layers, job.candidate.build)]
    set_weights(chunks[:1], groups, lambda name, shape: drawn(name, shape, config))
    weights = {name: tensor.detach() for name, tensor in _named(chunks[0], groups).items()}
    # the candidate gets our weights after their rounding
    set_weights(chunks[1:], groups, lambda name, shape: weights[name].cpu().to(torch.float32).view(*shape))
    ours, candidate = (_Layers(chunk, config, groups) for chunk in chunks)
    return [_compare_one(case, job, weights, ours, candidate) for case in job.cases]


def _compare_one(
    case: Case, job: BackendJob, weights: Mapping[str, Tensor], ours: _Layers, candidate: _Layers
) -> CaseResult:
    config, groups, layer = ours.config, ours.groups, case.layer
    inputs, exact = _judged(case, config, groups.device, weights)
    base, other = ours.run(layer, inputs), candidate.run(layer, inputs)
    positions = _positions(groups, inputs.hidden.shape[1])
    assert exact.input_gradient is not None
    output, input_gradient = (whole.transpose(0, 1)[positions] for whole in (exact.output, exact.input_gradient))
    is_counted = inputs.gradient.transpose(0, 1)[positions] != 0
    errors = compared(
        config.train,
        "layer_output",
        "output",
        torch.where(is_counted, base.output, 0),
        torch.where(is_counted, other.output, 0) if other.output.shape == base.output.shape else None,
        torch.where(is_counted, output, 0),
    )
    errors += compared(
        config.train, "input_gradient", "input", base.input_gradient, other.input_gradient, input_gradient
    )
    for name, gradient in exact.gradients.items():
        pair = base.gradients.get(name), other.gradients.get(name)
        errors += compared(config.train, "gradient", name, *pair, gradient)
    del inputs, exact, base, other
    timed = _drawn_inputs(config, groups.device, *job.timed_shape)
    return CaseResult(
        errors, *_times(job.repeats, groups, lambda: candidate.run(layer, timed), lambda: ours.run(layer, timed))
    )


def _positions(groups: Groups, length: int) -> Tensor:
    layout = groups.layout
    return torch.arange(length) if layout.cp == 1 else zigzag_index(length, layout.cp, groups.cp_rank)


def _named(chunk: nn.Module, groups: Groups, of_gradients: bool = False) -> dict[str, Tensor]:
    """Returns whole weights or gradients by global name; omits missing gradients."""
    tensors: dict[str, Tensor] = {}
    for parameter in sharded_parameters([unwrap(chunk)], groups):
        values = parameter.data.grad if of_gradients else parameter.data
        for shard in () if values is None else shards(parameter, parameter.key, values):
            axes = shard.prepend_axis_num
            name, shape = global_name(shard.key, tuple(shard.global_offset[:axes])), shard.global_shape[axes:]
            whole = tensors.setdefault(name, values.new_zeros(shape))
            whole[tuple(slice(at, at + size) for at, size in zip(shard.global_offset[axes:], shard.data.shape))] = (
                shard.data
            )
    return tensors


class _Layers:
    def __init__(self, chunk: nn.Module, config: Config, groups: Groups) -> None:
        self._chunk, self.config, self.groups = chunk, config, groups
        self._model = unwrap(chunk)
        self._layers = self._model.decoder.layers
        self._model.decoder.final_layernorm = None  # not a part of a layer

    def run(self, layer: int, inputs: _LayerInputs) -> _Tensors:
        """Runs one layer forward and backward through the block of a run; sums weight gradients over CP."""
        groups, model = self.groups, self._model
        local = _positions(groups, inputs.hidden.shape[1]).to(groups.device)
        hidden = inputs.hidden.transpose(0, 1)[local].requires_grad_()
        has_documents = self.config.data.isolate_documents
        positions = inputs.rows.positions[:, local] if has_documents else inputs.rows.positions[:1, local]
        model.decoder.layers = nn.ModuleList([self._layers[layer]])
        self._chunk.zero_grad(set_to_none=True)
        output = model.decoder(
            hidden_states=hidden,
            attention_mask=starts_of(inputs.rows) if has_documents else None,
            rotary_pos_emb=model.rotary(positions),
        )
        torch.autograd.backward(output, inputs.gradient.transpose(0, 1)[local])
        model.decoder.layers = self._layers
        gradients = _named(self._chunk, groups, of_gradients=True)
        if groups.layout.cp > 1:
            gradients = {name: gradient.float() for name, gradient in gradients.items()}
            for _, gradient in sorted(gradients.items()):
                dist.all_reduce(gradient, group=groups.cp)
        return _Tensors(output.detach(), hidden.grad, gradients)


def _drawn_inputs(config: Config, device: torch.device, num_rows: int, length: int) -> _LayerInputs:
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = num_rows, length, config.model.hidden_size
    hidden, gradient = (
        torch.randn(shape, generator=generator).to(device, DTYPES[config.train.precision]) for _ in range(2)
    )
    return _LayerInputs(rows_like(config.data.isolate_documents, num_rows, length, device), hidden, gradient)


def _judged(
    case: Case, config: Config, device: torch.device, weights: Mapping[str, Tensor]
) -> tuple[_LayerInputs, _Tensors]:
    """Returns inputs and exact results of a layer.

    Tokens whose choice of experts depends on rounding are not compared: another choice in float64 is not an error.
    """
    inputs = _drawn_inputs(config, device, NUM_ROWS, config.data.seq_length)
    prefix = f"decoder.layers.{case.layer}."
    leaves = {
        name: weight.to(torch.float64).requires_grad_(name.startswith(prefix) and is_trained(name, config.adapter))
        for name, weight in weights.items()
    }
    hidden = inputs.hidden.to(torch.float64).requires_grad_()
    seen: list[Routed] = []
    output = Transformer(config.model, merged(config, leaves)).layer(case.layer, hidden, inputs.rows, seen)
    for router in seen:
        is_settled = _is_settled(router.logits, leaves.get(f"{router.name}.expert_bias"), config)
        inputs = inputs._replace(gradient=torch.where(is_settled.unsqueeze(-1), inputs.gradient, 0))
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and "expert_bias" not in name}
    gradient = inputs.gradient.to(torch.float64)
    results = torch.autograd.grad(output, [hidden, *trained.values()], gradient, allow_unused=True)
    gradients = {name: value for name, value in zip(trained, results[1:], strict=True) if value is not None}
    return inputs, _Tensors(output.detach(), results[0], gradients)


def _is_settled(logits: Tensor, bias: Tensor | None, config: Sections) -> Tensor:
    """Marks tokens that keep their experts when their logits are rounded, [batch, seq]."""
    section = config.model.experts
    assert section is not None
    generator = torch.Generator().manual_seed(config.train.seed)
    size = 8 * UNIT_ROUNDOFF[config.train.precision] * float(logits.detach().std())
    chosen, settled = routed(logits, bias, section)[0], torch.ones(logits.shape[:2], dtype=torch.bool).to(logits.device)
    for _ in range(_DRAWS):
        moved = logits + size * torch.randn(logits.shape, generator=generator).to(logits)
        settled &= (routed(moved, bias, section)[0] == chosen).all(-1)
    return settled


def _times(repeats: int, groups: Groups, *passes: Callable[[], object]) -> list[float]:
    """Returns the median milliseconds of each pass; passes alternate, so that all see the same clock rate."""
    milliseconds: list[list[float]] = [[] for _ in passes]
    for number in range(_WARM_UP + repeats):
        for index, run in enumerate(passes):
            dist.barrier(groups.cp)
            _settle(groups.device)
            start = time.perf_counter()
            run()
            _settle(groups.device)
            if number >= _WARM_UP:
                milliseconds[index].append(1000 * (time.perf_counter() - start))
    return [statistics.median(times) for times in milliseconds]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

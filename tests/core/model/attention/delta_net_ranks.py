"""The core of a delta net, or of Mamba-2, on the ranks of a context-parallel group, for `test_delta_net_core.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.config.schema.layout import CpComm
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.delta_net import DeltaNetCore
from mtrain.core.layers.attention.key_source import CachedPass, remembering
from mtrain.core.layers.attention.mamba import MambaCore
from mtrain.core.layers.attention.recurrent.core import Heads, RecurrentCore
from mtrain.core.layers.transformer_config import CP_COMM_TYPES
from mtrain.core.ranks.groups import Groups


class Whole(NamedTuple):
    """Inputs of whole rows, and the gradient of the output; float64."""

    mixed: Tensor
    """[seq, batch, channels]."""
    weight: Tensor
    """[channels, kernel]."""
    log_decay: Tensor
    """[seq, batch, value_heads]."""
    beta: Tensor
    gradient: Tensor
    """[seq, batch, value_heads x value_dim]."""
    bias: Tensor | None = None
    """[channels], with `skip`."""
    skip: Tensor | None = None
    """[value_heads] of Mamba-2; None: a delta net."""

    def core(self, heads: Heads, groups: Groups, cp_comm_type: str | None, chunk: int) -> RecurrentCore:
        kind = DeltaNetCore if self.skip is None else MambaCore
        return kind(heads, groups.cp, cp_comm_type, chunk)


class Found(NamedTuple):
    """Results of a rank's tokens, the gradients of parameters of its share, and the collectives of both passes."""

    output: Tensor
    mixed: Tensor
    parameters: list[Tensor]
    """Gradients of weight, and of bias and skip where there are any."""
    log_decay: Tensor
    beta: Tensor
    forward: list[str]
    backward: list[str]


class _Collectives(TorchDispatchMode):
    """Records the name of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(func.name().removeprefix("c10d::").strip("_"))
        return func(*args, **(kwargs or {}))


def computed(
    groups: Groups, heads: Heads, cp_comm: CpComm, chunk: int, whole: Whole, document_starts: Tensor | None
) -> Found:
    """Runs forward and backward with the tokens of this rank."""
    cp, seq = groups.layout.cp, len(whole.mixed)
    own = zigzag_index(seq, cp, groups.cp_rank) if cp > 1 else torch.arange(seq)
    mixed, log_decay, beta = (part[own].requires_grad_() for part in (whole.mixed, whole.log_decay, whole.beta))
    given = (whole.weight, whole.bias, whole.skip)
    weight, *further = [each.clone().requires_grad_() for each in given if each is not None]
    core = whole.core(heads, groups, CP_COMM_TYPES[cp_comm], chunk)
    forward, backward = _Collectives(), _Collectives()
    with forward:
        output = core(mixed, weight, log_decay, beta, document_starts, *further)
    with backward:
        output.backward(whole.gradient[own])
    of_mixed, of_decay, of_beta = (gradient_of(each) for each in (mixed, log_decay, beta))
    parameters = [gradient_of(each) for each in (weight, *further)]
    return Found(output.detach(), of_mixed, parameters, of_decay, of_beta, forward.names, backward.names)


def generated(
    groups: Groups, heads: Heads, whole: Whole, passes: list[tuple[bool, list[tuple[int, int, int]]]]
) -> list[Tensor]:
    """Returns the outputs of each pass, [tokens, value_heads x value_dim], with two tokens that only pad its row."""
    seq, rows = whole.mixed.shape[:2]
    reading = CachedPass(rows, seq, groups.device)
    core = whole.core(heads, groups, None, chunk=4)
    outputs = []
    with remembering([core], reading):
        for of_prompts, pieces in passes:
            tokens = [(sequence, place) for sequence, start, end in pieces for place in range(start, end)]
            tokens += [(reading.filler, 0)] * 2
            reading.read([each[0] for each in tokens], [each[1] for each in tokens], of_prompts)
            # tokens that pad a row may hold anything
            mixed, log_decay, beta = (
                torch.stack([part[place, sequence % rows] for sequence, place in tokens]).unsqueeze(1)
                for part in (whole.mixed, whole.log_decay, whole.beta)
            )
            outputs.append(core(mixed, whole.weight, log_decay, beta, None, whole.bias, whole.skip)[:, 0])
    return outputs


def gradient_of(tensor: Tensor) -> Tensor:
    """Returns the gradient of a leaf that the backward pass has reached."""
    assert tensor.grad is not None
    return tensor.grad

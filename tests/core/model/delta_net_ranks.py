"""A gated delta net on the ranks of a TP group, for `test_delta_net.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.config.schema.mamba import MambaSection
from mtrain.core.layers.attention.delta_net import GatedDeltaNet
from mtrain.core.layers.attention.flash_linear_attention import outputs_of_rows
from mtrain.core.layers.attention.mamba import MambaMixer
from mtrain.core.layers.transformer_config import as_it_is
from mtrain.core.ranks.groups import Groups


class Example(NamedTuple):
    """Whole parameters and inputs, and the gradient of the output."""

    section: DeltaNetSection
    parameters: dict[str, Tensor]
    """Name in a checkpoint -> parameter, in the precision of the run."""
    hidden: Tensor
    """[seq, batch, hidden]."""
    document_starts: Tensor | None
    """[batch, seq]."""
    gradient: Tensor
    """[seq, batch, hidden]."""
    recompute: bool = False
    kernel: Callable[..., Any] | None = None
    """Function in the place of flash-linear-attention's; None: our delta rule."""


class Found(NamedTuple):
    """Results of a rank: what it holds of the output, of the input's gradient, and of the parameters' gradients."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    divided: frozenset[str]
    """Parameters that are marked as divided over TP."""
    reduced: list[int]
    """Numbers of elements of the all-reduces of the backward pass."""
    decay: Tensor | None = None
    """Logarithms of decays that the core receives, [seq, batch, value_heads_local]."""


class _AllReduces(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.c10d.allreduce_.default:
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def computed(groups: Groups, example: Example) -> Found:
    """Runs forward and backward with the heads of this rank, under sequence parallelism on its tokens."""
    layout, rank = groups.layout, dist.get_rank(groups.tp)
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=example.hidden.shape[2],
        num_attention_heads=layout.tp,
        layernorm_epsilon=1e-3,
        layernorm_zero_centered_gamma=True,
        params_dtype=example.hidden.dtype,
        use_cpu_initialization=True,
        init_method=as_it_is,
        output_layer_init_method=as_it_is,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        **(recomputed if example.recompute else {}),
    )
    net = GatedDeltaNet(config, 1, example.section, groups.collection, "all_gather")
    if example.kernel is not None:
        core: Any = net.core_attention
        core.rule = partial(outputs_of_rows, example.kernel)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(_own(example.parameters[name], name, layout.tp, rank))
            parameter.main_grad = torch.zeros_like(parameter)
    tokens = slice(None)
    if layout.sp:
        count = len(example.hidden) // layout.tp
        tokens = slice(rank * count, (rank + 1) * count)
    hidden = example.hidden[tokens].clone().requires_grad_()
    received: list[Tensor] = []
    net.core_attention.register_forward_pre_hook(lambda module, arguments: received.append(arguments[2].detach()))
    output, bias = net(hidden, example.document_starts, rotary_pos_emb=None)
    assert bias is None
    reduced = _AllReduces()
    with reduced:
        output.backward(example.gradient[tokens])
    assert hidden.grad is not None
    gradients = {name: _gradient_of(each) for name, each in net.named_parameters()}
    divided = frozenset(name for name, each in net.named_parameters() if getattr(each, "tensor_model_parallel", False))
    return Found(output.detach(), hidden.grad, gradients, divided, reduced.sizes, received[0])


def mamba_rates(groups: Groups, section: MambaSection, hidden: Tensor) -> list[Tensor]:
    """Returns the log decays and the steps that the core of Mamba-2 receives of a run in the dtype of `hidden`."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden.shape[2],
        num_attention_heads=1,
        params_dtype=hidden.dtype,
        use_cpu_initialization=True,
        init_method=as_it_is,
        output_layer_init_method=as_it_is,
    )
    mixer = MambaMixer(config, 1, section, groups.collection)
    with torch.no_grad():
        for parameter in (mixer.in_proj.weight, mixer.conv1d.weight, mixer.out_proj.weight):
            torch.nn.init.normal_(parameter, std=0.1)
        mixer.A_log.fill_(-9.0)
    received: list[Tensor] = []
    mixer.core_attention.register_forward_pre_hook(lambda module, arguments: received.extend(arguments[2:4]))
    mixer(hidden)
    return [each.detach() for each in received]


def _own(whole: Tensor, name: str, tp: int, rank: int) -> Tensor:
    if name == "out_norm.weight":
        return whole
    return whole.chunk(tp, 1 if name == "out_proj.weight" else 0)[rank]


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

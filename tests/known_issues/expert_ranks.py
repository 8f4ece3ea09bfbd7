"""One layer of experts in plain megatron-core and in ours; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.experts import ExpertsSection
from mtrain.core.layers.moe.experts import Experts
from mtrain.core.layers.moe.router import Router
from mtrain.core.ranks.groups import Groups

SECTION = ExpertsSection(num_experts=4, top_k=2, ffn_hidden_size=16)
SEQ, HIDDEN = 8, 16


class LayerRun(NamedTuple):
    """Gradients of a layer's parameters on this rank."""

    gradients: dict[str, Any]
    """Gradients by name; experts stacked: [experts of this rank, ...]."""
    norm: float
    """Gradient norm as megatron-core's optimizer reports it."""


def layer_config(groups: Groups, **fields: Any) -> TransformerConfig:
    """Describes the layer with megatron-core's fields."""
    layout = groups.layout
    defaults: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "num_moe_experts": SECTION.num_experts,
        "moe_router_topk": SECTION.top_k,
        "moe_ffn_hidden_size": SECTION.ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**defaults, **fields})


@contextmanager
def with_their_router() -> Iterator[None]:
    """Fixes by hand that their router cannot run without TransformerEngine."""
    moe_utils.te_general_gemm = None
    try:
        yield
    finally:
        del moe_utils.te_general_gemm


def layer(groups: Groups, config: TransformerConfig, is_ours: bool) -> MoELayer:
    """Builds their layer with their router and experts, or with ours; the weights are the same."""
    if is_ours:
        router: Any = partial(Router, section=SECTION.model_copy(update={"router_bias": config.add_bias_linear}))
        experts = ModuleSpec(module=Experts, params={"implementation": "auto"})
    else:
        router = TopKRouter
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    built = MoELayer(config, MoESubmodules(router=router, experts=experts), 1, groups.collection)
    first = groups.collection.ep.rank() * built.num_local_experts
    with torch.no_grad():
        for name, parameter in _stacked(built):
            generator = torch.Generator().manual_seed(len(name))
            whole = torch.randn(SECTION.num_experts, *parameter[0].shape, generator=generator)
            is_router = name.startswith("router")
            for own, value in zip(parameter, whole if is_router else whole[first:], strict=is_router):
                own.copy_(value)
    return built


def _stacked(built: MoELayer) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields each name with one tensor per expert."""
    experts: Any = built.experts
    kinds = ["weight", "bias"] if built.config.add_bias_linear else ["weight"]
    yield from ((f"router.{kind}", list(getattr(built.router, kind))) for kind in kinds)
    for linear in ("linear_fc1", "linear_fc2"):
        for kind in kinds:
            if isinstance(experts, Experts):
                yield f"{linear}.{kind}", list(getattr(getattr(experts, linear), kind))
            else:
                yield f"{linear}.{kind}", [getattr(getattr(each, linear), kind) for each in experts.local_experts]


def layer_run(groups: Groups, is_ours: bool, has_bias: bool = False, initialises: bool = True) -> LayerRun:
    """Runs forward and backward of this rank's part of one sequence; reduces gradients as megatron-core does."""
    config = layer_config(groups, add_bias_linear=has_bias, perform_initialization=initialises)
    built = layer(groups, config, is_ours)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp, module=built, pg_collection=groups.collection)
    sequence = torch.randn(SEQ, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    own = sequence.chunk(groups.layout.tp)[groups.tp_rank]
    with with_their_router():
        output, _ = wrapped(own)
        output.square().sum().backward()
    finalize_model_grads([wrapped], pg_collection=groups.collection)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0),
        [wrapped],
        use_gloo_process_groups=False,
        pg_collection=groups.collection,
    )
    optimizer.prepare_grads()
    return LayerRun(dict(_gradients(built)), float(optimizer.get_grad_norm()))


def _gradients(built: MoELayer) -> Iterator[tuple[str, Any]]:
    experts: Any = built.experts
    if isinstance(experts, Experts):
        yield from ((name, parameter.main_grad.numpy().copy()) for name, parameter in experts.named_parameters())
        return
    for name, _ in experts.local_experts[0].named_parameters():
        own = [dict(each.named_parameters())[name].main_grad for each in experts.local_experts]
        yield name, torch.stack(own).numpy()


def their_router_fails(groups: Groups) -> str:
    """Returns what their router raises without TransformerEngine; ours, with the same weights, raises nothing."""
    config = layer_config(groups)
    hidden = torch.randn(SEQ, 1, HIDDEN)
    weights, chosen = layer(groups, config, is_ours=True).router(hidden)
    assert weights.shape == chosen.shape == (SEQ, SECTION.num_experts)
    try:
        layer(groups, config, is_ours=False).router(hidden)
    except NameError as error:
        return str(error)
    return "nothing"


def scores_in_float64(groups: Groups) -> tuple[float, float]:
    """Returns how far the weights of a float64 router are from float64's own: theirs, ours."""
    config, hidden = layer_config(groups, moe_router_dtype="fp64"), torch.randn(SEQ, 1, HIDDEN).double()
    found = []
    with with_their_router():
        for is_ours in (False, True):
            router = layer(groups, config, is_ours).router.double()
            weights, chosen = router(hidden)
            logits = hidden.flatten(0, 1) @ router.weight.T
            exact = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
            found.append(float((weights - exact).detach().abs().max()))
    return found[0], found[1]


def split_sizes(groups: Groups) -> tuple[str, list[int]]:
    """Returns the error of an all-to-all for split sizes of their function on a CPU, and what it sends with ours."""
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.ones(dist.get_world_size(), dtype=torch.int64)
    values, received = torch.arange(2.0) + 10 * groups.rank, torch.empty(2)
    theirs = moe_utils.maybe_move_tensor_to_cpu(sizes, as_numpy=True)
    try:
        dist.all_to_all_single(received, values, theirs, theirs)
    except TypeError as error:
        said = str(error).splitlines()[0]
    else:
        said = "nothing"
    ours = token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True)
    dist.all_to_all_single(received, values, ours, ours)
    return said, [int(value) for value in received]


def uneven_lists(groups: Groups) -> tuple[list[float], list[float]]:
    """Gathers lists, of which rank r brings r + 1 numbers; returns them, and this rank's part of their
    reduce-scatter."""
    sizes = [rank + 1 for rank in range(dist.get_world_size())]
    own = torch.full((sizes[groups.rank],), float(groups.rank))
    gathered = [torch.empty(size) for size in sizes]
    dist.all_gather(gathered, own)
    scattered = torch.empty_like(own)
    dist.reduce_scatter(scattered, [part + 1 for part in gathered])
    return torch.cat(gathered).tolist(), scattered.tolist()


def their_keys(groups: Groups) -> list[str]:
    """Lists the checkpoint keys of a layer of experts on their local spec."""
    spec = get_gpt_layer_local_spec(num_experts=SECTION.num_experts, normalization="RMSNorm")
    built: nn.Module = spec.module(layer_config(groups, normalization="RMSNorm"), spec.submodules, 1)
    state: dict[str, Any] = built.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})  # type: ignore[operator]
    return [value.key for value in state.values()]


def loss_scales(groups: Groups) -> list[float]:
    """Returns the scales of their optimizers after a step in which an expert's gradient overflowed on every rank."""
    config = layer_config(groups, fp16=True, params_dtype=torch.float16)
    built = layer(groups, config, is_ours=False)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp, module=built, pg_collection=groups.collection)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, fp16=True, initial_loss_scale=1024.0, hysteresis=1),
        [wrapped],
        use_gloo_process_groups=False,
        pg_collection=groups.collection,
    )
    experts: Any = built.experts
    experts.local_experts[0].linear_fc1.weight.main_grad.fill_(float("inf"))
    optimizer.prepare_grads()
    return [float(part.grad_scaler.scale) for part in optimizer.chained_optimizers]

"""Router of plain Megatron-Core, and the way of its masks; the functions for `Pool.run`."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_tokens_per_expert_and_token_count
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mtrain.core.ranks.groups import Groups

EXPERTS = 4


def config_of(groups: Groups, **fields: Any) -> TransformerConfig:
    """Makes the configuration of a tiny model with experts under the layout."""
    layout = groups.layout
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**defaults, **fields})


def gradients(groups: Groups, microbatches: list[Any], is_cut: bool, fields: dict[str, Any]) -> list[Any]:
    """Returns what the losses of a router add to the gradient of its logits.

    Args:
        groups: Process groups of the ranks.
        microbatches: Logits [seq, batch, experts] of each microbatch.
        is_cut: Whether each context-parallel rank gets only its part.
        fields: Fields of TransformerConfig.
    """
    router = TopKRouter(config_of(groups, **fields), groups.collection)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    found = []
    for logits in microbatches:
        own = torch.as_tensor(logits).chunk(groups.layout.cp)[groups.cp_rank] if is_cut else torch.as_tensor(logits)
        leaf = own.clone().requires_grad_()
        weights, _ = router.routing(leaf)
        (gradient,) = torch.autograd.grad(weights.sum() * 0, leaf)
        found.append(gradient.numpy())
    return found


def z_loss_of_a_depth(groups: Groups, logits: Any, fields: dict[str, Any]) -> tuple[Any, list[float]]:
    """Returns the gradient of the z-loss of a router in a depth, and the values that its log got.

    Args:
        groups: Process groups of the ranks.
        logits: Logits [seq, batch, experts].
        fields: Fields of TransformerConfig.
    """
    router = TopKRouter(config_of(groups, **fields), groups.collection, is_mtp_layer=True)  # not in 0.16.1
    router.set_layer_number(1)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    logged: list[float] = []
    tracker = mock.Mock(record=lambda name, value, *_, **__: logged.append(float(value.detach())))
    leaf = torch.as_tensor(logits).requires_grad_()
    with mock.patch.object(megatron_router, "get_moe_metrics_tracker", return_value=tracker):
        weighed = router.apply_z_loss(leaf)
    (gradient,) = torch.autograd.grad(weighed.sum() * 0, leaf)
    return gradient.numpy(), logged


def counts_under_a_mask(groups: Groups, logits: Any, padding: Any) -> list[float] | str:
    """Counts the tokens that the bias of the choice is moved by; or returns the error."""
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    router = TopKRouter(config_of(groups, **fields), groups.collection)
    try:
        router.routing(torch.as_tensor(logits), torch.as_tensor(padding))
    except RuntimeError as error:
        return str(error)
    counts: list[float] = router.local_tokens_per_expert.tolist()
    return counts


class _OnlyARouter(MegatronModule):
    """Model that only consists of a router."""

    def __init__(self, config: TransformerConfig, groups: Groups) -> None:
        super().__init__(config)
        self.router = TopKRouter(config, groups.collection)


def bias_after_an_infinite_gradient(groups: Groups, logits: Any) -> list[float]:
    """Returns the bias of the choice, from 0, after gradients are finalised and before the optimizer is asked."""
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    config = config_of(groups, **fields)
    model = _OnlyARouter(config, groups)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(), module=model, pg_collection=groups.collection
    )
    model.router.routing(torch.as_tensor(logits))
    for parameter in model.parameters():
        parameter.main_grad.fill_(torch.inf)
    finalize_model_grads([wrapped], None, pg_collection=groups.collection)
    bias: list[float] = model.router.expert_bias.tolist()
    return bias


class Cut(NamedTuple):
    """Number of positions of a padding mask before and after the model's preprocessing."""

    given: int
    left: int


def padding_mask_of_a_stage(groups: Groups) -> Cut:
    """Measures which part of a row's mask the layers of this stage would get under sequence parallelism."""
    model = _model(groups)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    prepared = model._preprocess(tokens, tokens, padding_mask=tokens.bool())
    return Cut(8, prepared[5].shape[1])


def padding_mask_by_groups(groups: Groups) -> list[bool]:
    """Returns the mask that routers of this rank would get where the global group is that of the replicas.

    The whole row is padding in its second half, which is what rank 1 of tp should get.
    """
    model = _model(groups)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with mock.patch.object(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", groups.dp_cp):
        prepared = model._preprocess(tokens, tokens, padding_mask=torch.arange(8).unsqueeze(0) >= 4)
    mask: list[bool] = prepared[5].flatten().tolist()
    return mask


def layers_without_their_mask(groups: Groups) -> list[int]:
    """Lists the layers that get no padding mask where the first of two is recomputed."""
    recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    model = _model(groups, **recompute)
    without = []

    def look(number: int) -> Any:
        def hook(layer: Any, arguments: Any, options: dict[str, Any]) -> None:
            if options.get("padding_mask") is None:
                without.append(number)

        return hook

    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(look(number), with_kwargs=True)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(tokens, tokens, None, labels=tokens, padding_mask=tokens.bool())
    return without


def _model(groups: Groups, **fields: Any) -> GPTModel:
    """Builds a dense model without norms, since those of the local layers refuse sequence parallelism."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    config = config_of(groups, num_moe_experts=None, **fields)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * (2 // groups.layout.pp), layer_norm=IdentityOp),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=groups.pp_rank == 0,
        post_process=groups.pp_rank == groups.layout.pp - 1,
        position_embedding_type="learned_absolute",
        pg_collection=groups.collection,
    )


def token_counts(groups: Groups) -> tuple[float, float]:
    """Returns (own, all) tokens as the auxiliary losses count them under a mask; rank r has r + 1 tokens."""
    routed = torch.zeros(4, EXPERTS, dtype=torch.int64)
    routed[: groups.rank + 1, :2] = 1
    counted: tuple[Tensor, Tensor, Tensor] = get_tokens_per_expert_and_token_count(
        routed, groups.collection.tp_dp_cp, topk=2, with_padding_mask=True
    )
    return float(counted[1]), float(counted[2])

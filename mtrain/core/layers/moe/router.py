"""The router, which computes the logits of each token for all experts and chooses among them.

megatron-core's router (transformer/moe/router.py) calls a function that exists only with TransformerEngine
(moe_utils.py::RouterGatingLinearFunction) and rounds scores to float32 even in a float64 model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, assert_never

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.experts import ExpertsSection
from mtrain.core.layers.own_parameters import replicated_parameter

_EPSILON = 1e-20
"""Added to the sum by which sigmoid scores are divided, as in megatron-core and DeepSeek's models."""


class TopkRouting(NamedTuple):
    """The experts of each token."""

    weights: Tensor
    """Weights, [tokens, num_experts], float32 or float64 like the logits; 0 for experts that are not chosen."""
    chosen: Tensor
    """Mask of chosen experts, [tokens, num_experts] bool."""
    experts: Tensor
    """Chosen experts, [tokens, top_k] int64, best first, or in the prescribed order."""


def choose(
    logits: Tensor, section: ExpertsSection, expert_bias: Tensor | None, prescribed: Tensor | None = None
) -> TopkRouting:
    """Chooses the top_k best experts of each token, or replays prescribed ones with the weights of this router.

    Args:
        logits: Logits, [tokens, num_experts].
        expert_bias: Bias added to scores for the choice but not for the weights, [num_experts].
        prescribed: Experts to replay, [tokens, top_k]; negative for tokens that choose.
    """
    scores = scores_of(logits, section)
    ranking = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    experts = best_places(ranking.detach(), section)
    if prescribed is not None:
        experts = torch.where(prescribed >= 0, prescribed, experts)
    weights = _normalised(scores.gather(1, experts), section) * section.scaling_factor
    return TopkRouting(
        # dense tensors, [tokens, num_experts], as megatron-core's dispatchers expect
        torch.zeros_like(logits).scatter(1, experts, weights),
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True),
        experts,
    )


def router_marks(sequence_ids: Tensor | None, choices: Mapping[str, Tensor]) -> Tensor | None:
    """Combines the data of each position for routers into the one argument that megatron-core passes to all layers.

    As an argument of layers it is passed again in recomputation. `sequence_ids` are [batch, seq] int64; None without a
    router.

    Returns:
        [batch, seq] int64, or [batch, seq, 1 + layers x top_k] int32, which `Router` splits.
    """
    experts = choices.get(ROUTED_EXPERTS)
    if experts is None:
        return sequence_ids
    assert sequence_ids is not None, "batches for models with experts mark padding"
    return torch.cat((sequence_ids.unsqueeze(-1).to(experts.dtype), experts.flatten(2)), dim=-1)


def scores_of(logits: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the values that rank experts: sigmoid, softmax, or logits if the softmax follows the choice."""
    match section.score:
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1) if section.pre_softmax else logits
        case _:
            assert_never(section.score)


def best_places(ranking: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the indices of the top_k highest values of [tokens, num_experts], [tokens, top_k] int64.

    With groups, a token chooses only among experts of its group_top_k best groups, where the score of a group is the
    sum of its num_scored highest values.
    """
    if section.num_groups is not None and section.group_top_k is not None:
        grouped = ranking.view(len(ranking), section.num_groups, -1)
        group_scores = grouped.topk(section.num_scored, dim=-1).values.sum(-1)
        groups = group_scores.topk(section.group_top_k, dim=-1).indices
        is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, groups, True)
        # -inf instead of 0, since biased scores may be negative
        ranking = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    return ranking.topk(section.top_k, dim=-1).indices


def _normalised(scores: Tensor, section: ExpertsSection) -> Tensor:
    """Computes the weights of chosen experts from their scores, both [tokens, top_k]."""
    match section.score:
        case "softmax":
            return scores if section.pre_softmax else scores.softmax(-1)
        case "sigmoid":
            return scores / (scores.sum(-1, keepdim=True) + _EPSILON) if section.top_k > 1 else scores
        case _:
            assert_never(section.score)


class StatsHook(Protocol):
    """The watch of a router, which receives its logits and choices for each microbatch."""

    def logits(self, logits: Tensor, sequence_ids: Tensor | None) -> Tensor:
        """Receives logits, [seq_local, batch, num_experts], and the sequence of each position, [seq_local, batch]
        int64, negative at padding; returns the logits, possibly with a loss attached to their graph."""

    def choice(self, chosen: Tensor, sequence_ids: Tensor | None) -> None:
        """Receives the choice, [seq_local x batch, num_experts] bool, the router's own or a replayed one, before tokens
        are dropped, and sequences as in `logits`."""


class Router(MegatronModule):
    """Chooses experts in float32 (float64 in a float64 model), under any precision of weights and activations."""

    bias: nn.Parameter | None
    scale: nn.Parameter | None
    """Vector that multiplies the normalised input, [hidden_size]."""
    per_expert_scale: nn.Parameter | None
    """Factor of the weights of each expert, [num_experts]."""
    expert_bias: Tensor | None
    """Bias of each expert for the choice, [num_experts]."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        section: ExpertsSection,
        is_mtp_layer: bool = False,
    ) -> None:
        """Takes megatron-core's arguments; ignores is_mtp_layer, by which newer versions number layers. The weights are
        replicated over tensor-parallel ranks."""
        super().__init__(config)
        self.section = section
        self.tp_group = pg_collection.tp  # megatron-core reads it to describe shards
        self.layer_number: int | None = None
        self.watch: StatsHook | None = None
        self.record: list[Tensor] | None = None
        """Receives the chosen experts of each pass, [seq_local x batch, top_k] int64; None: not recorded."""
        self.weight = replicated_parameter(config, torch.empty(section.num_experts, config.hidden_size))
        if section.router_bias:
            self.bias = replicated_parameter(config, torch.zeros(section.num_experts))
        else:
            self.register_parameter("bias", None)
        sizes = {"scale": config.hidden_size, "per_expert_scale": section.num_experts}
        for name, size in sizes.items():
            scale = replicated_parameter(config, torch.ones(size)) if section.branch_norms else None
            self.register_parameter(name, scale)
        # a buffer, since it is updated by counts, not by a gradient, but belongs to checkpoints
        expert_bias = torch.zeros(section.num_experts, device=self.weight.device) if section.expert_bias else None
        self.register_buffer("expert_bias", expert_bias)

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of the layer in the whole model, from 1."""
        self.layer_number = layer_number

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes every position of this rank, [seq_local, batch, hidden_size].

        Args:
            padding_mask: Sequence of each position, [seq_local, batch] int64, negative at padding, which is routed but
                not counted; or with experts to replay, [seq_local, batch, marks] from `router_marks`.

        Returns:
            Weights and choice, both [seq_local x batch, num_experts].
        """
        logits, prescribed = self.logits(hidden), None
        if padding_mask is not None and padding_mask.dim() == 3:
            padding_mask, prescribed = self._split_marks(padding_mask)
        if self.watch is not None:
            # before the choice, so that the terms are in the graph of the logits
            logits = self.watch.logits(logits, padding_mask)
        choice = choose(logits.flatten(0, 1), self.section, self.expert_bias, prescribed)
        if self.watch is not None:
            self.watch.choice(choice.chosen, padding_mask)
        if self.record is not None:
            self.record.append(choice.experts)
        weights, chosen = choice.weights, choice.chosen
        if self.section.capacity_factor is not None:
            if padding_mask is not None:
                # padding, whose tokens are alike, would otherwise take places of text
                is_text = (padding_mask >= 0).reshape(-1, 1)
                weights, chosen = weights * is_text, chosen & is_text
            limits = self.section.top_k, self.section.capacity_factor
            weights, chosen = apply_router_token_dropping(weights, chosen, *limits)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale.to(weights.dtype)
        return weights, chosen

    def _split_marks(self, marks: Tensor) -> tuple[Tensor, Tensor]:
        """Splits marks into the sequence of each position, [seq_local, batch], and the prescribed experts of this
        layer, [seq_local x batch, top_k]."""
        assert self.layer_number is not None, "megatron-core numbers every layer"
        first = 1 + (self.layer_number - 1) * self.section.top_k
        prescribed = marks[..., first : first + self.section.top_k].flatten(0, 1)
        return marks[..., 0].long(), prescribed.long()

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps [seq_local, batch, hidden_size] to logits [seq_local, batch, num_experts] in at least float32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        hidden = hidden.to(dtype)
        if self.scale is not None:
            size = hidden.shape[-1]
            hidden = functional.rms_norm(hidden, (size,), None, self.config.layernorm_epsilon)
            hidden = hidden * (self.scale.to(dtype) * size**-0.5)
        # in float32, since close scores would tie in bfloat16
        return functional.linear(hidden, self.weight.to(dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keeps expert_bias in float32 in a half-precision model, which would round its small steps away."""
        before = self.expert_bias
        applied = super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype.itemsize < before.dtype.itemsize:
            self.expert_bias = before.to(after.device)
        return applied

"""`model.experts.*`: mixture-of-experts layers."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class ExpertsSection(Section):
    """Layers whose feed-forward part is a router with experts; megatron-core's fields are in parentheses."""

    num_experts: Annotated[int, bounds.EXPERTS] = Field(gt=0)
    """Experts in a layer, over all ranks (num_moe_experts)."""
    top_k: int = Field(gt=0)
    """Experts that each token goes to (moe_router_topk)."""
    ffn_hidden_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Width of one expert (moe_ffn_hidden_size)."""
    shared_ffn_hidden_size: Annotated[int, bounds.WIDTH] = Field(0, ge=0)
    """Width of all shared experts together, which every token passes (moe_shared_expert_intermediate_size); 0: no
    shared experts."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a learned product with the input
    (moe_shared_expert_gate)."""
    branch_norms: bool = False
    """Whether the shared and the chosen experts are two branches, each with a norm before and after it, as in Gemma 4.
    The router then reads the normalised residual stream, multiplied by a learned vector, and a learned factor
    multiplies each expert's weights."""
    first_dense_layers: int = Field(0, ge=0)
    """Dense layers before those with experts."""
    every: int = Field(1, gt=0)
    """Interval of the layers with experts after the dense ones: the first, the (every + 1)-th and so on."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores. sigmoid: the scores of the chosen experts are divided by their sum
    if top_k > 1."""
    pre_softmax: bool = False
    """Whether softmax runs over all experts before the choice, instead of over the chosen ones after it
    (moe_router_pre_softmax)."""
    num_groups: int | None = Field(None, gt=0)
    """Groups of experts for the group-limited choice (moe_router_num_groups); null: no groups."""
    group_top_k: int | None = Field(None, gt=0)
    """Groups that a token may choose from (moe_router_group_topk)."""
    group_score_top_k: int | None = Field(None, gt=0)
    """Number of a group's best experts whose summed scores rank the group; 2 in DeepSeek-V3. null: top_k / group_top_k,
    as in megatron-core."""
    scaling_factor: float = Field(1.0, gt=0)
    """Factor of the chosen scores (moe_router_topk_scaling_factor)."""
    router_bias: bool = False
    """Whether the router's logits have a learned bias."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Step size of loss-free balancing: after each training step, an expert's bias for the choice moves by this much
    towards an even load (moe_router_bias_update_rate); 0: biases do not move."""
    expert_bias: bool = False
    """Whether the router adds a bias to scores when it chooses experts; with bias_update_rate=0 it stays as loaded."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Collective that sends tokens to the ranks of their experts (moe_token_dispatcher_type)."""
    implementation: Literal["auto", "grouped", "sequential", "te"] = "auto"
    """Computation of a rank's experts: grouped in one product, or sequential; auto: grouped if the device supports it.
    te: by TransformerEngine, only with a certificate of `mtrain verify backend`."""
    capacity_factor: float | None = Field(None, gt=0)
    """Multiple of an even load, of a rank's positions in a microbatch, beyond which an expert drops the tokens that
    weigh it least; null: none. Which ones depends on the layout: needs loss.allow_layout_dependent."""

    @property
    def rows_per_token(self) -> float:
        """Rows of all experts together per token: with a capacity as many as experts may take, even if some are empty.
        Assumes an even load without one."""
        if self.capacity_factor is None:
            return self.top_k
        return min(self.capacity_factor * self.top_k, self.num_experts)

    @property
    def num_scored(self) -> int:
        """Number of a group's best experts whose summed scores rank the group; needs groups."""
        if self.group_score_top_k is not None:
            return self.group_score_top_k
        assert self.group_top_k is not None, "only called with groups"
        return self.top_k // self.group_top_k

    def has_experts(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has experts."""
        behind = layer - self.first_dense_layers
        return behind >= 0 and behind % self.every == 0

    def broken_rules(self) -> Iterator[str]:
        if self.top_k > self.num_experts:
            yield f"top_k={self.top_k} must not be above num_experts={self.num_experts}; lower it"
        if self.shared_gate and not self.shared_ffn_hidden_size:
            yield "shared_gate=true needs shared experts, but shared_ffn_hidden_size=0; set it, or turn the gate off"
        if self.branch_norms and self.shared_gate:
            yield (
                "shared_gate=true cannot be combined with branch_norms=true, whose norm after the shared experts "
                "cancels the gate's factor; remove one of them"
            )
        elif self.branch_norms and not self.shared_ffn_hidden_size:
            yield (
                "branch_norms=true needs shared experts, but shared_ffn_hidden_size=0; set it, or turn branch_norms off"
            )
        if self.top_k == 1 and self.score == "softmax" and not self.pre_softmax:
            yield (
                "top_k=1 with a softmax over the chosen experts always gives weight 1, and the router no gradient; "
                "set pre_softmax=true or score=sigmoid, or raise top_k"
            )
        yield from self._broken_rules_of_groups()
        if self.bias_update_rate and not self.expert_bias:
            yield f"bias_update_rate={self.bias_update_rate} updates a bias that does not exist; set expert_bias=true"

    def _broken_rules_of_groups(self) -> Iterator[str]:
        num_groups, group_top_k = self.num_groups, self.group_top_k
        if num_groups is None and group_top_k is not None:
            yield f"group_top_k={group_top_k} needs num_groups, which is not given; set both or remove both"
        elif num_groups is not None and group_top_k is None:
            yield f"num_groups={num_groups} needs group_top_k, which is not given; set both or remove both"
        elif num_groups is not None and group_top_k is not None:
            size = self.num_experts // num_groups
            if self.num_experts % num_groups or group_top_k > num_groups:
                yield (
                    f"num_groups={num_groups} must divide num_experts={self.num_experts} and group_top_k="
                    f"{group_top_k} must not be above it; change them"
                )
            elif group_top_k * size < self.top_k:
                yield (
                    f"group_top_k={group_top_k} groups of {size} experts must hold top_k={self.top_k} experts; change "
                    "them"
                )
            elif self.group_score_top_k is None and self.top_k % group_top_k:
                yield (
                    f"group_top_k={group_top_k} must divide top_k={self.top_k} where group_score_top_k is not given; "
                    "change them, or set group_score_top_k (DeepSeek-V3: 2)"
                )
            elif self.num_scored > size:
                yield (
                    f"group_score_top_k={self.group_score_top_k} experts cannot rank a group of {size}; lower it or "
                    "num_groups"
                )
        if self.group_score_top_k is not None and num_groups is None:
            yield (
                f"group_score_top_k={self.group_score_top_k} needs num_groups, which is not given; set both or remove "
                "it"
            )

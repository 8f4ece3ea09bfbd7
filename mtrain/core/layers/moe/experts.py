"""The experts of a rank, with weights stacked along the first axis.

They replace megatron-core's SequentialMLP and TEGroupedMLP, with the same checkpoint keys, and fix two bugs: experts
whose etp differs from the dense layers' tp are marked as experts even if ep = 1, so that their gradients are summed
over all their replicas, and their gradients count in the gradient norm on every rank.
"""

from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from mtrain.core.kernels import gradient_buffer
from mtrain.core.layers.moe.grouped_gemm import Implementation, Product, chosen_product, sequential, sequential_into
from mtrain.core.layers.own_parameters import expert_parameter
from mtrain.core.layers.swiglu import Activation, weighted_activated

_AXIS = {"linear_fc1": 0, "linear_fc2": 1}
"""Axis of an expert's weight that expert tensor parallelism divides."""


class Stack(nn.Module):
    """One projection of all experts of a rank."""

    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self._is_fused = config.gradient_accumulation_fusion
        # drawn later, by global name (init_weights.py)
        self.weight = expert_parameter(config, torch.empty(experts, rows, columns))
        if config.add_bias_linear:
            self.bias = expert_parameter(config, torch.zeros(experts, rows))
        else:
            self.register_parameter("bias", None)

    def forward(self, tokens: Tensor, counts: Tensor, product: Product) -> Tensor:
        """Multiplies tokens sorted by expert, [count, columns], to [count, rows], without the bias.

        A module of its own, since overlapped all-gathers of parameters are awaited in the call of their module.
        """
        chosen, buffer = self.product(tokens, product), gradient_buffer(self.weight)
        if self._is_fused and chosen is sequential and buffer is not None:
            return sequential_into(buffer, tokens, self.weight, counts)
        return chosen(tokens, self.weight, counts)

    def product(self, tokens: Tensor, preferred: Product) -> Product:
        """Returns the preferred product if it is usable, else the sequential one."""
        # grouped products need operands of the same precision
        return preferred if self.weight.dtype == tokens.dtype else sequential

    def biases(self, counts: Tensor, num_tokens: int) -> Tensor | None:
        """Returns the bias of each token, [num_tokens, rows]; None without biases."""
        if self.bias is None:
            return None
        # with output_size the host does not wait
        counts = counts.to(self.bias.device, non_blocking=True)
        return self.bias.repeat_interleave(counts, dim=0, output_size=num_tokens)


class Experts(MegatronModule):
    """The feed-forward networks of this rank's experts."""

    compiles_regions = False

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        implementation: Implementation | Literal["te"],
        name: str | None = None,
    ) -> None:
        """Makes the experts; `implementation` selects the product, `te` is for a subclass with its own product."""
        super().__init__(config)
        self.num_local_experts = num_local_experts
        self._ep, self._etp, self._edp = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        assert config.moe_ffn_hidden_size is not None
        # by the group of etp, which may divide experts differently from tp in dense layers
        ffn = config.moe_ffn_hidden_size // self._etp.size()
        fc1_rows = 2 * ffn if config.gated_linear_unit else ffn
        self._is_fused = config.gradient_accumulation_fusion
        self._row_sizes = (config.hidden_size, fc1_rows, ffn)
        self.implementation: Implementation = "auto" if implementation == "te" else implementation
        self._build(pg_collection)

    def _build(self, groups: ProcessGroupCollection) -> None:
        hidden_size, fc1_rows, ffn = self._row_sizes
        self.linear_fc1 = Stack(self.config, self.num_local_experts, fc1_rows, hidden_size)
        self.linear_fc2 = Stack(self.config, self.num_local_experts, hidden_size, ffn)
        # to refuse an unusable product now, not in the first step
        chosen_product(self.implementation, self._row_sizes, self.linear_fc1.weight)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Computes the weighted outputs of all experts; with etp > 1, this rank's summand of them.

        Args:
            tokens: Tokens sorted by expert, [count, hidden_size].
            tokens_per_expert: Number of tokens of each expert, [num_local_experts] int64.
            weights: Weight of each token, [count].

        Returns:
            Outputs in the shape and dtype of the tokens, and no bias.
        """
        product = chosen_product(self.implementation, self._row_sizes, self.linear_fc1.weight, self._is_fused)
        stacks = (self.linear_fc1, self.linear_fc2)
        # sequential products need counts on the host, which waits for them once
        on_host = any(stack.product(tokens, product) is sequential for stack in stacks)
        counts = tokens_per_expert.cpu() if on_host else tokens_per_expert
        weights = weights.unsqueeze(-1)
        hidden = self.linear_fc1(tokens, counts, product)
        biases = self.linear_fc1.biases(counts, len(tokens))
        # weighted before fc2, as in megatron-core's experts; fc2's bias is weighted separately
        hidden = hidden if biases is None else hidden + biases
        activate = weighted_activated.compiled_if(self.compiles_regions)
        hidden = activate(hidden, weights, Activation.of(self.config))
        output = self.linear_fc2(hidden, counts, product)
        # with etp > 1 every rank would add the bias to its summand, so config/rules.py refuses that
        biases = self.linear_fc2.biases(counts, len(tokens))
        if biases is not None:
            output = output + (biases * weights).to(tokens.dtype)
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: object = None
    ) -> dict[str, ShardedTensorFactory]:
        """Describes the tensors of all experts for checkpoints, under megatron-core's keys with an axis of experts."""
        return {
            f"{prefix}{linear}.{name}": ShardedTensorFactory(
                key=f"{prefix}experts.{linear}.{_kind(name)}",
                data=parameter,
                build_fn=self._builder(linear, name, sharded_offsets),
                merge_fn=_unused,
                # only ranks of expert data parallelism hold copies
                replica_id=(0, 0, self._edp.rank()),
            )
            for linear, stack in self.named_children()
            for name, parameter in stack.named_parameters()
        }

    def _builder(self, linear: str, name: str, outer: tuple[tuple[int, int, int], ...]) -> Any:
        """Returns a function that splits a parameter into shards of the global tensor [outer axes, num_experts, ...].
        `name` is `weight` or `bias` for a stack of all experts, or has the number of a single expert appended."""
        kind = _kind(name)
        first = self._ep.rank() * self.num_local_experts + int(name.removeprefix(kind) or 0)
        count, depth = self._ep.size() * self.num_local_experts, len(outer) + 1
        is_divided = kind == "weight" or linear == "linear_fc1"
        size, rank = (self._etp.size(), self._etp.rank()) if is_divided else (1, 0)
        # in the global tensor all gates come before all ups, so a rank's gates and ups are two slices
        num_parts = 2 if linear == "linear_fc1" and self.config.gated_linear_unit else 1

        def build(key: str, stack: Tensor, replica_id: ReplicaId, flattened_range: object) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *outer,
                    (depth - 1, first + number, count),
                    (depth + (_AXIS[linear] if kind == "weight" else 0), index * size + rank, num_parts * size),
                    replica_id=replica_id,
                    prepend_axis_num=depth,
                )
                # views, so that values loaded into a shard are in the stack
                for number, values in enumerate(stack.detach() if name == kind else stack.detach().unsqueeze(0))
                for index, part in enumerate(values.chunk(num_parts))
            ]

        return build


def _kind(name: str) -> str:
    """Returns `weight` or `bias`, the name of a parameter without the number of an expert."""
    return name.rstrip("0123456789")


def _unused(parts: object) -> Tensor:
    raise AssertionError("shards are views of the stack, so nothing is merged")

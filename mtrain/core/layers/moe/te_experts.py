"""A rank's experts on TransformerEngine's grouped products."""

from __future__ import annotations

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from torch import Tensor
from torch.nn import functional

from mtrain.core.layers.moe.experts import Experts
from mtrain.core.layers.own_parameters import marked

SHARED_EXPERTS = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
"""Projections of shared experts."""


class TransformerEngineExperts(Experts):
    """Experts with a tensor each, which TransformerEngine multiplies in one call; checkpoints are those of
    `Experts`."""

    def _build(self, groups: ProcessGroupCollection) -> None:
        hidden_size, fc1_rows, ffn = self._row_sizes
        options = {
            "config": self.config,
            "init_method": self.config.init_method,
            "bias": self.config.add_bias_linear,
            "is_expert": True,
            "pg_collection": groups,
        }
        # its sizes are those of all ranks of expert tensor parallelism together
        count, etp = self.num_local_experts, groups.expt_tp.size()
        self.linear_fc1 = TEColumnParallelGroupedLinear(
            count, hidden_size, fc1_rows * etp, **options, skip_bias_add=False
        )
        # fc2's bias is returned, since it has to be weighted
        self.linear_fc2 = TERowParallelGroupedLinear(count, ffn * etp, hidden_size, **options, skip_bias_add=True)
        for parameter in self.parameters():
            marked(parameter)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Computes the weighted outputs of all experts like `Experts.forward`; its kernels take sizes on the host."""
        counts, weights = tokens_per_expert.tolist(), weights.unsqueeze(-1)
        multiple = 1 if self.config.fp8 is None else get_fp8_align_size(self.config.fp8_recipe)
        padded_counts = [-(-count // multiple) * multiple for count in counts]
        hidden, _ = self.linear_fc1(_padded(tokens, counts, padded_counts), padded_counts)
        hidden = (self._activated(hidden) * _padded(weights, counts, padded_counts)).to(tokens.dtype)
        output, biases = self.linear_fc2(hidden, padded_counts)
        if padded_counts != counts:
            parts = torch.split(output, padded_counts)
            output = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        if biases is not None:
            by_token = torch.stack(biases).repeat_interleave(
                tokens_per_expert.to(output.device, non_blocking=True), dim=0, output_size=len(tokens)
            )
            output = output + (by_token * weights).to(tokens.dtype)
        return output, None


def _padded(rows: Tensor, counts: list[int], padded_counts: list[int]) -> Tensor:
    """Returns the rows of each expert, padded with zeros to its padded count."""
    if counts == padded_counts:
        return rows
    parts = zip(torch.split(rows, counts), padded_counts, strict=True)
    return torch.cat([functional.pad(part, (0, 0, 0, count - len(part))) for part, count in parts])

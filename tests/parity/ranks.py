"""What every rank does in a parity test."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.loss.terms import Objective


class Rows(NamedTuple):
    """A global batch: every row of a step."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    shares: Tensor


def train(groups, config: Config, steps) -> dict[str, Any]:
    from mtrain.mcore.gather import gradient_shards, parameter_shards
    from mtrain.mcore.model import build_model
    from mtrain.mcore.optimizer import Optimizer
    from mtrain.step import TrainingStep

    chunks = build_model(config, groups)
    optimizer = Optimizer(config, chunks, groups)
    step = TrainingStep(config, groups, chunks, optimizer, Objective.from_config(config.loss))
    records = []
    gradients = None
    for rows in steps:
        totals = step.forward_backward(microbatches(rows, groups, config) if groups.tp_rank == 0 else None)
        if gradients is None:
            gradients = gradient_shards(chunks, groups)
        update = step.update(totals, config.optimizer.lr)
        records.append({"loss": totals.loss, "grad_norm": update.grad_norm if update else None})
    optimizer.gather_parameters()
    return {"steps": records, "gradients": gradients, "parameters": parameter_shards(chunks, groups)}


def microbatches(rows, groups, config):
    mbs, dp = config.train.micro_batch_size, groups.layout.dp
    out = []
    for m in range(config.train.global_batch_size // (mbs * dp)):
        start = m * dp * mbs + groups.dp_rank * mbs
        s = slice(start, start + mbs)
        seq = rows.tokens.shape[1]
        out.append(
            Microbatch(rows.tokens[s], rows.labels[s], torch.arange(seq).expand(mbs, seq), {"main": rows.weights[s]}, {"main": rows.shares[s]}, None)
        )
    return out


def assemble_all(per_rank):
    from mtrain.mcore.gather import assemble

    return assemble(shard for rank in per_rank for shard in rank)

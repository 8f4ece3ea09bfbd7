"""Plain Megatron-Core on CPU ranks: its GPTModel, DDP, schedules and optimizer, combined as in its examples.

It uses nothing of `mtrain.core.ranks` besides the process groups and the CPU emulation, so faults are megatron-core's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.order import slots
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch

Arrays = dict[str, Any]


class PlainStep(NamedTuple):
    """Results of forward and backward of one global batch on one rank."""

    loss: float
    """Sum of the token losses / number of loss tokens over all data-parallel ranks, as a logger would compute it."""
    grad_norm: float
    """Gradient norm as megatron-core's optimizer computes it."""
    gradients: Arrays
    """Gradients by global name, this rank's shards."""


def plain_step(
    groups: Groups,
    model: ModelSection,
    parameters: Mapping[str, Any],
    batch: GlobalBatch,
    micro_batch_size: int,
    passes_mask: bool = True,
    **fields: Any,
) -> PlainStep:
    """Runs one step of plain Megatron-Core.

    Args:
        groups: Process groups of the ranks; without context parallelism, which the local spec refuses.
        model: Llama-shaped architecture whose vocabulary divides by tp.
        parameters: Global arrays by name.
        batch: Batch of the step.
        micro_batch_size: Number of rows in a microbatch.
        passes_mask: Whether the model gets the loss mask, for multi-token prediction.
        **fields: Further fields of TransformerConfig.
    """
    config = plain_config(groups, model, fields)
    chunks = [_chunk(config, groups, model, parameters, stage) for stage in range(groups.layout.vpp)]
    config.finalize_model_grads_func = finalize_model_grads
    reports = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, passes_mask),
        data_iterator=[_microbatches(batch, groups, micro_batch_size) for _ in chunks],
        model=chunks,
        num_microbatches=groups.layout.num_microbatches(len(batch), micro_batch_size),
        seq_length=len(batch[0].tokens),
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    totals = torch.stack([torch.zeros(2), *reports]).sum(0)
    dist.all_reduce(totals, group=groups.dp_cp)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0),
        chunks,
        use_gloo_process_groups=False,
        pg_collection=groups.collection,
    )
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    loss = float(totals[0] / totals[1]) if reports else 0.0
    return PlainStep(loss, norm, {k: v for chunk in chunks for k, v in _gradients(chunk)})


def plain_initial_weights(groups: Groups, model: ModelSection) -> Arrays:
    """Returns what megatron-core itself draws for a seed, by global name."""
    config = plain_config(groups, model, {})
    chunks = [_chunk(config, groups, model, None, stage) for stage in range(groups.layout.vpp)]
    return {name: parameter.detach().numpy().copy() for chunk in chunks for name, parameter in _named(chunk.module)}


def plain_config(groups: Groups, model: ModelSection, fields: Mapping[str, Any]) -> TransformerConfig:
    """Describes the model with megatron-core's fields, and further ones."""
    layout = groups.layout
    defaults: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**defaults, **fields})


def _chunk(
    config: TransformerConfig,
    groups: Groups,
    model: ModelSection,
    parameters: Mapping[str, Any] | None,
    vp_stage: int,
) -> DistributedDataParallel:
    stage = vp_stage * groups.layout.pp + groups.pp_rank
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    has_depths = config.mtp_num_layers is not None and stage == groups.layout.num_stages - 1
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=model.vocab_size,
        max_sequence_length=64,
        pre_process=stage == 0,
        post_process=stage == groups.layout.num_stages - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(model.rope.base),
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if has_depths else None,
        pg_collection=groups.collection,
        vp_stage=vp_stage if groups.layout.vpp > 1 else None,
    )
    for name, parameter in _named(chunk):
        if parameters is not None:
            own = _shard(name, torch.as_tensor(parameters[name]), groups.layout.tp, groups.tp_rank)
            parameter.data.copy_(own)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, pg_collection=groups.collection)


def _named(chunk: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields parameters by global name: layers are numbered through the whole model."""
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        # what 0.16.1 calls transformer_layer is mtp_model_layer in 0.19.2
        yield ".".join(parts).replace(".mtp_model_layer.", ".transformer_layer."), parameter


def _shard(name: str, whole: Tensor, tp: int, tp_rank: int) -> Tensor:
    if "norm" in name:
        return whole
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
    columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    return whole.chunk(tp, dim=1 if columns else 0)[tp_rank]


def _gradients(chunk: DistributedDataParallel) -> Iterator[tuple[str, Any]]:
    for name, parameter in _named(chunk.module):
        yield name, parameter.main_grad.numpy().copy()  # type: ignore[attr-defined]


def _microbatches(batch: GlobalBatch, groups: Groups, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for number in range(groups.layout.num_microbatches(len(batch), size)):
        rows = [batch[slot] for slot in slots(number, groups.dp_rank, groups.layout.dp, size)]
        fields: Sequence[Any] = [[getattr(row, name) for row in rows] for name in ("tokens", "labels", "mask")]
        tokens, labels, mask = (torch.from_numpy(np.stack(field)) for field in fields)
        yield tokens, labels, mask.float()


def _forward_step(
    passes_mask: bool, iterator: Iterator[tuple[Tensor, Tensor, Tensor]], chunk: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    tokens, labels, mask = next(iterator)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    output = chunk(tokens, positions, None, labels=labels, loss_mask=mask if passes_mask else None)

    def loss(token_losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = (token_losses * mask).sum()
        return total, mask.sum().int(), torch.stack([total.detach(), mask.sum()])  # stack copies: no alias

    return output, loss

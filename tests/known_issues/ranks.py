"""Faults of plain megatron-core and our replacements; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    checkpoint,
    param_is_not_tensor_parallel_duplicate,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.engine.finalize import finalize_gradients
from mtrain.core.engine.loss_reduction import GlobalTotals, PairAccumulator, StepSums
from mtrain.core.engine.rank_model import build_model
from mtrain.core.layers.attention.core_attention import CoreAttention
from mtrain.core.layers.transformer_config import transformer_config
from mtrain.core.loss.pair import LossPair
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from tests.core.state.gathering import gather_whole

SEQ, HIDDEN = 8, 16


def fields(groups: Groups, **changes: Any) -> dict[str, Any]:
    """Describes a small model with megatron-core's fields, under the layout of the groups."""
    layout = groups.layout
    small = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "normalization": "RMSNorm"}
    without = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    split = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }
    floats = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "use_cpu_initialization": True}
    return {**small, **without, **split, **floats, **changes}


def plain_gpt(groups: Groups, vocab_size: int, parallel_output: bool = True, **changes: Any) -> GPTModel:
    """Builds megatron-core's own model on its local layers."""
    return GPTModel(
        TransformerConfig(**fields(groups, **changes)),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocab_size,
        max_sequence_length=SEQ,
        pre_process=groups.pp_rank == 0,
        post_process=groups.pp_rank == groups.layout.pp - 1,
        parallel_output=parallel_output,
        position_embedding_type="rope",
        pg_collection=groups.collection,
    )


def vocab_parallel(local: Tensor, groups: Groups, vocab_size: int) -> VocabParallelLogits:
    """Wraps the logits of this rank as our losses take them."""
    group = groups.tp if groups.layout.tp > 1 else None
    return VocabParallelLogits(local, group, groups.tp_rank * local.shape[-1], vocab_size)


def gathered_logits(groups: Groups) -> list[float]:
    """Returns the mean loss of one model: gathered logits, split logits, and split logits with our loss."""
    rows = torch.arange(SEQ).remainder(5).unsqueeze(0)
    losses = []
    for parallel_output in (False, True):
        torch.manual_seed(1)
        model = plain_gpt(groups, vocab_size=8, parallel_output=parallel_output)
        losses.append(model(rows, rows, None, labels=rows).mean().item())
    logits = model(rows, rows, None)
    logits = logits.transpose(0, 1).contiguous()  # without labels the batch comes first
    return [*losses, vocab_parallel(logits, groups, 8).cross_entropy(rows).mean().item()]


def summed_gradient(groups: Groups, with_hook: bool) -> list[float]:
    """Returns the gradient of a replicated input that is concatenated and then used by all TP ranks, with other
    factors.

    Args:
        groups: Process groups of the ranks.
        with_hook: Whether the gradient becomes contiguous, as in `LinearAdapter`.
    """
    inputs = torch.ones(2, 3, requires_grad=True)
    copied = copy_to_tensor_model_parallel_region(inputs, group=groups.tp)
    if with_hook:
        copied.register_hook(torch.Tensor.contiguous)
    widened = torch.cat([copied, torch.ones(2, 1)], dim=1)
    (gradient,) = torch.autograd.grad((widened * (1.0 + groups.tp_rank)).sum(), inputs)
    return gradient.flatten().tolist()


def padded_vocabulary(groups: Groups, logits: Any, labels: Any, vocab_size: int) -> tuple[float, float, float]:
    """Returns the mean loss: theirs, ours, and the softmax over real tokens alone."""
    local, targets = torch.as_tensor(logits), torch.as_tensor(labels)
    exact = nn.functional.cross_entropy(local[..., :vocab_size].flatten(0, 1), targets.flatten())
    theirs = vocab_parallel_cross_entropy(local.clone(), targets).mean()
    ours = vocab_parallel(local, groups, vocab_size).cross_entropy(targets.t()).mean()
    return float(theirs), float(ours), float(exact)


def fused_cross_entropy(groups: Groups, logits: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Returns gradients of float32 logits: theirs, ours, and torch's own."""
    targets, gradients = torch.as_tensor(labels), []
    for number in range(3):
        local = torch.as_tensor(logits).clone().requires_grad_()
        if number == 0:
            loss = fused_vocab_parallel_cross_entropy(local * 1.0, targets, groups.tp).sum()
        elif number == 1:
            loss = vocab_parallel(local, groups, logits.shape[-1]).cross_entropy(targets.t()).sum()
        else:
            loss = nn.functional.cross_entropy(local.flatten(0, 1), targets.flatten(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, local)
        gradients.append(gradient.numpy())
    return gradients[0], gradients[1], gradients[2]


class Scale(nn.Module):
    """Smallest model that megatron-core's schedules run: one weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.ones(1))
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: object) -> None:
        """Implements the schedules' protocol."""

    def forward(self, values: Tensor) -> Tensor:
        return self.weight * values


def counted_tokens(groups: Groups, counts: Sequence[float], dtype: str) -> float | str:
    """Returns the total that their schedule makes of the token counts of microbatches, or the error."""
    config = TransformerConfig(**fields(groups, calculate_per_token_loss=True))
    found: list[float] = []
    config.finalize_model_grads_func = lambda model, total, **_: found.append(total.item())

    def forward_step(iterator: Any, model: Scale) -> tuple[Tensor, Callable[[Tensor], Any]]:
        count = torch.tensor(next(iterator), dtype=getattr(torch, dtype))
        return model(torch.ones(1)), lambda output: (output.sum(), count, {})

    try:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(counts),
            model=Scale(config),
            num_microbatches=len(counts),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
    except RuntimeError as error:
        return str(error)
    return found[0]


def pair_denominator(groups: Groups, counts: Sequence[float]) -> float:
    """Returns the total that our sums make of the same counts."""
    pairs = PairAccumulator([MAIN_TERM], groups.device)
    for count in counts:
        pairs.add({MAIN_TERM: LossPair(torch.zeros(()), torch.tensor(count, dtype=torch.float64))})
    terms = GlobalTotals(StepSums(pairs, {MAIN_TERM: 0.0}), groups).read({MAIN_TERM: 1.0}).terms
    return terms[MAIN_TERM].denominator


def gradients_without_tokens(groups: Groups, config: Config) -> tuple[float, float]:
    """Returns the largest gradient after a batch without loss tokens whose other terms left ones: theirs, ours."""
    largest = []
    for is_ours in (False, True):
        sharded = build_model(config, groups)
        gradients = [gradient for _, gradient in sharded.local_gradients()]
        for gradient in gradients:
            gradient.fill_(1.0)
        if is_ours:
            finalize_gradients(sharded, StepSums(PairAccumulator([MAIN_TERM], groups.device), {MAIN_TERM: 0.0}), groups)
        else:
            finalize_model_grads(list(sharded.chunks), torch.zeros((), dtype=torch.int32), groups.collection)
        largest.append(max(float(gradient.abs().max()) for gradient in gradients))
    return largest[0], largest[1]


def divided_by_finalisation(groups: Groups, config: Config, weights: float) -> tuple[float, float]:
    """Returns the result of the division of a gradient of 1 by the weights of a batch: theirs, ours."""
    sharded = build_model(config, groups)
    gradients = [gradient for _, gradient in sharded.local_gradients()]
    for gradient in gradients:
        gradient.fill_(1.0)
    finalize_model_grads(list(sharded.chunks), torch.tensor(weights), groups.collection)
    theirs = float(gradients[0].max())
    return theirs, divided_gradient(groups, config, 1.0, weights)


def shared_out_activation(groups: Groups) -> list[float]:
    """Returns the gradient of a sum of squares of dp_rank + 1 that is recomputed from what ranks have shared out, where
    the global tensor-parallel group is that of the replicas."""
    values = torch.full((4,), groups.dp_rank + 1.0, requires_grad=True)
    with mock.patch.object(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", groups.dp_cp):
        checkpoint(torch.square, True, values).sum().backward()
    gradient = values.grad
    assert gradient is not None
    return gradient.tolist()


def reduced_gradient(groups: Groups, per_token: bool, average_in_collective: bool) -> float:
    """Returns the gradient that their DDP reduces from rank + 1 on each rank."""
    config = TransformerConfig(**fields(groups, calculate_per_token_loss=per_token))
    options = DistributedDataParallelConfig(average_in_collective=average_in_collective)
    model = DistributedDataParallel(config, options, Scale(config), pg_collection=groups.collection)
    model.zero_grad_buffer()
    model(torch.tensor([groups.rank + 1.0])).sum().backward()
    model.finish_grad_sync()
    return float(model.module.weight.main_grad.sum())


def gradient_factors(groups: Groups, config: Config) -> set[float]:
    """Returns the factors by which our DDP multiplies gradients before it sums them."""
    chunks: Sequence[Any] = build_model(config, groups).chunks
    return {buffer.gradient_scaling_factor for chunk in chunks for buffer in chunk.buffers}


def drawn_on_a_gpu(groups: Groups) -> Any:
    """Returns this rank's rows of the embedding, drawn by the code that runs where there is a GPU."""
    model = plain_gpt(groups, vocab_size=8, use_cpu_initialization=False)
    return model.embedding.word_embeddings.weight.detach().numpy()


def drawn_here(groups: Groups, config: Config) -> Any:
    """Returns our whole initial model by global name, on rank 0."""
    whole = gather_whole(parameter_shards(build_model(config, groups).chunks, groups))
    return None if whole is None else {name: values.numpy() for name, values in whole.items()}


def sent_and_freed(groups: Groups, deallocates: bool, size: int) -> float:
    """Sends ones from rank 0, which goes on, to rank 1, which is slow; returns the smallest number that arrives."""
    values = torch.ones(size)
    if groups.rank == 0:
        request = dist.isend(values, 1)
        deallocate_output_tensor(values, deallocates)
        others = [torch.full((size,), -1.0) for _ in range(4)]
        dist.barrier()
        assert request is not None
        request.wait()
        return float(others[0].min())
    dist.barrier()
    dist.recv(values, 0)
    return float(values.min())


def refusals_of_dot_product_attention(groups: Groups) -> list[str]:
    """Returns the errors of their core attention for packed rows and for context parallelism."""
    said = []
    for cp, packed in ((1, PackedSeqParams()), (2, None)):
        try:
            config = TransformerConfig(**fields(groups, context_parallel_size=cp))
            attention = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups.collection)
            attention(*torch.ones(3, SEQ, 1, 2, HIDDEN // 2), None, packed_seq_params=packed)
        except AssertionError as error:
            said.append(str(error))
    return said


def attention_over_documents(groups: Groups) -> float:
    """Returns how far our attention on a row of two documents is from attention on each of them alone."""
    config = TransformerConfig(**fields(groups))
    attention = CoreAttention(config, 1, AttnMaskType.causal, "self", None, None, groups.collection)
    row, edge = torch.randn(3, SEQ, 1, 2, HIDDEN // 2), 3
    starts = torch.tensor([[0] * edge + [edge] * (SEQ - edge)], dtype=torch.int32)
    apart = torch.cat([attention(*part, None) for part in (row[:, :edge], row[:, edge:])])
    return float((attention(*row, starts) - apart).abs().max())


def sinks_are_marked(groups: Groups) -> tuple[bool, bool]:
    """Says whether the gradient norm counts the attention sinks of this tensor-parallel rank: theirs, ours."""
    config = TransformerConfig(**fields(groups, softmax_type="learnable"))
    theirs = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups.collection)
    ours = CoreAttention(config, 1, AttnMaskType.causal, "self", None, None, groups.collection)
    first, second = (
        bool(param_is_not_tensor_parallel_duplicate(attention.softmax_offset, groups.tp))
        for attention in (theirs, ours)
    )
    return first, second


def residual_types(groups: Groups) -> tuple[str, str]:
    """Returns the type that a first stage with a float32 residual sends, and the type that the next one expects."""
    half: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    model = plain_gpt(groups, vocab_size=8, fp32_residual_connection=True, **half)
    rows = torch.zeros(1, SEQ, dtype=torch.int64)
    return str(model.embedding(rows, rows).dtype), str(model.config.pipeline_dtype)


def recomputed_without_output(groups: Groups) -> str:
    """Returns the error with which their recomputation of a norm ends."""
    try:
        CheckpointWithoutOutput().checkpoint(lambda values: values * 2, torch.ones(4, requires_grad=True))
    except NameError as error:
        return str(error)
    return ""


def recomputed_modules(groups: Groups, config: Config) -> list[str] | None:
    """Lists the modules that `train.recompute` makes megatron-core recompute."""
    modules: list[str] | None = transformer_config(config, groups.layout, groups.device).recompute_modules
    return modules


def divided_gradient(groups: Groups, config: Config, gradient: float, denominator: float) -> float:
    """Returns the result of our one division of a gradient."""
    sharded = build_model(config, groups)
    gradients = [each for _, each in sharded.local_gradients()]
    for each in gradients:
        each.fill_(gradient)
    pairs = PairAccumulator([MAIN_TERM], groups.device)
    pairs.add({MAIN_TERM: LossPair(torch.zeros(()), torch.tensor(denominator, dtype=torch.float64))})
    finalize_gradients(sharded, StepSums(pairs, {MAIN_TERM: denominator}), groups)
    return float(gradients[0].max())

"""Runs microbatches through megatron-core's schedules: no pipelining, 1F1B, interleaved."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.train import TrainSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import PairAccumulator
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.build import run_chunk, unwrap
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.pair import LossPair

LossOfLogits = Callable[[Logits, Microbatch], tuple[Tensor, Mapping[str, LossPair]]]
"""Maps logits and a sliced microbatch to the scalar to differentiate and the pairs of all terms."""


def connect(sharded: ShardedModel, optimizer: Optimizer, train: TrainSection) -> None:
    """Tells megatron-core's schedules how to scale the loss and when to reduce gradients."""
    # all chunks share the TransformerConfig, from which the schedules read their callbacks
    translated = get_model_config(sharded.chunks[0])
    translated.grad_scale_func = optimizer.scale_loss
    # Not None, so that megatron-core completes delayed weight gradients. The reduction itself is ours, since it may
    # have to wait for other passes.
    translated.finalize_model_grads_func = lambda *model, **options: None
    if train.overlap_grad_reduce:
        # makes only the backward pass of the last microbatch reduce its buckets, not every one
        translated.no_sync_func = _one_or_list([partial(sharded.no_sync, chunk) for chunk in sharded.chunks])
        # lets pipelines start the reduction of a chunk right after its last backward pass
        translated.grad_sync_func = _one_or_list([partial(sharded.start_grad_sync, chunk) for chunk in sharded.chunks])


def _one_or_list(functions: list[Callable[..., Any]]) -> Callable[..., Any] | list[Callable[..., Any]]:
    # schedules.py expects a function, or with interleaving a list with one per chunk
    return functions[0] if len(functions) == 1 else functions


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Microbatch],
    loss: LossOfLogits,
    accumulator: PairAccumulator,
    config: Config,
) -> None:
    """Runs forward and backward for every microbatch; adds pairs to the accumulator, and gradients to the buffers of
    the chunks.

    The scalar is differentiated unchanged: megatron-core divides by nothing, since its configuration says per-token
    loss and its token counts stay 0. `finalize_gradients` sums gradients over ranks. `loss` is called only on the last
    stage.
    """

    def consume(logits: Logits, batch: Microbatch) -> Tensor:
        objective, pairs = loss(logits, batch)
        accumulator.add(pairs)
        return objective

    with torch.set_grad_enabled(True):  # under no_grad of a caller the step would silently have no gradients
        _run(chunks, batches, consume, config, forward_only=False)


@contextlib.contextmanager
def deferred_grad_sync(sharded: ShardedModel) -> Iterator[None]:
    """Keeps gradients on their ranks inside the block, since other passes will add to them."""
    translated = get_model_config(sharded.chunks[0])
    # both, since schedules leave their no_sync at the last microbatch, and grad_sync_func starts a reduction
    synced = translated.no_sync_func, translated.grad_sync_func
    translated.no_sync_func = translated.grad_sync_func = None
    try:
        with contextlib.ExitStack() as contexts:
            for chunk in sharded.chunks:
                contexts.enter_context(sharded.no_sync(chunk))
            yield
    finally:
        translated.no_sync_func, translated.grad_sync_func = synced


@torch.no_grad()
def run_forward(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Microbatch],
    take: Callable[[Logits, Microbatch], None],
    config: Config,
) -> None:
    """Runs forward for every microbatch; calls `take` with the logits of each, in order, on the last stage."""

    def consume(logits: Logits, batch: Microbatch) -> Tensor:
        take(logits, batch)
        return torch.zeros((), device=logits.main.hidden.device)  # the schedules need a loss, but do not use it

    _run(chunks, batches, consume, config, forward_only=True)


@contextlib.contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turns dropout off inside the block; blocks may be nested."""
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, before):
            chunk.train(was_training)


def _run(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Microbatch],
    consume: Callable[[Logits, Microbatch], Tensor],
    config: Config,
    forward_only: bool,
) -> None:
    def forward_step(iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor | Logits, Any]:
        # all stages have the same rows in the same order, so each takes the same microbatch
        batch = next(iterator)

        def loss_of_output(logits: Logits) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # megatron-core does not change a loss in this form of three parts; the token count is unused
            return consume(logits, batch), torch.zeros((), dtype=torch.int32, device=logits.main.hidden.device), {}

        return run_chunk(chunk, batch), loss_of_output  # megatron-core calls it only on the last stage

    num_passed = max((unwrap(chunks[0]).num_passed_features(batch) for batch in batches), default=0)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],  # each virtual stage iterates over all microbatches
        model=list(chunks),
        num_microbatches=len(batches),
        # of all that a stage sends to the next one
        seq_length=config.row_width * (1 + num_passed),
        micro_batch_size=config.train.micro_batch_size,
        forward_only=forward_only,
    )

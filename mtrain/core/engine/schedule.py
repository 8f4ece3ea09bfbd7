"""Runs microbatches through megatron-core's own schedules: no pipelining, 1F1B, interleaved."""

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
from mtrain.core.layers.build import run_chunk
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.pair import LossPair

LossOfLogits = Callable[[Logits, Microbatch], tuple[Tensor, Mapping[str, LossPair]]]
"""(logits, sliced microbatch) -> (scalar to differentiate, pairs of all terms)."""


def connect(sharded: ShardedModel, optimizer: Optimizer, train: TrainSection) -> None:
    """Sets in megatron-core's schedules how to scale the loss and when to reduce gradients and gather parameters."""
    # one object for all chunks: the schedules read their callbacks from the TransformerConfig
    translated = get_model_config(sharded.chunks[0])
    translated.grad_scale_func = optimizer.scale_loss
    # A function, so that megatron-core completes weight gradients that it has put off; the reduction is ours, because
    # it may have to wait for other passes.
    translated.finalize_model_grads_func = lambda *model, **options: None
    if train.overlap_grad_reduce:
        # without it every backward pass would reduce its bucket; with it only that of the last microbatch does
        translated.no_sync_func = _one_or_list([partial(sharded.no_sync, chunk) for chunk in sharded.chunks])
        # lets pipelines start the reduction of a chunk as soon as its last backward pass is done
        translated.grad_sync_func = _one_or_list([partial(sharded.start_grad_sync, chunk) for chunk in sharded.chunks])


def _one_or_list(functions: list[Callable[..., Any]]) -> Callable[..., Any] | list[Callable[..., Any]]:
    # schedules.py calls a function without interleaving, and with it indexes a list by chunk
    return functions[0] if len(functions) == 1 else functions


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Microbatch],
    loss: LossOfLogits,
    accumulator: PairAccumulator,
    config: Config,
) -> None:
    """Runs forward and backward for every microbatch; pairs end up in the accumulator, gradients in the chunks'
    buffers.

    The scalar is differentiated as it is: megatron-core divides by nothing, because its token counts stay at zero and
    its config says per-token loss. Gradients of different ranks are summed by `finalize_gradients`. `loss` is called on
    the last stage alone.
    """

    def consume(logits: Logits, batch: Microbatch) -> Tensor:
        objective, pairs = loss(logits, batch)
        accumulator.add(pairs)
        return objective

    with torch.set_grad_enabled(True):  # a caller's no_grad would silently make a step without gradients
        _run(chunks, batches, consume, config, forward_only=False)


@contextlib.contextmanager
def deferred_grad_sync(sharded: ShardedModel) -> Iterator[None]:
    """Keeps every gradient on its rank inside the block, whatever the schedule says: other passes will add to it."""
    translated = get_model_config(sharded.chunks[0])
    # both: the schedules leave their own no_sync at the last microbatch, and grad_sync_func starts a reduction
    synced = translated.no_sync_func, translated.grad_sync_func
    translated.no_sync_func = translated.grad_sync_func = None
    try:
        with contextlib.ExitStack() as held:
            for chunk in sharded.chunks:
                held.enter_context(sharded.no_sync(chunk))
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
    """Runs forward for every microbatch; `take` receives the logits of each on the last stage, in order."""

    def consume(logits: Logits, batch: Microbatch) -> Tensor:
        take(logits, batch)
        return torch.zeros((), device=logits.main.hidden.device)  # the schedules need a loss; nothing reads this one

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
        # the stages share rows and order, so every stage takes the same microbatch; positions and documents are in it
        batch = next(iterator)

        def loss_of_output(logits: Logits) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # megatron-core leaves the three-part form unchanged; its own token count is not used
            return consume(logits, batch), torch.zeros((), dtype=torch.int32, device=logits.main.hidden.device), {}

        return run_chunk(chunk, batch), loss_of_output  # megatron-core calls the second on the last stage alone

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],  # each virtual stage goes through all microbatches on its own
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=config.row_width,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=forward_only,
    )

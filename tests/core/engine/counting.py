"""Counts a training step's collectives and host reads; the rank side of test_collectives.py."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers.build import run_chunk
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.cpu_collectives import emulated_collective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import term_inputs
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, build, own_microbatches


class Counts(NamedTuple):
    """What one step of one rank did."""

    collectives: Counter[tuple[str, int]]
    """(name, elements) of each collective, swaps of two ranks included; transfers between stages are left out."""
    reads: Counter[str]
    """Reads of a tensor's value by the host, which on a GPU would wait for it; by the file that reads."""


class Counting(TorchDispatchMode):
    """Counts inside its `with` block and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts(Counter(), Counter())

    def __enter__(self) -> Counting:
        self._tolist = torch.Tensor.tolist  # reads memory without an operation that could be counted
        counts = self.counts

        def tolist(tensor: Tensor) -> Any:
            counts.reads[_asking_file()] += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = function.name().split("::")
        tensors = [each for each in tree_flatten(args)[0] if isinstance(each, Tensor)]
        is_between_stages = name.startswith("send") and tensors[0].ndim > 1
        kind, is_sent = emulated_collective(), namespace == "c10d" and not name.startswith("recv_")
        if is_sent and kind is not None:
            # half of what is gathered or scattered
            self.counts.collectives[(kind, 2 * tensors[0].numel())] += 1
        elif is_sent and not is_between_stages:
            self.counts.collectives[(name.split(".")[0], max(each.numel() for each in tensors))] += 1
        elif name.split(".")[0] == "_local_scalar_dense":
            self.counts.reads[_asking_file()] += 1
        return function(*args, **(kwargs or {}))


def _asking_file() -> str:
    """Returns the innermost file on the stack outside torch and this module, as a path from its package on."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__):
            package = max(number for number, part in enumerate(path.parts) if part in ("mtrain", "megatron", "tests"))
            return "/".join(path.parts[package:])
        frame = frame.f_back
    return "torch"


Way = Literal["ours", "megatrons", "bare"]
"""How a step is made: by us; by megatron-core, with its normalization, loss logging and optimizer step; or bare, with
gradients reduced and a step without any normalization."""
Steps = Mapping[Way, Counts]
"""Counts of the same step made in several ways."""


def count_steps(
    groups: Groups, configs: Sequence[Config], batch: GlobalBatch, ways: Sequence[Way] = ("ours",)
) -> list[Steps]:
    """Counts a step of each configuration, each way on a model of its own."""
    return [{way: _counted(groups, config, batch, way) for way in ways} for config in configs]


def _counted(groups: Groups, config: Config, batch: GlobalBatch, way: Way) -> Counts:
    """Counts the second step: the first could leave work to it, and does once what megatron-core keeps from then on."""
    built = build(groups, config)
    _step(built, groups, config, batch, way)
    with Counting() as counting:
        _step(built, groups, config, batch, way)
    return counting.counts


def _step(built: Built, groups: Groups, config: Config, batch: GlobalBatch, way: Way) -> None:
    if way == "ours":
        _our_step(built, groups, config, batch)
    else:
        _plain_step(built, groups, config, batch, normalises=way == "megatrons")


def _our_step(built: Built, groups: Groups, config: Config, batch: GlobalBatch) -> None:
    totals = built.training.forward_backward(own_microbatches(batch, groups, config))
    assert built.training.update(totals, config.optimizer.lr) is not None


def _plain_step(built: Built, groups: Groups, config: Config, batch: GlobalBatch, normalises: bool) -> None:
    """Makes a step as megatron-core's users write it: a sum of losses, an int32 count, a report to be logged."""
    count = groups.layout.num_microbatches(len(batch), config.train.micro_batch_size)
    terms = [MAIN_TERM, *config.loss.side_terms]
    rows = slice_for_rank(
        broadcast_batches(own_microbatches(batch, groups, config), count, terms, config, groups), groups
    )

    def finalize(model: Any, num_tokens: Tensor | None = None, **options: Any) -> None:
        finalize_model_grads(model, num_tokens if normalises else None, **options)

    def forward_step(iterator: Iterator[Microbatch], chunk: Any) -> Any:
        microbatch = next(iterator)

        def loss_of_output(logits: Logits) -> Any:
            inputs = term_inputs(logits, microbatch, config, groups)[MAIN_TERM]
            loss = (inputs.logits.cross_entropy(inputs.labels) * inputs.weights).sum()
            num_tokens = inputs.weights.sum()
            return loss, num_tokens.to(torch.int32), {"loss": torch.stack([loss.detach(), num_tokens])}

        return run_chunk(chunk, microbatch), loss_of_output

    get_model_config(built.model.chunks[0]).finalize_model_grads_func = finalize
    built.model.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in built.model.chunks],
        model=built.model.chunks,
        num_microbatches=count,
        seq_length=config.data.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=False,
    )
    built.model.optimizer.inner.step()
    if normalises and reports:
        total = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=groups.dp_cp)
        assert (total[0] / total[1]).item() > 0

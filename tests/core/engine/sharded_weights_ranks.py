"""Faults that implementations of ZeRO-3 have had; the rank side of test_sharded_weights.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.engine import sharded_weights
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.engine.sharded_model import DataParallel
from mtrain.core.engine.sharded_weights import ShardedWeights
from mtrain.core.layers import divided_weights
from mtrain.core.layers.build import build_frozen_model
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.output_layer import DeferredLogits
from mtrain.core.layers.transformer_config import DTYPES
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.forward import forward_totals
from mtrain.core.step.teacher import Teacher
from mtrain.training.resume import initialize
from tests.core.engine.counting import Counting
from tests.core.state.gathering import gather_whole
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Outcome, Run, arrays, build, own_microbatches, run_step

_set_factor = FSDPModule.set_gradient_divide_factor
_finish = ShardedWeights.finish_grad_sync
_optimizer = ShardedWeights.optimizer


def _of_the_root_alone(module: FSDPModule, factor: float) -> None:
    if isinstance(module, LanguageModel):
        _set_factor(module, factor)


def _in_half(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**options | {"reduce_dtype": torch.bfloat16})


def _outside_its_unit(deferred: DeferredLogits) -> Tensor:
    """Gathers the table after the forward pass of the unit that has it, as `full_tensor` invites to."""
    _MODELS[-1].reshard()
    table = deferred.layer.weight
    assert isinstance(table, DTensor)
    return table.full_tensor()


_MODELS: list[Any] = []
"""Units that have the output layers, of the models built so far."""


def _divided_and_noted(chunk: LanguageModel, *others: Any) -> Any:
    _MODELS.append(chunk)
    return _divide(chunk, *others)


_divide = divided_weights.divide_weights


def _replicas_count(sharded: ShardedWeights) -> Any:
    for each in sharded._learning:
        each.main.tensor_model_parallel = True  # which only parts of a parameter have
    return _optimizer(sharded)


def _summed_over_tp(sharded: ShardedWeights, groups: Groups) -> None:
    _finish(sharded, groups)
    for gradient in sharded.gradient_buffers():
        dist.all_reduce(gradient, group=groups.tp)


def _nothing(sharded: ShardedWeights) -> None:
    """Leaves gathered weights as they are."""


def _mean(sharded: DataParallel, groups: Groups) -> None:
    _finish_whole(sharded, groups)
    sharded.scale_gradients(1 / groups.dp_cp.size())


_finish_whole = DataParallel.finish_grad_sync


FAULTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "factor on the root alone": [(FSDPModule, "set_gradient_divide_factor", _of_the_root_alone)],
    "sums in half": [(divided_weights, "MixedPrecisionPolicy", _in_half)],
    "table outside its unit": [
        (sharded_weights, "divide_weights", _divided_and_noted),
        (DeferredLogits, "_table", _outside_its_unit),
    ],
    "stale weights": [(ShardedWeights, "gather_in_forward", _nothing)],
    "replicas in the norm": [(ShardedWeights, "optimizer", _replicas_count)],
    "sums over tp": [(ShardedWeights, "finish_grad_sync", _summed_over_tp)],
    "mean of adapters": [(DataParallel, "finish_grad_sync", _mean)],
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plants a fault while the block runs; None plants none."""
    with ExitStack() as stack:
        for target in FAULTS.get(fault or "", ()):
            stack.enter_context(patch.object(*target))
        yield


def train_with(groups: Groups, faults: Sequence[str | None], run: Run) -> list[Outcome]:
    """Trains the run once with each fault, with forward passes in which nothing learns before each update."""
    found = []
    for fault in faults:
        with planted(fault):
            found.append(_train(groups, *run))
    return found


def _train(groups: Groups, config: Any, parameters: Mapping[str, Any] | None, batches: Sequence[Any]) -> Outcome:
    built = build(groups, config, parameters)
    objective = built.training._objective
    found = []
    for number, batch in enumerate(batches):
        rows = own_microbatches(batch, groups, config)
        with patch.object(built.training, "update", _after_a_look(built, objective, rows)):
            found.append(run_step(built, groups, config, batch, number))
    built.model.sharded.gather_parameters()
    is_learned = [parameter.requires_grad or parameter.grad is None for parameter in parameters_of(built.model.chunks)]
    assert all(is_learned), "a frozen parameter has a gradient"
    return Outcome(found, arrays(gather_whole(parameter_shards(built.model.chunks, groups))))


def parameters_of(chunks: Sequence[Any]) -> Iterator[Any]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _after_a_look(built: Any, objective: Any, rows: Any) -> Callable[..., Any]:
    update = built.training.update

    def looked(*arguments: Any) -> Any:
        forward_totals(built.model, objective, [rows])
        return update(*arguments)

    return looked


def begins_rounded(groups: Groups, config: Config) -> bool:
    """Says whether the main weights of an initialised model are rounded to the precision that computes."""
    model = build_rank_model(config, groups, weights_follow=True)
    initialize(model)
    computes_in = DTYPES[config.train.precision]
    mains = [flat_slice.main for flat_slice in model.optimizer.state.flat_slices()]
    return all(torch.equal(main, main.to(computes_in).float()) for main in mains)


def remembered_passes(groups: Groups, config: Config, batch: GlobalBatch) -> list[tuple[int, ...]]:
    """Counts the units that torch remembers of the forward passes of a model and of a teacher, after each of some
    validations in which nothing learns."""
    built, chunks = build(groups, config), build_frozen_model(config, groups)
    teacher, rows = Teacher(config, chunks, groups), own_microbatches(batch, groups, config)
    assert rows is not None
    counts = []
    for _ in range(3):
        forward_totals(built.model, built.training._objective, [rows])
        for row in rows:
            teacher.logits_of(rows)(row)
        roots: list[Any] = [*built.model.chunks, *chunks]
        counts.append(tuple(len(root._get_fsdp_state()._comm_ctx.post_forward_order) for root in roots))
    return counts


class Traffic(NamedTuple):
    """Elements that a step moves over the ranks of DP x CP."""

    gathered: int
    summed: int
    num_passes: int
    of_table: int
    """Elements of the output layer, rows of padding included."""
    of_others: int


def traffic(groups: Groups, config: Config, batch: GlobalBatch) -> Traffic:
    """Counts the elements of all gathers and sums of a step's gradients."""
    built = build(groups, config)
    rows = own_microbatches(batch, groups, config)
    assert rows is not None
    with Counting() as counting:
        built.training.forward_backward(rows)
    moved = counting.counts.collectives.items()
    sizes = {True: 0, False: 0}
    sharded: Any = built.model.sharded
    for each in sharded._learning:
        size = groups.dp_cp.size()
        rows_of_rank = -(-each.stand_in.shape[0] // size)
        sizes[each.name.startswith("output_layer")] += rows_of_rank * size * each.stand_in[0].numel()
    return Traffic(
        sum(count * elements for (name, elements), count in moved if "allgather" in name),
        sum(count * elements for (name, elements), count in moved if "reduce_scatter" in name),
        len(rows),
        sizes[True],
        sizes[False],
    )


def sums_of_torch(groups: Groups, factor_on: str) -> tuple[Tensor, Tensor]:
    """Returns the gradient of a linear layer inside another unit, and the sum of what the ranks add to it.

    Args:
        factor_on: Units whose divide factor is 1: `all`, or `root`.
    """
    rank = groups.dp_cp.rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 3, bias=False))
    whole = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    mesh = DeviceMesh.from_group(groups.dp_cp, "cpu")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules() if factor_on == "all" else [model]:
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    inputs = torch.arange(12.0).view(2, 6) + rank
    for _ in range(2):  # microbatches
        model(inputs).sum().backward()
        (inputs @ whole[0].t() @ whole[1].t()).sum().backward()
    expected = whole[0].grad
    assert expected is not None
    dist.all_reduce(expected, group=groups.dp_cp)
    gradient: Any = model[0].weight.grad
    return gradient.full_tensor(), expected

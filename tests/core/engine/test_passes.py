"""Passes over memory that a training step makes, counted by operation, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch, three_steps
from tests.parity.cases import SINGLE
from tests.parity.ranks import build, own_microbatches
from tests.pool import Pool


class Operations(TorchDispatchMode):
    """Counts torch's operations by name inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[function.name().removeprefix("aten::").split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def operations(groups: Groups, config: Config, batch: GlobalBatch) -> dict[str, Counter[str]]:
    """Counts the operations of one step on one rank, by part of the step."""
    built, counted = build(groups, config), {}
    with Operations() as counted["gradient"]:
        totals = built.training.forward_backward(own_microbatches(batch, groups, config))
    with Operations() as counted["update"]:
        built.training.update(totals, config.optimizer.lr)
    return {part: each.counts for part, each in counted.items()}


def test_adamw_updates_a_group_in_one_pass(pool: Pool) -> None:
    config = SINGLE.config(model__num_layers=1)
    (found,) = pool.run(operations, Layout(), config, three_steps()[0])
    assert found["update"]["_fused_adamw_"] == 2  # with and without weight decay
    assert not {"_foreach_lerp_", "_foreach_addcdiv_", "addcdiv_"} & found["update"].keys()


def test_a_rank_without_replicas_copies_neither_gradients_nor_weights_to_itself(pool: Pool) -> None:
    config = SINGLE.config(model__num_layers=1)
    assert config.train.distributed_optimizer
    (found,) = pool.run(operations, Layout(), config, three_steps()[0])
    exchanges = {
        name for counts in found.values() for name in counts if "reduce_scatter" in name or "allgather" in name
    }
    assert exchanges == set()
    assert found["update"]["copy_"] == 0

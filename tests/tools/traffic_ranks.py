"""Measures what ranks send in a step; the rank side of test_traffic.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import build, own_microbatches
from tools.bench.slots import Slot, recorded
from tools.bench.traffic import Calls, measured

Sent = dict[tuple[str, str], Calls]


class Step(NamedTuple):
    """Traffic and slots of one rank."""

    sent: Sent
    slots: list[Slot]


def sent(groups: Groups, configs: Sequence[Config], batch: GlobalBatch) -> list[Step]:
    """Measures the second step of each configuration; the first one allocates."""
    return [_second_step(groups, config, batch) for config in configs]


def _second_step(groups: Groups, config: Config, batch: GlobalBatch) -> Step:
    built = build(groups, config)

    def step() -> None:
        totals = built.training.forward_backward(own_microbatches(batch, groups, config))
        built.training.update(totals, config.optimizer.lr)

    step()
    with recorded(built.model.chunks, groups.layout, groups.pp_rank) as timeline:
        found = measured(groups, step)
    return Step(found, timeline.slots)

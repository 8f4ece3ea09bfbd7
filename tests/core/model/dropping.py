"""Dropping by capacity in the reference of `mtrain verify`, whose choice of experts is cut from outside.

The capacity of an expert is ceil(tokens x top_k / experts x factor) tokens, where the tokens are the positions that a
rank has of a microbatch. Beyond it, the tokens that weigh an expert least leave it.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.config.schema.experts import ExpertsSection
from mtrain.core.batch.sample import Sample
from mtrain.data.loader import Given, RowsOfRank
from mtrain.verify.reference.model import experts

Part = list[tuple[int, int]]
"""The tokens of a microbatch on a rank, as samples and positions."""


def parts_of_ranks(batch: Sequence[Sample], config: Config, layout: Layout) -> tuple[list[Part], int]:
    """Returns the parts of all ranks and microbatches that have any token, and the positions of a part."""
    plan = RowsOfRank(config, 0, layout.dp).plan(Given(batch), len(batch))
    width, chunk = config.row_width, config.row_width // (2 * layout.cp)
    shared = layout.tp if layout.sp else 1
    found = defaultdict[tuple[int, int, int], Part](list)
    for slot, (row, begin) in Given(batch).positions(plan, layout.dp).items():
        for position in range(batch[slot].width):
            number, rest = divmod(begin + position, chunk)
            owner = min(number, 2 * layout.cp - 1 - number)
            own = rest + (chunk if number >= layout.cp else 0)
            key = (row // config.train.micro_batch_size, owner, own * layout.cp * shared // width)
            found[key].append((slot, position))
    return list(found.values()), config.train.micro_batch_size * width // (layout.cp * shared)


@contextlib.contextmanager
def dropping(batch: Sequence[Sample], config: Config, layout: Layout) -> Iterator[list[int]]:
    """Makes experts of the reference drop tokens as in a run on a layout; yields the numbers of dropped choices."""
    parts, size = parts_of_ranks(batch, config, layout)
    whole_choice, dropped = experts.routed, list[int]()

    def routed(
        logits: Tensor, expert_bias: Tensor | None, section: ExpertsSection, named: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = whole_choice(logits, expert_bias, section, named)
        assert section.capacity_factor is not None
        capacity = math.ceil(size * section.top_k / section.num_experts * section.capacity_factor)
        stays = chosen.clone()
        for part in parts:
            slots, positions = map(torch.tensor, zip(*part, strict=True))
            for expert in range(section.num_experts):
                ranking, order = weights[slots, positions, expert].detach().sort(descending=True)
                last = order[capacity:]
                assert len(last) == 0 or ranking[capacity - 1] != ranking[capacity] or ranking[capacity] == 0, "a tie"
                stays[slots[last], positions[last], expert] = False
        dropped.append(int((chosen & ~stays).sum()))
        return stays, weights * stays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "routed", routed)
        yield dropped

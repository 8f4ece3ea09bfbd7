"""A step, its links and its core, measured on ranks; the rank side of test_scaling.py."""

from __future__ import annotations

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tools.bench.parts import machine
from tools.bench.scaling import OfRank, measure


def measured(groups: Groups, config: Config) -> tuple[OfRank, machine.Links, machine.Core]:
    """Measures one round."""
    return measure(groups, config, 1), machine.links(groups, 1), machine.core(groups, 32, 16, 32, 8, 1)

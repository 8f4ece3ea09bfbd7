"""Work of every rank in the tests of packed rows: several runs in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Outcome, train


def train_each(
    groups: Groups, configs: Sequence[Config], parameters: Mapping[str, Any], batches: Sequence[GlobalBatch]
) -> list[Outcome]:
    """Runs each configuration, all from the same parameters."""
    return [train(groups, config, parameters, batches) for config in configs]

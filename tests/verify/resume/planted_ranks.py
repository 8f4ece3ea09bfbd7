"""The rank side of the tests of resume faults."""

from types import SimpleNamespace
from typing import Any

import torch

from mtrain.config import Config
from mtrain.core.engine.rank_model import build_model
from mtrain.core.ranks.groups import Groups
from tests.verify.resume.faults import PLANTS


def is_drawn_again(groups: Groups, config: Config) -> bool:
    """Says whether the first shard has its initial weights again; unfilled memory is nan in this process."""
    torch.use_deterministic_algorithms(True)
    chunks = build_model(config, groups).chunks
    run: Any = SimpleNamespace(model=SimpleNamespace(config=config, groups=groups, chunks=chunks))
    first = next(chunks[0].parameters()).data
    drawn = first.clone()
    first.fill_(7.0)
    PLANTS["stale-shard"].goes_on(run, {})
    return torch.equal(first, drawn)

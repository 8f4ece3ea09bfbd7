"""Which modules a step calls; the rank side of test_calls.py."""

from __future__ import annotations

from torch import nn

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import build, own_microbatches


def uncalled(groups: Groups, config: Config, batch: GlobalBatch) -> tuple[list[str], int]:
    """Returns the modules with parameters of their own that a step did not call, and the number of such modules."""
    built = build(groups, config)
    owners: dict[str, nn.Module] = {
        name: module
        for chunk in built.model.chunks
        for name, module in chunk.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    called: set[str] = set()
    for name, module in owners.items():
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    built.training.forward_backward(own_microbatches(batch, groups, config))
    return sorted(owners.keys() - called), len(owners)

"""What ranks count of a batch."""

from collections.abc import Sequence

from mtrain.config import Config
from mtrain.core.engine.loss_reduction import TokenCounts
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import build, own_microbatches


def counted(groups: Groups, configs: Sequence[Config], batch: GlobalBatch) -> list[tuple[int, TokenCounts]]:
    """Returns text, padding and loss tokens as the step under each configuration reports them to every rank."""
    found = []
    for config in configs:
        totals = build(groups, config).training.forward_backward(own_microbatches(batch, groups, config))
        found.append((totals.num_text_tokens, totals.tokens))
    return found

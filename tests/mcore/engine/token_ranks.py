"""What ranks count of a batch."""

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.loss_reduction import TokenCounts
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import build, own_microbatches


def counted(groups: Groups, config: Config, batch: GlobalBatch) -> tuple[int, TokenCounts]:
    """Text, padding and loss tokens as the step tells every rank."""
    totals = build(groups, config).training.forward_backward(own_microbatches(batch, groups, config))
    return totals.num_text_tokens, totals.tokens

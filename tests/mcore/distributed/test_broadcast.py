"""Rows that one rank of a tensor-parallel group reads reach the others as they are."""

from mtrain.plan.layout import Layout
from tests.config.samples import INDEXED, config
from tests.mcore.distributed import broadcast_ranks
from tests.pool import Pool


def test_starts_of_documents_come_to_the_host_once_a_step(pool: Pool) -> None:
    """A GPU is waited for at each copy: none where the rows were read, one elsewhere, however many microbatches."""
    run = config(layout={"tp": 2}, data={**INDEXED, "isolate_documents": True})
    assert pool.run(broadcast_ranks.received, Layout(tp=2), run, 3) == [(True, 0), (True, 1)]

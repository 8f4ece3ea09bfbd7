"""Rows that one rank of a tensor-parallel group reads reach the others unchanged."""

from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import MachineError, RankLostError
from tests.config.samples import INDEXED, config
from tests.core.distributed import broadcast_ranks
from tests.fault_table import Notice
from tests.pool import Pool

PACKED: dict[str, Any] = {"kind": "mock", "seq_length": 64, "isolate_documents": True, "packing": {}}


def test_hosts_need_nothing_of_their_devices(pool: Pool) -> None:
    """Nothing waits for a GPU: what the host needs to decide has come another way before any row arrives."""
    layout = {"tp": 2, "cp": 2}
    data = [PACKED, {**INDEXED, "isolate_documents": True}, INDEXED]
    runs = [config(layout=layout, data=each) for each in data]
    ranks = pool.run(broadcast_ranks.received, Layout(tp=2, cp=2), runs, 3)
    for rank, found in enumerate(ranks):
        for each, other in zip(found, ranks[rank // 2 * 2], strict=True):
            assert each.is_same
            assert each.members == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert each.of_hosts == each.expected == other.expected
    packed, documents, alone = (each.expected for each in ranks[0])
    assert [number for number, _, _ in packed] == [22] * 3, "those of the microbatch that has most"
    assert [each[1:] for each in packed] == [each[1:] for each in documents]
    assert [starts for _, starts, _ in alone] == [None] * 3
    # the tokens that count differ between parts of the row
    assert packed[0][2] != ranks[2][0].expected[0][2]


def test_a_host_that_waits_for_a_lost_one_says_so(pool: Pool) -> None:
    with pytest.raises(RankLostError, match="rank 1 lost the connection to another rank") as error:
        pool.run(broadcast_ranks.from_a_rank_that_leaves, Layout(tp=2))
    assert error.value.exit_code == 5


@pytest.mark.fault(
    "ranks",
    "GLOO_SOCKET_IFNAME names a network interface that is not there, under tensor parallelism on GPUs",
    happens="one message with the ranks that cannot be reached and what to set",
    exit_code=7,
)
def test_hosts_that_cannot_be_reached_say_what_to_set(pool: Pool, notice: Notice) -> None:
    with notice, pytest.raises(MachineError, match=r"ranks \[0, 1\].*none0.*set GLOO_SOCKET_IFNAME") as error:
        pool.run(broadcast_ranks.through_a_missing_interface, Layout(tp=2))
    assert error.value.exit_code == notice.exit_code

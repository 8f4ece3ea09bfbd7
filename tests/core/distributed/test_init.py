"""Devices, and how ranks agree."""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mtrain.arch.layout import Layout
from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import MachineError, RankLostError
from mtrain.core.ranks.init import choose_device, gpu_index, init_distributed
from mtrain.core.ranks.party import Purpose
from tests.core.distributed import init_ranks
from tests.fault_table import Notice
from tests.messages import refuses
from tests.pool import Pool

ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0)
PURPOSE = Purpose("test", Path(), {})


def test_every_rank_gets_what_rank_zero_found(pool: Pool) -> None:
    assert pool.run(init_ranks.result_of_rank_zero, Layout(dp=3)) == [7, 7, 7]


def test_ranks_wait_for_the_slowest_in_every_round(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(init_ranks.rounds_with_a_slow_rank, Layout(dp=3), str(tmp_path)) == [[3, 3]] * 3


def test_every_rank_raises_what_rank_zero_raised(pool: Pool) -> None:
    assert pool.run(init_ranks.error_of_rank_zero, Layout(dp=3)) == [("seen on rank 0", True)] * 3


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == torch.device("cpu")
    assert choose_device("cpu", 0) == torch.device("cpu")
    with refuses(MachineError, "train.device=cuda"):
        choose_device("cuda", 0)


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    assert [gpu_index(rank, 8, {}) for rank in range(8)] == list(range(8))
    assert gpu_index(3, 1, {"SLURM_GPUS_PER_TASK": "1"}) == 0, "it sees no other"
    with refuses(MachineError, "rank 1"):
        gpu_index(1, 1, {})


LOST = {
    "gloo": RuntimeError("[/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
    "gloo, timeout": RuntimeError("[/gloo/buffer.cc:81] Timed out waiting 3000ms for recv operation to complete"),
    "nccl": dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL 2.27\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    ),
    "nccl, aborted": dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    "nccl, timeout": dist.DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=3000)"
    ),
    "store": dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"),
    "store, gone": dist.DistNetworkError("failed to recv, got 0 bytes"),
}
"""Errors of torch: those of gloo and the store as seen, NCCL's as in ProcessGroupNCCL.cpp and nccl's init.cc."""


@pytest.mark.parametrize("error", LOST.values(), ids=LOST.keys())
def test_a_lost_rank_is_recognised_whatever_the_backend(error: RuntimeError) -> None:
    with (
        refuses(RankLostError, "rank 0") as caught,
        init_distributed(ALONE, "auto", 10, PURPOSE),
    ):
        raise error
    assert caught.value.exit_code == 5
    assert "third_party" not in str(caught.value)


def test_other_faults_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="a shape does not fit"), init_distributed(ALONE, "auto", 10, PURPOSE):
        raise RuntimeError("a shape does not fit")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**52), lambda: np.empty(2**52), lambda: bytearray(2**62)])
@pytest.mark.fault(
    "input",
    "a model, a batch or a sequence for which the machine has no memory",
    happens="one message says what to lower",
    exit_code=7,
)
def test_a_lack_of_memory_says_what_to_lower(allocate: Callable[[], object], notice: Notice) -> None:
    words = r"not enough memory .* lower train\.micro_batch_size"
    with notice, pytest.raises(MachineError, match=words) as error, init_distributed(ALONE, "auto", 10, PURPOSE):
        allocate()
    assert error.value.exit_code == notice.exit_code
    assert "alloc_cpu.cpp" not in str(error.value)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """Yields a port of this machine on which another program listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


@pytest.mark.parametrize(
    ("rank", "address"),
    [(1, "127.0.0.1"), (0, "127.0.0.1"), (1, "no-such-host.invalid")],
    ids=["alone", "port", "name"],
)
@pytest.mark.fault(
    "ranks",
    "no rank 0 at MASTER_ADDR, a port that is in use, a name that cannot be resolved",
    happens="one message with rank, address and port, after train.process_group_timeout_s at most (here 1 s)",
    exit_code=7,
)
@pytest.mark.waits
def test_a_world_that_cannot_meet_says_where(rank: int, address: str, notice: Notice) -> None:
    with taken_port() as taken:
        port = 1 if rank == 1 else taken
        place = re.escape(f"{address}:{port}")
        known: dict[str, Any] = {"local_rank": 0, "local_world_size": 1, "master_addr": address, "master_port": port}
        lonely = RankEnvironment(rank=rank, world_size=2, **known)
        with (
            notice,
            pytest.raises(MachineError, match=rf"rank {rank} of 2 cannot meet the others at {place}") as error,
            init_distributed(lonely, "auto", 1, PURPOSE),
        ):
            raise AssertionError("not reached")
    assert error.value.exit_code == notice.exit_code

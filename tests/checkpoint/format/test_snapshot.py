"""Copies of a state on a GPU lie in pinned memory of their own size."""

import gc
import threading
from typing import Any

import pytest
import torch

from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format import writer as snapshots
from mtrain.checkpoint.format.writer import Snapshot
from mtrain.core.state.host_memory import pinned_memory
from mtrain.core.state.shard import Shard

SIZE_BYTES = 70_000


class Driver:
    """Stand-in for the CUDA runtime that records its calls."""

    def __init__(self, fault: int) -> None:
        self.fault = fault
        self.pinned: dict[int, int] = {}
        """Address -> number of pinned bytes."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.fault:
            self.pinned[address] = size_bytes
        return self.fault

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


class Stream:
    """The stream of training, with the number of times it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Driver:
    """Replaces the driver of a GPU."""
    found = Driver(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_memory_is_pinned_to_the_byte_and_given_back_once(driver: Driver) -> None:
    memory = pinned_memory(SIZE_BYTES, "snapshots")
    assert memory.shape == (SIZE_BYTES,)
    assert driver.pinned == {memory.data_ptr(): SIZE_BYTES}
    del memory
    gc.collect()
    assert driver.pinned == {}
    assert pinned_memory(0, "snapshots").numel() == 0
    assert driver.pinned == {}


@pytest.mark.parametrize("driver", [2], indirect=True)
def test_memory_that_cannot_be_pinned_is_used_all_the_same(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    memory = pinned_memory(SIZE_BYTES, "snapshots")
    assert memory.fill_(7).sum() == 7 * SIZE_BYTES
    assert "warning: 0.0 GiB for snapshots could not be pinned (CUDA error 2)" in capsys.readouterr().err


def test_a_state_on_a_gpu_is_copied_into_pinned_memory_that_is_used_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    state: Any = torch.arange(1000.0).as_subclass(OnGpu)
    shards = [
        Shard("whole", (1000,), TensorSlice((0,), (1000,)), state),
        Shard("part", (1000,), TensorSlice((0,), (17,)), state[:17]),
    ]
    snapshot = Snapshot()
    for waits in (1, 2):
        copies = snapshot.take(shards)
        assert [copy.data.tolist() for copy in copies] == [each.data.tolist() for each in shards]
        assert list(driver.pinned.values()) == [snapshot.size_bytes]
        assert snapshot.size_bytes < 4 * 1017 + 2 * 64
        assert stream.waits == waits, "training may change the state as soon as the call returns"
        state.add_(1)


def test_memory_that_was_expected_is_taken_during_training_and_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, taken_in, taking = threading.Event(), list[str](), snapshots._memory

    def slow(size_bytes: int, on_gpu: bool) -> torch.Tensor:
        taken_in.append(threading.current_thread().name)
        assert may_end.wait(60)
        return taking(size_bytes, on_gpu)

    monkeypatch.setattr(snapshots, "_memory", slow)
    shards = [Shard("whole", (1000,), TensorSlice((0,), (1000,)), torch.arange(1000.0))]
    snapshot = Snapshot()
    for _ in range(2):
        snapshot.expect(shards)  # returns although no memory is left
    may_end.set()
    for _ in range(2):
        (copy,) = snapshot.take(shards)
        assert copy.data.equal(shards[0].data)
        snapshot.expect(shards)
    assert taken_in == ["snapshot-memory"]
    assert snapshot.size_bytes == 4032


def test_memory_that_is_not_there_is_reported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(size_bytes: int, on_gpu: bool) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(snapshots, "_memory", refused)
    shards = [Shard("whole", (1000,), TensorSlice((0,), (1000,)), torch.arange(1000.0))]
    snapshot = Snapshot()
    snapshot.expect(shards)
    with pytest.raises(RuntimeError, match="allocate memory"):
        snapshot.take(shards)

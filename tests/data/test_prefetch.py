"""Reading ahead in a thread."""

import threading

import pytest

from mtrain.base.errors import DataError
from mtrain.data.loader import Prefetch
from tests.messages import refuses


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_from_the_first_asked_for(depth: int) -> None:
    with Prefetch(lambda number: number * 10, 4, depth) as items:
        assert [next(items) for _ in range(20)] == [number * 10 for number in range(4, 24)]


def test_no_more_is_read_ahead_than_asked_for() -> None:
    read: list[int] = []
    third = threading.Event()

    def note(number: int) -> int:
        read.append(number)
        if number == 3:
            third.set()
        return number

    with Prefetch(note, 0, depth=3) as items:
        next(items)
        assert third.wait(10)  # 1, 2 and 3 are read ahead of the one that was taken
        assert not threading.Event().wait(0.05)
        assert read == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_fault_comes_up_where_its_item_is_asked_for(depth: int) -> None:
    def read(number: int) -> int:
        if number == 2:
            raise DataError("line 7 is bad")
        return number

    with Prefetch(read, 0, depth) as items:
        assert [next(items), next(items)] == [0, 1]
        for _ in range(2):
            with refuses(DataError, "line 7"):
                next(items)


def test_the_thread_ends_with_the_block_even_when_nothing_was_taken() -> None:
    with Prefetch(lambda number: number, 0, depth=2) as items:
        assert _threads() == ["prefetch"]
    assert _threads() == []
    items.close()
    with pytest.raises(StopIteration):
        next(items)

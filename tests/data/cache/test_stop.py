"""A stop signal while data are tokenised: the build ends at once, and leaves nothing that is ever read."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.base.errors import StopRequestedError
from mtrain.base.files import remove
from mtrain.base.signals import StopSignal, leave_if_stopped
from mtrain.core.batch.sample import SampleEncoder
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.opening import CacheOptions, content_of, token_cache
from mtrain.data.formats.record_files import record_files
from tests.data.cache.byte_encoder import COUNT_FILE, ByteEncoder, EndlessEncoder
from tests.data.cache.test_cache import write
from tests.messages import refuses


def signalled(is_time: Callable[[], bool]) -> threading.Thread:
    """Sends this process SIGUSR1 as soon as it is time."""
    pause = threading.Event()

    def wait() -> None:
        while not is_time():
            pause.wait(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Returns a function that says whether a record has been encoded."""
    file = tmp_path / "encoded"
    file.touch()
    monkeypatch.setenv(COUNT_FILE, str(file))
    return lambda: file.stat().st_size > 0


@pytest.mark.parametrize(("encoder", "num_workers", "count"), [(ByteEncoder, 1, 30_000), (EndlessEncoder, 2, 3_000)])
def test_a_build_is_left_and_the_next_one_is_whole(
    tmp_path: Path, begun: Callable[[], bool], encoder: type[SampleEncoder], num_workers: int, count: int
) -> None:
    path = write(tmp_path / "a.jsonl", [f"text {number}" for number in range(count)])
    job, cache = EncodingJob(tuple(record_files(str(path))), encoder), tmp_path / "cache"
    with StopSignal():
        thread = signalled(begun)
        with refuses(StopRequestedError):
            token_cache(job, "bytes", CacheOptions(cache, num_workers=num_workers))
        thread.join()
    assert [found for found in (cache / "entries").iterdir() if not found.name.startswith(".lock")] == []
    job = EncodingJob(job.files, ByteEncoder)
    assert len(token_cache(job, "bytes", CacheOptions(cache, num_workers=1))) == count


def test_who_waits_for_another_build_or_reads_a_file_leaves_too(tmp_path: Path, begun: Callable[[], bool]) -> None:
    path = write(tmp_path / "a.jsonl")
    job, cache = EncodingJob(tuple(record_files(str(path))), EndlessEncoder), tmp_path / "cache"
    end, builder = threading.Event(), os.fork()
    if builder == 0:  # holds the lock and never ends by itself
        token_cache(job, "bytes", CacheOptions(cache, num_workers=1))
        os._exit(1)
    try:
        while not begun():
            end.wait(0.02)
        with StopSignal():
            said: list[str] = []
            thread = signalled(lambda: (tmp_path / "cache" / "entries").exists())
            with pytest.raises(StopRequestedError):
                token_cache(job, "bytes", CacheOptions(cache, say=said.append))
            thread.join()
            with refuses(StopRequestedError):
                content_of(path, tmp_path / "memory", reads_all=True)
    finally:
        os.kill(builder, signal.SIGKILL)
        os.waitpid(builder, 0)
        remove(cache)


def test_without_a_block_that_remembers_signals_nothing_is_asked() -> None:
    leave_if_stopped("anything is done")
    with StopSignal():
        leave_if_stopped("anything is done")

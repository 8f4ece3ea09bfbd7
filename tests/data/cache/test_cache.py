"""The token cache: what is read back, that it is built once, and that it never serves anything wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError, MachineError
from mtrain.core.batch.sample import HERE
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.entry import OF_SAMPLES, TokenCache, runs_of
from mtrain.data.cache.opening import CacheOptions, content_of, default_folder, token_cache
from mtrain.data.formats.record_files import record_files
from tests.data.cache.byte_encoder import COUNT_FILE, ByteEncoder, FatalEncoder
from tests.fault_table import Notice
from tests.messages import refuses
from tests.paths import ROOT

TEXTS = ["abCD", "EF", "g", *(f"Text {number}" for number in range(1000))]


def write(path: Path, texts: Sequence[str] = TEXTS, **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    settle(path)
    return path


def settle(path: Path) -> None:
    """Makes a file look as if it was written a while ago; ctime cannot be set back, so the clock of the content moves
    on."""
    os.utime(path, (1e9, 1e9))


@pytest.fixture(autouse=True)
def hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets files that a test has just written count as settled; their real times stay."""
    real = time.time_ns
    monkeypatch.setattr("mtrain.data.cache.opening.time.time_ns", lambda: real() + 3600 * 10**9)


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the records that have been encoded since the last call."""
    file = tmp_path / "encoded"
    file.touch()
    monkeypatch.setenv(COUNT_FILE, str(file))

    def since_then() -> int:
        size = file.stat().st_size
        file.write_bytes(b"")
        return size

    return since_then


def opened(path: Path | str, folder: Path, encoder: Any = ByteEncoder, fingerprint: str = "", **how: Any) -> TokenCache:
    job = EncodingJob(tuple(record_files(str(path))), encoder)
    return token_cache(job, fingerprint, CacheOptions(folder, **how))


def test_samples_are_read_back(tmp_path: Path) -> None:
    cache = opened(write(tmp_path / "a.jsonl", factor=0.3, weight=0.1), tmp_path / "cache")
    assert (len(cache), cache.num_records, cache.num_tokens) == (1003, 1003, sum(map(len, TEXTS)))
    assert cache.lengths.tolist() == [len(text) for text in TEXTS]
    assert cache.highest_id == ord("x")
    for index in (0, 1, 2, 500, 1002):
        sample = cache.read(index)
        assert bytes(sample.ids.tolist()).decode() == TEXTS[index]
        assert sample.loss_weights.tolist() == [np.float32(0.3) * each.isupper() for each in TEXTS[index]]
        assert sample.weight == 0.1
    assert cache.location(0) == f"{tmp_path}/a.jsonl line 1"
    assert cache.location(1002) == f"{tmp_path}/a.jsonl line 1003"
    ends = cache.starts[np.array([1, 2, 3])]
    assert cache.trained_before(ends).tolist() == [2, 4, 4]
    assert cache.trained_before(np.array([0, 2, 3, 5])).tolist() == [0, 0, 1, 3]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=12), max_size=5))
def test_runs_stand_for_the_weights_and_are_as_long_as_can_be(samples: list[list[float]]) -> None:
    lengths = np.array([len(values) for values in samples], np.int32)
    runs = runs_of(np.array([value for values in samples for value in values], np.float32), lengths)
    assert (runs.lengths > 0).all()
    ends = np.cumsum(runs.counts)
    assert ends[-1:].tolist() == [len(runs.lengths)] * (len(samples) > 0)
    for values, start, end in zip(samples, ends - runs.counts, ends, strict=True):
        own = runs.weights[start:end]
        assert np.repeat(own, runs.lengths[start:end]).tolist() == values
        assert (own[1:] != own[:-1]).all()


def test_a_second_start_encodes_nothing(tmp_path: Path, count: Callable[[], int]) -> None:
    path, lines = write(tmp_path / "a.jsonl"), list[str]()
    first = opened(path, tmp_path / "cache", say=lines.append)
    assert count() == len(TEXTS)
    second = opened(path, tmp_path / "cache")
    assert count() == 0
    assert second.fingerprint == first.fingerprint
    assert [line for line in lines if line.startswith("tokenised ") and "1,003 records" in line]


def test_the_same_records_have_the_same_fingerprint_in_any_form(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in (0, 1):
        write(folder / f"{number}.jsonl", TEXTS[600 * number : 600 * number + 600])
    forms = [opened(each, tmp_path / "cache") for each in (path, tmp_path / "b.jsonl.gz", folder)]
    assert len({cache.folder for cache in forms}) == 3
    assert len({cache.fingerprint for cache in forms}) == 1
    assert forms[2].location(600) == f"{folder}/1.jsonl line 1"
    assert opened(write(tmp_path / "c.jsonl", TEXTS[::-1]), tmp_path / "cache").fingerprint != forms[0].fingerprint
    assert opened(write(tmp_path / "d.jsonl", weight=2), tmp_path / "cache").fingerprint != forms[0].fingerprint


def test_a_moved_file_keeps_its_entry(tmp_path: Path, count: Callable[[], int]) -> None:
    path = write(tmp_path / "a.jsonl")
    first = opened(path, tmp_path / "cache")
    count()
    moved = opened(path.rename(tmp_path / "moved.jsonl"), tmp_path / "cache")
    assert (count(), moved.folder, moved.location(0)) == (0, first.folder, f"{tmp_path}/moved.jsonl line 1")


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    texts = [*TEXTS, "one!", *TEXTS]
    path = write(tmp_path / "a.jsonl", texts)
    found = [opened(path, tmp_path / f"of {n}", num_workers=n, stops_at_bad=False) for n in (1, 3)]
    names = sorted(each.name for each in found[0].folder.iterdir())
    assert [(found[1].folder / name).read_bytes() for name in names] == [
        (found[0].folder / name).read_bytes() for name in names
    ]
    assert (found[1].num_bad, found[1].bad_records()) == (1, [f"{path} line 1004: holds an !"])
    assert found[1].location(1003) == f"{path} line 1005"


def test_another_encoder_is_another_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert opened(path, tmp_path / "cache").folder != opened(path, tmp_path / "cache", fingerprint="other").folder


@pytest.mark.fault(
    "input",
    "a finetuning file that changed since it was tokenised, with its size and mtime as before",
    happens="noticed by ctime; the tokens are made again",
    exit_code=None,
)
def test_a_changed_file_is_never_served_from_the_cache(
    tmp_path: Path, count: Callable[[], int], notice: Notice
) -> None:
    path = write(tmp_path / "a.jsonl")
    before = opened(path, tmp_path / "cache")
    count()
    with notice:
        write(path, [text.replace("Text", "Tent") for text in TEXTS])
        after = opened(path, tmp_path / "cache")
    assert count() == len(TEXTS)
    assert bytes(after.read(3).ids.tolist()) == b"Tent 0"
    assert before.fingerprint != after.fingerprint
    assert notice.exit_code is None


def test_what_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of file systems are coarse: a second write in the same tick leaves no trace."""
    path, memory = write(tmp_path / "a.jsonl"), tmp_path / "files"
    content_of(path, memory, reads_all=False)
    assert len(list(memory.iterdir())) == 1
    monkeypatch.undo()
    other = write(tmp_path / "b.jsonl")
    content_of(other, memory, reads_all=False)
    assert len(list(memory.iterdir())) == 1


def test_the_content_can_be_read_at_every_start(tmp_path: Path) -> None:
    path, memory = write(tmp_path / "a.jsonl"), tmp_path / "files"
    real = content_of(path, memory, reads_all=False)
    (note,) = memory.iterdir()
    note.write_text(note.read_text().replace(real.sha256, "0" * 64))
    assert content_of(path, memory, reads_all=False).sha256 == "0" * 64, "what is remembered is believed"
    assert content_of(path, memory, reads_all=True).sha256 == real.sha256


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")

    class Appending(ByteEncoder):
        def encode(self, record: dict[str, Any], folder: Path = HERE) -> Any:
            path.touch()
            return super().encode(record)

    with refuses(DataError, "a.jsonl"):
        opened(path, tmp_path / "cache", Appending)
    assert not [each for each in (tmp_path / "cache" / "entries").iterdir() if each.is_dir()]


def flipped(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.fault(
    "disk",
    "a flipped bit in the tokens of the token cache",
    happens="refused when the sample is read, with its file and line",
    exit_code=3,
)
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_flipped_bit_in_a_sample_is_noticed(name: str, tmp_path: Path, notice: Notice) -> None:
    path = write(tmp_path / "a.jsonl")
    flipped(opened(path, tmp_path / "cache").folder / name)
    cache = opened(path, tmp_path / "cache")
    with notice, refuses(DataError, "a.jsonl") as caught:
        [cache.read(index) for index in range(len(cache))]
    assert caught.value.exit_code == notice.exit_code


@pytest.mark.parametrize("name", ["offsets", "run_offsets", "weights", "records", "checksums", "entry.json"])
def test_a_flipped_bit_in_the_index_makes_the_entry_anew(name: str, tmp_path: Path) -> None:
    path, lines = write(tmp_path / "a.jsonl"), list[str]()
    folder = opened(path, tmp_path / "cache").folder
    whole = (folder / name).read_bytes()
    flipped(folder / name)
    cache = opened(path, tmp_path / "cache", say=lines.append)
    assert bytes(cache.read(0).ids.tolist()).decode() == TEXTS[0]
    assert f"cannot be used ({name}" in lines[0]
    assert (folder / name).read_bytes() == whole


@pytest.mark.parametrize("name", ["ids", "entry.json"])
def test_a_file_that_was_cut_or_removed_makes_the_entry_anew(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    folder = opened(path, tmp_path / "cache").folder
    os.truncate(folder / name, 100)
    assert opened(path, tmp_path / "cache").read(0).ids.tolist() == list(TEXTS[0].encode())
    (folder / name).unlink()
    assert opened(path, tmp_path / "cache").read(0).ids.tolist() == list(TEXTS[0].encode())


def test_two_builders_at_once_build_once(tmp_path: Path, count: Callable[[], int]) -> None:
    path = write(tmp_path / "a.jsonl")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened(path, tmp_path / "cache"), range(4)))
    assert count() == len(TEXTS)
    assert len({cache.fingerprint for cache in found}) == 1


def test_without_locks_both_build_and_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)  # some network file systems are mounted like this
    path, of_others = write(tmp_path / "a.jsonl"), list[int]()

    def meanwhile() -> ByteEncoder:  # while one builds, another one finishes
        if not of_others:
            of_others.append(opened(path, tmp_path / "cache").folder.stat().st_ino)
        return ByteEncoder()

    cache = opened(path, tmp_path / "cache", meanwhile, num_workers=1)
    assert cache.read(3).ids.tolist() == list(b"Text 0")
    assert folders(tmp_path / "cache") == [cache.folder]
    # the other one may be opening its files, so they stay
    assert of_others == [cache.folder.stat().st_ino]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: opened(path, tmp_path / "several"), range(3)))
    assert [cache.read(3).ids.tolist() for cache in found] == [list(b"Text 0")] * 3
    assert folders(tmp_path / "several") == [found[0].folder]


def folders(cache: Path) -> list[Path]:
    return [each for each in (cache / "entries").iterdir() if each.is_dir()]


def alone(path: Path, cache: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """Runs a builder in a process of its own that meets a fault."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MTRAIN_TEST_FAULT": fault}
    command = [sys.executable, "-m", "tests.data.cache.build_alone", str(path), str(cache)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.fault(
    "disk",
    "kill -9 while finetuning data are tokenised into the cache",
    happens="the next start tokenises them again and removes what was left",
    exit_code=None,
)
def test_a_killed_builder_leaves_no_entry(tmp_path: Path, notice: Notice) -> None:
    path, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    assert alone(path, cache, "kill rank=0 step=2 phase=tokenise").returncode == -signal.SIGKILL
    assert [each.name.startswith(".building-") for each in folders(cache)] == [True]
    with notice:
        whole = opened(path, cache)
    assert [bytes(whole.read(index).ids.tolist()).decode() for index in range(len(whole))] == TEXTS
    assert folders(cache) == [whole.folder]
    assert notice.exit_code is None


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits the files of this process to 4 kB each, like a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails, as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.fault(
    "disk",
    "a disk that is full when finetuning data are tokenised",
    happens="refused with the folder and its key; nothing is left of the part that was written",
    exit_code=7,
)
def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, request: pytest.FixtureRequest, notice: Notice
) -> None:
    path, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    request.getfixturevalue("full_disk")
    with notice, refuses(MachineError, "data.cache_dir") as caught:
        opened(path, cache)
    assert caught.value.exit_code == notice.exit_code
    assert folders(cache) == []


def test_a_cache_that_cannot_be_written_still_serves_what_it_has(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.jsonl"), tmp_path / "cache"
    whole = opened(path, cache)
    (cache / "files").rename(tmp_path / "aside")
    (cache / "files").write_text("in the way of what would be remembered")
    lock = next((cache / "entries").glob(".lock-*"))
    lock.unlink()
    lock.mkdir()  # this lock cannot be taken: opening an existing entry must not need it
    assert opened(path, cache).fingerprint == whole.fingerprint


def test_a_bad_record_is_named_and_ends_the_build(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["a", "b", "!"])
    with refuses(DataError, "line 3", "a.jsonl"):
        opened(path, tmp_path / "cache")
    with refuses(DataError, "line 2", "a.jsonl"):
        opened(write(path, ["a", ""]), tmp_path / "cache")
    with refuses(DataError, "a.jsonl", "line 1"):
        opened(write(path, ["!", "!"]), tmp_path / "cache", stops_at_bad=False)


@pytest.mark.fault(
    "disk",
    "a process dies that tokenises finetuning data",
    happens="refused with its exit code; nothing is left of the part that was written",
    exit_code=7,
)
def test_a_worker_that_dies_is_named(tmp_path: Path, notice: Notice) -> None:
    path = write(tmp_path / "a.jsonl")
    with notice, refuses(MachineError) as caught:
        opened(path, tmp_path / "cache", FatalEncoder, num_workers=2)
    assert caught.value.exit_code == notice.exit_code
    assert folders(tmp_path / "cache") == []


def test_a_worker_passes_on_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_bytes(gzip.compress(path.read_bytes())[:-9])
    with refuses(DataError, "a.jsonl"):
        opened(path, tmp_path / "cache", num_workers=2)


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert default_folder() == Path("/some/where/mtrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder() == Path("/home/someone/.cache/mtrain")

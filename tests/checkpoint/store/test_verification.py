"""Every byte has one reader, and a changed one is found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError, MachineError
from mtrain.checkpoint.format.hashed_file import read_facts
from mtrain.checkpoint.store.directory import files_of_reader, load_entry, verify_files
from mtrain.checkpoint.store.manifest import DigestAlgorithm, FileInfo
from tests.checkpoint.checkpoints import FILES, change_manifest, save
from tests.fault_table import Notice
from tests.messages import refuses


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_every_file_has_one_reader_and_none_reads_much_more(sizes: list[int], num_readers: int) -> None:
    files = {str(number): FileInfo(size_bytes=size, sha256="0" * 64) for number, size in enumerate(sizes)}
    shares = [files_of_reader(files, reader, num_readers) for reader in range(num_readers)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size_bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.fault(
    "checkpoints",
    "flipped bit in a shard",
    happens="found by its digest before anything is used; the checkpoint before is taken, none good: exit code 3",
    exit_code=None,
)
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_by_name(tmp_path: Path, name: str, notice: Notice) -> None:
    entry = save(tmp_path, 10)
    verify_files(entry, FILES, num_threads=2)
    content = bytearray((entry.path / name).read_bytes())
    content[1] ^= 4
    (entry.path / name).write_bytes(content)
    with notice, refuses(DataError, name):
        verify_files(entry, FILES)


@pytest.mark.parametrize("algorithm", list(DigestAlgorithm))
def test_each_file_is_verified_by_the_digest_that_it_was_saved_with(tmp_path: Path, algorithm: DigestAlgorithm) -> None:
    """SHA-256 serves all files up to format 3."""
    saved = save(tmp_path, 10)
    files = {name: read_facts(saved.path / name, algorithm).model_dump() for name in FILES}
    assert all(facts.keys() == {"size_bytes", algorithm.value} for facts in files.values())
    change_manifest(saved.path, format=3 if algorithm is DigestAlgorithm.SHA256 else 4, files=files)
    entry = load_entry(saved.path)
    verify_files(entry, FILES)
    content = (entry.path / "common.pt").read_bytes()
    (entry.path / "common.pt").write_bytes(content[:-1] + b"?")
    with refuses(DataError, "common.pt", algorithm.shown):
        verify_files(entry, FILES)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    entry = save(tmp_path, 10)
    (entry.path / "common.pt").unlink()
    with refuses(MachineError):
        verify_files(entry, FILES)

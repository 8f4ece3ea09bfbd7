"""A manifest detects its own damage."""

import hashlib
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import checkpoint_at, load_entry, newest_good
from mtrain.checkpoint.store.manifest import FileInfo, Manifest, parsed_manifest, write_manifest
from tests.checkpoint.checkpoints import change_manifest, facts, save
from tests.fault_table import Notice
from tests.messages import refuses


def written(folder: Path, **changes: object) -> bytes:
    """Returns the bytes of a plausible manifest."""
    files = {f"__{rank}_0.distcp": FileInfo(size_bytes=10**rank, sha256=f"{rank:x}" * 64) for rank in range(3)}
    write_manifest(folder, Manifest(**{**facts(20, 2.5).model_dump(), "files": files, **changes}))
    return (folder / "mtrain.json").read_bytes()


@pytest.mark.fault(
    "checkpoints",
    "any single flipped bit of a manifest",
    happens="the manifest's own SHA-256 finds each; the checkpoint before is taken with a warning",
    exit_code=None,
)
def test_every_single_flipped_bit_is_found(tmp_path: Path, notice: Notice) -> None:
    raw = written(tmp_path)
    assert parsed_manifest(raw).step == 20
    accepted = []
    with notice:
        for number in range(8 * len(raw)):
            flipped = bytearray(raw)
            flipped[number // 8] ^= 1 << number % 8
            try:
                accepted.append(parsed_manifest(bytes(flipped)))
            except ValueError:
                continue
    assert accepted == []
    assert number > 4000


def test_every_cut_and_every_swap_of_lines_is_found(tmp_path: Path) -> None:
    raw = written(tmp_path)
    lines = raw.splitlines(keepends=True)
    damaged = [raw[:length] for length in range(len(raw))] + [raw + b"\n", raw + raw]
    damaged += [b"".join([*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]]) for n in range(len(lines) - 1)]
    for content in damaged:
        with pytest.raises(ValueError):
            parsed_manifest(content)


def test_a_manifest_of_version_0_1_0_is_read_as_it_is(tmp_path: Path) -> None:
    sealed = save(tmp_path, 10)
    change_manifest(sealed.path, format=2)
    assert b"sha256" not in (sealed.path / "mtrain.json").read_bytes().splitlines()[-2]
    old = load_entry(sealed.path)
    assert (sealed.manifest.is_sealed, old.manifest.is_sealed) == (True, False)
    assert old.manifest.files == sealed.manifest.files
    assert newest_good(tmp_path).warnings == ()


@pytest.mark.parametrize("name", ["config.yaml", "model.yaml"])
def test_the_configuration_hash_is_that_of_the_configuration_next_to_it(tmp_path: Path, name: str) -> None:
    file = FileInfo(size_bytes=3, sha256=hashlib.sha256(b"a: ").hexdigest())
    assert parsed_manifest(written(tmp_path, files={name: file}, config_hash=file.sha256)).config_hash == file.sha256
    with refuses(ValueError, name):
        written(tmp_path, files={name: file}, config_hash="0" * 64)
    write_other_hash(save(tmp_path, 10).path, name)
    with refuses(DataError, name):
        checkpoint_at(tmp_path / "step_00000010")


def write_other_hash(folder: Path, name: str) -> None:
    """Writes another configuration next to the tensors, and its hash into an intact manifest."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in ("common.pt", "__0_0.distcp")}
    (folder / name).write_bytes(files.setdefault(name, b"a: 1"))
    named = {file: {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for file, raw in files.items()}
    change_manifest(folder, files=named, config_hash="1" * 64)

"""Reads that fail for a moment succeed later; those that fail for good end in one message."""

from __future__ import annotations

import errno
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mtrain.base import steady_files
from mtrain.base.steady_files import SteadyFile, retried
from tests.base.flaky_disk import FlakyDisk
from tests.checkpoint.checkpoints import save
from tests.fault_table import Notice
from tests.paths import ROOT
from tests.training.test_trainer import BASE


@pytest.fixture(scope="module")
def flaky_disk(tmp_path_factory: pytest.TempPathFactory) -> FlakyDisk:
    """Builds the disk, which needs a C compiler: tests/needs.py."""
    return FlakyDisk(tmp_path_factory.mktemp("flaky"))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses between tries."""
    monkeypatch.setattr(steady_files, "PAUSES_S", (0.0, 0.0))


def program(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


VERIFY = "import sys; from pathlib import Path; from mtrain.checkpoint.store.directory import load_entry\n"
VERIFY += "from mtrain.checkpoint.store.directory import verify_files\n"
VERIFY += "entry = load_entry(Path(sys.argv[1])); verify_files(entry, entry.manifest.files)"


@pytest.mark.fault(
    "disk",
    "a read of a checkpoint's file fails with EIO for a moment (a library below Python's files)",
    happens="tried again, with a line each time; the checkpoint is verified",
    exit_code=0,
)
def test_a_checkpoint_is_verified_on_a_flaky_disk(tmp_path: Path, notice: Notice, flaky_disk: FlakyDisk) -> None:
    entry = save(tmp_path, 10)
    with notice:
        environment = flaky_disk.environment("__0_0.distcp", errno.EIO, 1)
        found = program(environment, "-c", VERIFY, str(entry.path))
    assert found.returncode == notice.exit_code, found.stderr
    assert found.stderr.count("__0_0.distcp failed: Input/output error; try 1 of 5 in 0.5 s") == 1


@pytest.mark.fault(
    "disk",
    "a read of the configuration fails with ESTALE for a moment",
    happens="tried again, with a line",
    exit_code=0,
)
def test_a_configuration_is_read_on_a_flaky_disk(tmp_path: Path, notice: Notice, flaky_disk: FlakyDisk) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(BASE)
    with notice:
        environment = flaky_disk.environment("run.yaml", errno.ESTALE, 1)
        arguments = [str(config), f"run.dir={tmp_path / 'run'}", "--world-size", "1"]
        found = program(environment, "-m", "mtrain", "check", *arguments)
    assert found.returncode == notice.exit_code, found.stderr
    assert "run.yaml failed: Stale file handle; try 1 of 5" in found.stderr


LINES = "import sys; from pathlib import Path; from mtrain.data.formats.jsonl import raw_lines\n"
LINES += "import hashlib; print(hashlib.sha256(b''.join(raw_lines(Path(sys.argv[1])))).hexdigest())"


def test_a_stream_goes_on_where_it_was(tmp_path: Path, flaky_disk: FlakyDisk) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(100_000)))
    whole = program(flaky_disk.environment("another", errno.EIO, 1), "-c", LINES, str(data))
    flaky = program(flaky_disk.environment("data.jsonl", errno.ETIMEDOUT, 2, first=5), "-c", LINES, str(data))
    assert len(whole.stdout.strip()) == 64
    assert flaky.stdout == whole.stdout, flaky.stderr
    assert flaky.stderr.count("Connection timed out") == 2


RECORDS = """
import sys
from pathlib import Path
from mtrain.data.formats.record_files import record_files
from mtrain.data.formats.record_files import chunks
for each in sys.argv[1:]:
    print([chunk.record(n) for chunk in chunks(record_files(each)) for n in range(len(chunk))])
"""


@pytest.mark.fault(
    "disk",
    "reads of packed lines, parquet and Arrow fail with EIO for a moment",
    happens="tried again, with a line each time; the records are those of a sound disk",
    exit_code=0,
)
def test_packed_records_and_tables_are_read_on_a_flaky_disk(
    tmp_path: Path, notice: Notice, flaky_disk: FlakyDisk
) -> None:
    rows = [{"text": f"{number} {number**7 % 1000003}"} for number in range(2000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "data.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "data.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    parquet.write_table(table, tmp_path / "data.parquet", row_group_size=500)
    with pyarrow.OSFile(f"{tmp_path}/data.stream", "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    files = [str(tmp_path / f"data.{kind}") for kind in ("gz", "zst", "parquet", "stream")]
    with notice:
        # of the last file the look at what it is, of the others a read of what is in it; each a program of its own, as
        # the library counts by process
        found = [
            program(
                flaky_disk.environment(each, errno.EIO, 1, first=1 if each == files[-1] else 2), "-c", RECORDS, each
            )
            for each in files
        ]
    for each, name in zip(found, files, strict=True):
        assert each.returncode == notice.exit_code, each.stderr
        assert each.stdout == f"{rows}\n", name
        assert f"{name} failed: Input/output error; try 1 of 5" in each.stderr


@pytest.mark.fault(
    "disk",
    "a quota of the user is used up (EDQUOT) while metrics are written",
    happens="one warning; what waits is written when there is room again, each line once",
    exit_code=None,
)
def test_records_wait_for_a_quota(tmp_path: Path, notice: Notice, flaky_disk: FlakyDisk) -> None:
    writer = "import sys; from pathlib import Path; from mtrain.report.metrics.jsonl import AppendedFile\n"
    writer += "file = AppendedFile(Path(sys.argv[1]))\n"
    writer += "for step in range(9): file.append(step, b'%d\\n' % step)\nfile.close()"
    with notice:
        found = program(
            flaky_disk.environment("metrics.jsonl", errno.EDQUOT, 4, first=3), "-c", writer, f"{tmp_path}/metrics.jsonl"
        )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(f"{step}\n" for step in range(9))
    assert found.stderr.count("Disk quota exceeded; training continues, the records wait") == 1
    assert found.stderr.count("has what was waiting for the disk") == 1


@pytest.mark.usefixtures("no_pauses")
def test_a_fault_that_lasts_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    tries = []

    def read() -> None:
        tries.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error, in 2 retries as well: 'x'"):
        retried(read, "x")
    assert len(tries) == 3
    assert capsys.readouterr().err.count("warning: reading x failed") == 2


@pytest.mark.usefixtures("no_pauses")
def test_other_faults_are_not_tried_again() -> None:
    tries = []

    def read() -> None:
        tries.append(1)
        raise FileNotFoundError(errno.ENOENT, "No such file")

    with pytest.raises(FileNotFoundError):
        retried(read, "x")
    assert len(tries) == 1


@pytest.mark.usefixtures("no_pauses")
def test_a_file_that_is_another_one_after_the_fault_is_not_read_on(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 10)
    with SteadyFile(path) as file:
        assert file.read(4) == b"aaaa"
        assert file._file is not None
        file._file.close()
        file._file = None
        path.write_bytes(b"b" * 12)
        with pytest.raises(OSError, match="it was changed while it was read"):
            file.read(4)


def test_it_is_a_file_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 100)
    with io.BufferedReader(SteadyFile(path)) as file:
        assert file.read() == path.read_bytes()
    assert file.raw.closed

"""Records: the same in every form of file, and messages about files that hold none."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtrain.base.errors import DataError, MachineError
from mtrain.data.formats.record_files import chunks, left_out, record_files, source_files
from tests.fault_table import Notice
from tests.messages import refuses

CALL = {"function": {"name": "f", "arguments": {"x": [1, 2]}}}
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "é\n"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    *({"messages": [{"role": "user", "content": str(n)}], "weight": 0.5, "tools": []} for n in range(600)),
    {"messages": [{"role": "tool", "content": ""}]},
]


def lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def zstd(data: bytes) -> bytes:
    """Compresses to two frames, as `cat a.zst b.zst` makes them."""
    packed = b""
    for part in (data[:100], data[100:]):
        buffer = pa.BufferOutputStream()
        with pa.CompressedOutputStream(buffer, "zstd") as stream:
            stream.write(part)
        packed += buffer.getvalue().to_pybytes()
    return packed


def table() -> pa.Table:
    """Builds a table with every key of any record."""
    return pa.Table.from_struct_array(pa.array(RECORDS))


def as_lines(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(lines(RECORDS))
    return str(folder / "a.jsonl")


def as_list(folder: Path) -> str:
    (folder / "a.json").write_text(json.dumps(RECORDS, indent=1))
    return str(folder / "a.json")


def as_lines_of_an_editor(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(lines(RECORDS) + b"\n \n\r\n")
    return str(folder / "a.jsonl")


def as_gzip(folder: Path) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS)[:100]) + gzip.compress(lines(RECORDS)[100:]))
    return str(folder / "a.jsonl.gz")


def as_zstd(folder: Path) -> str:
    (folder / "without a suffix").write_bytes(zstd(lines(RECORDS)))
    return str(folder / "without a suffix")


def as_parquet(folder: Path) -> str:
    pq.write_table(table(), folder / "a.parquet", row_group_size=100)
    return str(folder / "a.parquet")


def as_arrow_file(folder: Path) -> str:
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table())
    return str(folder / "a.arrow")


def as_dataset(folder: Path) -> str:
    """Saves with `datasets` itself, which is the oracle of its own form."""
    import datasets

    datasets.Dataset(table()).save_to_disk(str(folder / "saved"), num_shards=3)
    return str(folder / "saved")


def as_folder(folder: Path) -> str:
    (folder / "more").mkdir()
    for number, name in enumerate(("a-00.jsonl", "a-01.jsonl", "more/a-02.jsonl")):
        (folder / name).write_bytes(lines(RECORDS[200 * number : 200 * number + 200 if number < 2 else None]))
    (folder / "README.md").write_text("# no records")
    (folder / ".hidden.jsonl").write_text("{")
    return str(folder)


def as_pattern(folder: Path) -> str:
    as_folder(folder)
    return f"{folder}/**/a-0?.jsonl"


FORMS: dict[str, Callable[[Path], str]] = {
    "lines": as_lines,
    "lines with empty ones at the end": as_lines_of_an_editor,
    "list": as_list,
    "gzip": as_gzip,
    "zstd": as_zstd,
    "parquet": as_parquet,
    "arrow": as_arrow_file,
    "dataset": as_dataset,
    "folder": as_folder,
    "pattern": as_pattern,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_records_in_the_same_order(form: str, tmp_path: Path) -> None:
    files = record_files(FORMS[form](tmp_path))
    found = [(chunk, chunk.record(index)) for chunk in chunks(files) for index in range(len(chunk))]
    assert [record for _, record in found] == RECORDS
    assert len({(chunk.file, chunk.first) for chunk, _ in found}) > 1, "in several pieces"


def test_a_record_is_named_by_its_file_and_number(tmp_path: Path) -> None:
    as_folder(tmp_path)
    files = record_files(f"{tmp_path}/**/*.jsonl")
    last = list(chunks(files))[-1]
    assert files[last.file].place(last.first + len(last) - 1) == f"{tmp_path}/more/a-02.jsonl line 202"
    (row_file,) = record_files(as_parquet(tmp_path))
    assert row_file.place(7) == f"{tmp_path}/a.parquet row 7"
    (listed,) = record_files(as_list(tmp_path))
    assert listed.place(7) == f"{tmp_path}/a.json record 7"


def test_an_empty_line_between_others_is_a_record_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"b": 2}\n')
    (chunk,) = chunks(record_files(str(tmp_path / "a.jsonl")))
    assert chunk.record(2) == {"b": 2}
    with refuses(DataError, "empty"):
        chunk.record(1)


NO_RECORDS = {
    "pickle": (b"\x80\x04\x95", "is a pickle, which could run code"),
    "web page": (b"\n<!DOCTYPE html><html>login</html>", "is a web page .*; download the file again"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS.*git lfs pull"),
    "zip": (b"PK\x03\x04", "is a zip archive"),
    "tar": (b"a" * 257 + b"ustar\0", "is a tar archive"),
    "UTF-16": ("{}".encode("utf-16"), "is text in UTF-16.*save it as UTF-8"),
    "packed JSON list": (gzip.compress(b'[\n{"prompt": "a"}]'), "is one JSON list, packed.*one JSON object per line"),
    "empty JSON list": (b" [ ]\n", "is an empty JSON list"),
    "cut JSON list": (b'[{"prompt": "a"}, {"prom', "record 2: not JSON"),
    "JSON list without a comma": (b'[{"prompt": "a"} {}]', "'{}]' follows record 1"),
    "text after a JSON list": (b'[{"prompt": "a"}]\n{}', ".*follows record 1"),
    "bytes": (b"abc\0\0def", "is binary"),
    "nothing": (b"", "is empty"),
    "gzip of a tar": (gzip.compress(b"a" * 257 + b"ustar\0"), "is a tar archive"),
    "gzip twice": (gzip.compress(gzip.compress(b"{}")), "is packed twice"),
    "gzip of nothing": (gzip.compress(b""), "is empty"),
    "cut gzip": (gzip.compress(lines(RECORDS))[:-20], "is damaged gzip .*; copy or pack it again"),
    "damaged gzip": (gzip.compress(lines(RECORDS))[:-6] + b"000000", "is damaged gzip .*CRC"),
    "cut zstd": (zstd(lines(RECORDS))[:-20], "is damaged zstd .*Truncated"),
    "cut parquet": (b"PAR1" + b"\1" * 100, "is damaged parquet"),
    "cut Arrow file": (b"ARROW1\0\0" + b"\1" * 100, "is damaged Arrow file"),
    "cut Arrow stream": (b"\xff\xff\xff\xff\xf8\x02\0\0" + b"\1" * 100, "is damaged Arrow stream"),
}


@pytest.mark.fault(
    "input",
    "finetuning data that are a web page, a pickle, an archive, a pointer of Git LFS, or damaged",
    happens="refused with what the file is and what to do",
    exit_code=3,
)
@pytest.mark.parametrize("kind", NO_RECORDS)
def test_what_holds_no_records_is_named(kind: str, tmp_path: Path, notice: Notice) -> None:
    content, message = NO_RECORDS[kind]
    (tmp_path / "a.jsonl").write_bytes(content)
    with notice, pytest.raises(DataError, match=rf"a\.jsonl:? ?{message}") as caught:
        list(chunks(record_files(str(tmp_path / "a.jsonl"))))
    assert caught.value.exit_code == notice.exit_code


def test_places_without_records_are_named(tmp_path: Path) -> None:
    with refuses(DataError):
        record_files(str(tmp_path / "nowhere"))
    with refuses(DataError):
        record_files(f"{tmp_path}/*.jsonl")
    with refuses(DataError):
        record_files(str(tmp_path))
    as_lines(tmp_path)
    as_parquet(tmp_path)
    with refuses(DataError):
        record_files(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refuses(DataError):
        record_files(str(tmp_path))


def parquet_without_rows(path: Path) -> None:
    pq.write_table(table().slice(0, 0), path)


EMPTY: dict[str, Callable[[Path], object]] = {
    "b.jsonl": Path.touch,
    "c.jsonl": lambda path: path.write_bytes(b"\n \n\r\n"),
    "d.jsonl": lambda path: path.write_bytes(b" [ ]\n"),
    "e.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b"")),
    "f.jsonl.zst": Path.touch,
    "g.parquet": parquet_without_rows,
    "sub/h.parquet": Path.touch,
}


@pytest.mark.parametrize("seed", range(6))
def test_files_without_records_are_left_out_of_many(seed: int, tmp_path: Path) -> None:
    """Programs that cut their output into shards leave some without records."""
    random = Random(seed)
    (tmp_path / "sub").mkdir()
    chosen = sorted(random.sample(sorted(EMPTY), random.randrange(1, len(EMPTY) + 1)))
    for name in chosen:
        EMPTY[name](tmp_path / name)
    for given in (str(tmp_path), f"{tmp_path}/**/*.*"):
        with pytest.raises(DataError, match=rf"{len(chosen)} files holds a record; give files that hold samples"):
            source_files(given)
    for name in ("a.jsonl", "e.jsonl"):
        (tmp_path / name).write_bytes(lines(RECORDS))
    for given in (str(tmp_path), f"{tmp_path}/**/*.*"):
        source = source_files(given)
        assert [file.path.name for file in source.files] == ["a.jsonl", "e.jsonl"]
        assert sorted(str(path.relative_to(tmp_path)) for path in source.empty) == chosen
        assert sum(map(len, chunks(source.files))) == 2 * len(RECORDS)
        assert str(source.empty[0]) in left_out(source.empty)


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(lines(RECORDS))
    assert [file.path.name for file in record_files(str(tmp_path / "a[1].jsonl"))] == ["a[1].jsonl"]


@pytest.mark.fault(
    "input",
    "data in parquet, Arrow or zstd where pyarrow is not installed",
    happens="refused with what to install",
    exit_code=7,
)
@pytest.mark.parametrize("form", [as_parquet, as_zstd])
def test_a_library_that_is_missing_is_named(
    form: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    files = record_files(form(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with notice, refuses(MachineError, "mtrain[data]") as caught:
        list(chunks(files))
    assert caught.value.exit_code == notice.exit_code

"""Files of other programs: only plain files and plain JSON, with a limit."""

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.base.plain_files import NOT_A_PLAIN_FILE, parsed_json, parsed_yaml, read_ahead, read_plain_file


def test_a_file_is_read_whole_up_to_the_limit(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "link").symlink_to("file")
    assert read_plain_file(tmp_path / "file", len(content)) == content
    assert read_plain_file(tmp_path / "link", len(content)) == content
    with pytest.raises(OSError, match=r"it has 3145728 bytes, but at most 3145727 are read"):
        read_plain_file(tmp_path / "file", len(content) - 1)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 2**30)


OTHERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "40 GiB": _sparse,
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_no_plain_file_is_said_to_be_none(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError) as error:
        read_plain_file(tmp_path / "file", 1 << 20)
    assert error.value.errno in NOT_A_PLAIN_FILE


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_has_is_an_error_of_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError) as error:
        read_plain_file(tmp_path / name, 1)
    assert error.value.errno in NOT_A_PLAIN_FILE


def test_a_link_is_not_followed_where_it_may_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError) as error:
        read_plain_file(tmp_path / "link", 1, follow_link=False)
    assert error.value.errno in NOT_A_PLAIN_FILE


def test_json_is_read_as_it_stands() -> None:
    assert str(parsed_json(b"[" * 100 + b"]" * 100)).count("[") == 100
    content = '\ufeff{"a": [1, 2.5, -0, 1e-7, null, true, "\\ud83d\\ude42 é"], "b": {}}'
    assert parsed_json(content.encode()) == {"a": [1, 2.5, 0, 1e-7, None, True, "🙂 é"], "b": {}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**6, "nested too deeply"),
        (b"[" * 101 + b"]" * 101, "nested too deeply"),
        (b"1" * 5000, "digits"),
        (b"[1e999]", "1e999 is too large"),
        (b"[NaN]", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' appears twice"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b'["\xff"]', "can't decode"),
        ('{"a": 1}'.encode("utf-16"), "can't decode"),
    ],
)
def test_what_is_not_json_is_a_value_error(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parsed_json(content)


def test_yaml_is_read_as_it_stands() -> None:
    assert parsed_yaml("a: [1, x, 2.5]\nb: &b {c: é}\nd: *b\n".encode()) == {
        "a": [1, "x", 2.5],
        "b": {"c": "é"},
        "d": {"c": "é"},
    }


BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))


@pytest.mark.parametrize(
    "content",
    [
        b"a: [",
        b"[" * 10**5,
        b"\xff",
        b"!!python/object/apply:os.abort []",
        b"!!timestamp x",
        b"? [a]\n: b",
        BOMB.encode(),
    ],
)
def test_what_is_no_plain_yaml_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parsed_yaml(content)


def resident_pages(content: mmap.mmap) -> list[bool]:
    """Finds which pages of a mapped file are in memory, by mincore."""
    count = -(-len(content) // mmap.PAGESIZE)
    found, start = (ctypes.c_ubyte * count)(), ctypes.c_char.from_buffer(content)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(content)), found)
    assert libc.mincore(*arguments) == 0, os.strerror(ctypes.get_errno())
    del start
    return [bool(each & 1) for each in found]


def test_bytes_that_are_expected_are_read_and_no_others(tmp_path: Path) -> None:
    path, page = tmp_path / "file", mmap.PAGESIZE
    path.write_bytes(os.urandom(4096 * page + 5))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    is_on_disk = not any(resident_pages(content))  # a file system in memory holds all of it
    read_ahead(content, 1024 * page + 7, 1100 * page)
    read_ahead(content, 4096 * page + 1, 2**40)  # a damaged header: only existing bytes are read
    deadline = time.monotonic() + 600
    while not all(resident_pages(content)[1024:1100]) or not resident_pages(content)[-1]:
        assert time.monotonic() < deadline, "the bytes were not read"
        time.sleep(0.01)
    assert not is_on_disk or not any(resident_pages(content)[:512])
    content.close()

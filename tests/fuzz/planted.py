"""Targets that break their promise, to check that each way is found."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from mtrain.base.errors import ConfigError, DataError
from tests.fuzz.target import Target

_CONFIG_ONLY = frozenset({2})


def _write(folder: Path, random: Random) -> None:
    (folder / "number").write_text(str(random.randrange(10**6)))


def _accept(folder: Path) -> None:
    assert (folder / "number").read_text().isdecimal()


def _refuse(folder: Path) -> None:
    raise ConfigError("number=1 is wrong; change it")


def _other_error(folder: Path) -> None:
    raise RecursionError("too deep")


def _other_code(folder: Path) -> None:
    raise DataError("a folder is wrong; change it")


def _no_words(folder: Path) -> None:
    raise ConfigError("")


def _long_message(folder: Path) -> None:
    raise ConfigError("x" * 100_000)


def _memory(folder: Path) -> None:
    bytes(bytearray(os.urandom(1)) * 300 * 2**20)


def _too_much_memory(folder: Path) -> None:
    bytearray(2**40)


def _exit(folder: Path) -> None:
    raise SystemExit(0)


def _crash(folder: Path) -> None:
    os.abort()


def _busy(folder: Path) -> None:
    while True:
        pass


def _work(folder: Path) -> None:
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass


def _waiting(folder: Path) -> None:
    time.sleep(3600)


WORKS, BUSY = (Target(_write, read, _CONFIG_ONLY, cpu_seconds=1) for read in (_work, _busy))
# the others have a target's usual time: a machine may take more than a second to hand out what MEMORY touches
ACCEPTS, REFUSES, OTHER_ERROR, OTHER_CODE, NO_WORDS, LONG_MESSAGE, MEMORY, TOO_MUCH_MEMORY, EXIT, CRASH, WAITS = (
    Target(_write, read, _CONFIG_ONLY)
    for read in (
        _accept,
        _refuse,
        _other_error,
        _other_code,
        _no_words,
        _long_message,
        _memory,
        _too_much_memory,
        _exit,
        _crash,
        _waiting,
    )
)

"""A disk that fails for a moment, below everything: a library between programs and the C library, made here by `cc`.

Every read or write of a file whose path contains FLAKY_PATH fails with FLAKY_ERRNO, from call number FLAKY_FROM on and
FLAKY_COUNT times in each process. Python's files read and write by these calls.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int calls = 0;

static int fails(int file) {
    char link[64], path[4096];
    const char *part = getenv("FLAKY_PATH");
    if (part == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strstr(path, part) == NULL) return 0;
    int number = ++calls, from = atoi(getenv("FLAKY_FROM"));
    if (number < from || number >= from + atoi(getenv("FLAKY_COUNT"))) return 0;
    errno = atoi(getenv("FLAKY_ERRNO"));
    return 1;
}

ssize_t read(int file, void *buffer, size_t size) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "read");
    return fails(file) ? -1 : next(file, buffer, size);
}

ssize_t write(int file, const void *buffer, size_t size) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "write");
    return fails(file) ? -1 : next(file, buffer, size);
}
"""


class FlakyDisk:
    """The library, built once."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: Folder in which the library is built.
        """
        self._library = folder / "flaky_disk.so"
        source = folder / "flaky_disk.c"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True)

    def environment(self, path: str, error: int, count: int, first: int = 1) -> dict[str, str]:
        """Returns the environment of a program on this disk.

        Args:
            path: Part of the paths of the files that fail.
            error: Error number of the failures.
            count: Number of calls that fail.
            first: Number of the first call that fails, counted from 1.
        """
        preload = ":".join([str(self._library), *filter(None, [os.environ.get("LD_PRELOAD")])])
        faults = {"FLAKY_PATH": path, "FLAKY_ERRNO": error, "FLAKY_COUNT": count, "FLAKY_FROM": first}
        return {**os.environ, "LD_PRELOAD": preload} | {name: str(value) for name, value in faults.items()}

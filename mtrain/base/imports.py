"""Imports of a great deal of code at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Puts garbage collection off while a block imports, and leaves what it has made out of later collections.

    Importing torch and megatron-core makes a million objects that stay. The collector looks through them again and
    again, and once more when the process ends: 2 of the 7 processor seconds of a rank that starts and ends. A step that
    happens to be the collector's turn would look through them too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

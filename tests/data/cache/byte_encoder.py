"""An encoder whose tokens can be read: one for each byte of `text`; capital letters are trained, ! is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import HERE, TokenizedSample

COUNT_FILE = "MTRAIN_TEST_ENCODED"
"""Environment variable with the name of a file that grows by a byte with every record that any process encodes."""


class ByteEncoder:
    """Encoder of bytes: each byte is a token."""

    fingerprint = "bytes"

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes the bytes of one record."""
        if COUNT_FILE in os.environ:
            with Path(os.environ[COUNT_FILE]).open("ab") as file:
                file.write(b".")
        text = record["text"]
        if "!" in text:
            raise DataError("holds an !")
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        weights = np.array([float(character.isupper()) for character in text], np.float32)
        return TokenizedSample(ids, weights * np.float32(record.get("factor", 1)), record.get("weight", 1.0))


class FatalEncoder(ByteEncoder):
    """Encoder whose process dies of a record."""

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Ends the process."""
        os._exit(9)


class EndlessEncoder(ByteEncoder):
    """Encoder that never finishes a record."""

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes the record, then waits forever."""
        super().encode(record)
        while True:
            time.sleep(60)

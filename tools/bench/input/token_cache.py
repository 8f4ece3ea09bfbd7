"""Time from a second start to its first sample, by the number of conversations in the token cache.

    python tools/bench/input/token_cache.py FOLDER --conversations 1000000

It writes random conversations into FOLDER, tokenises them once (by bytes, so that the cache is measured and no
tokenizer), then starts anew in a process of its own and prints the seconds from opening the source to the first sample.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mtrain.core.batch.sample import HERE, TokenizedSample
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.opening import CacheOptions, token_cache
from mtrain.data.formats.record_files import record_files
from mtrain.data.samples.sft import RowLimit, SftDataset

_SEQ_LENGTH = 512


class BytesEncoder:
    """Encoder with a token for each byte; answers are trained."""

    fingerprint = "bytes"

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes one record, as `SampleEncoder` requires."""
        parts = [record["prompt"].encode(), record["response"].encode()]
        ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.int32)
        return TokenizedSample(ids, np.repeat(np.array([0, 1], np.float32), [len(part) for part in parts]))


def opened(folder: Path, say: Any) -> SftDataset:
    """Opens the samples, cut to rows."""
    job = EncodingJob(tuple(record_files(str(folder / "data.jsonl"))), BytesEncoder)
    cache = token_cache(job, "", CacheOptions(folder / "cache", num_workers=1, say=say))
    return SftDataset(cache, range(len(cache)), RowLimit(_SEQ_LENGTH, "split"))


def main(
    folder: Path,
    conversations: Annotated[int, typer.Option(min=1)] = 1_000_000,
    second_start: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measures a first and a second start."""
    path = folder / "data.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        with path.open("w") as file:
            for number in range(conversations):
                size = min(4000, int(draw.lognormvariate(4.5, 1)) + 1)
                file.write(json.dumps({"prompt": f"{number} " + "a" * size, "response": "b" * size}) + "\n")
        time.sleep(11)  # younger files are hashed again at the next start
    began = time.perf_counter()
    samples = opened(folder, print)
    first = samples.sample(0, len(samples) // 2)
    seconds = time.perf_counter() - began
    which = "second" if second_start else "first"
    print(f"{which} start: {seconds:.2f} s to the first of {len(samples):,} samples ({len(first.tokens)} tokens)")
    if not second_start:
        subprocess.run([sys.executable, __file__, str(folder), "--second-start"], check=True)


if __name__ == "__main__":
    typer.run(main)

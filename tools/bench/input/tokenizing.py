"""`mtrain tokenize` next to Megatron-LM's way: MB of text per processor second (`tools/bench/input/tokenizing.py`).

The text: sources of Python's standard library, cut into documents of 4,000 characters, as JSON lines; the tokenizer is
a byte-level BPE trained on a part of them. Every contender is a command that starts anew, and its seconds are user and
system time of all of its processes, start-up included:

- "megatron": a program of ours with the algorithm of Megatron-LM's preprocess_data.py: two multiprocessing workers, one
  document a task (32 sent at once), `tokenizers`' encode, megatron-core's IndexedDatasetBuilder.
- "ours": `mtrain tokenize` with one and two workers, and with `--fast`.

Contenders take turns; the pairs they write are compared byte by byte. Prints medians and best of all rounds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

_PR_SET_CHILD_SUBREAPER = 36
_DOCUMENT = 4000
_ENCODER: list[tuple[Any, int]] = []


def main(
    megabytes: Annotated[float, typer.Option(help="Of text.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    vocab_size: Annotated[int, typer.Option(min=300)] = 16_000,
    stand_in: Annotated[tuple[Path, Path, str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures all contenders and prints a table."""
    if stand_in is not None:
        preprocess(*stand_in)
        return
    # a server of workers outlives the command that started it: its seconds come to us when it ends
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text, size = write_text(folder, megabytes * 1e6)
        tokenizer = train(text, folder, vocab_size)
        ours = [sys.executable, "-m", "mtrain", "tokenize", str(text), "--tokenizer", str(tokenizer), "--overwrite"]
        ours += ["--output-prefix", str(folder / "out")]
        theirs = [sys.executable, __file__, "--stand-in", str(text), str(tokenizer), str(folder / "out")]
        contenders = {
            "megatron, 2 workers": theirs,
            "ours, 1 worker": [*ours, "--workers", "1"],
            "ours, 2 workers": [*ours, "--workers", "2"],
            "ours, 1 worker, --fast": [*ours, "--workers", "1", "--fast"],
            "ours, 2 workers, --fast": [*ours, "--workers", "2", "--fast"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        pairs = set()
        for _ in range(rounds):
            for name, command in contenders.items():
                seconds[name].append(processor_seconds(command, folder / "compiled"))
                pairs.add(tuple(digest(folder / f"out.{ending}") for ending in ("bin", "idx")))
    assert len(pairs) == 1, "the contenders write other bytes"
    print(f"{size / 1e6:.1f} MB of text, {vocab_size} tokens, {rounds} rounds; all pairs are equal")
    print(f"{'contender':<26} {'MB / cpu-s':>10} {'of best':>8} {'of median':>10}")
    first = seconds["megatron, 2 workers"]
    for name, found in seconds.items():
        ratios = f"{min(first) / min(found):>8.2f} {statistics.median(first) / statistics.median(found):>10.2f}"
        print(f"{name:<26} {size / 1e6 / min(found):>10.2f} {ratios}")


def write_text(folder: Path, num_bytes: float) -> tuple[Path, int]:
    """Writes the JSON lines; returns their path and the size of the text in them, in bytes."""
    path, size = folder / "text.jsonl", 0
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            text = source.read_bytes().decode(errors="ignore")
            for start in range(0, len(text), _DOCUMENT):
                if size < num_bytes:
                    file.write(json.dumps({"text": text[start : start + _DOCUMENT]}) + "\n")
                    size += len(text[start : start + _DOCUMENT].encode())
    return path, size


def train(text: Path, folder: Path, vocab_size: int) -> Path:
    """Trains a tokenizer.json on the first lines."""
    part, output = folder / "part.jsonl", folder / "tokenizer"
    with text.open() as lines, part.open("w") as file:
        file.writelines(line for number, line in enumerate(lines) if number < 500)
    command = [sys.executable, "-m", "mtrain", "train-tokenizer", str(part), "--output", str(output), "--kind", "hf"]
    subprocess.run([*command, "--vocab-size", str(vocab_size)], check=True, stdout=subprocess.DEVNULL)
    return output


def processor_seconds(command: list[str], compiled: Path) -> float:
    """Returns user and system time of a command and of all processes that it started.

    Args:
        command: The command.
        compiled: Folder for bytecode, kept for later rounds as for installed programs, whatever the environment says:
            else some of the seconds would be Python's compiler's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    while True:
        try:
            os.wait()  # processes that outlive the command are children of this one now
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def digest(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def preprocess(text: Path, tokenizer: Path, prefix: str) -> None:
    """Preprocesses as Megatron-LM's program does, in the same order."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    eos = model.token_to_id("<|endoftext|>")
    small = model.get_vocab_size() < 65500
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16 if small else np.int32)
    with text.open() as lines, multiprocessing.Pool(2, _start, (tokenizer, eos)) as pool:
        for ids in pool.imap(_encode, lines, 32):
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")


def _start(tokenizer: Path, eos: int) -> None:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    model.encode_special_tokens = True
    _ENCODER.append((model, eos))


def _encode(line: str) -> list[int]:
    model, eos = _ENCODER[0]
    return [*model.encode(json.loads(line)["text"], add_special_tokens=False).ids, eos]


if __name__ == "__main__":
    typer.run(main)

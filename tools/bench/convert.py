"""Conversions next to transformers' load and save and to a raw write: `python tools/bench/convert.py FOLDER`.

A Llama-shaped model with random bfloat16 weights is written into FOLDER, converted, and deleted. Contenders:

- "raw": the bytes of the safetensors files, from memory, into one new file, then fsync; and the same without
  fsync, which says how fast the page cache is.
- "import", "export": ours, with BLAKE3 of what is imported and fsync; "and proof" with the bitwise comparison at the
  end, which every conversion has.
- "transformers": from_pretrained and save_pretrained in the same dtype; no checksum, no fsync, no comparison.

Every contender is a process of its own in every round; rounds alternate. Seconds are wall time inside the process after
imports; GB/s are best of all rounds. Memory is the largest RssAnon sampled every 5 ms, less that before the start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import torch
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.hf.io.safetensors import header_of, raw_bytes
from mtrain.hf.schema.registry import FAMILIES

_SAMPLE_S = 0.005
_MB = 1e6
_GB = 1e9


class Sample(NamedTuple):
    """Measurement of one run of a contender."""

    seconds: float
    anonymous_bytes: int
    """Growth of the process's anonymous memory."""


def main(
    folder: Annotated[Path, typer.Argument(help="For about four times the model's size.")],
    layers: Annotated[int, typer.Option(help="Each has 67 million parameters.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Measures all contenders and prints a table."""
    source, ours = folder / "source", folder / "ours"
    folder.mkdir(parents=True)
    try:
        size, largest = apart(lambda: write_model(source, layers))
        apart(lambda: import_hf(source, ours, None, 1))
        contenders: dict[str, Callable[[Path], Any]] = {
            "raw": lambda out: write_raw(source, out, syncs=True),
            "raw, without fsync": lambda out: write_raw(source, out, syncs=False),
            "import and proof, 1 worker": lambda out: import_hf(source, out, None, 1),
            f"import and proof, {workers} workers": lambda out: import_hf(source, out, None, workers),
            "export and proof, 1 worker": lambda out: export_hf(ours, out, None, None, 1),
            f"export and proof, {workers} workers": lambda out: export_hf(ours, out, None, None, workers),
            "transformers": lambda out: load_and_save(source, out),
        }
        samples: dict[str, list[Sample]] = {name: [] for name in contenders}
        for _ in range(rounds):
            # deleted memory may have gone back to the host, so the first contender of a round would pay for new memory
            measured(contenders["raw"], folder / "out")
            for name, contender in contenders.items():
                samples[name].append(measured(contender, folder / "out"))
    finally:
        shutil.rmtree(folder)
    print(f"{size / _GB:.2f} GB, largest tensor {largest / _MB:.0f} MB, {rounds} rounds, {os.cpu_count()} cores")
    raw = min(sample.seconds for sample in samples["raw"])
    print(f"{'contender':<32} {'GB/s':>6} {'of raw':>7} {'anonymous MB':>13}")
    for name, found in samples.items():
        best, memory = min(one.seconds for one in found), max(one.anonymous_bytes for one in found)
        print(f"{name:<32} {size / _GB / best:>6.2f} {raw / best:>7.2f} {memory / _MB:>13.0f}")


def write_model(folder: Path, layers: int) -> tuple[int, int]:
    """Writes the model; returns its size and that of its largest tensor, in bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    }
    family = FAMILIES["llama"]
    shapes = {tensor.name: tensor.shape for tensor, _ in family.table(family.model(config)).tensors()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    sizes, places = [], {}
    for number, half in enumerate(halves, start=1):
        file_name = f"model-{number:05d}-of-{len(halves):05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            file.write(header_of({name: (torch.bfloat16, shapes[name]) for name in half}, {"format": "pt"}))
            for name in half:
                values = torch.randn(shapes[name], dtype=torch.bfloat16)
                file.write(raw_bytes(values))
                sizes.append(values.nbytes)
                places[name] = file_name
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes), max(sizes)


def write_raw(source: Path, out: Path, syncs: bool) -> float:
    """Writes the same bytes from memory; returns the seconds of writing."""
    content = [path.read_bytes() for path in sorted(source.glob("*.safetensors"))]
    began = time.monotonic()
    with out.open("wb") as file:
        for part in content:
            file.write(part)
        file.flush()
        if syncs:
            os.fsync(file.fileno())
    return time.monotonic() - began


def load_and_save(source: Path, out: Path) -> None:
    """Loads and saves the model with transformers."""
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(out)


def apart(work: Callable[[], Any]) -> Any:
    """Returns the result of the work, which runs in a forked process.

    This process must not compute itself: a fork after its OpenMP threads have started waits for them for ever.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def measured(contender: Callable[[Path], Any], out: Path) -> Sample:
    """Measures one run in a forked process."""
    sample: Sample = apart(lambda: _run(contender, out))
    shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink()
    return sample


def _run(contender: Callable[[Path], Any], out: Path) -> Sample:
    if contender.__code__.co_names[0] == "load_and_save":
        import transformers  # noqa: F401  not part of the work
    before = peak = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    own_seconds = contender(out)
    seconds = own_seconds if isinstance(own_seconds, float) else time.monotonic() - began
    done.set()
    watcher.join()
    return Sample(seconds, peak - before)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


if __name__ == "__main__":
    typer.run(main)

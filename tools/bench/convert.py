"""Conversions next to transformers' load and save and to a raw write: `python tools/bench/convert.py FOLDER`.

A Llama-shaped model with random bfloat16 weights is written into FOLDER, converted, and deleted; with --mxfp4 one of
GPT-OSS 20B's widths with its experts in MXFP4, which also returns to MXFP4. Contenders:

- "raw": the bytes of the safetensors files, from memory, into one new file, then fsync; and the same without
  fsync, which says how fast the page cache is.
- "import", "export": ours, with BLAKE3 of what is imported and fsync; "and proof" with the bitwise comparison at the
  end, which every conversion has.
- "transformers": from_pretrained and save_pretrained in the same dtype, MXFP4 as bfloat16; no checksum, no fsync, no
  comparison.

Every contender is a process of its own in every round; rounds alternate. Seconds are wall time inside the process after
imports; GB/s are best of all rounds, of the weights in bfloat16. cpu-s/GB are the least of all rounds, of all threads.
Memory is the largest RssAnon sampled every 5 ms, less that before the start.
"""

from __future__ import annotations

import filecmp
import json
import math
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
from mtrain.hf.io.mxfp4 import BLOCK_BYTES, BLOCK_SIZE, BLOCKS_SUFFIX, SCALES_SUFFIX
from mtrain.hf.io.safetensors import header_of, raw_bytes
from mtrain.hf.schema.registry import FAMILIES

_SAMPLE_S = 0.005
_MB = 1e6
_GB = 1e9
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    # the published one, 201088, would be as much in plain bfloat16 as two layers
    "vocab_size": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_OF_MXFP4 = ("1 worker", "transformers")
"""Ends of the names of contenders that convert it."""
_IN_MXFP4 = ("gate_up_proj", "down_proj")
"""Ends of the names that GPT-OSS has in MXFP4."""


class Sample(NamedTuple):
    """Measurement of one run of a contender."""

    seconds: float
    cpu_seconds: float
    anonymous_bytes: int
    """Growth of the process's anonymous memory."""


def main(
    folder: Annotated[Path, typer.Argument(help="For about four times the model's size.")],
    layers: Annotated[int, typer.Option(help="Each has 67 million parameters; with --mxfp4, 829 million.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    mxfp4: Annotated[bool, typer.Option("--mxfp4", help="GPT-OSS with its experts in MXFP4.")] = False,
    experts: Annotated[int, typer.Option(min=4, help="Experts of a layer, with --mxfp4.")] = 32,
) -> None:
    """Measures all contenders and prints a table."""
    source, ours = folder / "source", folder / "ours"
    folder.mkdir(parents=True)
    try:
        config = _GPT_OSS | {"num_local_experts": experts} if mxfp4 else _LLAMA
        size, largest = apart(lambda: write_model(source, layers, config))
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
        if mxfp4:
            contenders = {name: each for name, each in contenders.items() if name.endswith(_OF_MXFP4)}
            contenders["export in MXFP4 and proof, 1 worker"] = lambda out: export_hf(ours, out, None, "mxfp4", 1)
        samples: dict[str, list[Sample]] = {name: [] for name in contenders}
        for _ in range(rounds):
            # deleted memory may have gone back to the host, so the first contender of a round would pay for new memory
            measured(next(iter(contenders.values())), folder / "out")
            for name, contender in contenders.items():
                samples[name].append(measured(contender, folder / "out"))
        if mxfp4:
            print(f"{apart(lambda: rewritten(source, ours, folder / 'out')) / _GB:.3f} GB came back byte for byte")
    finally:
        shutil.rmtree(folder)
    print(f"{size / _GB:.2f} GB, largest tensor {largest / _MB:.0f} MB, {rounds} rounds, {os.cpu_count()} cores")
    first = min(sample.seconds for sample in next(iter(samples.values())))
    print(f"{'contender':<36} {'GB/s':>6} {'of first':>9} {'anonymous MB':>13} {'cpu-s/GB':>9}")
    for name, found in samples.items():
        best, memory = min(one.seconds for one in found), max(one.anonymous_bytes for one in found)
        cpu = min(one.cpu_seconds for one in found) / size * _GB
        print(f"{name:<36} {size / _GB / best:>6.2f} {first / best:>9.2f} {memory / _MB:>13.0f} {cpu:>9.2f}")


def write_model(folder: Path, layers: int, described: dict[str, Any] = _LLAMA) -> tuple[int, int]:
    """Writes a model; returns its size and that of its largest tensor, in bytes of bfloat16."""
    config = described | {"num_hidden_layers": layers}
    family = FAMILIES[config["model_type"]]
    meant = {tensor.name: tensor.shape for tensor, _ in family.table(family.model(config)).tensors()}
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, shape in meant.items():
        if "quantization_config" not in config or not name.endswith(_IN_MXFP4):
            stored[name] = (torch.bfloat16, shape)
            continue
        experts, inputs, outputs = shape
        blocks = (experts, outputs, inputs // BLOCK_SIZE)
        stored[name + BLOCKS_SUFFIX] = (torch.uint8, (*blocks, BLOCK_BYTES))
        stored[name + SCALES_SUFFIX] = (torch.uint8, blocks)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(stored)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    total, places = 0, {}
    for number, half in enumerate(halves, start=1):
        file_name = f"model-{number:05d}-of-{len(halves):05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            file.write(header_of({name: stored[name] for name in half}, {"format": "pt"}))
            for name in half:
                values = drawn(name, *stored[name])
                file.write(raw_bytes(values))
                total += values.nbytes
                places[name] = file_name
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = [math.prod(shape) * torch.bfloat16.itemsize for shape in meant.values()]
    return sum(sizes), max(sizes)


def drawn(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Draws the content of a tensor; scales are those of numbers below 1."""
    if dtype == torch.uint8:
        low, high = (110, 125) if name.endswith(SCALES_SUFFIX) else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype)


def rewritten(source: Path, ours: Path, out: Path) -> int:
    """Exports an import in MXFP4 and returns the bytes of its weights, which are those of the source."""
    export_hf(ours, out, None, "mxfp4", 1)
    names = sorted(path.name for path in source.iterdir())
    same, *others = filecmp.cmpfiles(source, out, names, shallow=False)
    assert (same, others) == (names, [[], []]), f"of {names} these came back: {same}"
    return sum(path.stat().st_size for path in out.glob("*.safetensors"))


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
    """Loads and saves the model with transformers, in bfloat16."""
    import transformers

    is_packed = "quantization_config" in json.loads((source / "config.json").read_text())
    plain = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if is_packed else {}
    transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto", **plain).save_pretrained(out)


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
    began, cpu_began = time.monotonic(), time.process_time()
    own_seconds = contender(out)
    cpu_seconds = time.process_time() - cpu_began
    seconds = own_seconds if isinstance(own_seconds, float) else time.monotonic() - began
    done.set()
    watcher.join()
    return Sample(seconds, cpu_seconds, peak - before)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


if __name__ == "__main__":
    typer.run(main)

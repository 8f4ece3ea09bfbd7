"""Weights by what has changed, side by side with all of them: `python tools/bench/parts/weight_deltas.py FOLDER TEXTS`.

One process trains a model from a folder of Hugging Face in bf16 on texts, and after each step hands its weights to a
copy, all of them and by changes in turn. Seconds are medians of the time that one thread computes, from the trainer's
weights to those of the copy, without a network between them; the last column is the speed of one below which changes
arrive earlier. A first step of Adam moves every weight by the learning rate, so later ones do not change more.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated

import torch
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain import Datum, Engine, WeightCopy, load_config
from mtrain.hf.tokenizer.tokenizer import load_tokenizer

RATES = (1e-6, 1e-5, 1e-4)
NUM_TOKENS, NUM_SAMPLES = 128, 8
"""Tokens of a sample, and samples of a step."""


def measure(engine: Engine, batches: list[list[Datum]], rate: float) -> str:
    """Takes a step for each batch; returns a row of the table, of syncs after the first."""
    engine.begin_anew()
    deltas, copy = engine.weight_deltas(), WeightCopy()
    sizes: list[int] = []
    there = {name: torch.empty_like(tensor) for name, tensor in engine.named_hf_tensors()}

    def changes() -> None:
        parts = 0
        for part in deltas.parts():
            copy.apply(part)
            parts += part.numel()
        sizes.append(parts)

    def whole() -> None:
        for name, tensor in engine.named_hf_tensors():
            there[name].copy_(tensor)

    changes()
    seconds: dict[Callable[[], None], list[float]] = {whole: [], changes: []}
    for batch in batches:
        engine.forward_backward(batch)
        engine.optim_step(lr=rate)
        for action, found in seconds.items():
            began = time.process_time()
            action()
            found.append(time.process_time() - began)
        assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in there.items())
    whole_s, changes_s = (statistics.median(found) for found in seconds.values())
    all_bytes, some_bytes = sum(each.nbytes for each in there.values()), statistics.median(sizes[1:])
    speed = (all_bytes - some_bytes) / (changes_s - whole_s) / 1e9
    return (
        f"| {rate:g} | {all_bytes / 1e6:.0f} | {whole_s:.2f} | {some_bytes / 1e6:.1f} ({some_bytes / all_bytes:.1%}) | "
        f"{changes_s:.2f} | {speed:.2f} GB/s |"
    )


def main(
    folder: Annotated[Path, typer.Argument(help="Model of Hugging Face, with its tokenizer.")],
    texts: Annotated[Path, typer.Argument(help="Lines of JSON with messages.")],
    num_steps: Annotated[int, typer.Option(help="Steps at each learning rate.")] = 2,
) -> None:
    """Prints a table in Markdown."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    ids = [tokenizer.encode("\n".join(each["content"] for each in line["messages"]))[:NUM_TOKENS] for line in lines]
    starts = range(0, num_steps * NUM_SAMPLES, NUM_SAMPLES)
    batches = [[Datum(each) for each in (ids * num_steps)[start : start + NUM_SAMPLES]] for start in starts]
    given = [f"model.hf={folder}", "train={global_batch_size: 8, num_steps: 10, precision: bf16, device: cpu}"]
    given += [f"data={{kind: mock, seq_length: {NUM_TOKENS}}}", "run.dir=unused", "optimizer.lr=1e-6"]
    print("| learning rate | all, MB | s | changes, MB | s | changes arrive earlier below |\n|---|---|---|---|---|---|")
    with Engine(load_config([], given)) as engine:
        for rate in RATES:
            print(measure(engine, batches, rate), flush=True)


if __name__ == "__main__":
    typer.run(main)

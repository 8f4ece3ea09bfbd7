"""Cost of making batches, in tokens per processor second: `python tools/bench/input/loading.py`.

A corpus of random tokens in documents of log-normal lengths, as a `.bin/.idx` pair, and the same documents as
conversations. Contenders take turns over as many rows:

- "megatron": GPTDataset of megatron-core with its index files there, and torch's DataLoader in this process.
- "ours": `StepLoader`, read by the caller without a thread, microbatches with labels, weights and counts.
- "ours, packed": the documents as conversations, tokenised in advance, packed into rows of the same width.

The last column is how many tokens per second a rank can train before one processor cannot feed it: the prefetch
thread hides loading in steps that take longer.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain import load_config
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.data.loader import StepLoader

VOCAB = 32_000


class Sizes(NamedTuple):
    """Sizes of the data."""

    documents: int
    rows: int
    """Number of rows in a step."""
    seq: int


def main(
    documents: Annotated[int, typer.Option(min=100)] = 20_000,
    rows: Annotated[int, typer.Option(min=1, help="Of a step.")] = 64,
    seq: Annotated[int, typer.Option(min=16)] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Of a round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measures all contenders and prints a table."""
    sizes = Sizes(documents, rows, seq)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_documents(folder, sizes)
        write_tokenizer(folder / "tokenizer.json")
        contenders = {
            "megatron": megatron(folder, sizes),
            "ours": ours(folder, sizes),
            "ours, packed": packed(folder, sizes),
        }
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                start = time.process_time()
                tokens = sum(next(step) for _ in range(steps))
                speeds[name].append(tokens / (time.process_time() - start))
    print(f"{documents} documents, steps of {rows} rows of {seq}, {steps} steps a round, {rounds} rounds")
    print(f"{'contender':<16} {'M tokens / cpu-s':>17} {'of megatron':>12}")
    for name, found in speeds.items():
        speed = statistics.median(found)
        print(f"{name:<16} {speed / 1e6:>17.2f} {speed / statistics.median(speeds['megatron']):>12.2f}")


def write_documents(folder: Path, sizes: Sizes) -> None:
    """Writes the pair `corpus`, and `rows.jsonl` with the same documents."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 1.0, sizes.documents), 8, sizes.seq).astype(int)
    with writing_corpus(str(folder / "corpus"), VOCAB) as writer, (folder / "rows.jsonl").open("w") as lines:
        for length in lengths:
            ids = draw.integers(0, VOCAB, length, np.uint16)
            writer.add(ids)
            lines.write(json.dumps({"input_ids": ids.tolist(), "loss_mask": [0, *[1] * (length - 1)]}) + "\n")


def write_tokenizer(path: Path) -> None:
    """Writes the tokenizer that conversations name; tokenised data only need its size."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<unk>": 0, "</s>": 1, **{str(number): number for number in range(2, VOCAB)}}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(path))
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))


def settings(folder: Path, sizes: Sizes) -> list[str]:
    """Returns the settings of a run; the model is not built."""
    return [
        f"run.dir={folder}/run",
        "optimizer.lr=0.001",
        f"model={{num_layers: 1, hidden_size: 64, ffn_hidden_size: 64, num_attention_heads: 1, vocab_size: {VOCAB}}}",
        f"train={{global_batch_size: {sizes.rows}, micro_batch_size: 4, num_steps: 1000000, device: cpu}}",
    ]


def tokens_of(loader: StepLoader) -> Iterator[int]:
    """Yields the number of tokens of step after step, as they are made."""
    for step in itertools.count():
        yield sum(int(batch.tokens.numel()) for batch in loader.batches(step))


def ours(folder: Path, sizes: Sizes) -> Iterator[int]:
    """Yields the tokens of steps with windows of the pair."""
    data = f"data={{kind: indexed, train: [{{path: {folder}/corpus}}], seq_length: {sizes.seq}}}"
    return tokens_of(StepLoader(load_config([], [*settings(folder, sizes), data]), 0, 1))


def packed(folder: Path, sizes: Sizes) -> Iterator[int]:
    """Yields the tokens of steps with conversations, about as many as fill as many rows."""
    per_row = sizes.seq // 400  # their mean length is about that
    data = f"data={{kind: sft, format: tokens, train: [{{path: {folder}/rows.jsonl}}], seq_length: {sizes.seq}}}"
    given = [*settings(folder, sizes), data, f"data.tokenizer={folder}/tokenizer.json", "data.packing={}"]
    return tokens_of(StepLoader(load_config([], [*given, f"train.global_batch_size={sizes.rows * per_row}"]), 0, 1))


def megatron(folder: Path, sizes: Sizes) -> Iterator[int]:
    """Yields the tokens of steps of megatron-core's dataset, in batches of four rows."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config: Any = GPTDatasetConfig(
        random_seed=1,
        sequence_length=sizes.seq,
        blend=None,
        split="1",
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(folder / "cache"),
        mid_level_dataset_surplus=0.005,
    )
    pair = IndexedDataset(str(folder / "corpus"))
    order = np.arange(sizes.documents, dtype=np.int32)
    dataset: Any = GPTDataset(pair, str(folder / "corpus"), order, 100_000, Split.train, config)
    found = torch.utils.data.DataLoader(dataset, batch_size=4)
    per_step = sizes.rows // 4
    while True:
        batches = iter(found)
        while chunk := list(itertools.islice(batches, per_step)):
            yield sum(int(batch["tokens"].numel()) for batch in chunk)


class _Tokenizer:
    """Tokenizer with the attributes that megatron-core's dataset reads."""

    eod = VOCAB - 1
    pad = -1
    vocab_size = VOCAB
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "none"}


if __name__ == "__main__":
    typer.run(main)

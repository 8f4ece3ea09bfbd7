"""Finetuning packed, padded and padded to the longest of a batch: `python tools/bench/packed_training.py`.

Each contender trains one step on the same conversations, forward, backward and update: mtrain with packed rows, mtrain
with a row a conversation, and a plain loop over transformers' Llama of the same shape that pads each batch of eight to
its longest. A fourth is mtrain with each conversation in a microbatch of its own length: the cost of the tokens alone.
Rounds of all contenders alternate in one process, and processor time is compared, which other work on the machine
changes least. Prompts are 77 % of the tokens; trained tokens are those of the answers. With `--hybrid` three of four
layers are gated delta nets, and transformers' model is Qwen3.5's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain import Datum, Engine
from mtrain.config import Config
from mtrain.core.batch.collate import RowForm, collate
from mtrain.core.batch.datum import sample_of
from tools.bench.peers.padding import BATCH_SIZE, batched, padded

HIDDEN, LAYERS, HEADS, GROUPS, FFN, VOCAB = 256, 4, 8, 4, 704, 8192
PROMPTS = 0.77
NET = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 32, "value_head_dim": 32}
HYBRID = {
    "head_dim": HIDDEN // HEADS,
    "qk_norm": True,
    "zero_centered_norm": True,
    "attention_gate": True,
    "rope": {"partial": 0.25},
    "delta_net": NET,
}
"""Qwen3.5 of the same size."""


class Rows(NamedTuple):
    """Sizes of rows, and what the layers are."""

    seq_length: int
    row_width: int
    is_hybrid: bool


def config(rows: Rows, is_packed: bool) -> Config:
    """Makes the configuration, with the same model and optimizer for both."""
    train: dict[str, Any] = {"global_batch_size": 64, "num_steps": 1000, "precision": "fp32", "device": "cpu"}
    train |= {"tokens_per_micro_batch": rows.row_width} if is_packed else {"micro_batch_size": BATCH_SIZE}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "ffn_hidden_size": FFN,
                "num_attention_heads": HEADS,
                "num_query_groups": GROUPS,
                "vocab_size": VOCAB,
                **(HYBRID if rows.is_hybrid else {}),
            },
            "train": train,
            "optimizer": {"lr": 1e-4, "schedule": "constant"},
            "data": {
                "kind": "mock",
                "seq_length": rows.seq_length,
                "isolate_documents": is_packed,
                "packing": {} if is_packed else None,
            },
        }
    )


def conversations(count: int, seq_length: int, seed: int = 0) -> list[Datum]:
    """Draws conversations of log-normal lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.0, 0.9, count).astype(int), 8, seq_length)
    return [
        Datum(rng.integers(0, VOCAB, n + 1).tolist(), [float(place >= PROMPTS * n) for place in range(n + 1)])
        for n in lengths
    ]


def transformers_loop(rows: Rows) -> Callable[[Sequence[Datum]], None]:
    """Builds a step of a plain loop; gradients of a batch are accumulated over its parts."""
    model = theirs(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Sequence[Datum]) -> None:
        trained = sum(sum(datum.weights or ()) for datum in batch)
        for part in batched(batch):
            ids, labels = padded(part)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(datum.input_ids) for datum in part])[:, None]
            loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels, num_items_in_batch=trained).loss
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def theirs(rows: Rows) -> Any:
    """Builds transformers' model of the same shape."""
    import transformers

    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": rows.seq_length,
        "tie_word_embeddings": False,
    }
    if not rows.is_hybrid:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    net = {f"linear_{key}": value for key, value in NET.items()}
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**common, **net, head_dim=HIDDEN // HEADS))


def each_alone(engine: Engine) -> Callable[[Sequence[Datum]], None]:
    """Builds a step of mtrain in which each conversation is a microbatch of its own length."""
    training, form = engine._built().training, RowForm.of(engine.config)

    def step(batch: Sequence[Datum]) -> None:
        samples = [sample_of(datum, "a sample", engine.config) for datum in batch]
        rows = [collate([[sample]], replace(form, width=sample.width), None) for sample in samples]
        step = training.open()
        training.accumulate(step, rows, len(rows), engine._objective, is_last=False)
        training.update(training.reduce(step), lr=1e-4)

    return step


def stepping(engine: Engine) -> Callable[[Sequence[Datum]], None]:
    """Builds a step of mtrain."""

    def step(batch: Sequence[Datum]) -> None:
        engine.forward_backward(batch)
        engine.optim_step()

    return step


def main(
    rounds: Annotated[int, typer.Option(help="rounds of all contenders")] = 5,
    seq_length: Annotated[int, typer.Option(help="positions of the longest conversation")] = 1024,
    row_width: Annotated[int, typer.Option(help="positions of a packed row")] = 2048,
    batch: Annotated[int, typer.Option(help="conversations of a step")] = 64,
    hybrid: Annotated[bool, typer.Option(help="with gated delta nets in three of four layers")] = False,
) -> None:
    """Prints processor seconds of a step and trained tokens a second."""
    data = conversations(batch, seq_length)
    trained = sum(sum(datum.weights or ()) for datum in data)
    rows = Rows(seq_length, row_width, hybrid)
    names = ("packed", "padded to seq_length", "transformers, padded to the longest", "each alone, as it is")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            # one engine at a time in a process; building it is not measured
            found = _measured(name, data, rows)
            if number:  # the first round warms up
                seconds[name].append(found)
    of = "hybrid" if hybrid else "dense"
    print(f"torch {torch.__version__}, {of}, {batch} conversations, {trained:.0f} trained tokens, {rounds} rounds")
    print("| contender | cpu-s a step | trained tokens a cpu-s | packed is faster by |")
    print("|---|---|---|---|")
    for name, each in seconds.items():
        median = statistics.median(each)
        ratio = statistics.median(other / own for own, other in zip(seconds["packed"], each))
        print(f"| {name} | {median:.2f} | {trained / median:.0f} | {ratio:.2f} |")


def _measured(name: str, data: Sequence[Datum], rows: Rows) -> float:
    if name.startswith("transformers"):
        return _timed(transformers_loop(rows), data)
    with Engine(config(rows, name == "packed")) as engine:
        return _timed(each_alone(engine) if name.startswith("each") else stepping(engine), data)


def _timed(step: Callable[[Sequence[Datum]], None], data: Sequence[Datum]) -> float:
    step(data[:BATCH_SIZE])  # allocates
    start = time.process_time()
    step(data)
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)

"""Finetuning with images, packed and not, over a plain loop of transformers: `python tools/bench/image_training.py`.

Each contender trains all parameters of a small Qwen3-VL for one step on the same conversations, forward, backward and
update: mtrain with packed rows, mtrain with each conversation in a microbatch of its own length, mtrain with rows of
one conversation padded to `data.seq_length`, and transformers' own model, which pads each batch of eight to its
longest. Rounds of all contenders alternate in one process, and processor time is compared, which other work on the
machine changes least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain import Engine
from mtrain.config import Config
from mtrain.core.batch.collate import RowForm, collate
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.sample import Sample, shifted
from mtrain.data.loader import Given, RowsOfRank
from mtrain.hf.schema.registry import family_of
from tools.bench.peers.padding import BATCH_SIZE

VOCAB, IMAGE = 8192, 8000
PATCH, MERGE = 16, 2
PROMPTS = 0.77
SHAPE: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 256,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
    },
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
    "tie_word_embeddings": False,
}

Step = Callable[[Sequence[Sample]], None]


def theirs() -> Any:
    """Builds transformers' model."""
    import transformers

    return transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**SHAPE))


def config(seq_length: int, row_width: int | None) -> Config:
    """Makes the configuration of packed rows, or of a row for each conversation; the model is transformers'."""
    import transformers

    described = transformers.Qwen3VLConfig(**SHAPE).to_dict()
    family = family_of(described)
    model = family.with_vision(family.model(described), described)[1].model_dump()
    model["vision"] |= {"freeze_tower": False, "freeze_projector": False}
    train: dict[str, Any] = {"global_batch_size": 64, "num_steps": 1000, "precision": "fp32", "device": "cpu"}
    if row_width is None:
        train["micro_batch_size"], data = BATCH_SIZE, {}
    else:
        train["tokens_per_micro_batch"], data = row_width, {"isolate_documents": True, "packing": {}}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": model,
            "train": train,
            "optimizer": {"lr": 1e-4, "schedule": "constant"},
            "data": {"kind": "mock", "seq_length": seq_length, **data},
        }
    )


def conversations(count: int, seq_length: int) -> list[Sample]:
    """Draws conversations of log-normal lengths, each of which begins with an image that takes about half of it."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.9, count).astype(int), 16, seq_length)
    return [_conversation(rng, int(length)) for length in lengths]


def _conversation(rng: np.random.Generator, length: int) -> Sample:
    side = max(1, int((length / 2) ** 0.5))
    features = side * side
    ids = rng.integers(0, IMAGE, length + 1)
    ids[:features] = IMAGE
    answers = np.arange(1, length + 1) >= PROMPTS * length
    axes = np.empty((length, 3), np.int64)
    axes[:features] = np.indices((1, side, side)).reshape(3, -1).T
    axes[features:] = side + np.arange(length - features)[:, None]
    places = np.where(np.arange(length) < features, np.arange(length), -1)
    grid = np.array([[1, side * MERGE, side * MERGE]])
    pixels = rng.normal(size=(features * MERGE**2, 3 * 2 * PATCH**2)).astype(np.float32)
    images = SampleImages(pixels=pixels, grids=grid, places=places, axes=axes)
    return replace(shifted(ids, answers.astype(float)), images=images)


def in_rows(engine: Engine) -> Step:
    """Builds a step of mtrain on the rows of its configuration."""
    training, rows = engine._built().training, RowsOfRank(engine.config, 0, 1)

    def step(samples: Sequence[Sample]) -> None:
        given = Given(samples)
        batches = rows.microbatches(rows.plan(given, len(samples)), given, has_first=True)
        training.update(training.forward_backward(batches), lr=1e-4)

    return step


def each_alone(engine: Engine) -> Step:
    """Builds a step of mtrain in which each conversation is a microbatch of its own length."""
    training, form = engine._built().training, RowForm.of(engine.config)

    def step(samples: Sequence[Sample]) -> None:
        batches = [collate([[each]], replace(form, width=each.width), None) for each in samples]
        training.update(training.forward_backward(batches), lr=1e-4)

    return step


def transformers_loop() -> Step:
    """Builds a step of a plain loop; gradients of a step are accumulated over its batches."""
    model = theirs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(samples: Sequence[Sample]) -> None:
        trained = sum(float(each.mask.sum()) for each in samples)
        for start in range(0, len(samples), BATCH_SIZE):
            inputs, labels = padded_to_longest(samples[start : start + BATCH_SIZE])
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
            torch.autograd.backward(F.cross_entropy(logits, labels.flatten(), reduction="sum") / trained)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def padded_to_longest(part: Sequence[Sample]) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns the inputs of transformers' model, and labels [samples, longest], -100 where none counts."""
    longest = max(each.width for each in part)
    ids, labels, mask = (torch.full((len(part), longest), fill) for fill in (0, -100, 0))
    for row, each in enumerate(part):
        ids[row, : each.width] = torch.from_numpy(each.tokens)
        labels[row, : each.width] = torch.from_numpy(np.where(each.mask > 0, each.labels, -100))
        mask[row, : each.width] = 1
    images = [each.images for each in part if each.images is not None]
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.from_numpy(np.concatenate([each.pixels for each in images])),
        "image_grid_thw": torch.from_numpy(np.concatenate([each.grids for each in images])),
    }
    return inputs, labels


PACKED, ALONE, ROWS = "mtrain, packed", "mtrain, each alone", "mtrain, a row of seq_length each"
THEIRS = "transformers, padded to the longest"


def main(
    rounds: Annotated[int, typer.Option(help="rounds of all contenders")] = 5,
    seq_length: Annotated[int, typer.Option(help="positions of the longest conversation")] = 1024,
    row_width: Annotated[int, typer.Option(help="positions of a packed row")] = 2048,
    batch: Annotated[int, typer.Option(help="conversations of a step")] = 64,
) -> None:
    """Prints processor seconds of a step, and tokens a second."""
    samples = conversations(batch, seq_length)
    tokens = sum(each.width for each in samples)
    seconds: dict[str, list[float]] = {name: [] for name in (PACKED, ALONE, ROWS, THEIRS)}
    for number in range(rounds + 1):
        for name, found in seconds.items():
            measured = _measured(name, samples, config(seq_length, None if name == ROWS else row_width))
            if number:  # the first round warms up
                found.append(measured)
    print(f"torch {torch.__version__}, {batch} conversations with an image each, {tokens:,} tokens, {rounds} rounds")
    print("| contender | cpu-s a step | tokens a cpu-s | over transformers |")
    print("|---|---|---|---|")
    for name, found in seconds.items():
        median = statistics.median(found)
        ratio = statistics.median(other / own for own, other in zip(found, seconds[THEIRS], strict=True))
        print(f"| {name} | {median:.2f} | {tokens / median:.0f} | {ratio:.2f} |")


def _measured(name: str, samples: Sequence[Sample], run: Config) -> float:
    if name == THEIRS:
        return _timed(transformers_loop(), samples)
    with Engine(run) as engine:
        return _timed(each_alone(engine) if name == ALONE else in_rows(engine), samples)


def _timed(step: Step, samples: Sequence[Sample]) -> float:
    step(samples[:BATCH_SIZE])  # allocates
    start = time.process_time()
    step(samples)
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)

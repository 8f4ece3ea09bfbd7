"""Global batches that are hard on a loss: ragged masks, empty samples, ranks without loss tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mtrain.core.batch.sample import Sample, shifted

BATCH, SEQ, VOCAB = 16, 32, 61
"""Number of samples in a step, of positions in a row, and of real tokens."""

GlobalBatch = list[Sample]
"""Samples of one step by slot."""

Counts = list[int]

RAGGED: Counts = [32, 0, 1, 30, 16, 0, 5, 25, 1, 31, 8, 3, 20, 0, 2, 12]
"""Number of loss tokens of each sample, 0 % to 97 % masked, three samples empty; at random places of the row."""
AT_THE_END: Counts = [4, 0, 1, 3, 2, 4, 1, 0, 2, 3, 4, 1, 0, 2, 4, 3]
"""Number of loss tokens of each sample, all in the last four positions: with cp = 2 and cp = 4 they are rank 0's."""
FIRST_RANK: Counts = [32, *[0] * 7, 9, *[0] * 7]
"""Number of loss tokens, only in slots 0 and 8: other data-parallel ranks have none, for dp and micro-batch sizes to
4."""


def random_places(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Draws a mask [SEQ] with `count` ones."""
    mask = np.zeros(SEQ)
    mask[rng.permutation(SEQ)[:count]] = 1.0
    return mask


def last_places(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Draws a mask [SEQ] with `count` ones among the last four positions."""
    mask = np.zeros(SEQ)
    mask[SEQ - 4 + rng.permutation(4)[:count]] = 1.0
    return mask


def batch_of(rng: np.random.Generator, masks: list[NDArray[np.float64]], weights: list[float]) -> GlobalBatch:
    """Draws random tokens under these masks and sample weights."""
    rows = [rng.integers(0, VOCAB, SEQ + 1) for _ in masks]
    return [
        Sample(tokens=row[:-1], labels=np.where(mask > 0, row[1:], 0), mask=mask, weight=weight)
        for row, mask, weight in zip(rows, masks, weights, strict=True)
    ]


def three_steps(seed: int = 7) -> list[GlobalBatch]:
    """Draws ragged masks; a context-parallel rank without loss tokens; data-parallel ranks without loss tokens."""
    rng = np.random.default_rng(seed)
    ones = [1.0] * BATCH
    return [
        batch_of(rng, [random_places(rng, count) for count in RAGGED], ones),
        batch_of(rng, [last_places(rng, count) for count in AT_THE_END], ones),
        batch_of(rng, [random_places(rng, count) for count in FIRST_RANK], ones),
    ]


def two_steps(seed: int = 7) -> list[GlobalBatch]:
    """Draws all difficulties of `three_steps`; in the second step all other ranks have none of the few loss tokens."""
    rng = np.random.default_rng(seed)
    ones = [1.0] * BATCH
    few = [min(count, size) for count, size in zip(FIRST_RANK, AT_THE_END, strict=True)]
    return [
        batch_of(rng, [random_places(rng, count) for count in RAGGED], ones),
        batch_of(rng, [last_places(rng, count) for count in few], ones),
    ]


def weighted_steps(seed: int = 8) -> list[GlobalBatch]:
    """Draws `three_steps` with fractional sample weights (one of them 0) and fractional token weights."""
    rng = np.random.default_rng(seed)
    steps = []
    for batch in three_steps(seed):
        samples = [1.0, 0.25, 2.5, 0.1, 1.0, 3.0, 0.7, 0.3, 0.9, 0.0, 1.1, 0.2, 1 / 3, 1.7, 0.6, 0.05]
        masks = [sample.mask * rng.choice([1.0, 0.5, 0.125, 0.3], SEQ) for sample in batch]
        steps.append(batch_of(rng, masks, samples))
    return steps


def cut(sample: Sample, length: int) -> Sample:
    """Cuts a sample of one document to its first `length` positions."""
    fields = {name: getattr(sample, name)[:length] for name in ("tokens", "labels", "mask")}
    return replace(sample, **fields)


def full_batch(seed: int = 9) -> GlobalBatch:
    """Draws a batch in which every token has a loss, as in pretraining on whole rows."""
    rng = np.random.default_rng(seed)
    return batch_of(rng, [np.ones(SEQ)] * BATCH, [1.0] * BATCH)


def empty_batch(seed: int = 10) -> GlobalBatch:
    """Draws a batch without loss tokens."""
    rng = np.random.default_rng(seed)
    return batch_of(rng, [np.zeros(SEQ)] * BATCH, [1.0] * BATCH)


def documents_steps(seed: int = 11) -> list[GlobalBatch]:
    """Draws rows of several documents whose edges fall inside chunks and on chunk borders, and which cross every
    border."""
    rng = np.random.default_rng(seed)
    edges = [[], [1], [31], [16], [8, 24], [4, 12, 20, 28], [3, 11, 19, 27], [5, 6, 7], [15, 17], [2, 30], [13]]
    edges += [[8, 16, 24], [10, 11, 25], [1, 2, 3, 4], [29, 30, 31], [9, 18]]
    steps = []
    for _ in range(2):
        masks = []
        for row, count in zip(edges, RAGGED, strict=True):
            mask = random_places(rng, count)
            mask[[edge - 1 for edge in row]] = 0.0  # no token is predicted across an edge
            masks.append(mask)
        plain = batch_of(rng, masks, [1.0] * BATCH)
        steps.append([_with_documents(sample, row) for sample, row in zip(plain, edges, strict=True)])
        edges = edges[5:] + edges[:5]
    return steps


def _with_documents(sample: Sample, edges: list[int]) -> Sample:
    starts = np.zeros(SEQ, np.int32)
    starts[edges] = edges
    return Sample(
        tokens=sample.tokens,
        labels=sample.labels,
        mask=sample.mask,
        weight=sample.weight,
        document_starts=np.maximum.accumulate(starts),
    )


def padded_steps(seed: int = 12) -> list[GlobalBatch]:
    """Draws questions and answers of ragged lengths, the prompt without a loss; one batch of the second step has no
    loss at all."""
    rng = np.random.default_rng(seed)
    steps = []
    for prompts in ([0.5] * BATCH, [1.0, *[0.2] * (BATCH - 1)]):
        rows = []
        for slot, share in enumerate(prompts):
            length = int(rng.integers(1, SEQ + 1)) if slot else SEQ - 3
            mask = np.zeros(length)
            mask[int(share * length) :] = 1.0
            rows.append(shifted(rng.integers(0, VOCAB, length + 1), mask))
        steps.append(rows)
    return steps

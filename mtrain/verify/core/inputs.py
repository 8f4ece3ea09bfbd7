"""Comparison of a layout's samples and learning rates with the raw samples and the published schedule.

Packed rows are split first: each sample is compared as if it were alone in a row.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.loss import TermSection
from mtrain.core.batch.batch import Microbatch
from mtrain.verify.core.result import Deviation
from mtrain.verify.core.tolerances import RATE_TOLERANCE, UNIT_ROUNDOFF
from mtrain.verify.reference.aggregation import token_weights
from mtrain.verify.reference.schedule import published_rate
from mtrain.verify.reference.text import Rows, Text, rows_of

_IDS, _EXTRA, _EXPERTS = "sequence ids", "extra ", "routed experts"

Fields = dict[str, NDArray[Any]]


def rate_deviations(rates: Mapping[int, float], config: Config) -> Iterator[Deviation]:
    """Yields deviations of learning rates, relative to the highest rate."""
    for number, found in rates.items():
        exact = published_rate(number, config.optimizer, config.train.num_steps)
        yield Deviation("lr", "lr", number + 1, abs(found - exact) / config.optimizer.lr, RATE_TOLERANCE)


def expected_fields(texts: Sequence[Text], config: Config) -> Fields:
    """Returns the rows of a global batch by slot, made from the raw samples."""
    rows = rows_of(texts, config.data.seq_length, config.model.vocab_size, torch.device("cpu"))
    places = torch.arange(rows.tokens.shape[1])
    fields = {
        "tokens": rows.tokens,
        "labels": rows.labels,
        "positions": torch.where(rows.is_text, rows.positions, 0),
        "documents": torch.where(rows.is_text, places - rows.positions, 0),
        "padding": ~rows.is_text,
        **{f"weights of {name}": weights for name, weights in _weights(rows, config).items()},
        **{f"{_EXTRA}{name}": each for name, each in rows.extras.items()},
        **({} if rows.routed_experts is None else {_EXPERTS: rows.routed_experts}),
    }
    return {name: field.numpy() for name, field in fields.items()}


def _weights(rows: Rows, config: Config) -> dict[str, torch.Tensor]:
    sections: dict[str, TermSection] = {"main": config.loss, **config.loss.side_terms}
    found = {name: token_weights(rows.weights, rows.sample_weights, term) for name, term in sections.items()}
    for depth in range(1, config.model.num_predictions):
        found[f"mtp_{depth}"] = token_weights(rows.ahead(depth).weights, rows.sample_weights, config.loss)
    return found


def sample_deviations(step: int, batches: Sequence[Microbatch], expected: Fields) -> Iterator[Deviation]:
    """Yields the shares of samples that differ from `expected_fields`, however rows, ranks and microbatches hold them.

    `batches` are those of all ranks; `step` counts from 1.
    """
    length = expected["tokens"].shape[1]
    found = [alone for batch in batches for row in _rows(batch) for alone in _samples(row, batch, length)]
    pairs = _paired(found, expected["tokens"])
    size = len(expected["tokens"])
    yield Deviation("samples", "tokens", step, (max(size, len(found)) - len(pairs)) / size, 0.0)
    for name, values in expected.items():
        if name != "tokens":
            differing = sum(not _is_alike(name, found[own], values[slot], expected, slot) for own, slot in pairs)
            yield Deviation("samples", name, step, differing / size, 0.0)


def _rows(batch: Microbatch) -> Iterator[Fields]:
    starts = torch.zeros_like(batch.tokens) if batch.document_starts is None else batch.document_starts
    experts = batch.choices.get(ROUTED_EXPERTS)
    for row in range(len(batch.tokens)):
        padding = {} if batch.is_padding is None else {"padding": batch.is_padding[row].numpy()}
        yield {
            "tokens": batch.tokens[row].numpy(),
            "labels": batch.labels[row].numpy(),
            "positions": batch.positions[row].numpy(),
            "documents": starts[row].numpy(),
            **padding,
            **{f"weights of {term}": weights[row].numpy() for term, weights in batch.weights.items()},
            **{f"{_EXTRA}{name}": each[row].numpy() for name, each in batch.extras.items()},
            **({} if experts is None else {_EXPERTS: experts[row].numpy()}),
            **({} if batch.sequence_ids is None else {_IDS: batch.sequence_ids[row].numpy()}),
        }


def _samples(row: Fields, batch: Microbatch, length: int) -> Iterator[Fields]:
    """Yields the samples of a row, each as if alone in a row of this length; skips empty ones."""
    if batch.sequence_ids is None:
        yield row
        return
    edges = [0, *(np.flatnonzero(np.diff(row[_IDS])) + 1), len(row[_IDS])]
    for start, end in itertools.pairwise(edges):
        alone = {name: values[start:end] for name, values in row.items() if name != _IDS}
        alone["documents"] = alone["documents"] - start
        if any(alone[name].any() for name in ("tokens", "labels", "weights of main")):
            yield {name: _as_long(values, length, fill=name == "padding") for name, values in alone.items()}


def _as_long(values: NDArray[Any], length: int, fill: bool) -> NDArray[Any]:
    """Pads or cuts values to a length; expected samples only lose padding."""
    filler = np.full((max(0, length - len(values)), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values[:length], filler])


def _paired(found: Sequence[Fields], tokens: NDArray[Any]) -> list[tuple[int, int]]:
    slots: dict[bytes, list[int]] = defaultdict(list)
    for slot in reversed(range(len(tokens))):
        slots[tokens[slot].tobytes()].append(slot)
    pairs = []
    for number, row in enumerate(found):
        if slots[row["tokens"].tobytes()]:
            pairs.append((number, slots[row["tokens"].tobytes()].pop()))
    return pairs


def _is_alike(name: str, row: Fields, exact: NDArray[Any], expected: Fields, slot: int) -> bool:
    """Compares a field where it matters: labels where they count, positions and documents where text is."""
    if name not in row:
        return name == "padding"  # not needed by this configuration
    own, is_text = row[name], ~expected["padding"][slot]
    if name.startswith("weights of "):
        return bool(np.all(np.abs(own - exact) <= 2 * UNIT_ROUNDOFF * np.abs(exact)))
    if name == "labels" or name.startswith(_EXTRA):
        counts = expected["weights of main"][slot] > 0
        return bool(np.array_equal(own[counts], exact[counts]))
    return bool(np.array_equal(own, exact) if name == "padding" else np.array_equal(own[is_text], exact[is_text]))

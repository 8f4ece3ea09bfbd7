"""Samples of files as token ids, and rows of a global batch from them and from document edges.

Samples from JSONL, and the tokens that are learned:

    prompt/response:  bos? + prompt + response + eos             learned: response, eos
    messages:         bos? + for each message header + content   learned: content and eos of the assistant's messages
                      + (eos if it is the assistant's)

The header is "### role\\n", with "\\n\\n" before it from the second message on; each piece is tokenised separately.

Windows of a tokenised corpus are read from its two files. `.idx`: 9 bytes of magic, version (u64), element type (u8),
number of sequences n (u64) and of document edges d (u64), n lengths (i32), n byte offsets (i64), d edges (i64). A
document is the sequences between two edges. An epoch concatenates the documents in some order, and with windows of s
tokens, window w holds tokens w s ... w s + s of that stream.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.hf.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Picture:
    """Image in a sample: takes one token for each merge x merge patches, from `start` on, and another after each row of
    them in Mistral 3."""

    start: int
    rows: int
    """Height in patches."""
    columns: int
    pixels: NDArray[np.float32]
    """Flattened patches, [rows x columns, elements of a patch], ordered by blocks of merge x merge patches, or row by
    row for Gemma 3 and Mistral 3."""
    content: bytes = b""
    """The image's file; empty for random pixels."""


@dataclass(frozen=True)
class Text:
    """Sample as read, not shifted, masked or padded."""

    ids: NDArray[np.int64]
    """Token ids, [n], 1 <= n <= seq_length + 1."""
    counts: NDArray[np.float64]
    """Weight of the prediction of each token, [n]; the first is never predicted."""
    weight: float = 1.0
    edges: tuple[int, ...] = ()
    """Positions in `ids` where isolated documents begin, ascending, never 0."""
    extras: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Extras of each token by name, [n]; the first is unused."""
    routed_experts: NDArray[np.int64] | None = None
    """Experts of each read token, [n, layers, top_k], -1 where the router chooses; the last row is unused. None: the
    router chooses everywhere."""
    pictures: tuple[Picture, ...] = ()
    """Images, in order."""


@dataclass(frozen=True)
class Rows:
    """Rows of a global batch, one per sample; [batch, seq] except `sample_weights`."""

    tokens: Tensor
    labels: Tensor
    """0 where no next token exists or counts."""
    weights: Tensor
    """Weight w_it of each prediction, float64."""
    documents: Tensor
    """Document number in the row; -1 outside the text."""
    positions: Tensor
    """Position in the document."""
    sample_weights: Tensor
    """Sample weights v_i, [batch] float64."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Extras of the predicted token by name, float64."""
    routed_experts: Tensor | None = None
    """Experts to take, [batch, seq, layers, top_k], -1 where the router chooses; None: it chooses everywhere."""
    carried: torch.dtype = torch.float64
    """Dtype of each token's loss factor; float32 in a trainer's batches."""
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """Images of each row; empty if no row has any."""

    @property
    def is_text(self) -> Tensor:
        """Marks positions that hold text, [batch, seq] bool."""
        return self.documents >= 0

    def ahead(self, depth: int) -> Rows:
        """Shifts tokens, labels and weights by `depth` tokens within documents; other positions hold no text."""
        missing = torch.full((len(self.tokens), depth), -1, device=self.documents.device)
        there = torch.cat([self.documents[:, depth:], missing], dim=1)
        known = (there == self.documents) & self.is_text

        def moved(values: Tensor) -> Tensor:
            return torch.where(known, torch.roll(values, -depth, dims=1), torch.zeros_like(values))

        tokens, labels, weights = map(moved, (self.tokens, self.labels, self.weights))
        documents = torch.where(known, self.documents, -1)
        return replace(self, tokens=tokens, labels=labels, weights=weights, documents=documents)


def rows_of(texts: Sequence[Text], seq_length: int, vocab_size: int, device: torch.device) -> Rows:
    """Makes rows in which position t holds token t and predicts token t + 1, unless that begins another document.

    Token ids are taken modulo `vocab_size`.
    """
    rows = [_row(text, seq_length, vocab_size) for text in texts]

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([row[name] for row in rows])).to(device)

    weights = torch.tensor([text.weight for text in texts], dtype=torch.float64, device=device)
    return Rows(
        tokens=stacked("tokens"),
        labels=stacked("labels"),
        weights=stacked("weights"),
        documents=stacked("documents"),
        positions=stacked("positions"),
        sample_weights=weights,
        extras={name: _extra(texts, name, seq_length).to(device) for name in texts[0].extras},
        routed_experts=_routes(texts, seq_length, device),
        pictures=tuple(text.pictures for text in texts) if any(text.pictures for text in texts) else (),
    )


def _extra(texts: Sequence[Text], name: str, seq_length: int) -> Tensor:
    rows = torch.zeros(len(texts), seq_length, dtype=torch.float64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.ids) - 1] = torch.from_numpy(text.extras[name][1:])
    return rows


def _routes(texts: Sequence[Text], seq_length: int, device: torch.device) -> Tensor | None:
    first = texts[0].routed_experts
    if first is None:
        return None
    rows = torch.full((len(texts), seq_length, *first.shape[1:]), -1)
    for row, text in zip(rows, texts, strict=True):
        assert text.routed_experts is not None, "either all samples of a batch name experts or none"
        row[: len(text.ids) - 1] = torch.from_numpy(text.routed_experts[:-1])
    return rows.to(device)


def _row(text: Text, seq_length: int, vocab_size: int) -> dict[str, NDArray[Any]]:
    size = len(text.ids) - 1
    row: dict[str, NDArray[Any]] = {
        "tokens": np.zeros(seq_length, np.int64),
        "labels": np.zeros(seq_length, np.int64),
        "weights": np.zeros(seq_length, np.float64),
        "documents": np.full(seq_length, -1, np.int64),
        "positions": np.zeros(seq_length, np.int64),
    }
    document, start = 0, 0
    for position in range(size):
        if position in text.edges:
            document, start = document + 1, position
        row["tokens"][position] = text.ids[position] % vocab_size
        row["documents"][position], row["positions"][position] = document, position - start
        if position + 1 not in text.edges and text.counts[position + 1] > 0:
            row["labels"][position] = text.ids[position + 1] % vocab_size
            row["weights"][position] = text.counts[position + 1]
    return row


def objects(path: Path, numbers: Collection[int]) -> dict[int, Any]:
    """Reads the JSON objects of these lines, counted from 0."""
    with path.open("rb") as file:
        return {number: json.loads(line) for number, line in enumerate(file) if number in numbers}


def num_lines(path: Path) -> int:
    """Counts the lines of the file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def text_of(record: dict[str, Any], tokenizer: Tokenizer, seq_length: int) -> Text:
    """Converts a line to a sample; cuts a long one at the end."""
    ids: list[int] = list(tokenizer.begin_ids)
    counts = [0.0] * len(ids)

    def add(text: str, is_learned: bool, ends: bool) -> None:
        new = tokenizer.encode(text) + [tokenizer.eos_id] * ends
        ids.extend(new)
        counts.extend([float(is_learned)] * len(new))

    if "messages" in record:
        for number, message in enumerate(record["messages"]):
            answers = message["role"] == "assistant"
            add("\n\n" * (number > 0) + f"### {message['role']}\n", False, False)
            add(message["content"], answers, answers)
    else:
        add(record["prompt"], False, False)
        add(record["response"], True, True)
    size = seq_length + 1
    weight = float(record.get("weight", 1.0))
    return Text(np.array(ids[:size], np.int64), np.array(counts[:size]), weight)


_ELEMENTS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER_BYTES = 34


@dataclass(frozen=True)
class RawCorpus:
    """Documents of a `.bin/.idx` pair."""

    tokens: NDArray[np.integer]
    """All tokens in file order, memory-mapped."""
    begins: NDArray[np.int64]
    """Start of each document in `tokens`, and the end of the last, [documents + 1]."""

    @classmethod
    def open(cls, prefix: str) -> RawCorpus:
        """Opens both files and reads the index; the caller has checked them."""
        content = np.memmap(f"{prefix}.idx", np.uint8, "r")
        num_sequences, num_edges = content[18:_HEADER_BYTES].view("<u8").tolist()
        lengths_end = _HEADER_BYTES + 4 * num_sequences
        lengths = content[_HEADER_BYTES:lengths_end].view("<i4")
        edges = content[lengths_end + 8 * num_sequences :].view("<i8")[:num_edges]
        begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[edges]
        return cls(np.memmap(Path(f"{prefix}.bin"), _ELEMENTS[int(content[17])], "r"), begins)

    @property
    def num_documents(self) -> int:
        """Returns the number of documents."""
        return len(self.begins) - 1

    def window(self, order: NDArray[np.int64], index: int, seq_length: int, isolate: bool) -> Text:
        """Returns a window of the documents in this order, which predicts `seq_length` tokens.

        `isolate` keeps the edges between documents.
        """
        lengths = np.diff(self.begins)[order]
        ends = np.cumsum(lengths)
        first, last = index * seq_length, index * seq_length + seq_length + 1
        ids, edges = [], []
        for turn in np.flatnonzero((ends > first) & (ends - lengths < last)):
            start = int(ends[turn] - lengths[turn])
            here, there = max(first, start), min(last, int(ends[turn]))
            if here > first:
                edges.append(here - first)
            begin = int(self.begins[order[turn]]) - start
            ids.append(self.tokens[begin + here : begin + there].astype(np.int64))
        joined = np.concatenate(ids)
        return Text(joined, np.ones(len(joined)), edges=tuple(edges) if isolate else ())

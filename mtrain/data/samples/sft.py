"""Samples of conversations: one sequence for the loss each, read from the token cache.

The encoder decides what a record is (`mtrain.data.encoding`); here its tokens are cut to the length of a row. A sample
fits if it has at most seq_length + 1 tokens, as the last one is only predicted; `too_long` decides about the others.

The record counts as a sequence. If `too_long` is split, each piece counts as one, with the weight of its record: it is
a sample of the global batch like any other, its length is that of its own mask, and it meets the other pieces of its
record in a step only by chance. Where a record is cut depends on data.seq_length alone, never on the layout or on
packing. A sample without anything to learn is an empty sequence (loss.empty_sequences).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.config.extras import ROUTED_EXPERTS, choice_columns
from mtrain.core.batch.sample import Sample, TokenizedSample, shifted, with_label
from mtrain.data.cache.entry import TokenCache
from mtrain.data.formats.recognise import FileKind
from mtrain.data.samples.too_long import Pieces, RowLimit, TooLong, pieces_of, why_nothing

_NAMES_OF_0_1_0: dict[TooLong, str] = {"end": "truncate", "drop": "drop", "refuse": "refuse"}


def sample_of_record(found: TokenizedSample, start: int, end: int, extras: Sequence[str] = ()) -> Sample:
    """Builds a sample from the tokens `start` to before `end` of a record."""
    columns: dict[str, NDArray[np.float32] | float] = {}
    choices: dict[str, NDArray[np.int32]] = {}
    if extras:
        assert found.extras is not None, "the cache was made for them"
        places, shape = choice_columns(extras)
        others = {*range(len(extras))} - {*places}
        columns = {extras[place]: found.extras[start + 1 : end, place] for place in sorted(others)}
        if places:
            # experts belong to the token that is read, other extras to the predicted one; a single token is padding
            rows = found.extras[start : end - 1, places] if end - start > 1 else np.full((1, len(places)), -1)
            choices[ROUTED_EXPERTS] = rows.reshape(-1, *shape).astype(np.int32)
    sample = shifted(
        found.ids[start:end].astype(np.int64),
        # position t predicts token t + 1, so the weight of the first token is not used
        found.loss_weights[start + 1 : end].astype(np.float64),
        weight=found.weight,
        extras=columns,
    )
    return replace(sample, choices=choices)


class SftDataset:
    """Samples of a part of a source."""

    def __init__(
        self,
        cache: TokenCache,
        numbers: range,
        limit: RowLimit,
        extras: Sequence[str] = (),
        is_judged: bool = False,
    ) -> None:
        """Args:
        numbers: Numbers of the samples that are used, counted from 0.
        extras: Values that the cache has of each token, apart from its weight."""
        self._seq_length, self._too_long = seq_length, too_long = limit
        self.cache, self._numbers, self._extras, self._is_judged = cache, numbers, tuple(extras), is_judged
        self._pieces: Pieces
        self._pieces, self.too_long = pieces_of(cache, numbers, seq_length, too_long)
        if not len(self._pieces):
            lost = f"{self.too_long.samples} were left out as longer than {seq_length + 1} tokens"
            raise DataError(
                f"{cache.files[0].path}: samples {numbers.start + 1} to {numbers.stop} have nothing to train on "
                f"({lost}); give more of them, another data.split or a larger data.seq_length"
            )
        self.fingerprint = f"{cache.fingerprint}-{numbers.start}-{numbers.stop}-{seq_length}-{too_long}"

    def __len__(self) -> int:
        return len(self._pieces)

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sample; the same in every epoch."""
        found = self.cache.read(int(self._pieces.samples[index]))
        start = int(self._pieces.starts[index])
        end = start + int(self._pieces.sizes[index])
        if self._is_judged and end < len(found.ids):
            found = with_label(found, end)
        return sample_of_record(found, start, end, self._extras)

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that samples take in rows, at least 1, without reading them."""
        return np.maximum(1, self._pieces.sizes[indices].astype(np.int64) - 1)

    def why_nothing(self) -> str | None:
        """Explains, with counts, why no sample has anything to learn; None if one has."""
        return why_nothing(self.cache, self._pieces, self._is_judged)

    def place(self, index: int) -> str:
        """Names file and record of a sample."""
        return self.cache.place(int(self._pieces.samples[index]))

    def fingerprint_of_0_1_0(self, tokenizer: str) -> str | None:
        """Returns the fingerprint that version 0.1.0 gave these data; None if it could not read them."""
        (file, *others) = self.cache.files
        old = _NAMES_OF_0_1_0.get(self._too_long)
        if others or file.kind is not FileKind.LINES or old is None or self.cache.bad.count:
            return None
        part = f"{self._numbers.start}-{self._numbers.stop}"
        return f"{self.cache.file_digests[0]}-{tokenizer}-{part}-{self._seq_length}-{old}"

    def notes(self) -> Iterator[str]:
        """Yields lines for the user on samples that are not trained as they stand in the files."""
        lost, path = self.too_long, self.cache.files[0].path
        if not lost.samples:
            return
        tokens = f"{lost.samples:,} of {len(self._numbers):,} samples have more than {self._seq_length + 1} tokens"
        match self._too_long:
            case "end" | "start":
                what = f"cut at the {self._too_long} by {lost.lost_tokens:,} tokens in all"
            case "drop":
                what = f"left out, with {lost.lost_tokens:,} tokens"
            case "split":
                what = f"split into {lost.pieces:,} pieces"
            case "refuse":
                raise AssertionError("refused when they were found")
            case _:
                assert_never(self._too_long)
        empty = f"; in {lost.empty:,} nothing is left to learn" if lost.empty else ""
        yield f"{path}: {tokens}: {what}{empty}"

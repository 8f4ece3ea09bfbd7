"""Samples of preferences: pairs of answers, or answers with the mismatched sequences of KTO; two sequences each.

Sequences 2 i and 2 i + 1 belong together. In pairs these are the chosen and the rejected answer. For separately judged
answers, 2 i is the answer, and 2 i + 1 is its prompt with the answer of another record, half a source away: a pure
function of the file, whereas neighbours in a batch would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import Sample, shifted, with_label
from mtrain.core.loss.preference.scores import GroupMember, Role
from mtrain.data.cache.entry import TokenCache
from mtrain.data.samples.too_long import Pieces, RowLimit, why_nothing


class PreferenceDataset:
    """Groups of a part of a source."""

    def __init__(
        self,
        cache: TokenCache,
        numbers: range,
        limit: RowLimit,
        compares: Literal["pairs", "answers"],
        is_judged: bool = False,
    ) -> None:
        """Args:
        numbers: Numbers of the groups that are used, counted from 0.
        is_judged: Whether a head judges pairs: a label follows each sequence, which no cut removes, and the pair
            has a margin."""
        self._seq_length, self._too_long = seq_length, too_long = limit
        self.cache, self._compares, self._is_judged = cache, compares, is_judged
        self._groups, self._numbers = np.arange(numbers.start, numbers.stop), numbers
        lengths = self._whole_lengths(np.repeat(self._groups, 2), np.tile([0, 1], len(self._groups))).reshape(-1, 2)
        is_long = (lengths > seq_length + 1).any(axis=1)
        self._num_long, self._num_groups = int(is_long.sum()), len(self._groups)
        if self._num_long and too_long == "refuse":
            first = int(self._groups[np.argmax(is_long)])
            raise DataError(
                f"{self._place_of(first)}: has {lengths[is_long][0].max()} tokens in a sequence, but data.seq_length="
                f"{seq_length} takes {seq_length + 1} ({self._num_long} of {len(self._groups)} records are longer); "
                "raise it, or set data.too_long to end, start or drop"
            )
        if too_long == "drop":
            self._groups = self._groups[~is_long]
        if not len(self._groups):
            raise DataError(
                f"{cache.files[0].path}: records {numbers.start + 1} to {numbers.stop} have nothing to train on "
                f"({self._num_long} were left out as longer than {seq_length + 1} tokens); give more of them, another "
                "data.split or a larger data.seq_length"
            )
        self.fingerprint = f"{cache.fingerprint}-{compares}-{numbers.start}-{numbers.stop}-{seq_length}-{too_long}"
        self.references: NDArray[np.float64] | None = None
        """[sequences]: scores under the reference model, once they are known."""

    def __len__(self) -> int:
        return 2 * len(self._groups)

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sequence; the same in every epoch."""
        place, second = divmod(index, 2)
        group = int(self._groups[place])
        if self._is_judged:
            return self._judged(place, second)
        ids, weights, weight, role = self._sequence(group, second)
        start, end = self._bounds(len(ids))
        reference = None if self.references is None else float(self.references[index])
        sample = shifted(ids[start:end].astype(np.int64), weights[start + 1 : end].astype(np.float64), weight)
        return sample.as_member(GroupMember(place, role, reference))

    def _judged(self, place: int, second: int) -> Sample:
        found = self.cache.read(2 * int(self._groups[place]) + second)
        start, end = self._bounds(len(found.ids))
        if end < len(found.ids):
            found = with_label(found, end)
        assert found.extras is not None, "the cache was made with margins"
        sample = shifted(
            found.ids[start:end].astype(np.int64), found.loss_weights[start + 1 : end].astype(np.float64), found.weight
        )
        role: Role = "rejected" if second else "chosen"
        return sample.as_member(GroupMember(place, role, margin=float(found.extras[-1, 0])))

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that sequences take in rows, at least 1, without reading them."""
        lengths = self._whole_lengths(self._groups[indices // 2], indices % 2)
        widths: NDArray[np.int64] = np.maximum(1, np.minimum(lengths, self._seq_length + 1) - 1)
        return widths

    def why_nothing(self) -> str | None:
        """Explains why no answer has anything to learn; None if one has. KTO's mismatched sequences have no
        gradient."""
        own = self._groups
        samples = np.stack([2 * own, 2 * own + 1], axis=1).ravel() if self._compares == "pairs" else own
        lengths = self.cache.lengths[samples]
        sizes = np.minimum(lengths, self._seq_length + 1)
        starts = lengths - sizes if self._too_long == "start" else np.zeros_like(lengths)
        return why_nothing(self.cache, Pieces(samples, starts, sizes), self._is_judged)

    def place(self, index: int) -> str:
        """Names file and record of a sequence."""
        return self._place_of(int(self._groups[index // 2]))

    def notes(self) -> Iterator[str]:
        """Yields lines for the user on sequences that are not trained as they stand in the files."""
        if not self._num_long:
            return
        what = "left out whole" if self._too_long == "drop" else f"cut at the {self._too_long}"
        yield (
            f"{self.cache.files[0].path}: {self._num_long:,} of {self._num_groups:,} records have a sequence of more "
            f"than {self._seq_length + 1} tokens: {what}"
        )

    def _bounds(self, length: int) -> tuple[int, int]:
        most = self._seq_length + 1
        return (max(0, length - most), length) if self._too_long == "start" else (0, min(length, most))

    def _others(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: the groups whose answers stand in the mismatched sequences of `groups`."""
        first, count = self._numbers.start, len(self._numbers)
        others: NDArray[np.int64] = first + (groups - first + count // 2) % count
        return others

    def _whole_lengths(self, groups: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = self.cache.lengths
        match self._compares:
            case "pairs":
                of_pairs: NDArray[np.int64] = lengths[2 * groups + second]
                return of_pairs
            case "answers":
                prompts, other = self.cache.prompt_lengths, self._others(groups)
                mismatched: NDArray[np.int64] = prompts[groups] + lengths[other] - prompts[other]
                found: NDArray[np.int64] = np.where(second == 0, lengths[groups], mismatched)
                return found
            case _:
                assert_never(self._compares)

    def _sequence(self, group: int, second: int) -> tuple[NDArray[np.int32], NDArray[np.float32], float, Role]:
        """Returns ids, weight of each token, weight of the sequence, and its role."""
        if self._compares == "pairs":
            found = self.cache.read(2 * group + second)
            return found.ids, found.loss_weights, found.weight, "rejected" if second else "chosen"
        found = self.cache.read(group)
        if not second:
            role: Role = "rejected" if np.signbit(found.weight) else "chosen"
            return found.ids, found.loss_weights, abs(found.weight), role
        (number,) = self._others(np.array([group])).tolist()
        other, begin = self.cache.read(number), int(self.cache.prompt_lengths[number])
        prompt = int(self.cache.prompt_lengths[group])
        ids = np.concatenate([found.ids[:prompt], other.ids[begin:]])
        return ids, np.concatenate([found.loss_weights[:prompt], other.loss_weights[begin:]]), 1.0, "mismatched"

    def _place_of(self, group: int) -> str:
        return self.cache.place(2 * group if self._compares == "pairs" else group)

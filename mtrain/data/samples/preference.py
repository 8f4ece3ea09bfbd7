"""Samples of preferences, two sequences each: pairs of answers, or answers with the mismatched sequences of KTO.

Sequences 2 i and 2 i + 1 belong together. In a pair they are the chosen and the rejected answer. For separately judged
answers, 2 i is the answer, and 2 i + 1 is its prompt with the answer of another record, half a source away: a pure
function of the file, whereas neighbours in a batch would depend on the layout.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.core.batch.sample import EncodedImage, Sample, TokenizedSample, with_label
from mtrain.core.loss.preference.member import GroupMember, Role
from mtrain.data.cache.entry import TokenCache
from mtrain.data.samples.images import encoded_images, outside, spans, with_images
from mtrain.data.samples.sft import Pieces, RowLimit, sample_of_record, why_nothing


class PreferenceDataset:
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
        self._seq_length, self._too_long, self._images = seq_length, too_long, images = limit
        self.cache, self._compares, self._is_judged = cache, compares, is_judged
        self._groups, self._numbers = np.arange(numbers.start, numbers.stop), numbers
        lengths = self._whole_lengths(np.repeat(self._groups, 2), np.tile([0, 1], len(self._groups))).reshape(-1, 2)
        is_long = np.any(lengths > seq_length + 1, axis=1)
        self._num_long, self._num_groups = int(is_long.sum()), len(self._groups)
        if self._num_long and too_long == "refuse":
            first = int(self._groups[np.argmax(is_long)])
            raise DataError(
                f"{self._location_of(first)}: has {counted(lengths[is_long][0].max(), 'token')} in a sequence, but "
                f"data.seq_length={seq_length} takes {seq_length + 1} ({self._num_long} of "
                f"{counted(len(self._groups), 'record')} {'is' if self._num_long == 1 else 'are'} longer); raise it, "
                "or set data.too_long to end, start or drop"
            )
        if too_long == "drop":
            self._groups = self._groups[~is_long]
        if not len(self._groups):
            raise DataError(
                f"{cache.files[0].path}: records {numbers.start + 1} to {numbers.stop} have nothing to train on "
                f"({self._num_long} were left out as longer than {counted(seq_length + 1, 'token')}); give more of "
                "them, another data.split or a larger data.seq_length"
            )
        self._spared = self._spared_tokens(is_long)
        self.fingerprint = f"{cache.fingerprint}-{compares}-{numbers.start}-{numbers.stop}-{seq_length}-{too_long}"
        if cache.images is not None and images is not None:
            self.fingerprint += f"-{images.fingerprint}"
        self.references: NDArray[np.float64] | None = None
        """[sequences]: scores under the reference model; None until they are computed."""

    def __len__(self) -> int:
        return 2 * len(self._groups)

    def sample(self, epoch: int, index: int) -> Sample:
        """Returns a sequence; the same in every epoch."""
        group = index // 2
        sequence, role, start, end = self._cut(index)
        if self._is_judged and end < len(sequence.ids):
            sequence = with_label(sequence, end)
        margin = 0.0
        if self._is_judged:
            assert sequence.extras is not None, "the cache has margins"
            margin = float(sequence.extras[-1, 0])
        reference = None if self.references is None else float(self.references[index])
        sample = sample_of_record(sequence, start, end).as_member(GroupMember(group, role, reference, margin))
        return with_images(sample, sequence, start, end, self._images, self.location(index))

    def images(self, index: int) -> tuple[EncodedImage, ...]:
        """Returns the images of a sequence as they are stored, for display."""
        sequence, _, start, end = self._cut(index)
        return () if self._images is None else encoded_images(sequence, start, end, self._images)

    def _cut(self, index: int) -> tuple[TokenizedSample, Role, int, int]:
        """Returns a sequence with its role, and the first token and the end of what fits into a row."""
        sequence, role = self._sequence(int(self._groups[index // 2]), index % 2)
        length = len(sequence.ids)
        size = int(self._sizes(np.array([index]))[0])
        start = length - size if self._too_long == "start" else 0
        return sequence, role, start, start + size

    def _sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: tokens of sequences that fit into a row."""
        lengths = self._whole_lengths(self._groups[indices // 2], indices % 2)
        spared = np.array([self._spared.get(index, 0) for index in indices.tolist()] if self._spared else 0)
        sizes: NDArray[np.int64] = np.minimum(lengths, self._seq_length + 1) - spared
        return sizes

    def _spared_tokens(self, is_long: NDArray[np.bool_]) -> dict[int, int]:
        """Returns by index of a sequence how many tokens more than necessary are cut, since no cut is inside an image.

        Args:
            is_long: [groups before some are dropped], whether a group has a sequence that is longer than a row.
        """
        spared = dict[int, int]()
        if self._images is None or self.cache.images is None or self._too_long == "drop" or not is_long.any():
            return spared
        for group in np.flatnonzero(is_long).tolist():
            number = int(self._groups[group])
            for second, length in enumerate(self._whole_lengths(np.full(2, number), np.arange(2)).tolist()):
                # all images are in the prompt, which the mismatched sequence of an answer shares
                shown = spans(self.cache, 2 * number + second if self._compares == "pairs" else number, self._images)
                cut = length - self._seq_length - 1 if self._too_long == "start" else self._seq_length
                if length > self._seq_length + 1:
                    to: Literal["earlier", "later"] = "later" if self._too_long == "start" else "earlier"
                    spared[2 * group + second] = abs(outside(shown, cut, to) - cut)
        return spared

    def widths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: positions that sequences take in rows, at least 1, without reading them."""
        widths: NDArray[np.int64] = np.maximum(1, self._sizes(indices) - 1)
        return widths

    def why_nothing(self) -> str | None:
        """Explains why no answer has anything to learn; None if one has. KTO's mismatched sequences do not count, since
        they have no gradient."""
        groups = self._groups
        samples = np.stack([2 * groups, 2 * groups + 1], axis=1).ravel() if self._compares == "pairs" else groups
        lengths = self.cache.lengths[samples]
        indices = np.arange(len(self)) if self._compares == "pairs" else 2 * np.arange(len(groups))
        sizes = self._sizes(indices)
        starts = lengths - sizes if self._too_long == "start" else np.zeros_like(lengths)
        return why_nothing(self.cache, Pieces(samples, starts, sizes), self._is_judged)

    def location(self, index: int) -> str:
        return self._location_of(int(self._groups[index // 2]))

    def notes(self) -> Iterator[str]:
        """Yields lines for the user on sequences that are changed before training."""
        if not self._num_long:
            return
        what = "left out whole" if self._too_long == "drop" else f"cut at the {self._too_long}"
        yield (
            f"{self.cache.files[0].path}: {self._num_long:,} of {counted(self._num_groups, 'record', ',')} "
            f"{'has' if self._num_long == 1 else 'have'} a sequence of more than "
            f"{counted(self._seq_length + 1, 'token')}: {what}"
        )

    def _mismatched_groups(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n]: the groups whose answers are in the mismatched sequences of `groups`."""
        first, count = self._numbers.start, len(self._numbers)
        mismatched: NDArray[np.int64] = first + (groups - first + count // 2) % count
        return mismatched

    def _whole_lengths(self, groups: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = self.cache.lengths
        match self._compares:
            case "pairs":
                of_pairs: NDArray[np.int64] = lengths[2 * groups + second]
                return of_pairs
            case "answers":
                prompts, other = self.cache.prompt_lengths, self._mismatched_groups(groups)
                mismatched: NDArray[np.int64] = prompts[groups] + lengths[other] - prompts[other]
                of_answers: NDArray[np.int64] = np.where(second == 0, lengths[groups], mismatched)
                return of_answers
            case _:
                assert_never(self._compares)

    def _sequence(self, group: int, second: int) -> tuple[TokenizedSample, Role]:
        if self._compares == "pairs":
            return self.cache.read(2 * group + second), "rejected" if second else "chosen"
        answer = self.cache.read(group)
        if not second:
            return replace(answer, weight=abs(answer.weight)), "rejected" if np.signbit(answer.weight) else "chosen"
        (number,) = self._mismatched_groups(np.array([group])).tolist()
        other, begin = self.cache.read(number), int(self.cache.prompt_lengths[number])
        prompt = int(self.cache.prompt_lengths[group])
        ids = np.concatenate([answer.ids[:prompt], other.ids[begin:]])
        weights = np.concatenate([answer.loss_weights[:prompt], other.loss_weights[begin:]])
        return TokenizedSample(ids, weights, images=answer.images), "mismatched"

    def _location_of(self, group: int) -> str:
        return self.cache.location(2 * group if self._compares == "pairs" else group)

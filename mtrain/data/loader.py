"""What one data-parallel rank trains and validates on, as microbatches.

Sample g = step * global_batch_size + slot of the run goes to slot `slot` of step `step` (steps count from 0 here), and
microbatch m of data-parallel rank d holds slots (m * dp + d) * micro_batch_size and those after it. So nothing that a
rank reads depends on what was read before.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Literal

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.data.collate import collate, loss_terms
from mtrain.data.order import slots
from mtrain.data.prefetch import Prefetch
from mtrain.data.samples.sample import Sample
from mtrain.data.sources import HeldOut, MockHeldOut, Sources
from mtrain.tokenizer import Tokenizer

_SampleOfSlot = Callable[[int], Sample | None]


class HeldOutBatches:
    """A validation or test set as this rank sees it: every sample once over all ranks, in the set's order.

    All ranks make the same number of passes with the same number of microbatches; rows beyond the end of the set have
    weights and shares 0.
    """

    def __init__(self, rows: "RowsOfRank", samples: HeldOut | MockHeldOut) -> None:
        self._rows, self._samples = rows, samples
        self.num_samples = len(samples)
        """In the set, over all ranks."""
        self.num_passes = -(-self.num_samples // rows.global_batch_size)
        """Calls of the pipeline schedule, each with as many microbatches as a training step."""

    def batches(self) -> Iterator[list[Microbatch]]:
        """Yields the microbatches of each pass."""
        for number in range(self.num_passes):
            start = number * self._rows.global_batch_size
            sample = functools.partial(self._sample, start)
            yield self._rows.microbatches(sample, self._rows.num_microbatches, has_first=number == 0)

    def _sample(self, start: int, slot: int) -> Sample | None:
        index = start + slot
        return self._samples.sample(index) if index < self.num_samples else None


class StepLoader:
    """Batches of one data-parallel rank: a pure function of the configuration, the files and the step."""

    def __init__(self, config: Config, dp_rank: int, dp_size: int) -> None:
        """Opens and checks everything that the configuration names.

        Raises:
            ConfigError: the global batch does not divide over the ranks.
            DataError: a file is missing, damaged, too small, or does not fit the model.
        """
        self._rows = RowsOfRank(config, dp_rank, dp_size)
        sources = Sources(config)
        self.tokenizer: Tokenizer | None = sources.tokenizer
        self._stream = sources.training()
        # opened with the training data: a file that is missing is reported before the first step, not at the first
        # validation
        self._held_out = {part: sources.held_out(part) for part in ("valid", "test")}
        self.notes = sources.notes()
        """Lines for the user on what of the files is not trained, or not as it stands there."""
        self._depth = config.data.prefetch_steps

    @property
    def fingerprint(self) -> str:
        """Changes when the training data or the way they are cut change; does not depend on rank, layout or step."""
        return self._stream.fingerprint

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """What earlier versions called the same data."""
        return self._stream.earlier_fingerprints

    def batches(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of the step after `step` completed updates."""
        start = step * self._rows.global_batch_size
        count = self._rows.num_microbatches
        return self._rows.microbatches(lambda slot: self._stream.sample(start + slot), count, has_first=True)

    def iterate(self, from_step: int) -> Prefetch[list[Microbatch]]:
        """batches(from_step), batches(from_step + 1), ... without end, read ahead; to be used in a `with` block."""
        return Prefetch(self.batches, from_step, self._depth)

    def held_out(self, part: Literal["valid", "test"] = "valid") -> HeldOutBatches | None:
        """The validation or test set; None where the configuration has none."""
        samples = self._held_out[part]
        return None if samples is None else HeldOutBatches(self._rows, samples)


class RowsOfRank:
    """Which slots of a global batch become which rows on this rank."""

    def __init__(self, config: Config, dp_rank: int, dp_size: int) -> None:
        """
        Raises:
            ConfigError: train.global_batch_size does not divide over the ranks.
        """
        self.global_batch_size = config.train.global_batch_size
        self._micro_batch_size = config.train.micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._seq_length, self._terms = config.data.seq_length, loss_terms(config.loss)
        self._with_documents, self._mtp_depths = config.data.isolate_documents, config.model.mtp_depths
        self._with_padding = config.model.experts is not None
        self.num_microbatches, rest = divmod(self.global_batch_size, dp_size * self._micro_batch_size)
        if rest:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} must be a multiple of dp x train.micro_batch_size = "
                f"{dp_size} x {self._micro_batch_size}; change one of them"
            )

    def microbatches(self, sample: _SampleOfSlot, num_microbatches: int, has_first: bool) -> list[Microbatch]:
        """
        Args:
            sample: What lies in a slot; None beyond the end of a set.
            num_microbatches: How many to make.
            has_first: Whether slot 0 carries the 1 of the aggregations whose denominator is 1.
        """
        return [self._microbatch(number, sample, has_first) for number in range(num_microbatches)]

    def _microbatch(self, number: int, sample: _SampleOfSlot, has_first: bool) -> Microbatch:
        # slots are dealt out by (microbatch, rank), so a step holds the same samples whatever dp is
        own = slots(number, self._dp_rank, self._dp_size, self._micro_batch_size)
        return collate(
            [sample(slot) for slot in own],
            self._seq_length,
            self._terms,
            # slot 0 lies on one data-parallel rank alone, so the constant denominators have one owner
            first_of_step=0 if has_first and own.start == 0 else None,
            with_documents=self._with_documents,
            with_padding=self._with_padding,
            mtp_depths=self._mtp_depths,
        )

"""Contents of a step: its samples, and the row and rank that computes each."""

from collections.abc import Iterator
from dataclasses import dataclass

from mtrain.core.batch.order import SamplePosition
from mtrain.data.loader import StepLoader


@dataclass(frozen=True)
class PlacedSample:
    """One sample of a step."""

    number: int
    """Number of the sample in the order of the run, counted from 0."""
    position: SamplePosition
    """Source, epoch and index in the source."""
    slot: int
    """Position of the sample in the global batch."""
    microbatch: int
    dp_rank: int
    row: int
    """Number of the row in the microbatch of this rank."""
    place: int
    """Number of the sample in its row, counted from 0."""


def contents(loader: StepLoader, step: int, dp_size: int = 1) -> Iterator[PlacedSample]:
    """Yields everything that the step after `step` completed updates trains, microbatch by microbatch and rank by rank.

    The result depends only on the configuration, the lengths of samples and the number of ranks; the loader's batches
    are compared with it.
    """
    numbers, plan = loader.steps.samples(step).numbers, loader.plan(step)
    for microbatch in range(plan.num_microbatches):
        for dp_rank in range(dp_size):
            for row, slots in enumerate(plan.rows(microbatch, dp_rank)):
                for place, slot in enumerate(slots):
                    number = int(numbers[slot])
                    position = loader.stream.locate(number)
                    yield PlacedSample(number, position, slot, microbatch, dp_rank, row, place)

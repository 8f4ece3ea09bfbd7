"""Microbatches that one data-parallel rank trains and validates on.

Sample g = step * global_batch_size + slot of the run goes to slot `slot` of step `step`, counted from 0; if a step
counts packed rows, `mtrain.data.steps` decides instead.
Without packing a row is a sample, and microbatch m of data-parallel rank d holds the micro_batch_size slots from
(m * dp + d) * micro_batch_size on. With packing the lengths of all samples of the step alone decide which samples share
a row, and which rank gets it (`mtrain.data.packing`). So nothing that a rank reads depends on what was read before, and
a step holds the same samples under any layout.
"""

import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.derived import data_phases
from mtrain.core.batch.batch import Microbatch, PlacedMember
from mtrain.core.batch.collate import Place, RowForm, collate
from mtrain.core.batch.order import slots
from mtrain.core.batch.sample import Sample
from mtrain.data.ledger import StartEntry, StepEntry, step_entry
from mtrain.data.packing.step_plan import PackedRows, StepPlan, StepShape, plan_rows, plan_step
from mtrain.data.shown import ShownStep, shown_step
from mtrain.data.sources import REFERENCES, HeldOut, MockSamples, OpenedData
from mtrain.data.steps import SampleStream

Item = TypeVar("Item")


class Prefetch(Generic[Item], Iterator[Item]):
    """Yields read(first), read(first + 1), ... without end, and reads up to `depth` items ahead in a thread.

    An exception in the thread is raised by the `next` that would have returned its item, and by every later one.
    `close`, or the end of the `with` block, stops the thread and waits for it.
    """

    def __init__(self, read: Callable[[int], Item], first: int, depth: int) -> None:
        """Args:
        read: Returns the item of a number; called from one thread at a time.
        depth: Largest number of items read ahead; 0 reads in the caller, without a thread.
        """
        self._read, self._next = read, first
        self._fault: Exception | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if depth > 0:
            # a semaphore and an unbounded queue, not queue.Queue(depth): a put that blocks could not be woken by
            # `close`
            self._free = threading.Semaphore(depth)
            self._ready: queue.SimpleQueue[Item | _Fault] = queue.SimpleQueue()
            # daemon: if nobody closes it, a read that hangs must not keep the process from ending
            self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
            self._thread.start()

    def __next__(self) -> Item:
        if self._is_closed:
            raise StopIteration
        if self._fault is not None:
            raise self._fault
        if self._thread is None:
            item = self._read(self._next)
            self._next += 1
            return item
        received = self._ready.get()
        if isinstance(received, _Fault):
            # stored, or a second `next` would wait forever for a thread that has ended
            self._fault = received.error
            raise received.error
        self._free.release()
        return received

    def _run(self, number: int) -> None:
        while True:
            # before reading, so that no more than `depth` items exist, including the one being read
            self._free.acquire()
            if self._is_closed:
                return
            try:
                self._ready.put(self._read(number))
            except Exception as error:  # of any kind: the caller, who cannot see this thread, gets it
                self._ready.put(_Fault(error))
                return
            number += 1

    def close(self) -> None:
        """Stops reading; waits for the item that is being read. Idempotent."""
        self._is_closed = True
        if self._thread is not None:
            self._free.release()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Fault:
    """Exception of the thread, instead of an item."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Slots(Protocol):
    """The samples of a step, or of a pass through a validation set, by slot."""

    def sample(self, slot: int) -> Sample | None:
        """Returns the sample in a slot; None beyond the end of a set."""

    def width(self, slot: int) -> int:
        """Returns the positions that the sample takes in a row; 0 beyond the end of a set."""


@dataclass(frozen=True)
class OneSampleEach:
    """Row plan without packing: each slot is a row."""

    num_slots: int
    num_microbatches: int
    micro_batch_size: int
    dp_size: int

    def rows(self, microbatch: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        # slots are dealt out by (microbatch, rank), so a step holds the same samples whatever dp is
        rank_slots = slots(microbatch, dp_rank, self.dp_size, self.micro_batch_size)
        return tuple((slot,) if slot < self.num_slots else () for slot in rank_slots)


RowPlan: TypeAlias = OneSampleEach | StepPlan
"""Assignment of slots to the rows of every rank."""


@dataclass(frozen=True)
class Given:
    """Samples in memory, by slot."""

    samples: Sequence[Sample]

    def sample(self, slot: int) -> Sample | None:
        return self.samples[slot] if slot < len(self.samples) else None

    def width(self, slot: int) -> int:
        return self.samples[slot].width if slot < len(self.samples) else 0

    def positions(self, plan: RowPlan, dp_size: int) -> dict[int, tuple[int, int]]:
        """Returns slot -> (row, counted by microbatch and data-parallel rank; first position in the row)."""
        turns = [(microbatch, rank) for microbatch in range(plan.num_microbatches) for rank in range(dp_size)]
        positions: dict[int, tuple[int, int]] = {}
        for number, row in enumerate(row for turn in turns for row in plan.rows(*turn)):
            begins = itertools.accumulate((self.width(slot) for slot in row), initial=0)
            positions |= {slot: (number, begin) for slot, begin in zip(row, begins)}
        return positions


class HeldOutBatches:
    """This rank's part of a validation or test set, which all ranks together read once, in order.

    All ranks make equally many passes and microbatches; rows beyond the end of the set have weights and shares 0.
    """

    def __init__(self, rows: "RowsOfRank", samples: HeldOut | MockSamples) -> None:
        self._rows, self._samples = rows, samples
        self.num_samples = len(samples)
        """Samples in the set, over all ranks."""
        self.num_passes = -(-self.num_samples // rows.global_batch_size)
        """Number of calls of the pipeline schedule."""

    def batches(self) -> Iterator[list[Microbatch]]:
        for number in range(self.num_passes):
            yield self._rows.of_step(
                HeldOutSlots(self._samples, number * self._rows.global_batch_size), has_first=number == 0
            )


@dataclass(frozen=True)
class HeldOutSlots:
    samples: HeldOut | MockSamples
    start: int

    def sample(self, slot: int) -> Sample | None:
        index = self.start + slot
        return self.samples.sample(index) if index < len(self.samples) else None

    def width(self, slot: int) -> int:
        index = self.start + slot
        return self.samples.width(index) if index < len(self.samples) else 0


@dataclass(frozen=True)
class TrainingSlots:
    stream: SampleStream
    numbers: NDArray[np.int64]
    """[slots]: number of each slot's sample in the order of the run."""
    read: dict[int, Sample] = field(default_factory=dict)

    def sample(self, slot: int) -> Sample:
        self.read[slot] = self.stream.sample(int(self.numbers[slot]))
        return self.read[slot]

    def width(self, slot: int) -> int:
        return int(self._widths[slot])

    @cached_property
    def _widths(self) -> NDArray[np.int64]:
        return self.stream.widths(self.numbers)

    def entry(self, step: int) -> StepEntry:
        """Builds the ledger's entry of the samples that were read for a step."""
        read = [(self.stream.locate(int(self.numbers[slot])), sample) for slot, sample in self.read.items()]
        return step_entry(step, len(self.numbers), read)


class StepLoader(OpenedData):
    """Batches of one data-parallel rank: a pure function of the configuration, the files and the step."""

    def __init__(self, config: Config, dp_rank: int, dp_size: int, extras: Sequence[str] = ()) -> None:
        """Opens and checks everything that the configuration names; raises as `RowsOfRank` and `OpenedData` do."""
        self._rows = RowsOfRank(config, dp_rank, dp_size, extras)
        super().__init__(config)
        self._config = config
        self._references = ""
        self._depth = config.data.prefetch_steps
        # the steps read ahead, the one that the trainer is using, and the one being read
        self._read: deque[StepEntry] = deque(maxlen=self._depth + 3)

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are cut; the same on every rank, under any layout, at any step."""
        return super().fingerprint + self._references

    @property
    def valid_fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of the validation sets, by name, in the order of the configuration."""
        return {name: samples.fingerprint for name, samples in self.sets["valid"].items()}

    @property
    def num_slots(self) -> int:
        """Returns the number of samples in one pass over a held-out set."""
        return self._rows.global_batch_size

    def name_references(self, digests: Sequence[str]) -> None:
        """Adds the digests of a reference model's scores, which `preferences` have received, to the fingerprint."""
        self._references = f"{REFERENCES}{' '.join(digests)})"

    def batches(self, step: int) -> list[Microbatch]:
        """Returns this rank's microbatches of the step after `step` updates."""
        return self._rows.microbatches(self.plan(step), self.samples(step), has_first=True)

    def next_entry(self, step: int) -> StepEntry:
        """Returns the entry of the oldest step that `iterate` yielded and this has not returned yet, numbered `step`,
        the trainer's count of updates."""
        return replace(self._read.popleft(), step=step)

    def start_entry(self, step: int) -> StartEntry:
        """Returns the facts that the ledger's entries after `step` updates share."""
        names, sizes = zip(*self.stream.named_sizes)
        return StartEntry(step, self.fingerprint, names, sizes, data_phases(self._config.data))

    def samples(self, step: int) -> TrainingSlots:
        """Returns the samples of the step after `step` updates, by slot."""
        return TrainingSlots(self.stream, self.steps.samples(step).numbers)

    def plan(self, step: int) -> RowPlan:
        """Assigns the slots of a step to rows; the same on every rank."""
        samples = self.steps.samples(step)
        return self._rows.plan(TrainingSlots(self.stream, samples.numbers), len(samples.numbers), samples.rows)

    def shown(self, step: int, count: int) -> ShownStep:
        """Returns the first `count` samples of a step, counted from 1, for display."""
        return shown_step(self._config, self.stream, self.tokenizer, step, count)

    def iterate(self, from_step: int, pinned: bool = False) -> Prefetch[list[Microbatch]]:
        """Yields batches(from_step), batches(from_step + 1), ... without end, read ahead; use it in a `with` block.

        Args:
            pinned: Whether the batches are in pinned memory, which a GPU copies while the host continues.
        """
        self._read.clear()

        def read(step: int) -> list[Microbatch]:
            samples = self.samples(step)
            batches = self._rows.microbatches(self.plan(step), samples, has_first=True)
            self._read.append(samples.entry(step + 1))
            return [batch.map(lambda rows: rows.pin_memory()) for batch in batches] if pinned else batches

        return Prefetch(read, from_step, self._depth)

    def held_out(self, split: Literal["valid", "test"] = "valid") -> HeldOutBatches | None:
        """Returns the first validation or test set, or None."""
        return next(iter(self.held_out_sets(split).values()), None)

    def held_out_sets(self, split: Literal["valid", "test"]) -> dict[str, HeldOutBatches]:
        """Returns all validation or test sets by name, in the order of the configuration."""
        return {name: HeldOutBatches(self._rows, samples) for name, samples in self.sets[split].items()}


_MOST_READERS = 8
"""Threads that read samples with images; a node has several ranks."""


class RowsOfRank:
    """Assigns the samples of a global batch to the rows of this rank."""

    def __init__(self, config: Config, dp_rank: int, dp_size: int, extras: Sequence[str] = ()) -> None:
        """`extras` are values that loss functions read in addition to the weights; every sample needs them."""
        self.global_batch_size, self._micro_batch_size = config.sequences_per_step, config.train.micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._form, self._shape = RowForm.of(config, extras), StepShape.of(config, dp_size)
        if not self._form.is_packed and self.global_batch_size % (dp_size * self._micro_batch_size):
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} must be a multiple of dp x train.micro_batch_size = "
                f"{dp_size} x {self._micro_batch_size}; change one of them"
            )

    def of_step(self, samples: Slots, has_first: bool) -> list[Microbatch]:
        """Builds this rank's microbatches of a global batch; `has_first` is as for `microbatches`."""
        return self.microbatches(self.plan(samples, self.global_batch_size), samples, has_first)

    def plan(self, samples: Slots, num_slots: int, packed: PackedRows | None = None) -> RowPlan:
        """Assigns slots to rows, the same on every rank; `packed` are slots that already share a row."""
        if self._form.is_packed:
            widths = np.array([samples.width(slot) for slot in range(num_slots)], np.int64)
            return plan_step(widths, self._shape) if packed is None else plan_rows(widths, packed, self._shape)
        count = -(-num_slots // (self._dp_size * self._micro_batch_size))
        # a number that megatron-core's interleaved schedule can run
        count = -(-count // self._shape.multiple_of) * self._shape.multiple_of
        return OneSampleEach(num_slots, count, self._micro_batch_size, self._dp_size)

    def microbatches(self, plan: RowPlan, samples: Slots, has_first: bool) -> list[Microbatch]:
        """Builds this rank's part of a plan. `has_first`: slot 0 carries the whole denominator of aggregations whose
        denominator is 1."""
        rows = [plan.rows(number, self._dp_rank) for number in range(plan.num_microbatches)]
        if self._form.patches_per_feature is None:
            return [self._microbatch(of_batch, samples.sample, has_first) for of_batch in rows]
        local_slots = [slot for of_batch in rows for row in of_batch for slot in row]
        # decoding an image takes 10 to 100 ms, during which Pillow and numpy release the interpreter's lock
        with ThreadPoolExecutor(min(_MOST_READERS, len(os.sched_getaffinity(0)))) as readers:
            read = dict(zip(local_slots, readers.map(samples.sample, local_slots)))
        return [self._microbatch(of_batch, read.__getitem__, has_first) for of_batch in rows]

    def _microbatch(
        self, rows: tuple[tuple[int, ...], ...], sample_of: Callable[[int], Sample | None], has_first: bool
    ) -> Microbatch:
        row_samples = [[sample_of(slot) for slot in row] for row in rows]
        # slot 0 is on one data-parallel rank only, so a constant denominator is counted once
        firsts = [Place(number, row.index(0)) for number, row in enumerate(rows) if has_first and 0 in row]
        present = [[sample for sample in row if sample is not None] for row in row_samples]
        batch = collate(present, self._form, firsts[0] if firsts else None)
        return replace(batch, members=tuple(_members(rows, row_samples)))


def _members(
    rows: Sequence[Sequence[int]], row_samples: Sequence[Sequence[Sample | None]]
) -> Iterator[PlacedMember | None]:
    """Yields the identity of each sequence, counted as `collate` does: a row without a sample is also a sequence."""
    for slots_of_row, samples in zip(rows, row_samples):
        present = [(slot, sample) for slot, sample in zip(slots_of_row, samples) if sample is not None]
        for slot, sample in present:
            yield PlacedMember(slot, sample.member, float(sample.mask.sum()), sample.weight)
        if not present:
            yield None

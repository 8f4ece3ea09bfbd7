"""Sizes of the training data for `mtrain check`: records, tokens, the longest sequence, epochs."""

from collections.abc import Iterator

from mtrain.base.spelling import counted
from mtrain.config.schema.data import FilesSection
from mtrain.config.schema.vision import VisionSection
from mtrain.core.batch.sample import SampleSource
from mtrain.data.packing.step_plan import StepShape, num_microbatches_of, packed
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.samples.sft import SftDataset
from mtrain.data.sources import Blended, Epochs
from mtrain.data.steps import steps_of
from mtrain.plan.search.cost import PackedSteps
from mtrain.preflight.findings import Findings


def look_at_sizes(epochs: Epochs, findings: Findings) -> None:
    """Adds a fact about each source of files, and about how often the run passes it."""
    stream, data = epochs.stream, epochs.config.data
    if isinstance(stream, Blended) and isinstance(data, FilesSection):
        for (name, _), source in zip(stream.named_sizes, stream.sources):
            findings.fact("data", f"{name}: {_size(source, data.seq_length, epochs.config.model.vision)}")
        for line in _passes(epochs, data):
            findings.fact("epoch", line)


_MOST_STEPS = 16
"""Steps to pack for a mean."""


def packed_steps(epochs: Epochs, dp_size: int) -> PackedSteps:
    """Packs a few steps, spread over the run, as training does; returns their means."""
    config, stream = epochs.config, epochs.stream
    shape, steps = StepShape.of(config, dp_size), steps_of(config, stream)
    counts, pairs, num_rows = [], 0, 0
    for step in range(0, config.train.num_steps, -(-config.train.num_steps // _MOST_STEPS)):
        samples = steps.samples(step)
        widths = stream.widths(samples.numbers)
        rows = len((packed(widths, shape.row_width) if samples.rows is None else samples.rows).ends)
        counts.append(num_microbatches_of(rows, shape))
        pairs, num_rows = pairs + int((widths * (widths + 1)).sum()), num_rows + rows
    whole = num_rows * shape.row_width * (shape.row_width + 1)
    return PackedSteps(sum(counts) / len(counts), pairs / whole)


def _size(source: SampleSource, seq_length: int, vision: VisionSection | None) -> str:
    """Describes the records of a source, or the samples of running text."""
    if not isinstance(source, SftDataset | PreferenceDataset):
        return f"{counted(len(source), 'sample', ',')} of {counted(seq_length, 'token', ',')}"
    cache = source.cache
    images = ""
    if cache.images is not None and vision is not None:
        patches = cache.images.grids.prod(axis=1)
        images = (
            f" ({int(patches.sum()) // vision.patches_per_feature:,} of {counted(len(patches), 'image', ',')}, the "
            "largest of "
        )
        images += f"{counted(patches.max(), 'patch', ',')})"
    too_long = float((cache.lengths > seq_length + 1).mean())
    return (
        f"{counted(cache.num_records, 'record', ',')}, {counted(cache.num_tokens, 'token', ',')}{images}, the longest "
        f"sequence has {cache.lengths.max():,}; {too_long:.1%} are longer than data.seq_length + 1"
    )


def _passes(epochs: Epochs, data: FilesSection) -> Iterator[str]:
    """Yields how often the run passes each source; for a single source, also the number of steps in an epoch."""
    if data.curriculum:
        return
    config, num_steps = epochs.config, epochs.config.train.num_steps
    group, by_rows = config.sequences_per_sample, config.steps_count_rows
    if len(data.train) == 1:
        size = epochs.num_sequences
        steps = epochs.num_steps(size)
        passed = num_steps / steps if by_rows else num_steps * config.sequences_per_step / size
        yield (
            f"{counted(size // group, 'sample', ',')} in {counted(steps, 'step', ',')}; the run's {num_steps:,} pass "
            f"them {passed:.2f} times"
        )
    elif not by_rows:  # the number of samples per row depends on all sources
        whole = sum(source.weight for source in data.train)
        for source, (name, size_) in zip(data.train, epochs.stream.named_sizes):
            assert size_ is not None, "files have an end"
            passed = num_steps * config.sequences_per_step * source.weight / whole / size_
            yield f"{name}: {counted(size_ // group, 'sample', ',')}, passed {passed:.2f} times by the run"

"""Opens the data that `data.*` names, before training starts, and reads samples; numpy, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import ConfigError, DataError, NothingToLearnError
from mtrain.config import Config
from mtrain.config.derived import compared, label_columns
from mtrain.config.load import MergedContent, whole
from mtrain.config.schema.data import (
    FilesSection,
    IndexedSection,
    MockSection,
    PackingSection,
    SftSection,
    SourceSection,
)
from mtrain.core.batch.order import Blend, BlendPhase, BlendPhases, SampleOrder, SamplePosition, key_of, mix
from mtrain.core.batch.sample import Sample, SampleSource, shifted
from mtrain.data.cache.entry import TokenCache
from mtrain.data.formats.megatron_indexed import Corpus, document_ranges
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.samples.pretrain import PretrainDataset
from mtrain.data.samples.sft import RowLimit, SftDataset
from mtrain.data.sft_caches import SftCaches
from mtrain.data.steps import SampleStream, Steps, later_blends, steps_of, with_later
from mtrain.hf.schema.registry import ORIGIN
from mtrain.hf.tokenizer.tokenizer import AddedTokens, Tokenizer, check_vocabulary, load_tokenizer, tokenizer_of

Split = Literal["train", "valid", "test"]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class Blended:
    """Sources mixed in their shares, each in a new order every epoch."""

    def __init__(
        self,
        seed: int,
        weights: Sequence[float],
        sources: Sequence[SampleSource],
        of_0_1_0: Sequence[str | None] = (),
        names: Sequence[str] = (),
        later: Mapping[int, BlendPhase] = MappingProxyType({}),
        group_size: int = 1,
    ) -> None:
        """Args:
        sources: Sources of the first blend, one per weight, followed by those that only later blends have.
        of_0_1_0: Fingerprint that version 0.1.0 gave each source; None if it could not read the source.
        names: Names of the sources, for display; by default their numbers.
        group_size: Number of consecutive samples of a source that stay together.
        """
        first = BlendPhase(0, tuple(range(len(weights))), tuple(weights))
        phases = [first, *later.values()]
        self._first = Blend(weights)
        dealer = BlendPhases(phases, len(sources)) if later else self._first
        self.order = SampleOrder(seed, dealer, [len(source) // group_size for source in sources])
        self._group_size, self._has_later = group_size, bool(later)
        self.sources = tuple(sources)
        self._names = tuple(names) if names else tuple(map(str, range(len(sources))))
        # with the weights: other shares are another order, and resuming would repeat or skip samples
        fingerprints = [source.fingerprint for source in sources]
        self.fingerprint = with_later(_blend_of(fingerprints, weights), later, fingerprints)
        known = [name for name in of_0_1_0[: len(weights)] if name is not None]
        earlier = [_blend_of(known, weights)] if len(known) == len(weights) else []
        self.earlier_fingerprints: tuple[str, ...] = tuple(
            with_later(fingerprint, later, fingerprints) for fingerprint in earlier
        )

    def sample(self, g: int) -> Sample:
        position = self.locate(g)
        sample = replace(self.sources[position.source].sample(position.epoch, position.index), source=position.source)
        if sample.member is None:
            return sample
        # numbered by the order, not by the source: a step may hold the same pair twice
        return sample.as_member(replace(sample.member, group=g // self._group_size))

    def locate(self, g: int) -> SamplePosition:
        group, number = divmod(g, self._group_size)
        position = self.order.locate(group)
        return replace(position, index=position.index * self._group_size + number)

    def next_epoch(self, g: int) -> int:
        assert not self._has_later, "a rule refuses packed rows with a curriculum"
        return self._group_size * self._first.next_epoch(g // self._group_size, self.order.sizes)

    def widths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = np.empty(len(numbers), np.int64)
        groups, inside = np.divmod(numbers, self._group_size)
        for part in self.order.locate_all(groups):
            indices = part.indices * self._group_size + inside[part.positions]
            widths[part.positions] = self.sources[part.source].widths(indices)
        return widths

    @property
    def named_sizes(self) -> tuple[tuple[str, int | None], ...]:
        return tuple((name, len(source)) for name, source in zip(self._names, self.sources))


def _blend_of(fingerprints: Sequence[str], weights: Sequence[float]) -> str:
    return "+".join(f"{weight:g}*{fingerprint}" for weight, fingerprint in zip(weights, fingerprints))


class HeldOut:
    """A validation or test set: the sources one after the other, each sample once; their weights are ignored."""

    def __init__(self, sources: Sequence[SampleSource], max_samples: int | None) -> None:
        self._sources = tuple(sources)
        total = sum(len(source) for source in sources)
        self._size = total if max_samples is None else min(total, max_samples)
        self.fingerprint = f"{self._size} of {' + '.join(source.fingerprint for source in sources)}"

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Sample:
        """Returns a sample, in the order of the sources."""
        source, inner = self._locate(index)
        sample = source.sample(0, inner)
        # numbered by the set, not by the source
        return sample if sample.member is None else sample.as_member(replace(sample.member, group=index // 2))

    def width(self, index: int) -> int:
        """Returns the positions that a sample takes in a row."""
        source, inner = self._locate(index)
        return int(source.widths(np.array([inner]))[0])

    def _locate(self, index: int) -> tuple[SampleSource, int]:
        for source in self._sources:
            if index < len(source):
                return source, index
            index -= len(source)
        raise IndexError(index)


_TRAIN, _HELD_OUT = 0, 1


class MockSamples:
    """Samples of uniformly random tokens below `vocab_size`: a pure function of (seed, g)."""

    def __init__(self, seed: int, seq_length: int, vocab_size: int, size: int | None = None) -> None:
        """`size` is the number of samples in a held-out set; None for training, which is endless."""
        self._seed, self._seq_length, self._vocab_size, self._size = seed, seq_length, vocab_size, size
        self._part = _TRAIN if size is None else _HELD_OUT
        self.earlier_fingerprints: tuple[str, ...] = ()
        name = f"mock-{key_of(seed, seq_length, vocab_size, self._part):016x}"
        self.fingerprint = name if size is None else f"{size} of {name}"

    def __len__(self) -> int:
        assert self._size is not None, "a held-out set"
        return self._size

    def sample(self, g: int) -> Sample:
        # part of the key, so that validation never sees a training sample
        key = np.uint64(key_of(self._seed, self._part, g))
        words = mix(np.arange(self._seq_length + 1, dtype=np.uint64) ^ key)
        ids = (words % np.uint64(self._vocab_size)).astype(np.int64)
        return shifted(ids, np.ones(self._seq_length))

    def widths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(numbers), self._seq_length, np.int64)

    def width(self, index: int) -> int:
        return self._seq_length

    def locate(self, g: int) -> SamplePosition:
        """Returns the position of sample g; samples never repeat."""
        return SamplePosition(source=0, epoch=0, index=g)

    def next_epoch(self, g: int) -> None: ...

    @property
    def named_sizes(self) -> tuple[tuple[str, int | None], ...]:
        return (("mock", None),)


def check_own_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that gives other ids than the one stored with the weights: the model would read other words.

    Nothing is compared if the weights come without a readable tokenizer, if `data.allow_other_tokenizer` is set, or in
    a run that resumes from its own checkpoint.
    """
    if config.data.allow_other_tokenizer or any(Path(config.run.dir, "checkpoints").glob("step_*")):
        return
    start = config.checkpoint.initialize_from
    folders = [*([Path(config.model.hf)] if config.model.hf is not None else [])]
    folders += [Path(start) / ORIGIN] if start is not None else []
    for folder in folders:
        stored = _tokenizer_at(folder, tokenizer.added)
        if (
            stored is not None
            and stored.path.resolve() != tokenizer.path.resolve()
            and not stored.encodes_like(tokenizer)
        ):
            raise DataError(
                f"data.tokenizer={config.data.tokenizer} gives other ids than {stored.path}, which came with the "
                f"weights, so the model would read other tokens than it was trained on; set data.tokenizer={folder}, "
                "or data.allow_other_tokenizer=true to train with the other one"
            )


def _tokenizer_at(folder: Path, added: AddedTokens) -> Tokenizer | None:
    try:
        return load_tokenizer(folder, added) if folder.is_dir() else None
    except DataError:  # no tokenizer, or an unusable one
        return None


class Sources:
    """Sources of a configuration; each file is opened once, even if data.split uses it for several splits."""

    def __init__(self, config: Config) -> None:
        self._config, head = config, config.model.head
        self._is_judged = head is not None
        self.tokenizer: Tokenizer | None = None
        if config.data.tokenizer is not None:
            self.tokenizer = tokenizer_of(config)
            check_vocabulary(self.tokenizer, config.model.vocab_size)
            check_own_tokenizer(config, self.tokenizer)
        # data.split uses one file for three splits; it is opened, checked and hashed once
        self._corpus = cache(lambda path: Corpus(path, config.model.vocab_size))
        self._notes: list[str] = []
        self._caches: SftCaches | None = None
        if isinstance(config.data, SftSection):
            assert self.tokenizer is not None  # a rule of the section
            compares = compared(config.loss, config.data)
            self._caches = SftCaches(config.data, self.tokenizer, config.model, compares, label_columns(config.loss))
        elif config.sequences_per_sample > 1:
            raise ConfigError(
                f"loss.function={config.loss.function} compares answers, but data.kind={config.data.kind} has none; "
                "set data.kind=sft and name files of preferences (docs/training/preference.md)"
            )
        elif head is not None:
            raise ConfigError(
                f"{head} judges sequences of records, but data.kind={config.data.kind} has none; "
                "set data.kind=sft and name files (docs/training/heads.md)"
            )
        self.preferences: dict[str, PreferenceDataset] = {}
        """Opened sources of groups, by fingerprint."""

    def training(self) -> SampleStream:
        """Opens the training samples; refuses them if no sample of any source has anything to learn."""
        data, seed = self._config.data, self._config.order_seed
        match data:
            case MockSection():
                return MockSamples(seed, data.seq_length, self._config.model.vocab_size)
            case IndexedSection() | SftSection():
                sections, size = data.all_sources, self._config.train.global_batch_size
                sources = [self._open(data, section, "train", number) for number, section in enumerate(sections)]
                names = [section.path for section in sections]
                self._refuse_nothing(dict(zip(names, sources)))
                weights = [section.weight for section in data.train]
                later = later_blends(data, size)
                size = self._config.sequences_per_sample
                return Blended(seed, weights, sources, self._fingerprints_of_0_1_0(sources), names, later, size)
            case _:
                assert_never(data)

    def held_out(self, split: Literal["valid", "test"]) -> dict[str, HeldOut | MockSamples]:
        """Opens the validation or test sets, by name and in order; a lone set has the name of its split."""
        data, limit = self._config.data, self._config.valid.max_samples
        limit = None if limit is None else limit * self._config.sequences_per_sample
        match data:
            case MockSection():
                # valid and test are different sequences, and neither is the training one
                seed = key_of(self._config.order_seed, _SPLITS.index(split))
                size = self._config.train.global_batch_size if limit is None else limit
                return {split: MockSamples(seed, data.seq_length, self._config.model.vocab_size, size)}
            case IndexedSection() | SftSection():
                return {
                    name: HeldOut([self._open(data, section, split, None) for section in sections], limit)
                    for name, sections in _held_out_sections(data, split).items()
                }
            case _:
                assert_never(data)

    def notes(self) -> list[str]:
        """Returns lines for the user on parts of the opened files that are not trained, or changed first."""
        return [*(self._caches.notes() if self._caches is not None else ()), *self._notes]

    def _refuse_nothing(self, sources: Mapping[str, SampleSource]) -> None:
        """Refuses a run in which no step could change the model; notes a source that changes nothing."""
        reasons = {name: why for name, source in sources.items() if (why := source.why_nothing()) is not None}
        if len(reasons) < len(sources):
            self._notes += [f"{name}: no token in it is trained: {why}" for name, why in reasons.items()]
            return
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise NothingToLearnError(
            f"no training sample has a token to train ({listed}), so no step would change the model; give records "
            "with answers in the loss, or raise data.seq_length if they are cut"
        )

    def _fingerprints_of_0_1_0(self, sources: Sequence[SampleSource]) -> list[str | None]:
        if self.tokenizer is None:
            return []
        bos, tokenizer = self.tokenizer.bos_id, self.tokenizer.fingerprint
        if self.tokenizer.begin_ids != (() if bos is None else (bos,)):
            return []  # 0.1.0 put the tokenizer's bos before every sample, so its samples differ
        return [
            source.fingerprint_of_0_1_0(tokenizer) if isinstance(source, SftDataset) else None for source in sources
        ]

    def _open(
        self, data: IndexedSection | SftSection, section: SourceSection, split: Split, shuffle_number: int | None
    ) -> SampleSource:
        match data:
            case SftSection():
                assert self._caches is not None
                assert self.tokenizer is not None
                tokens = self._caches.open(section.path)
                if (compares := compared(self._config.loss, data)) is not None:
                    return self._open_preferences(data, tokens, split, compares)
                numbers = _numbers(data, split, len(tokens))
                columns = label_columns(self._config.loss) or data.extra_columns
                limit = RowLimit(data.seq_length, data.too_long, self._caches.images)
                dataset = SftDataset(tokens, numbers, limit, columns, self._is_judged)
                self._notes += [note for note in dataset.notes() if note not in self._notes]  # one file, several sets
                return dataset
            case IndexedSection():
                corpus = self._corpus(section.path)
                documents = _numbers(data, split, len(corpus.document_lengths))
                key = None if shuffle_number is None else (self._config.order_seed, shuffle_number)
                return PretrainDataset(corpus, documents, data.seq_length, data.isolate_documents, key)
            case _:
                assert_never(data)

    def _open_preferences(
        self, data: SftSection, tokens: TokenCache, split: Split, compares: Literal["pairs", "answers"]
    ) -> PreferenceDataset:
        numbers = _numbers(data, split, len(tokens) // 2 if compares == "pairs" else len(tokens))
        assert self._caches is not None
        limit = RowLimit(data.seq_length, data.too_long, self._caches.images)
        dataset = PreferenceDataset(tokens, numbers, limit, compares, self._is_judged)
        self._notes += [note for note in dataset.notes() if note not in self._notes]
        # equal sets share one dataset, so that each sequence is scored by the reference model once
        return self.preferences.setdefault(dataset.fingerprint, dataset)


def _held_out_sections(data: FilesSection, split: Literal["valid", "test"]) -> dict[str, tuple[SourceSection, ...]]:
    if data.split is not None:
        return {split: data.all_sources} if data.split[_SPLITS.index(split)] > 0 else {}
    if split == "valid":
        return data.valid_sets
    return {split: data.test} if data.test else {}


def _numbers(data: FilesSection, split: Split, total: int) -> range:
    """Returns the numbers of the documents or samples of a split, in file order."""
    return range(total) if data.split is None else document_ranges(total, data.split)[_SPLITS.index(split)]


REFERENCES = " (reference scores "
"""Text in a fingerprint before the scores of the reference model."""


class OpenedData:
    """The data of a configuration, as every rank that reads data opens them."""

    def __init__(self, config: Config) -> None:
        """Opens and checks everything that the configuration names. Held-out sets are opened with the training data, so
        that a missing file is reported before the first step."""
        sources = Sources(config)
        self.tokenizer: Tokenizer | None = sources.tokenizer
        self.stream: SampleStream = sources.training()
        self.steps: Steps = steps_of(config, self.stream)
        self.sets: Mapping[str, Mapping[str, HeldOut | MockSamples]] = {
            split: sources.held_out(split) for split in ("valid", "test")
        }
        """Held-out sets by name, for each of "valid" and "test"."""
        self.preferences: Mapping[str, PreferenceDataset] = sources.preferences
        """Sources of compared sequences, by fingerprint."""
        self.notes: list[str] = sources.notes()
        """Lines for the user on parts of the files that are not trained, or changed first."""

    @property
    def fingerprint(self) -> str:
        """Identifies the training data and how they are cut."""
        return self.stream.fingerprint + self.steps.fingerprint

    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Lists the fingerprints that earlier versions gave the same data."""
        return tuple(fingerprint + self.steps.fingerprint for fingerprint in self.stream.earlier_fingerprints)


@dataclass(frozen=True)
class Epochs:
    """Passes through the only source of a run."""

    config: Config
    stream: SampleStream

    @property
    def num_sequences(self) -> int:
        ((_, size),) = self.stream.named_sizes
        assert size is not None, "files have an end"
        return size

    @property
    def packing(self) -> PackingSection | None:
        """Returns the packing with a window of at most an epoch. It is recorded, so that runs of earlier versions
        continue with theirs."""
        packing = self.config.data.packing
        if packing is None or not self.config.steps_count_rows:
            return packing
        return packing.model_copy(update={"window": min(packing.window, self.num_sequences)})

    def num_steps(self, num_sequences: int) -> int:
        """Returns the smallest number of steps with at least this many sequences."""
        data = self.config.data.model_copy(update={"packing": self.packing})
        return steps_of(self.config.model_copy(update={"data": data}), self.stream).holding(num_sequences)


def with_num_steps(config: Config, *, counts: bool = True) -> Config:
    """Returns the configuration with `train.num_steps` instead of `train.num_epochs`; opens the training data.

    The steps are the fewest that hold all samples of these epochs. `optimizer.warmup_ratio` becomes steps as well.

    Args:
        counts: Whether to count the samples; False takes any number of steps in which the schedule has room, for data
            that are not on this machine.
    """
    if config.train.num_epochs is None:
        return config
    key, data = f"train.num_epochs={config.train.num_epochs:g}", config.data
    if not isinstance(data, FilesSection):
        raise ConfigError(f"{key}, but data.kind={data.kind} has no end; set train.num_steps")
    if len(data.all_sources) > 1:
        raise ConfigError(
            f"{key} counts passes through one source, but data.train and data.curriculum name "
            f"{len(data.all_sources)}, and their weights decide how often each is passed; name their files by one "
            "pattern or folder, or set train.num_steps"
        )
    content, schedule = config.model_dump(), config.optimizer
    if counts:
        epochs = Epochs(config, Sources(config).training())
        # as text: 0.1 is a tenth here, not the float next to it
        num_sequences = math.ceil(Fraction(str(config.train.num_epochs)) * epochs.num_sequences)
        content["data"]["packing"] = None if epochs.packing is None else epochs.packing.model_dump()
        num_steps = epochs.num_steps(num_sequences)
    else:
        num_steps = 1000 + schedule.warmup_steps + (0 if schedule.decay_steps is None else schedule.decay_steps)
    content["train"] |= {"num_epochs": None, "num_steps": num_steps}
    return MergedContent(content, ()).config(whole)

"""From `data.*` to samples: opens what the configuration names, before training starts."""

from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol, assert_never

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.schema.data import AnyData, FilesSection, IndexedSection, MockSection, SftSection, SourceSection
from mtrain.data.formats.jsonl import Lines
from mtrain.data.formats.megatron_indexed import Corpus, document_ranges
from mtrain.data.formats.mock import MockSamples
from mtrain.data.order import SampleOrder, key_of
from mtrain.data.samples.pretrain import PretrainDataset
from mtrain.data.samples.sample import Sample, SampleSource
from mtrain.data.samples.sft import LineFormat, SFTDataset
from mtrain.tokenizer import Tokenizer, chat_template, load_tokenizer

Part = Literal["train", "valid", "test"]
_PARTS: tuple[Part, ...] = ("train", "valid", "test")


class SampleStream(Protocol):
    """The endless sequence of training samples."""

    fingerprint: str
    """Changes when the data or their order change, for the same seed."""

    def sample(self, g: int) -> Sample:
        """Sample g of the run, counted from 0."""


class Blended:
    """Sources in their shares, each in a new order every epoch."""

    def __init__(self, seed: int, weights: Sequence[float], sources: Sequence[SampleSource]) -> None:
        self.order = SampleOrder(seed, weights, [len(source) for source in sources])
        self.sources = tuple(sources)
        # weights too: other shares are another order, and resuming would repeat or leave out samples
        self.fingerprint = "+".join(f"{weight:g}*{source.fingerprint}" for weight, source in zip(weights, sources))

    def sample(self, g: int) -> Sample:
        place = self.order.locate(g)
        return self.sources[place.source].sample(place.epoch, place.index)


class HeldOut:
    """A validation or test set: the sources one after the other, each sample once; weights of sources play no part."""

    def __init__(self, sources: Sequence[SampleSource], max_samples: int | None) -> None:
        self._sources = tuple(sources)
        total = sum(len(source) for source in sources)
        self._size = total if max_samples is None else min(total, max_samples)

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Sample:
        """Sample `index`, in the order of the sources."""
        for source in self._sources:
            if index < len(source):
                return source.sample(0, index)
            index -= len(source)
        raise IndexError(index)


class MockHeldOut:
    """As many random samples as a global batch, or as `valid.max_samples` says."""

    def __init__(self, samples: MockSamples, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Sample:
        return self._samples.sample(index)


class Sources:
    """Opens the sources of a configuration; each file once, even where a split uses it for several parts."""

    def __init__(self, config: Config) -> None:
        """
        Raises:
            DataError: The tokenizer is missing, damaged, or has more tokens than the model.
        """
        self._config = config
        self.tokenizer: Tokenizer | None = None
        if config.data.tokenizer is not None:
            self.tokenizer = load_tokenizer(config.data.tokenizer)
            # an id beyond the embedding would be an index error on a device, steps later
            _check_vocabulary(self.tokenizer, config.model.vocab_size)
        # a split uses one file for three parts: opened, checked and hashed once
        self._corpus = cache(lambda path: Corpus(path, config.model.vocab_size))
        self._form = _line_format(config.data, self.tokenizer)
        self._lines = cache(lambda path: Lines(path, self._form.check))

    def training(self) -> SampleStream:
        """The training samples.

        Raises:
            DataError: a source is missing, damaged, too small, or does not fit the model.
        """
        data, seed = self._config.data, self._config.train.seed
        match data:
            case MockSection():
                return MockSamples(seed, data.seq_length, self._config.model.vocab_size)
            case IndexedSection() | SftSection():
                sources = [self._open(data, section, "train", number) for number, section in enumerate(data.train)]
                return Blended(seed, [section.weight for section in data.train], sources)
            case _:
                assert_never(data)

    def held_out(self, part: Literal["valid", "test"]) -> HeldOut | MockHeldOut | None:
        """The validation or test set; None where the configuration has none.

        Raises:
            DataError: as for the training samples.
        """
        data, limit = self._config.data, self._config.valid.max_samples
        match data:
            case MockSection():
                # valid and test are different sequences, and neither is the training one
                seed = key_of(self._config.train.seed, _PARTS.index(part))
                samples = MockSamples(seed, data.seq_length, self._config.model.vocab_size, held_out=True)
                return MockHeldOut(samples, self._config.train.global_batch_size if limit is None else limit)
            case IndexedSection() | SftSection():
                sections = _held_out_sections(data, part)
                return HeldOut([self._open(data, each, part, None) for each in sections], limit) if sections else None
            case _:
                assert_never(data)

    def _open(
        self, data: IndexedSection | SftSection, section: SourceSection, part: Part, shuffle_number: int | None
    ) -> SampleSource:
        match data:
            case SftSection():
                assert self.tokenizer is not None  # a rule of the section
                lines = self._lines(section.path)
                numbers = _numbers(data, part, len(lines))
                return SFTDataset(lines, numbers, self.tokenizer, data.seq_length, data.too_long, self._form)
            case IndexedSection():
                corpus = self._corpus(section.path)
                documents = _numbers(data, part, len(corpus.document_lengths))
                key = None if shuffle_number is None else (self._config.train.seed, shuffle_number)
                return PretrainDataset(corpus, documents, data.seq_length, data.isolate_documents, key)
            case _:
                assert_never(data)


def _held_out_sections(data: FilesSection, part: Literal["valid", "test"]) -> tuple[SourceSection, ...]:
    if data.split is not None:
        return data.train if data.split[_PARTS.index(part)] > 0 else ()
    return data.valid if part == "valid" else data.test


def _numbers(data: FilesSection, part: Part, total: int) -> range:
    """The documents or lines of a part, in file order."""
    return range(total) if data.split is None else document_ranges(total, data.split)[_PARTS.index(part)]


def _line_format(data: AnyData, tokenizer: Tokenizer | None) -> LineFormat:
    """Whether messages are refused is known only here: the configuration alone does not tell the tokenizer's folder."""
    if not isinstance(data, SftSection):
        return LineFormat()
    if data.chat_format == "plain" or tokenizer is None:
        return LineFormat(frozenset(data.ignore_keys))
    return LineFormat(frozenset(data.ignore_keys), chat_template(tokenizer.path))


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, but model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}, or name the model's own tokenizer"
        )

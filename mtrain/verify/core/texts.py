"""Raw samples of every step, from which the layouts and the reference make rows independently.

Only their order comes from the trainer; it is checked against the rules for an order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.schema.data import FilesSection, IndexedSection, MockSection, SftSection
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.cache.entry import TokenCache
from mtrain.data.encoding.compared import image_processor
from mtrain.data.encoding.encoder import PLAIN, RecordEncoder
from mtrain.data.formats.recognise import FileKind
from mtrain.data.formats.record_files import chunks
from mtrain.data.samples.pretrain import PretrainDataset
from mtrain.data.samples.sft import SftDataset
from mtrain.data.sources import Blended, MockSamples, Sources
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import Tokenizer
from mtrain.verify.core.samples import HardBatch, SamplePlan
from mtrain.verify.reference.order import Draw, Shares, broken_order, is_permutation, unshuffled
from mtrain.verify.reference.text import Picture, RawCorpus, Text, num_lines, objects, text_of

_NUM_ORDERED = 4096
"""Number of samples whose order is checked; more than a few steps need."""


@dataclass(frozen=True)
class Texts:
    """Raw samples of all steps of a check."""

    steps: tuple[tuple[Text, ...], ...]
    order_faults: tuple[str, ...] = ()


def texts_of(config: Config, plan: SamplePlan) -> Texts:
    """Returns the samples of each step; raises DataError for a bad file."""
    texts, faults = _own_texts(config, plan) if plan.user_steps else ([], ())
    size = config.train.global_batch_size
    steps = [tuple(texts[step * size : (step + 1) * size]) for step in range(plan.user_steps)]
    steps += [tuple(HardBatch(config, number, plan.choices).texts()) for number in range(plan.hard_steps)]
    return Texts(tuple(steps), faults)


def _own_texts(config: Config, plan: SamplePlan) -> tuple[list[Text], tuple[str, ...]]:
    model = plan.user_model(config.model)
    user = config.model_copy(update={"model": model})
    sources, count = Sources(user), plan.user_steps * config.train.global_batch_size
    stream = sources.training()
    if isinstance(stream, MockSamples):
        return [_random(stream, number) for number in range(count)], ()
    assert isinstance(stream, Blended), "there are two kinds of stream"
    locations = [stream.order.locate(number) for number in range(max(count, _NUM_ORDERED))]
    turns = [Draw(location.source, location.epoch, location.index) for location in locations]
    sizes = [len(source) for source in stream.sources]
    data = config.data
    assert not isinstance(data, MockSection), "random tokens are no blend"
    faults = list(broken_order(turns, sizes, _shares(data, config.train.global_batch_size)))
    match data:
        case SftSection():
            assert sources.tokenizer is not None, "a rule of the section"
            reader = _Reader(data, sources.tokenizer, image_processor(data, model))
            return _answers(reader, stream, turns[:count], faults.append), tuple(faults)
        case IndexedSection():
            return _windows(data, stream, turns[:count], faults.append), tuple(faults)
        case _:
            assert_never(data)


def _shares(data: FilesSection, size: int) -> list[Shares]:
    """Returns the source shares of each blend, with the first sample of the blend."""
    paths = [source.path for source in data.all_sources]
    first = Shares(0, {number: source.weight for number, source in enumerate(data.train)})
    later = [
        Shares(blend.from_step * size, {paths.index(section.path): section.weight for section in blend.sources})
        for blend in data.curriculum
    ]
    return [first, *later]


def _random(samples: MockSamples, number: int) -> Text:
    sample = samples.sample(number)
    return Text(np.append(sample.tokens, sample.labels[-1]), np.ones(len(sample.tokens) + 1))


def _answers(reader: "_Reader", stream: Blended, turns: list[Draw], tell: Callable[[str], None]) -> list[Text]:
    texts: dict[Draw, Text] = {}
    data = reader.data
    for number, source in enumerate(stream.sources):
        assert isinstance(source, SftDataset), "the kind has one sort of samples"
        source_turns = [turn for turn in turns if turn.source == number]
        records = _records(source.cache, {source.cache.record(turn.index) for turn in source_turns})
        path = _lone_lines(source.cache)
        num_records = source.cache.num_records if path is None else num_lines(path)
        count = _in_training(num_records - source.cache.num_bad, data)
        if len(source) != count and data.too_long == "end":
            file = data.all_sources[number].path
            tell(
                f"source {number} has {counted(len(source), 'sample')}, but {file} has "
                f"{counted(count, 'training record')}"
            )
        for turn in source_turns:
            texts[turn] = reader.text(*records[source.cache.record(turn.index)])
    return [texts[turn] for turn in turns]


def _records(tokens: TokenCache, numbers: set[int]) -> dict[int, tuple[Any, Path]]:
    """Reads records by number, with the folders of their files: JSON lines with the reference's reader, other formats
    with readers tested against it."""
    if (path := _lone_lines(tokens)) is not None:
        return {number: (record, path.parent) for number, record in objects(path, numbers).items()}
    records: dict[int, tuple[Any, Path]] = {}
    for chunk in chunks(tokens.files):
        first, folder = tokens.file_starts[chunk.file] + chunk.first - 1, tokens.files[chunk.file].path.parent
        within = (index for index in range(len(chunk)) if first + index in numbers)
        records |= {first + index: (chunk.record(index), folder) for index in within}
    return records


def _lone_lines(tokens: TokenCache) -> Path | None:
    (file, *more) = tokens.files
    return file.path if file.kind is FileKind.LINES and not more else None


class _Reader:
    """Converts records: plain forms with the reference, chat templates and images with the trainer's encoder and
    processor, which are tested against transformers."""

    def __init__(self, data: SftSection, tokenizer: Tokenizer, images: ImageProcessor | None) -> None:
        self.data, self._tokenizer, self._images = data, tokenizer, images
        self._encoder = RecordEncoder(data, tokenizer, images)

    def text(self, record: dict[str, Any], folder: Path) -> Text:
        """Returns the sample of a record from a file in `folder`; cuts a long one at the end, or before an image."""
        data = self.data
        if _is_plain(record, data):
            return text_of(record, self._tokenizer, data.seq_length)
        sample = self._encoder.encode(record, folder)
        pictures = list(self._pictures(sample))
        size = min(data.seq_length, len(sample.ids) - 1)
        size = next((picture.start for picture, end in pictures if picture.start < size < end), size)
        kept = tuple(picture for picture, end in pictures if end <= size)
        ids, counts = sample.ids[: size + 1].astype(np.int64), sample.loss_weights[: size + 1].astype(np.float64)
        return Text(ids, counts, sample.weight, pictures=kept)

    def _pictures(self, sample: TokenizedSample) -> Iterator[tuple[Picture, int]]:
        """Yields the images of a sample, each with the end of its tokens."""
        if self._images is None:
            return
        places, begin = np.flatnonzero(sample.ids == self._images.image_token), 0
        for image in sample.images:
            (_, rows, columns), start = image.grid, int(places[begin])
            pixels = self._images.patches(image.content).pixels
            picture = Picture(start, rows, columns, pixels, image.content)
            yield picture, start + len(self._images.tokens(image.grid))
            begin += self._images.num_features(image.grid)


def _is_plain(record: dict[str, Any], data: SftSection) -> bool:
    if data.special_tokens_in_text:
        return False
    if "messages" not in record:
        return "prompt" in record
    weighs = any(message.keys() & {"weight", "train"} for message in record["messages"])
    return data.chat_template == PLAIN and data.loss_on == "all_answers" and not weighs


def _windows(data: IndexedSection, stream: Blended, turns: list[Draw], tell: Callable[[str], None]) -> list[Text]:
    corpora = [RawCorpus.open(section.path) for section in data.all_sources]
    orders = {}
    for source, epoch in sorted({(turn.source, turn.epoch) for turn in turns}):
        windows = stream.sources[source]
        assert isinstance(windows, PretrainDataset)
        orders[source, epoch] = windows.document_order(epoch)
        count = _in_training(corpora[source].num_documents, data)
        if not is_permutation(orders[source, epoch], count):
            tell(f"source {source}: epoch {epoch} does not hold each of its {counted(count, 'document')} once")
    for source, windows in enumerate(stream.sources):
        assert isinstance(windows, PretrainDataset)
        first, second = (windows.document_order(epoch)[:_NUM_ORDERED].tolist() for epoch in (0, 1))
        for fault in unshuffled(first, second):
            tell(f"documents of source {source}: {fault}")
    isolate, length = data.isolate_documents, data.seq_length
    return [corpora[turn.source].window(orders[turn.source, turn.epoch], turn.index, length, isolate) for turn in turns]


def _in_training(count: int, data: FilesSection) -> int:
    """Counts the training documents or lines: all, or the first ones if a split holds others out."""
    return count if data.split is None else round(count * data.split[0])

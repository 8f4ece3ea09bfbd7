"""Shows the samples of a step for people to check: what is trained, what is not, and the weight of every token.

A token's weight is that of predicting it, in the main term and by its aggregation, as the training step uses it;
divided by the step's denominator it is the token's share of the loss.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.derived import compared, data_phases, phase_number
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.core.batch.choices import choosing_layers
from mtrain.core.batch.sample import Sample
from mtrain.core.loss.aggregation import aggregate
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.samples.sft import SftDataset
from mtrain.data.sources import Blended
from mtrain.data.steps import SampleStream, steps_of
from mtrain.hf.images import for_browser
from mtrain.hf.tokenizer.tokenizer import Tokenizer

_WINDOW = 4
"""Tokens before a token that decide how it is written: a space before it, the first bytes of its character."""
_TRAINED, _END = "⟦", "⟧"
_DOCUMENT = "┃"


@dataclass(frozen=True)
class ShownToken:
    id: int
    text: str
    """Text that the token adds; the name of a control token, or of a token that is part of a character."""
    weight: float
    """Weight of predicting the token; 0 if it is not trained."""
    begins_document: bool
    picture: bytes | None = None
    """File for browsers of the image whose tokens begin here; the text of its other tokens is empty."""


@dataclass(frozen=True)
class ShownSample:
    """One sequence for the loss."""

    slot: int
    """Position of the sample in the global batch."""
    origin: str
    """File and record, or number of the window, for display."""
    weight: float
    """Weight of the whole sequence, as the data give it."""
    tokens: tuple[ShownToken, ...]
    num_routed: int | None = None
    """Number of tokens whose experts the record names; None if the data name no experts."""

    @property
    def num_trained(self) -> int:
        return sum(token.weight > 0 for token in self.tokens)


@dataclass(frozen=True)
class ShownStep:
    """A global batch, or its first samples."""

    step: int
    """Counted from 1, as in metrics.jsonl."""
    num_samples: int
    denominator: float
    """Denominator of the main term for the whole batch."""
    aggregation: str
    samples: tuple[ShownSample, ...]
    phase: str = ""
    """Phase of the curriculum, for display; empty without a curriculum."""

    @property
    def headline(self) -> str:
        return (
            f"Step {self.step}{self.phase}: {len(self.samples)} of {counted(self.num_samples, 'sample')}, "
            f"{self.aggregation}, denominator {self.denominator:g}"
        )


def shown_step(config: Config, stream: SampleStream, tokenizer: Tokenizer | None, step: int, count: int) -> ShownStep:
    """Reads the first `count` samples of a step, counted from 1, with the weights of their tokens; without a tokenizer
    the texts are ids. All samples of the step are read, for the denominator."""
    numbers = steps_of(config, stream).samples(step - 1).numbers.tolist()
    denominators, samples, compares = [], [], compared(config.loss, config.data)
    for slot, number in enumerate(numbers):
        sample = stream.sample(number)
        # a sample without text has one position of padding, which may carry a share of the denominator
        mask = sample.mask if len(sample.mask) else np.zeros(1)
        terms = aggregate(mask, _weight(sample, compares), config.loss, slot == 0)
        denominators.append(math.fsum(terms.denominator_weights))
        if slot < count:
            tokens = tuple(_with_pictures(_tokens(sample, terms.weights.tolist(), tokenizer), stream, number, sample))
            experts, routed = sample.choices.get(ROUTED_EXPERTS), None
            if experts is not None:
                routed = int((experts[:, choosing_layers(config.model)] >= 0).any(axis=(1, 2)).sum())
            samples.append(ShownSample(slot, _origin(stream, number), sample.weight, tokens, routed))
    total = math.fsum(denominators)
    phases = data_phases(config.data)
    phase = phase_number(phases, step)
    of_phase = f" (phase {phase} of the curriculum, {phases[phase - 1]})" if phase else ""
    return ShownStep(step, len(numbers), total, config.loss.aggregation, tuple(samples), of_phase)


def _weight(sample: Sample, compares: Literal["pairs", "answers"] | None) -> float:
    """Returns a sample's weight in the denominator: a pair counts once, KTO's mismatched sequences do not count."""
    role = None if sample.member is None else sample.member.role
    return 0.0 if role == "mismatched" or (role == "rejected" and compares == "pairs") else sample.weight


def _tokens(sample: Sample, weights: Sequence[float], tokenizer: Tokenizer | None) -> Iterator[ShownToken]:
    ids = [*sample.tokens.tolist(), *sample.labels[-1:].tolist()]
    edges = {0} if sample.document_starts is None else set(sample.document_starts.tolist())
    for number, id_ in enumerate(ids):
        text = str(id_) if tokenizer is None else _text(tokenizer, ids, number)
        # position t predicts token t + 1, so nothing predicts the first one
        weight = 0.0 if number == 0 else weights[number - 1]
        yield ShownToken(id_, text, weight, number in edges)


def _with_pictures(
    tokens: Iterable[ShownToken], stream: SampleStream, number: int, sample: Sample
) -> Iterator[ShownToken]:
    """Replaces the text of each image's first token by a description, and that of its other tokens by nothing."""
    images = sample.images
    if images is None:
        yield from tokens
        return
    assert isinstance(stream, Blended), "random samples have no images"
    position = stream.locate(number)
    source = stream.sources[position.source]
    assert isinstance(source, SftDataset | PreferenceDataset), "other sources have no images"
    contents = {}
    merged = len(images.pixels) // int((images.places >= 0).sum())  # patches of a feature
    ends = np.cumsum(images.grids.prod(axis=1)) // merged
    for image, grid, end in zip(source.images(position.index), images.grids.tolist(), ends.tolist()):
        count = math.prod(grid) // merged
        contents[end - count] = (for_browser(image.content), f"[image of {counted(count, 'token')}]")
    for token, place in itertools.zip_longest(tokens, images.places.tolist(), fillvalue=-1):
        assert isinstance(token, ShownToken), "a sample has one token more than places"
        content, text = contents.get(place, (None, ""))
        yield token if place < 0 else replace(token, text=text, picture=content)


def _text(tokenizer: Tokenizer, ids: Sequence[int], number: int) -> str:
    before = ids[max(0, number - _WINDOW) : number]
    head, whole = tokenizer.decode(before).rstrip("\ufffd"), tokenizer.decode([*before, ids[number]])
    added = whole.removeprefix(head)
    return _printable(added if added and "\ufffd" not in added else tokenizer.name(ids[number]))


def _printable(text: str) -> str:
    """Escapes characters that would move a terminal's cursor or change its colours."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _origin(stream: SampleStream, g: int) -> str:
    if not isinstance(stream, Blended):
        return f"random sample {g}"
    position = stream.locate(g)
    source = stream.sources[position.source]
    if isinstance(source, SftDataset | PreferenceDataset):
        return f"{source.location(position.index)}, epoch {position.epoch + 1}"
    return f"source {position.source + 1}, epoch {position.epoch + 1}, window {position.index}"


def as_text(shown: ShownStep) -> str:
    """Writes a step as plain text for files and logs."""
    lines = [f"{shown.headline}. Trained text is between {_TRAINED} and {_END}; {_DOCUMENT} begins a document."]
    for sample in shown.samples:
        lines += ["", headline(sample), "".join(_marked(sample.tokens))]
    return "\n".join(lines) + "\n"


def headline(sample: ShownSample) -> str:
    weights = [token.weight for token in sample.tokens if token.weight > 0]
    low, high = f"{min(weights, default=0.0):.6g}", f"{max(weights, default=0.0):.6g}"
    spread = low if low == high else f"{low} to {high}"
    counts = f"{counted(len(sample.tokens), 'token')}, {sample.num_trained} trained, each weighs {spread}"
    replayed = "" if sample.num_routed is None else f"; experts of {counted(sample.num_routed, 'token')} replayed"
    return f"slot {sample.slot}: {sample.origin}: {counts}; sequence weight {sample.weight:g}{replayed}"


def _marked(tokens: Sequence[ShownToken]) -> Iterator[str]:
    is_inside = False
    for token in tokens:
        is_trained = token.weight > 0
        if is_trained != is_inside:
            yield _TRAINED if is_trained else _END
            is_inside = is_trained
        yield (_DOCUMENT if token.begins_document else "") + token.text
    if is_inside:
        yield _END

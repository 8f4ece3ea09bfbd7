"""Batches of a check: the user's own, then hard ones, which reveal faults of a loss."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.base.errors import NothingToLearnError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS, TEMPERATURE, columns_of
from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.choices import choice_shapes
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.order import key_of
from mtrain.core.batch.sample import Sample, TokenizedSample, shifted
from mtrain.core.loss.functions.load import extras_of, load_loss_function, reads_temperature
from mtrain.data.encoding.checks import token_extras
from mtrain.data.encoding.plain import tokens_sample
from mtrain.data.loader import Given, RowPlan, RowsOfRank, Slots, StepLoader
from mtrain.data.samples.sft import sample_of_record
from mtrain.verify.core.shrink import SEQ_LENGTH, Shrunk
from mtrain.verify.reference.model.images import places_of
from mtrain.verify.reference.policy import EXTRAS
from mtrain.verify.reference.text import Picture, Text

NUM_HARD_KINDS = 3
_LONGEST = 512
"""Longest rows, in tokens, to try in search of answers; longer ones would take minutes."""
_TOKEN_WEIGHTS = np.array([1.0, 0.5, 0.3, 0.125], np.float32).astype(np.float64)
"""Drawn weights of tokens, rounded to float32 like records."""
_SAMPLE_WEIGHTS = (1.0, 0.25, 2.5, 1 / 3, 0.0)
_TEMPERATURES = (0.6, 1.0, 1.3)
_BOUNDS_OF_RATIOS = ("dual_clip", "rollout_cap", "rollout_floor")
"""Options of policy losses that may be too far from 1 for usual ratios."""
_LEAST_SPREAD = 0.3
_NUM_EDGES = 3
_EDGES_EVERY = 3
"""Every third row has several documents, if documents are isolated."""
_PACKED_SHARES = (0.5, 0.1, 0.8, 0.3, 0.2, 1.0, 0.6)
"""Shares of a row that samples take in turn, if rows are packed."""
_NO_IMAGE_EVERY = 4
"""Every fourth sample has no images, if the model has a vision tower."""
_MOST_BEFORE_IMAGE = 6
"""Exclusive bound of the number of tokens before an image of a document, and between two images."""
_SHORT_EVERY = 5
"""Every fifth row is padded by a quarter, except those with loss tokens at the end."""


@dataclass(frozen=True)
class SamplePlan:
    """Sources of the samples of each step."""

    user_steps: int
    hard_steps: int
    user_vocab_size: int = 0
    """Vocabulary size of the user's data; larger than the model's if token ids are taken modulo the model's."""
    user_image_token: int = 0
    """Id of the image token in the user's data."""
    choices: tuple[str, ...] = ()
    """Choices in the user's records, such as the experts of each token; random samples also have them."""
    has_images: bool = False

    @property
    def num_steps(self) -> int:
        """Returns the number of steps."""
        return self.user_steps + self.hard_steps

    def user_model(self, small: ModelSection) -> ModelSection:
        """Returns the model with the user's token ids, to open the user's data."""
        vision = small.vision
        if vision is not None:
            vision = vision.model_copy(update={"image_token": self.user_image_token})
        return small.model_copy(update={"vocab_size": self.user_vocab_size, "vision": vision})

    def describe(self) -> str:
        """Describes the plan for a report."""
        hard = (
            f"{counted(self.hard_steps, 'step')} of random tokens under random masks (0 to 97 % masked, some samples "
            "entirely)"
        )
        hard += ", with experts that routers replay" if self.choices else ""
        hard += ", with random images" if self.has_images else ""
        return f"{counted(self.user_steps, 'step')} of the run's own data, then {hard}" if self.user_steps else hard


@dataclass(frozen=True)
class SamplePositions:
    """Positions of the samples in the rows of a step."""

    plan: RowPlan
    samples: Slots

    def of(self, microbatch: int, dp_rank: int, width: int) -> NDArray[np.int64]:
        """Returns slot (-1: none) and position in the sample at each position of the rows, [2, rows, width]."""
        rows = self.plan.rows(microbatch, dp_rank)
        index = np.full((2, len(rows), width), -1)
        for row, slots in enumerate(rows):
            begin = 0
            for slot in slots:
                # padding after the last sample belongs to none
                end = begin + self.samples.width(slot)
                index[0, row, begin:end], index[1, row, begin:end] = slot, np.arange(end - begin)
                begin = end
        return index


class Batches:
    """Microbatches of one data-parallel rank."""

    def __init__(self, config: Config, plan: SamplePlan, dp_rank: int, dp_size: int) -> None:
        """Opens the user's data, if the plan uses them."""
        self._config, self._plan = config, plan
        extras = (*drawn_extras(config.loss), *plan.choices)
        self._rows = RowsOfRank(config, dp_rank, dp_size, extras)
        self._loader = user_loader(config, plan, dp_rank, dp_size) if plan.user_steps else None

    def positions(self, step: int) -> SamplePositions:
        """Returns the positions of a step's samples, equal on all ranks."""
        if self._loader is not None and step < self._plan.user_steps:
            return SamplePositions(self._loader.plan(step), self._loader.samples(step))
        samples = self._hard_samples(step)
        return SamplePositions(self._rows.plan(samples, self._config.train.global_batch_size), samples)

    def of_step(self, step: int) -> list[Microbatch]:
        """Returns the microbatches of a step, counted from 0."""
        if self._loader is not None and step < self._plan.user_steps:
            return [batch.with_vocabulary(self._config.model.vocab_size) for batch in self._loader.batches(step)]
        return self._rows.of_step(self._hard_samples(step), has_first=True)

    def _hard_samples(self, step: int) -> Given:
        return Given(HardBatch(self._config, step - self._plan.user_steps, self._plan.choices).samples())


def of_user(num_steps: int, model: ModelSection) -> SamplePlan:
    """Returns the plan of steps of the user's data alone, which are tokens of the user's model."""
    return SamplePlan(num_steps, 0, model.vocab_size, 0 if model.vision is None else model.vision.image_token)


def user_loader(config: Config, plan: SamplePlan, dp_rank: int, dp_size: int) -> StepLoader:
    """Opens the user's data with the user's vocabulary."""
    return StepLoader(config.model_copy(update={"model": plan.user_model(config.model)}), dp_rank, dp_size)


def _record(text: Text, model: ModelSection) -> TokenizedSample:
    """Converts a text to a record, like the reader of finetuning data."""
    record = {"input_ids": text.ids.tolist(), "loss_mask": text.counts.tolist(), "weight": text.weight}
    sample = tokens_sample(record, frozenset(), model.vocab_size)
    extras = {name: values.tolist() for name, values in text.extras.items()}
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys(extras, ())
    if text.routed_experts is not None:
        extras[ROUTED_EXPERTS] = text.routed_experts[:-1].tolist()
        sizes |= choice_shapes(model)
    return replace(sample, extras=token_extras(extras, sizes, len(text.ids))) if extras else sample


def _columns(text: Text) -> tuple[str, ...]:
    if text.routed_experts is None:
        return tuple(text.extras)
    _, layers, top_k = text.routed_experts.shape
    return (*text.extras, *columns_of(f"{ROUTED_EXPERTS}:{layers}x{top_k}"))


def _of_documents(text: Text) -> Sample:
    filled, edges = len(text.ids) - 1, np.array(text.edges, np.int64)
    starts = np.zeros(filled, np.int32)
    starts[edges] = edges
    starts = np.maximum.accumulate(starts)
    mask = text.counts[1:].copy()
    mask[edges - 1] = 0.0  # no token is predicted across an edge
    # float32 holds these numbers exactly
    extras = {name: values[1:].astype(np.float32) for name, values in text.extras.items()}
    choices = {} if text.routed_experts is None else {ROUTED_EXPERTS: text.routed_experts[:-1].astype(np.int32)}
    return replace(shifted(text.ids, mask, text.weight, starts, extras), choices=choices)


def _images_of(text: Text, vision: VisionSection) -> SampleImages | None:
    """Converts images as the reader of finetuning data does."""
    if not text.pictures:
        return None
    length, grids = len(text.ids) - 1, []
    starts = np.zeros(length, np.int64)
    starts[list(text.edges)] = text.edges
    starts = np.maximum.accumulate(starts)
    places, axes = np.full(length, -1), (np.arange(length) - starts)[:, None].repeat(3, axis=1)
    for picture in text.pictures:
        height, width = picture.rows // vision.merge_size, picture.columns // vision.merge_size
        count = height * width
        places[places_of(picture, vision)] = np.arange(count) + places.max() + 1
        if vision.rope_sections is not None:
            span, after = slice(picture.start, picture.start + count), slice(picture.start + count, length)
            axes[span] = axes[picture.start] + np.indices((1, height, width)).reshape(3, -1).T
            axes[after][starts[after] == starts[picture.start]] -= count - max(height, width)
        grids.append([1, picture.rows, picture.columns])
    return SampleImages(np.concatenate([each.pixels for each in text.pictures]), np.array(grids), places, axes)


def _mask(rng: np.random.Generator, kind: int, slot: int, batch: int, length: int) -> NDArray[np.float64]:
    mask = np.zeros(length)
    if kind == 2:
        if slot == 0:
            mask[: max(1, length // 8)] = 1.0
        elif slot == batch // 2:
            mask[-max(1, length // 16) :] = 1.0
        return mask
    share = (1.0, 0.0, 0.03, 0.9, 0.5, 0.15)[slot % 6]  # of tokens that count
    mask[rng.permutation(length)[: max(1, round(share * length)) if share else 0]] = 1.0
    return mask * rng.choice(_TOKEN_WEIGHTS, length) if kind == 1 else mask


def drawn_extras(loss: LossSection) -> tuple[str, ...]:
    """Returns the extras that the loss functions read and that can be drawn.

    Functions that read numbers of sampled tokens also get temperatures.
    """
    terms = (loss, *loss.side_terms.values())
    functions = [load_loss_function(term.function, term.options) for term in terms]
    read = {name for function in functions for name in extras_of(function)}
    names = [name for name in EXTRAS if name in read]
    if names and any(reads_temperature(function) for function in functions):
        names.append(TEMPERATURE)
    return tuple(names)


def _spread(loss: LossSection) -> float:
    """Returns the standard deviation of log-probabilities at which some ratios exceed the farthest bound."""
    bounds = [
        abs(math.log(value))
        for term in (loss, *loss.side_terms.values())
        for name, value in term.options.items()
        if name in _BOUNDS_OF_RATIOS and value
    ]
    return max([_LEAST_SPREAD, *(bound / 2 for bound in bounds)])


@dataclass(frozen=True)
class HardBatch:
    """Global batch of random tokens, which reveals faults of a loss.

    Batches alternate: ragged masks, some empty; fractional weights of tokens and samples; loss tokens in only two
    samples, at one end of the row, so that some data-parallel and context-parallel ranks have none. Some rows are not
    full.
    """

    config: Config
    number: int
    choices: tuple[str, ...] = ()

    @property
    def kind(self) -> int:
        """Returns the kind, one of NUM_HARD_KINDS."""
        return self.number % NUM_HARD_KINDS

    def samples(self) -> list[Sample]:
        """Returns the batch by slot, made by the trainer's own code.

        A text becomes a user's `Datum` or a record of a file; several documents fit neither, so they are shifted like a
        corpus.
        """
        vision = self.config.model.vision
        samples = [self._sample(text, slot) for slot, text in enumerate(self.texts())]
        if vision is None:
            return samples
        return [
            replace(sample, images=_images_of(text, vision)) for sample, text in zip(samples, self.texts(), strict=True)
        ]

    def texts(self) -> list[Text]:
        """Returns the texts by slot."""
        config, number = self.config, self.number
        rng = np.random.default_rng([key_of(config.train.seed, number) & 0xFFFFFFFF, number])
        batch, length = config.train.global_batch_size, config.data.seq_length
        return [self._text(rng, _mask(rng, self.kind, slot, batch, length), slot) for slot in range(batch)]

    def _sample(self, text: Text, slot: int) -> Sample:
        if text.edges:
            return _of_documents(text)
        if slot % 2 and text.counts[1:].any():  # a record without anything to learn is refused
            return sample_of_record(_record(text, self.config.model), 0, len(text.ids), _columns(text))
        # in turn one number per token and one per predicted token
        first = slot // 2 % 2
        extras = {name: values[first:].tolist() for name, values in text.extras.items()}
        temperature = extras.pop(TEMPERATURE, [None])[0]
        datum = Datum(
            text.ids.tolist(),
            text.counts.tolist(),
            text.weight,
            extras,
            temperature=temperature,
            routed_experts=text.routed_experts,
        )
        return sample_of(datum, f"sample {slot}", self.config, tuple(text.extras))

    def _text(self, rng: np.random.Generator, mask: NDArray[np.float64], slot: int) -> Text:
        config, length = self.config, self.config.data.seq_length
        ids = rng.integers(0, config.model.vocab_size, length + 1)
        weight = float(rng.choice(_SAMPLE_WEIGHTS)) if self.kind == 1 else 1.0
        size = self._size(slot)
        edges: tuple[int, ...] = ()
        if config.data.isolate_documents:
            count = min(_NUM_EDGES, size - 1)
            edges = tuple(sorted(rng.choice(np.arange(1, size), size=count, replace=False).tolist()))
            edges = edges if slot % _EDGES_EVERY == 0 else ()
        extras, experts = self._extras(slot, size + 1), self._experts(slot, size + 1)
        pictures = tuple(self._pictures(slot, (0, *edges, size)))
        return Text(ids[: size + 1], np.append(0.0, mask[:size]), weight, edges, extras, experts, pictures)

    def _pictures(self, slot: int, edges: Sequence[int]) -> Iterator[Picture]:
        """Draws images into the documents between these edges: none in some samples, one or two in documents of others;
        in a batch whose loss tokens are in two samples, only the one that ends with them has images."""
        vision, last = self.config.model.vision, self.config.train.global_batch_size // 2
        if vision is None or (slot != last if self.kind == 2 else slot % _NO_IMAGE_EVERY == 2):
            return
        rng = np.random.default_rng([self.config.train.seed, self.kind, slot, 2])
        tower = description_of(vision)
        side = tower.fixed_side(vision)
        for begin, end in itertools.pairwise(edges):
            start = begin + int(rng.integers(0, _MOST_BEFORE_IMAGE))
            # a lone one, so that even two ranks that share the images of a microbatch are not both given one
            for _ in range(1 if slot % _NO_IMAGE_EVERY == 1 else 2):
                rows, columns = rng.integers(1, 4, 2)
                if side is not None:
                    rows = columns = side // vision.merge_size
                count = int(rows * (columns + tower.has_row_ends))
                if start + count >= end:
                    break
                sizes = rows * columns * vision.patches_per_feature, vision.patch_elements
                pixels = rng.standard_normal(sizes, np.float32)
                yield Picture(start, int(rows) * vision.merge_size, int(columns) * vision.merge_size, pixels)
                start += count + int(rng.integers(1, _MOST_BEFORE_IMAGE))

    def _extras(self, slot: int, size: int) -> dict[str, NDArray[np.float64]]:
        """Draws the extras of a sample.

        Advantages have both signs; log-probabilities are near those of a model with drawn weights, so that some ratios
        exceed every bound and some do not. A temperature holds for the whole sample.
        """
        rng = np.random.default_rng([self.config.train.seed, self.kind, slot])
        usual, spread = -math.log(self.config.model.vocab_size), _spread(self.config.loss)

        def drawn(name: str) -> NDArray[np.float64]:
            if name == TEMPERATURE:
                values = np.full(size, rng.choice(_TEMPERATURES))
            elif name == "advantages":
                values = rng.normal(0.7, 1.0, size)
            else:
                values = usual + rng.normal(0.0, spread, size)
            return values.astype(np.float32).astype(np.float64)

        return {name: drawn(name) for name in drawn_extras(self.config.loss)}

    def _experts(self, slot: int, size: int) -> NDArray[np.int64] | None:
        """Draws experts unlike a router's, some often and some seldom; in each layer, one token in four has none."""
        model = self.config.model
        if not self.choices or model.experts is None:
            return None
        rng = np.random.default_rng([self.config.train.seed, self.kind, slot, 1])
        ranks = rng.random((size, model.num_layers, model.experts.num_experts))
        experts = (ranks + np.linspace(0.0, 1.0, model.experts.num_experts)).argsort(-1)[..., : model.experts.top_k]
        experts[rng.random(experts.shape[:2]) < 0.25] = -1
        experts[:, [layer for layer in range(model.num_layers) if not model.has_experts(layer)]] = -1
        return experts

    def _size(self, slot: int) -> int:
        """Returns the number of positions of a sample; some packed samples are short enough to share a row."""
        config = self.config
        length = config.data.seq_length
        if slot in (0, config.train.global_batch_size // 2):
            return length
        if config.data.packing is not None:
            return max(2, round(length * _PACKED_SHARES[slot % len(_PACKED_SHARES)]))
        return length - length // 4 if slot % _SHORT_EVERY == 2 else length


def has_loss_tokens(config: Config, plan: SamplePlan) -> bool:
    """Says whether most samples of the user's first global batch have loss tokens at this row length."""
    alone = config.model_copy(update={"data": config.data.model_copy(update={"packing": None})})
    try:
        batches = user_loader(alone, plan, 0, 1).batches(0)
    except NothingToLearnError:  # every answer begins after the end of rows of this length
        return False
    learned = torch.cat([(batch.weights["main"] != 0).any(dim=1) for batch in batches])
    return bool(learned.double().mean() > 0.5)


def with_loss_tokens(shrink_to: Callable[[int], Shrunk], user: Config) -> Shrunk:
    """Returns the small configuration with rows long enough for loss tokens; `made` shrinks to a row length."""
    length = SEQ_LENGTH
    shrunk = shrink_to(length)
    limit, plan = min(user.data.seq_length, _LONGEST), of_user(1, user.model)
    while shrunk.reads_files and length < limit and not has_loss_tokens(shrunk.config, plan):
        length *= 2
        shrunk = shrink_to(length)
    return shrunk

"""Global batches of a user's program: each rank's part of them, and the results of forward passes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS, TEMPERATURE
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.datum import Datum, check_temperature, named_choices, sample_of
from mtrain.core.batch.order import slots
from mtrain.core.batch.sample import Sample
from mtrain.core.batch.zigzag import zigzag_index_on
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.recorded_choices import RecordedChoices
from mtrain.core.engine.schedule import evaluating, run_forward
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import FurtherScore, label_log_probs
from mtrain.core.step.results import ForwardResult
from mtrain.core.step.scoring_pass import sequence_scores
from mtrain.data.loader import Given, RowPlan, RowsOfRank
from mtrain.training.given_images import GivenImages

_TYPE = "{} of type {}, but must be {}"
_NOTHING = "the {} no sample, but at least one is needed; skip the call if there is none"


class SplitBatch(NamedTuple):
    """A global batch, split over the ranks."""

    samples: Given
    plan: RowPlan
    """Rows of the samples."""
    microbatches: list[Microbatch] | None
    """Microbatches of this rank; None on ranks that receive them from tensor-parallel rank 0."""


class GlobalBatches:
    """Splits global batches, which all ranks have, into the parts of the ranks."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._config, self._groups = config, groups
        self.images = GivenImages(config.model, config.data)
        """Reader of the images of samples and prompts."""
        self._rows = RowsOfRank(config, groups.dp_rank, groups.layout.dp)

    def split(self, batch: Sequence[Datum], extras: Sequence[str] = (), has_first: bool = True) -> SplitBatch:
        """Checks and converts all samples, on every rank, so that all refuse the same one; each needs these `extras`.
        `has_first`: whether the batch begins a step."""
        if not checked_batch(batch):
            raise _refused(_NOTHING.format("batch has"))
        return self._split(batch, len(batch), extras, has_first)

    def passes(self, batches: Iterable[Sequence[Datum]], extras: Sequence[str]) -> Iterator[list[Microbatch] | None]:
        """Yields this rank's microbatches of each `train.global_batch_size` samples."""
        if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | Mapping):
            raise _refused(_TYPE.format("batches are", type(batches).__name__, "lists of Datum, one a batch"))
        data, size = itertools.chain.from_iterable(map(checked_batch, batches)), self._rows.global_batch_size
        for number in itertools.count():
            batch = list(itertools.islice(data, size))
            if not batch:
                if number == 0:
                    raise _refused(_NOTHING.format("batches have"))
                return
            # planned for `size` samples even if fewer are left, so that every pass has a training step's microbatches
            yield self._split(batch, size, extras, number == 0).microbatches

    def _split(self, batch: Sequence[Datum], size: int, extras: Sequence[str], has_first: bool) -> SplitBatch:
        samples = Given([self._sample(datum, f"sample {slot}", extras) for slot, datum in enumerate(batch)])
        plan = self._rows.plan(samples, size)
        if self._groups.tp_rank > 0:
            return SplitBatch(samples, plan, None)
        # the loss function of the call determines the extras of a batch
        rows = RowsOfRank(self._config, self._groups.dp_rank, self._groups.layout.dp, extras=extras)
        return SplitBatch(samples, plan, rows.microbatches(plan, samples, has_first))

    def _sample(self, datum: Datum, name: str, extras: Sequence[str]) -> Sample:
        return self.images.with_images(sample_of(datum, name, self._config, extras), datum.images, name)


def checked_config(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(f"Engine needs a Config from load_config, but got a {type(config).__name__}")
    if config.train.num_epochs is not None:
        raise ConfigError(
            f"train.num_epochs={config.train.num_epochs:g} counts samples of files, but a program passes its own; set "
            "train.num_steps"
        )
    return config


def checked_batch(batch: Sequence[Datum]) -> Sequence[Datum]:
    """Returns the batch, which a program may have passed as any type."""
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise _refused(_TYPE.format("the batch is", type(batch).__name__, "a list of Datum"))
    for slot, datum in enumerate(batch):
        if not isinstance(datum, Datum):
            raise _refused(_TYPE.format(f"sample {slot} is", type(datum).__name__, "a Datum, such as Datum([1, 2, 3])"))
    return batch


def _refused(text: str) -> DataError:
    error = DataError(text)
    error.on_every_rank = True  # all ranks have the same samples
    return error


class AskedScores(NamedTuple):
    """Options of a forward pass: the temperature, and results in addition to log-probabilities."""

    further: tuple[FurtherScore, ...] = ()
    temperature: float | None = None
    """Divisor of the logits; None: the temperature of each sample, by default 1."""
    routed_experts: bool = False
    """Whether to report the tokens' experts; one all-reduce over the world per layer with experts."""


@torch.no_grad()
def label_scores(
    model: RankModel,
    batches: Sequence[Microbatch] | None,
    num_microbatches: int,
    extras: Sequence[str],
    query: AskedScores,
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probability of the label at each position of a global batch, and what else `query` names.

    Rows are ordered by microbatch, then by data-parallel rank: without packing by slot of the global batch. One
    all-reduce of the result over the world at the end, in addition to megatron-core's own collectives. The model's
    parameters are gathered first, and it is left in training mode.

    Args:
        batches: Microbatches of this data-parallel rank, full rows; None on ranks that do not read data.

    Returns:
        Scores, [1 + further, rows, seq] float32 on the device: log-probabilities in nats, then `query.further`; and the
            tokens' experts, [rows, seq, layers, top_k] int32 on the CPU, or None if not requested.
    """
    model.sharded.gather_parameters()
    config, groups = model.config, model.groups
    size, seq, layout = config.train.micro_batch_size, config.row_width, groups.layout
    shared = broadcast_batches(batches, num_microbatches, (MAIN_TERM,), config, groups, extras)
    rows = [replace(batch, mtp=()) for batch in slice_for_rank(shared, groups)]  # without MTP
    result = torch.zeros(1 + len(query.further), num_microbatches * layout.dp * size, seq, device=groups.device)
    columns = torch.arange(seq)
    if layout.cp > 1:
        columns = zigzag_index_on(groups.device, seq, layout.cp, groups.cp_rank)
    numbers = itertools.count()
    temperature = 1.0 if query.temperature is None else query.temperature

    def take(logits: Logits, batch: Microbatch) -> None:
        scores = label_log_probs(logits, batch, config, groups, query.further, temperature)
        row_range = slots(next(numbers), groups.dp_rank, layout.dp, size)
        if groups.counts_loss:  # otherwise every tensor-parallel rank would add the same numbers
            result[:, row_range.start : row_range.stop, columns] = scores

    experts = RecordedChoices(model, ROUTED_EXPERTS) if query.routed_experts else None
    with evaluating(model.chunks), nullcontext() if experts is None else experts.recording():
        run_forward(model.chunks, rows, take, config)
    dist.all_reduce(result)
    if experts is None:
        return result, None

    def write(table: Tensor, number: int, first: int, chosen: Tensor) -> None:
        row_range = slots(number, groups.dp_rank, layout.dp, size)
        table[row_range.start : row_range.stop, columns[first : first + len(chosen)]] = chosen.transpose(0, 1)

    return result, experts.gathered(result.shape[1], seq, size, write)


def scores_of_samples(batch: Sequence[Datum], model: RankModel, batches: GlobalBatches) -> list[float]:
    """Returns the score of each sample of a global batch for a preference loss. Collective over the world."""
    extras = named_choices(checked_batch(batch))
    _, plan, microbatches = batches.split(batch, extras)
    return sequence_scores(model, microbatches, plan.num_microbatches, extras).scores.tolist()


def token_scores(batch: Sequence[Datum], query: AskedScores, model: RankModel, batches: GlobalBatches) -> ForwardResult:
    """Returns log-probabilities of a global batch, and what else `query` names. Collective over the world."""
    if (head := model.config.model.head) is not None:
        raise ConfigError(
            f"{head} is a head, which gives no log-probabilities of tokens; use Engine.scores (of one label) or "
            "Engine.evaluate"
        )
    if query.temperature is not None:
        check_temperature(query.temperature, "temperature")
    elif all(datum.temperature is None for datum in checked_batch(batch)):
        query = query._replace(temperature=1.0)
    extras = (*([TEMPERATURE] if query.temperature is None else []), *named_choices(batch))
    samples, plan, microbatches = batches.split(batch, extras)
    scores, experts = label_scores(model, microbatches, plan.num_microbatches, extras, query)
    all_scores = scores.cpu()
    positions = samples.positions(plan, model.groups.layout.dp)
    parts = [
        (row, slice(begin, begin + len(datum.input_ids) - 1))
        for (row, begin), datum in zip((positions[slot] for slot in range(len(batch))), batch)
    ]
    of_samples = [all_scores[:, row, part].clone() for row, part in parts]
    further = {name: [score[number] for score in of_samples] for number, name in enumerate(query.further, start=1)}
    return ForwardResult(
        [score[0] for score in of_samples],
        further.get("entropy", []),
        [] if experts is None else [experts[row, part].clone() for row, part in parts],
        [score > 0 for score in further.get("likeliest", [])],
    )

"""Global batches of a user's program, and the part of them that a rank reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import Given, RowPlan, RowsOfRank


class GlobalBatches:
    """Splits samples that all ranks hold, so that each rank takes its part."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._config, self._groups = config, groups
        self._rows = RowsOfRank(config, groups.dp_rank, groups.layout.dp)

    def samples(self, batch: Sequence[Datum], extras: Sequence[str] = ()) -> Given:
        """Checks and converts all samples, on every rank, so that all refuse the same one; each needs these
        `extras`."""
        if not checked_batch(batch):
            raise _nothing_given("batch has")
        return self._given(batch, extras)

    def plan(self, samples: Given, size: int) -> RowPlan:
        """Assigns `size` samples to rows."""
        return self._rows.plan(samples, size)

    def own(
        self, plan: RowPlan, samples: Given, has_first: bool, extras: Sequence[str] = ()
    ) -> list[Microbatch] | None:
        """Returns this rank's microbatches of a global batch; None if tensor-parallel rank 0 reads for it."""
        if self._groups.tp_rank > 0:
            return None
        # the loss function of the call determines the extras of a batch
        rows = RowsOfRank(self._config, self._groups.dp_rank, self._groups.layout.dp, extras=extras)
        return rows.microbatches(plan, samples, has_first)

    def passes(self, batches: Iterable[Sequence[Datum]], extras: Sequence[str]) -> Iterator[list[Microbatch] | None]:
        """Yields this rank's microbatches of each `train.global_batch_size` samples."""
        if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | Mapping):
            raise _of_type("batches are", batches, "lists of Datum, one a batch")
        data, size = itertools.chain.from_iterable(map(checked_batch, batches)), self._rows.global_batch_size
        for number in itertools.count():
            batch = list(itertools.islice(data, size))
            if not batch:
                if number == 0:
                    raise _nothing_given("batches have")
                return
            samples = self._given(batch, extras)
            # planned as a whole, so that the number of microbatches is that of a training step
            yield self.own(self.plan(samples, size), samples, number == 0, extras)

    def _given(self, batch: Sequence[Datum], extras: Sequence[str]) -> Given:
        return Given([sample_of(datum, f"sample {slot}", self._config, extras) for slot, datum in enumerate(batch)])


def checked_config(config: Config) -> Config:
    """Returns the configuration of an engine, whose program brings its own batches."""
    if not isinstance(config, Config):
        raise ConfigError(f"Engine needs a Config, as load_config makes it, but got a {type(config).__name__}")
    if config.train.num_epochs is not None:
        raise ConfigError(
            f"train.num_epochs={config.train.num_epochs:g} counts samples of files, but a program brings its own; set "
            "train.num_steps"
        )
    return config


def checked_batch(batch: Sequence[Datum]) -> Sequence[Datum]:
    """Returns the batch, which a program may have passed as any type."""
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        raise _of_type("the batch is", batch, "a list of Datum")
    for slot, datum in enumerate(batch):
        if not isinstance(datum, Datum):
            raise _of_type(f"sample {slot} is", datum, "a Datum, such as Datum([1, 2, 3])")
    return batch


def _of_type(what: str, given: object, needed: str) -> DataError:
    error = DataError(f"{what} of type {type(given).__name__}, but must be {needed}")
    error.on_every_rank = True  # all ranks hold the same
    return error


def _nothing_given(what: str) -> DataError:
    error = DataError(f"the {what} no sample, but at least one is needed; leave the call out where there is none")
    error.on_every_rank = True  # all ranks hold the same
    return error

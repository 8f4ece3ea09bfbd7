"""Global batches of a user's program, and the part of them that a rank reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.data.batch import Microbatch
from mtrain.data.datum import Datum, sample_of
from mtrain.data.loader import Given, RowPlan, RowsOfRank
from mtrain.mcore.distributed.groups import Groups


class GlobalBatches:
    """Splits samples that every rank is given alike, so that each rank takes its own part."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._config, self._groups = config, groups
        self._rows = RowsOfRank(config, groups.dp_rank, groups.layout.dp)

    def samples(self, batch: Sequence[Datum], extras: Sequence[str] = ()) -> Given:
        """Checks and converts all samples, on every rank, so that all refuse the same one.

        Args:
            batch: Samples of the global batch.
            extras: Names of the extras that each sample must have.

        Raises:
            DataError: There is no sample, or one does not fit the configuration.
        """
        if not batch:
            raise _nothing_given("batch has")
        return self._given(batch, extras)

    def plan(self, samples: Given, size: int) -> RowPlan:
        """Assigns samples to rows; `size` is their number."""
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
        """Yields this rank's microbatches of each `train.global_batch_size` samples.

        Raises:
            DataError: There is no sample, or one does not fit the configuration.
        """
        data, size = itertools.chain.from_iterable(batches), self._rows.global_batch_size
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


def _nothing_given(what: str) -> DataError:
    error = DataError(f"the {what} no sample, but at least one is needed; leave the call out where there is none")
    error.on_every_rank = True  # all ranks are given the same
    return error

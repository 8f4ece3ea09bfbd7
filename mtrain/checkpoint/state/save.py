"""Saves checkpoints while training continues.

A save begins with a copy of this rank's state; training continues while a thread writes and hashes it. Ranks exchange
their progress only at step boundaries, in the training thread, so the order of collectives is the same on all ranks.
Once all have written, a thread of the first rank publishes; one step boundary later, all ranks know the outcome.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, assert_never

import torch
import torch.distributed as dist

from mtrain.base.background import started
from mtrain.base.environment import program_versions
from mtrain.base.errors import MachineError, MtrainError, NumericError, RunFolderError, SpoiledStateError
from mtrain.base.fault_points import fault_point
from mtrain.base.files import disk_faults
from mtrain.checkpoint.format.writer import Snapshot, Written, write_metadata, write_shards
from mtrain.checkpoint.state.base import base_of
from mtrain.checkpoint.store.directory import (
    AfterPublishingError,
    StagingDir,
    abandon,
    named_staging,
    open_staging,
    publish,
)
from mtrain.checkpoint.store.manifest import (
    CONFIG_NAME,
    NO_BAD_STEPS,
    BadStepHistory,
    ChangeInfo,
    CheckpointInfo,
    FileInfo,
    GitState,
    MetricInfo,
    TrainingState,
    write_state,
)
from mtrain.checkpoint.store.retention import Retention, way_back
from mtrain.checkpoint.store.steps import step_name
from mtrain.config.load import config_hash, config_yaml
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import local_shards
from mtrain.core.ranks.all_reduce import AsyncVote
from mtrain.core.ranks.init import any_rank, on_first_rank
from mtrain.core.state.finite import NonFinite, described, non_finite
from mtrain.core.state.shard import Shard

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_CLEANING_S = 10.0
"""Seconds that the next save, or the end, waits until a failed save is deleted; the next start deletes the rest."""


class Provenance(NamedTuple):
    """Origin of a checkpoint, in addition to its configuration."""

    dataset: str | None = None
    """Fingerprint of the training data; only the first rank needs it."""
    git: GitState | None = None
    changes: tuple[ChangeInfo, ...] = ()
    inputs: Mapping[str, str] = MappingProxyType({})
    """Key -> fingerprint of what the run reads besides its training data."""
    valid_measure: str | None = None
    """Fingerprint of the samples and loss function of the run's validation."""


class Stage(Enum):
    """Stage of a save."""

    WRITING = "writing"
    PUBLISHING = "publishing"
    """All ranks have written, and the first rank lists and publishes the files."""


@dataclass
class PendingSave:
    """A save in flight."""

    staging: StagingDir
    state: TrainingState
    facts: CheckpointInfo
    work: Future[Any]
    """This rank's work in the current stage."""
    began_s: float
    blocked_s: float = 0.0
    """Seconds that training waited for the copy; without checkpoint.async_save, it waits for the whole save."""
    stage: Stage = Stage.WRITING
    _vote: AsyncVote | None = None
    """Vote in flight on whether a rank is busy."""

    def was_ready(self, limit_s: float, device: torch.device) -> bool:
        """Returns whether no rank was busy at the previous call, and starts the vote for the next one; a rank counts as
        ready after `limit_s`. Collective over the world, but nobody waits: a ready rank stays ready, so an answer
        may be late."""
        vote, self._vote = self._vote, None
        if vote is not None and not vote.read():
            return True
        self._vote = AsyncVote(self._is_busy(limit_s), device)
        return False

    def is_ready(self, limit_s: float, device: torch.device) -> bool:
        """Returns whether no rank is busy now; waits for the answers of all. Collective over the world."""
        if self._vote is not None:
            self._vote.read()  # every rank must complete the vote in flight
            self._vote = None
        return not any_rank(self._is_busy(limit_s), device)

    def outcome(self) -> Outcome | None:
        """Returns the outcome of this rank's completed work; None if the work returns nothing."""
        fault = self.work.exception()
        if fault is None or isinstance(fault, MtrainError):
            return self.work.result() if fault is None else fault
        return MachineError(f"{type(fault).__name__}: {fault}")

    def _is_busy(self, limit_s: float) -> bool:
        return not self.work.done() and time.monotonic() - self.began_s < limit_s


Outcome: TypeAlias = Written | NonFinite | MtrainError
"""Result of one rank's writing."""


def first_fault(everyone: Sequence[Outcome | None]) -> MtrainError | None:
    """Returns the first fault; a state that is not finite precedes a disk error."""
    not_finite = described([outcome if isinstance(outcome, NonFinite) else None for outcome in everyone])
    for rank, outcome in enumerate(everyone):
        if isinstance(outcome, RunFolderError):
            return outcome
        if isinstance(outcome, MtrainError) and not_finite is None:
            return MachineError(f"rank {rank}: {outcome}")
    return None if not_finite is None else SpoiledStateError(not_finite)


class Saver:
    """The saves of one model; at most one is in flight. All methods are collective over the world."""

    def __init__(
        self,
        model: RankModel,
        retention: Retention,
        origin: Provenance = Provenance(),  # noqa: B008
        on_saved: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:
        """`on_saved` is called on the first rank once a checkpoint is on disk, with its step and the duration in
        seconds."""
        self._model, self._retention, self._origin, self._on_saved = model, retention, origin, on_saved
        self._groups, self._config = model.groups, model.config
        self._timeout_s = self._config.checkpoint.save_timeout_s
        self._config_hash, self._versions = config_hash(self._config), program_versions()
        self._snapshot = Snapshot()
        self._flight: PendingSave | None = None
        self._stuck: list[Future[Any]] = []
        self._cleaning: Future[None] | None = None
        self._fault: MtrainError | None = None

    def expect(self) -> None:
        """Allocates the memory for copies of the state in a thread, if saves are planned; call it after an update."""
        section = self._config.checkpoint
        if section.async_save and (section.at_end or section.interval_steps > 0):
            self._snapshot.expect(local_shards(self._model))

    def save(
        self,
        step: int,
        judged: float | MetricInfo | None = None,
        tokens: int = 0,
        history: BadStepHistory = NO_BAD_STEPS,
    ) -> None:
        """Saves everything that a resume needs; with checkpoint.async_save, it is on disk some steps later.

        Waits for a save in flight first. Collectives: one all-reduce and one broadcast of small objects.

        Args:
            judged: Validation loss or metric of tasks at this step, which retention compares; None: neither is known.
            tokens: Text tokens that the run has consumed.

        Raises:
            SpoiledStateError: The state is not finite; nothing was published. Raised on all ranks, like all errors
                here.
            RunFolderError: The step is already published, or another run has taken the folder over.
            MachineError: A save failed, and checkpoint.on_save_failure is `stop`.
        """
        self.wait()  # a second save in flight would need memory for another copy of the state
        began, model = time.monotonic(), self._model
        model.sharded.gather_parameters()  # or a rank would save weights from before the update
        state = self._training_state(model.optimizer, step, history)
        staging = on_first_rank(lambda: self._named_staging(step))  # one folder name for all ranks
        fault_point("snapshot", self._groups.rank, step)
        parts = local_shards(model)
        if self._config.checkpoint.async_save and not self._is_stuck():
            parts = self._snapshot.take(parts)  # training waits only for this copy
        facts = CheckpointInfo(
            step=step,
            tokens=tokens,
            layout=state.layout,
            config_hash=self._config_hash,
            versions=self._versions,
            dataset=self._origin.dataset,
            git=self._origin.git,
            changes=self._origin.changes,
            skipped=history.skipped,
            inputs=dict(self._origin.inputs),
            valid_loss=judged if isinstance(judged, float) else None,
            valid_measure=self._origin.valid_measure if isinstance(judged, float) else None,
            task_metric=judged if isinstance(judged, MetricInfo) else None,
            base=base_of(model),
            reference=self._config.loss.reference,
        )
        work = started(lambda: self._write(staging, parts), f"save-{step}")
        self._flight = PendingSave(staging, state, facts, work, began, time.monotonic() - began)
        if not self._config.checkpoint.async_save:
            self.wait()

    def poll(self) -> None:
        """Advances or ends a save in flight once all ranks are ready; call it at every step boundary.

        Raises as `save` does. Collectives: while a save is in flight, one all-reduce of a number, which is read at the
        next boundary; twice per save, short objects.
        """
        if self._groups.rank == 0:
            self._retention.poll()  # only the first rank deletes old checkpoints
        if self._flight is not None and self._flight.was_ready(self._timeout_s, self._groups.device):
            self._go_on(self._flight)

    def _go_on(self, flight: PendingSave) -> None:
        """Starts the next stage of a save, or ends it; a fault of any rank fails the save on all ranks."""
        outcome, fault = self._outcome(flight), None
        match flight.stage:
            case Stage.WRITING:
                fault = self._after_writing(flight, outcome)
            case Stage.PUBLISHING:
                fault = on_first_rank(lambda: outcome if isinstance(outcome, MtrainError) else None)
                if fault is None:
                    self._land(flight)
            case _:
                assert_never(flight.stage)
        if fault is not None:
            self._fail(flight, fault)

    def confirm(self, step: int) -> None:
        """Confirms, on all ranks, that the weights after `step` updates have given a finite loss: their checkpoint then
        counts as good, and older ones may be deleted."""
        self._retention.confirmed = max(step, self._retention.confirmed)

    def give_up(self) -> str:
        """Ends the saves after a numeric error: completes those of confirmed weights, and drops others. Returns, as a
        sentence, what the user can go back to."""
        self._settle()
        return on_first_rank(self._way_back)

    def rewind(self, step: int, changes: tuple[ChangeInfo, ...]) -> None:
        """Goes back to an older checkpoint, with the changes of the configuration up to it; later confirmations no
        longer count."""
        self._origin = self._origin._replace(changes=changes)
        self._fault = None
        self._retention.rewind(step)

    def doubtful(self, below: int) -> dict[int, str]:
        """Ends the saves like `give_up`; returns step -> reason for checkpoints that a rollback must not use. Those of
        step `below` and later are too new."""
        self._settle()
        return on_first_rank(lambda: self._retention.doubtful(below))

    def _settle(self) -> None:
        flight = self._flight
        if flight is not None and flight.facts.step > self._retention.confirmed and flight.stage is Stage.WRITING:
            while not flight.is_ready(self._timeout_s, self._groups.device):
                concurrent.futures.wait([flight.work], _POLL_S)
            with contextlib.suppress(NumericError):
                self._fail(flight, NumericError("no finite loss followed"))
        with contextlib.suppress(MtrainError):  # the numeric error came first and is reported
            self.finish()

    def _way_back(self) -> str:
        try:
            return way_back(self._retention.root, self._retention.confirmed)
        except MachineError as fault:  # must not replace the numeric error
            return f"the step to go back to is not known: {fault}"

    def wait(self) -> None:
        """Waits until no save is in flight; raises as `save` does."""
        while (flight := self._flight) is not None:
            concurrent.futures.wait([flight.work], _POLL_S)  # a timeout, because other ranks may wait for this one
            if flight.is_ready(self._timeout_s, self._groups.device):
                self._go_on(flight)

    def finish(self) -> None:
        """Waits until the last save is on disk; raises if it failed, whatever checkpoint.on_save_failure says."""
        self.wait()
        if self._groups.rank == 0:
            self._retention.finish(self._timeout_s)
        if self._cleaning is not None:
            concurrent.futures.wait([self._cleaning], _CLEANING_S)
        if self._fault is not None:
            raise self._fault

    def _named_staging(self, step: int) -> StagingDir:
        """Names the folder of a save, on the first rank, once a failed save's files have freed their space."""
        if self._cleaning is not None:
            concurrent.futures.wait([self._cleaning], _CLEANING_S)
        return named_staging(self._retention.root, step)

    def _training_state(self, optimizer: Optimizer, step: int, history: BadStepHistory) -> TrainingState:
        return TrainingState(
            step=step,
            consumed_samples=step * self._config.train.global_batch_size,
            adam_step=optimizer.state.adam_step(),
            loss_scaler=optimizer.state.loss_scaler(),
            layout=str(self._groups.layout),
            device=self._groups.device.type,
            vocab_size=self._config.model.vocab_size,
            recent=history.recent,
        )

    def _write(self, staging: StagingDir, shards: Sequence[Shard]) -> Written | NonFinite:
        """Writes this rank's files, in a thread; writes nothing if the state is not finite."""
        rank, step = self._groups.rank, staging.step
        if self._is_stuck():
            raise MachineError("the writer of an earlier checkpoint still waits for the disk")
        not_finite = non_finite(shards)
        if not_finite is not None:
            return not_finite
        with disk_faults(f"save the checkpoint of step {step}"):
            fault_point("open", rank, step)
            open_staging(staging, self._retention.check)
            path = staging.path / f"__{rank}_0.distcp"
            try:
                written = write_shards(path, shards, lambda number: fault_point(f"write.{number}", rank, step))
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()  # a full disk needs the space now
                raise
            fault_point("written", rank, step)
        return written

    def _publish(self, flight: PendingSave, everyone: Sequence[Written]) -> None:
        """Writes the metadata and publishes the checkpoint, in a thread of the first rank."""
        step = flight.facts.step
        files: dict[str, FileInfo] = {}
        with disk_faults(f"save the checkpoint of step {step}"):
            fault_point("list", 0, step)
            for written in everyone:
                files |= written.files
            files |= write_metadata(flight.staging.path, (tensor for written in everyone for tensor in written.tensors))
            fault_point("state", 0, step)
            write_state(flight.staging.path, flight.state)
            (flight.staging.path / CONFIG_NAME).write_text(config_yaml(self._config), encoding="utf-8")
            fault_point("publish", 0, step)

        def check() -> None:
            fault_point("rename", 0, step)
            self._retention.check()

        try:
            publish(flight.staging, flight.facts, files, check)
        except AfterPublishingError as fault:
            _log.warning(f"warning: {fault}")

    def _after_writing(self, flight: PendingSave, outcome: Outcome | None) -> MtrainError | None:
        """Starts to publish, on the first rank, if all ranks have written; else returns the first fault."""
        everyone: list[Outcome | None] | None = [None] * dist.get_world_size() if self._groups.rank == 0 else None
        dist.gather_object(outcome, everyone)
        fault = on_first_rank(lambda: first_fault(everyone or []))
        if fault is not None:
            return fault
        flight.stage, flight.work = Stage.PUBLISHING, Future()
        if everyone is None:
            flight.work.set_result(None)  # nothing to do here while the first rank publishes
        else:
            written = [other for other in everyone if isinstance(other, Written)]
            flight.work = started(lambda: self._publish(flight, written), f"publish-{flight.facts.step}")
        return None

    def _outcome(self, flight: PendingSave) -> Outcome | None:
        """Returns the outcome of this rank's work, or a fault if it exceeds checkpoint.save_timeout_s."""
        if not flight.work.done():
            self._stuck.append(flight.work)
            self._snapshot = Snapshot()  # the writer may still be reading the old one
            return MachineError(f"not finished within checkpoint.save_timeout_s={self._timeout_s}")
        return flight.outcome()

    def _land(self, flight: PendingSave) -> None:
        """Ends a published save, and reports it on the first rank."""
        self._flight, self._fault = None, None
        if self._groups.rank == 0:
            self._retention.note_published(flight.facts.step)
            self._retention.poll()
            seconds = time.monotonic() - flight.began_s
            waited_s = flight.blocked_s if self._config.checkpoint.async_save else seconds
            _log.info(
                f"saved {flight.staging.root / step_name(flight.facts.step)} in {seconds:.1f} s; training waited "
                f"{1000 * waited_s:.0f} ms"
            )
            self._on_saved(flight.facts.step, seconds)

    def _fail(self, flight: PendingSave, fault: MtrainError) -> None:
        """Ends a failed save on all ranks."""
        if not isinstance(fault, RunFolderError):
            kind = type(fault) if isinstance(fault, NumericError) else MachineError
            fault = kind(f"no checkpoint of step {flight.facts.step}: {fault}")
        fault.on_every_rank = True  # makes one rank print it
        self._flight, self._fault = None, fault
        if self._groups.rank == 0:
            # in a thread, because deleting may take as long as writing
            self._cleaning = started(lambda: _abandoned(flight.staging), "abandon")
        if not isinstance(fault, MachineError) or self._config.checkpoint.on_save_failure == "stop":
            raise fault
        if self._groups.rank == 0:
            _log.warning(f"warning: {fault}; training continues")

    def _is_stuck(self) -> bool:
        self._stuck = [work for work in self._stuck if not work.done()]
        return bool(self._stuck)


def _abandoned(staging: StagingDir) -> None:
    with contextlib.suppress(MtrainError):  # must not replace the fault of the save
        if staging.path.exists():
            abandon(staging)

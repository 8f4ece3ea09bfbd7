"""Saving while training continues.

A save begins with a copy of this rank's state; training continues while a thread writes and hashes it. Ranks exchange
their progress only at step boundaries, in the thread that trains, so the order of collectives is the same on all ranks.
When all have written, the first rank lists and publishes in a thread; one step boundary later all know how it ended.
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
"""Seconds that the next save and the end wait until a failed one's files are deleted; a start deletes them as well."""


class Provenance(NamedTuple):
    """Origin of a checkpoint, in addition to its configuration."""

    dataset: str | None = None
    """Fingerprint of the training data; needed on the first rank only."""
    git: GitState | None = None
    changes: tuple[ChangeInfo, ...] = ()
    inputs: Mapping[str, str] = MappingProxyType({})
    """Fingerprints of what the run reads besides its training data, by key."""
    valid_measure: str | None = None
    """Fingerprint of what the run's validation losses measure."""


class Stage(Enum):
    """What the ranks do for a save."""

    WRITING = "writing"
    PUBLISHING = "publishing"
    """All have written, and the first rank lists and publishes the files."""


@dataclass
class PendingSave:
    """A save in flight: its folder and facts, and what this rank does for it now."""

    staging: StagingDir
    state: TrainingState
    facts: CheckpointInfo
    work: Future[Any]
    """Work that this rank is doing for it now."""
    began_s: float
    blocked_s: float = 0.0
    """Seconds that training waited for the copy; without checkpoint.async_save it waits for the whole save."""
    stage: Stage = Stage.WRITING
    _vote: AsyncVote | None = None
    """Vote on whether a rank is busy."""

    def was_ready(self, limit_s: float, device: torch.device) -> bool:
        """Says whether no rank was busy at the last call, and asks for the next one; a save that takes longer than
        `limit_s` counts as ended. Collective over the world. No rank waits for another one, and no host for its device:
        a rank that was ready stays ready, so an answer may be late."""
        asked, self._vote = self._vote, None
        if asked is not None and not asked.read():
            return True
        self._vote = AsyncVote(self._is_busy(limit_s), device)
        return False

    def is_ready(self, limit_s: float, device: torch.device) -> bool:
        """Says whether no rank is busy now; the host waits for all of them. Collective over the world."""
        if self._vote is not None:
            self._vote.read()  # every rank has to take part in it to the end
            self._vote = None
        return not any_rank(self._is_busy(limit_s), device)

    def outcome(self) -> Outcome | None:
        """Returns the outcome on this rank of work that is done; None if the work returns nothing."""
        fault = self.work.exception()
        if fault is None or isinstance(fault, MtrainError):
            return self.work.result() if fault is None else fault
        return MachineError(f"{type(fault).__name__}: {fault}")

    def _is_busy(self, limit_s: float) -> bool:
        return not self.work.done() and time.monotonic() - self.began_s < limit_s


Outcome: TypeAlias = Written | NonFinite | MtrainError
"""Result of the writing of one rank."""


def first_fault(everyone: Sequence[Outcome | None]) -> MtrainError | None:
    """Returns the first fault; a state that is not finite comes before a disk error."""
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
        """`on_saved` is called on the first rank when a checkpoint is on disk, with its step and the seconds that it
        took."""
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
        """Takes the memory for copies of the state in a thread, if saves are planned; call it after an update."""
        section = self._config.checkpoint
        if section.async_save and (section.at_end or section.interval_steps > 0):
            self._snapshot.expect(local_shards(self._model))

    def save(
        self,
        step: int,
        valid_loss: float | None = None,
        tokens: int = 0,
        history: BadStepHistory = NO_BAD_STEPS,
    ) -> None:
        """Saves everything that resuming needs; with checkpoint.async_save it is on disk some steps later.

        Waits for a save in flight first. Collectives: one all-reduce and one broadcast of small objects.

        Args:
            valid_loss: Loss of the validation at this step, if there was one.
            tokens: Number of text tokens that the run has consumed.

        Raises:
            SpoiledStateError: The state is not finite; nothing was published. Like all errors here, on all ranks.
            RunFolderError: The step is published already, or the folder belongs to another run now.
            MachineError: A save failed and checkpoint.on_save_failure is `stop`.
        """
        self.wait()  # one save in flight: another copy of the state would need as much memory again
        began, model = time.monotonic(), self._model
        model.sharded.gather_parameters()  # else a rank would save weights from before the update
        state = self._training_state(model.optimizer, step, history)
        staging = on_first_rank(lambda: self._named_staging(step))  # one folder name for all ranks
        fault_point("snapshot", self._groups.rank, step)
        parts = local_shards(model)
        if self._config.checkpoint.async_save and not self._is_stuck():
            parts = self._snapshot.take(parts)  # training waits for a copy in memory
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
            valid_loss=valid_loss,
            valid_measure=None if valid_loss is None else self._origin.valid_measure,
            base=base_of(model),
            reference=self._config.loss.reference,
        )
        work = started(lambda: self._write(staging, parts), f"save-{step}")
        self._flight = PendingSave(staging, state, facts, work, began, time.monotonic() - began)
        if not self._config.checkpoint.async_save:
            self.wait()

    def poll(self) -> None:
        """Ends or advances a save in flight when all ranks are ready, at every step boundary; raises as `save` does.

        Collectives: one all-reduce of one number while a save is in flight, whose answer is read at the next boundary;
        twice per save, short objects.
        """
        if self._groups.rank == 0:
            self._retention.poll()  # only the first rank deletes old checkpoints that are no longer needed
        if self._flight is not None and self._flight.was_ready(self._timeout_s, self._groups.device):
            self._go_on(self._flight)

    def _go_on(self, flight: PendingSave) -> None:
        """Starts the next stage of a save, or ends it; a fault of any rank is one of all."""
        own, fault = self._outcome(flight), None
        match flight.stage:
            case Stage.WRITING:
                fault = self._after_writing(flight, own)
            case Stage.PUBLISHING:
                fault = on_first_rank(lambda: own if isinstance(own, MtrainError) else None)
                if fault is None:
                    self._land(flight)
            case _:
                assert_never(flight.stage)
        if fault is not None:
            self._fail(flight, fault)

    def confirm(self, step: int) -> None:
        """Confirms the weights after `step` updates, which have given a finite loss; the same on all ranks. A
        checkpoint of them then counts as good, and older ones may be deleted."""
        self._retention.confirmed = max(step, self._retention.confirmed)

    def give_up(self) -> str:
        """Ends the saves after a numeric error: those of confirmed weights are completed, others dropped. Returns what
        the user can go back to."""
        self._settle()
        return on_first_rank(self._way_back)

    def rewind(self, step: int, changes: tuple[ChangeInfo, ...]) -> None:
        """Goes back to an older checkpoint, up to which the run has changed these keys: what was confirmed since then
        no longer is."""
        self._origin = self._origin._replace(changes=changes)
        self._fault = None
        self._retention.rewind(step)

    def doubtful(self, below: int) -> dict[int, str]:
        """Ends the saves like `give_up`; returns step -> reason of published checkpoints that a rollback must not go
        back to. Those from step `below` on are too new."""
        self._settle()
        return on_first_rank(lambda: self._retention.doubtful(below))

    def _settle(self) -> None:
        flight = self._flight
        if flight is not None and flight.facts.step > self._retention.confirmed and flight.stage is Stage.WRITING:
            while not flight.is_ready(self._timeout_s, self._groups.device):
                concurrent.futures.wait([flight.work], _POLL_S)
            with contextlib.suppress(NumericError):
                self._fail(flight, NumericError("no finite loss followed"))
        with contextlib.suppress(MtrainError):  # the numeric error came first and is the one to report
            self.finish()

    def _way_back(self) -> str:
        try:
            return way_back(self._retention.root, self._retention.confirmed)
        except MachineError as fault:  # the numeric error is the one that ends the run
            return f"the step to go back to is not known: {fault}"

    def wait(self) -> None:
        """Waits until no save is in flight; raises as `save` does."""
        while (flight := self._flight) is not None:
            concurrent.futures.wait([flight.work], _POLL_S)  # at most: other ranks may wait for this one
            if flight.is_ready(self._timeout_s, self._groups.device):
                self._go_on(flight)

    def finish(self) -> None:
        """Waits until the last save is on disk; raises if it is not, whatever checkpoint.on_save_failure says."""
        self.wait()
        if self._groups.rank == 0:
            self._retention.finish(self._timeout_s)
        if self._cleaning is not None:
            concurrent.futures.wait([self._cleaning], _CLEANING_S)
        if self._fault is not None:
            raise self._fault

    def _named_staging(self, step: int) -> StagingDir:
        """Names the folder of a save, on the first rank, after deleting failed ones, as a full disk has no space."""
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
        """Writes this rank's files, in a thread; writes nothing of a state that is not finite."""
        rank, step = self._groups.rank, staging.step
        if self._is_stuck():
            raise MachineError("the disk still holds the writer of an earlier checkpoint")
        found = non_finite(shards)
        if found is not None:
            return found
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
        """Lists and publishes the checkpoint, in a thread of the first rank."""
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

    def _after_writing(self, flight: PendingSave, own: Outcome | None) -> MtrainError | None:
        """Starts publishing, on the first rank, if all ranks have written; else returns the first fault."""
        everyone: list[Outcome | None] | None = [None] * dist.get_world_size() if self._groups.rank == 0 else None
        dist.gather_object(own, everyone)
        fault = on_first_rank(lambda: first_fault(everyone or []))
        if fault is not None:
            return fault
        flight.stage, flight.work = Stage.PUBLISHING, Future()
        if everyone is None:
            flight.work.set_result(None)  # nothing to do here while the first rank publishes
        else:
            written = [one for one in everyone if isinstance(one, Written)]
            flight.work = started(lambda: self._publish(flight, written), f"publish-{flight.facts.step}")
        return None

    def _outcome(self, flight: PendingSave) -> Outcome | None:
        """Returns the outcome of this rank's work; a fault if it has not ended within checkpoint.save_timeout_s."""
        if not flight.work.done():
            self._stuck.append(flight.work)
            self._snapshot = Snapshot()  # the writer may still be reading the old one
            return MachineError(f"not finished within checkpoint.save_timeout_s={self._timeout_s}")
        return flight.outcome()

    def _land(self, flight: PendingSave) -> None:
        """Ends a save that is published, and reports it on the first rank."""
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
        """Ends a save that failed, the same on all ranks."""
        if not isinstance(fault, RunFolderError):
            kind = type(fault) if isinstance(fault, NumericError) else MachineError
            fault = kind(f"no checkpoint of step {flight.facts.step}: {fault}")
        fault.on_every_rank = True  # makes one rank print it
        self._flight, self._fault = None, fault
        if self._groups.rank == 0:
            # in a thread: deleting may take as long as writing did
            self._cleaning = started(lambda: _abandoned(flight.staging), "abandon")
        if not isinstance(fault, MachineError) or self._config.checkpoint.on_save_failure == "stop":
            raise fault
        if self._groups.rank == 0:
            _log.warning(f"warning: {fault}; training continues")

    def _is_stuck(self) -> bool:
        self._stuck = [work for work in self._stuck if not work.done()]
        return bool(self._stuck)


def _abandoned(staging: StagingDir) -> None:
    with contextlib.suppress(MtrainError):  # the fault of the save is the one to report
        if staging.path.exists():
            abandon(staging)

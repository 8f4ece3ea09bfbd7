"""Checks a start up to its first step, with the functions that the start itself calls, so both refuse the same.

Loads torch only to check weights, or a loss function other than next_token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.checkpoint.store.directory import CheckpointEntry, Newest, checkpoint_at
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.config.schema.data import MockSection, SftSection
from mtrain.config.schema.loss import LossSection
from mtrain.hf.schema.files import has_weights
from mtrain.preflight.disk import look_at_disk
from mtrain.preflight.files import look_at_files, source_paths
from mtrain.preflight.findings import Findings
from mtrain.report.metrics.trackers.open import refuse_missing
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import refuse_if_held
from mtrain.training.tasks.harness import refuse_missing_harness

if TYPE_CHECKING:
    from mtrain.data.sources import OpenedData

_SOON_TOKENISED_BYTES, _SOON_READ_BYTES = 64 << 20, 1 << 30
"""Largest size of record files, and of a checkpoint, that a check reads in full."""


def look(config: Config, findings: Findings, needs_weights: bool = True, *, is_now: bool = True) -> None:
    """Goes through a start up to the point where it needs ranks and devices, and checks for disk space.

    Args:
        is_now: Whether the run would start now; otherwise, a run that works in its folder may have ended by then.
    """
    run_as_given, folder = config, RunFolder(Path(config.run.dir))
    if config.metrics.trackers:
        with findings.looking():
            refuse_missing(config.metrics.trackers)
            findings.fact("trackers", ", ".join(config.metrics.trackers))
    if config.eval.tasks:
        with findings.looking():
            refuse_missing_harness()
            findings.fact("tasks", ", ".join(config.eval.tasks))
    if config.checkpoint.export_hf_every_steps:
        with findings.looking():
            from mtrain.hf.schema.registry import refuse_unexportable  # loads all families, which few checks need

            refuse_unexportable(config)
    if is_now:
        with findings.looking():
            refuse_if_held(folder.lock_file)
    if folder.path.is_dir():
        with findings.looking():
            from mtrain.training.changed import going_on  # loads numpy, which a new run does not need

            config = going_on(folder, config)
    if not _is_usual(config.loss):
        with findings.looking():
            from mtrain.core.loss.objective import objective_of  # torch

            findings.fact("loss", f"{', '.join(objective_of(config).functions)} can be loaded")
    start = Start(config, findings, needs_weights)
    known = len(findings.faults)
    look_at_files(config, findings)
    data = None
    if len(findings.faults) == known and start.is_soon_opened():
        with findings.looking():
            from mtrain.data.sources import OpenedData

            data = OpenedData(config)
            for note in data.notes:
                findings.fact("note", note)
            from mtrain.data.sources import Epochs
            from mtrain.preflight.sizes import look_at_sizes, packed_steps

            epochs = Epochs(config, data.stream)
            look_at_sizes(epochs, findings)
            if config.data.packing is not None:
                findings.packed_steps = partial(packed_steps, epochs)
    with findings.looking():
        start.look_at_weights(folder, data)
    look_at_disk(run_as_given, findings)


def _is_usual(loss: LossSection) -> bool:
    """Returns whether the loss needs no check: next_token alone, without options."""
    terms = (loss, *loss.side_terms.values())
    return loss.teacher is None and all(term.function == "next_token" and not term.options for term in terms)


@dataclass(frozen=True)
class Start:
    """The start of a run or of its reference model, and the findings about it."""

    config: Config
    findings: Findings
    needs_weights: bool = True
    """Whether a `model.hf` folder without weights is a fault."""

    def is_soon_opened(self) -> bool:
        """Returns whether opening the data takes only seconds, as for an indexed corpus and for few records.

        Random tokens need no check, unless the configuration asks for preference pairs or labels.
        """
        config = self.config
        if isinstance(config.data, MockSection):
            return config.sequences_per_sample > 1 or config.model.output.head_rows > 0
        if not isinstance(config.data, SftSection):
            return True
        from mtrain.data.formats.record_files import record_files

        files = {file.path for path in source_paths(config.data) for file in record_files(path)}
        return sum(path.stat().st_size for path in files) <= _SOON_TOKENISED_BYTES

    def look_at_weights(self, folder: RunFolder, data: OpenedData | None) -> None:
        """Checks the origin of the weights; a resumed run has its own, and needs at most the frozen model."""
        from mtrain.training.changed import changed_inputs, changes_since, resumable

        config, findings = self.config, self.findings
        resumed = _verified(partial(resumable, config.checkpoint, folder)) if folder.path.is_dir() else None
        if resumed is not None:
            findings.fact("resumes", f"from {resumed.path}")
            inputs: dict[str, str] = {}
            if not _is_usual(config.loss):
                from mtrain.core.loss.functions.sources import source_fingerprints

                inputs = source_fingerprints(config.loss)  # without a teacher's, which would need its weights
            # the data's fingerprint contains the reference model's scores, which only a run has
            if data is not None and not data.preferences:
                changes_since(resumed, data, config, folder.path, inputs)
            else:
                changed_inputs(resumed, inputs, config.checkpoint.allow_changed)
        if resumed is None or config.adapter is not None:
            self.look_at_model("weights")
        if config.loss.teacher is not None:
            from mtrain.checkpoint.state.start_weights import check_weights  # megatron-core
            from mtrain.checkpoint.state.teacher import teacher_config

            teacher = _entry_at(Path(config.loss.teacher.checkpoint))
            check_weights(teacher, teacher_config(config, teacher.path))
            findings.fact("teacher", str(teacher.path))
        if resumed is None:
            self._look_at_adapter("adapter")
        if resumed is None and config.loss.reference is not None:
            self._look_at_reference(config.loss.reference)

    def look_at_model(self, name: str) -> None:
        """Checks the initial weights of a run or a service, and reports them as the finding `name`."""
        config, findings = self.config, self.findings
        if config.checkpoint.initialize_from is not None:
            from mtrain.checkpoint.state.start_weights import check_megatron_weights, check_weights  # megatron-core

            start = Path(config.checkpoint.initialize_from)
            folder = megatron_folder(start)
            if folder is not None:
                check_megatron_weights(folder, config)
                findings.fact(name, str(folder))
                return
            entry = _entry_at(start)
            check_weights(entry, config)
            findings.fact(name, str(entry.path))
        elif config.model.hf is not None:
            if not self.needs_weights and not has_weights(Path(config.model.hf)):
                findings.fact(name, f"{config.model.hf} has no weights, which a start would refuse")
                return
            from mtrain.hf.io.source import source_for  # torch

            source = source_for(Path(config.model.hf), config.model)
            findings.fact(name, f"{config.model.hf}: fits the model ({counted(len(source.weights.names()), 'tensor')})")

    def _look_at_adapter(self, name: str) -> None:
        config = self.config
        if config.adapter is not None and config.adapter.path is not None:
            from mtrain.hf.io.peft import PeftFolder
            from mtrain.hf.schema.registry import family_of_run

            PeftFolder(Path(config.adapter.path), family_of_run(config), config.model, config.adapter)
            self.findings.fact(name, config.adapter.path)

    def _look_at_reference(self, named: str) -> None:
        from mtrain.training.references import named_reference

        reference = named_reference(self.config, named)
        start = Start(reference.config, self.findings)
        try:
            start.look_at_model("reference")
            start._look_at_adapter("reference")
            if reference.saved is not None:
                self.findings.fact("reference", f"{_entry_at(reference.saved).path}, adapters of a run")
        except DataError as error:
            raise DataError(f"loss.reference={named}: {error}") from error


def _entry_at(start: Path) -> CheckpointEntry:
    entry = _verified(partial(checkpoint_at, start))
    assert entry is not None, "checkpoint_at raises without one"
    return entry


def _verified(find: Callable[[Mapping[int, str]], Newest]) -> CheckpointEntry | None:
    """Returns the newest valid checkpoint; reads all of its bytes, as a start does, unless they are many."""
    from mtrain.checkpoint.store.directory import verify_files

    unusable: dict[int, str] = {}
    while True:
        entry = find(unusable).entry
        if entry is None or sum(facts.size_bytes for facts in entry.manifest.files.values()) > _SOON_READ_BYTES:
            return entry
        try:
            verify_files(entry, list(entry.manifest.files))
        except DataError as fault:
            unusable[entry.step] = str(fault)
        else:
            return entry

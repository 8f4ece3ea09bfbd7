"""Builds all parts of a run, before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.arch.lr import LearningRate, learning_rate
from mtrain.base.errors import DataError
from mtrain.base.imports import faulty_gpu_packages
from mtrain.checkpoint.state.teacher import loaded_teacher, teacher_config, teacher_fingerprint
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import NO_BAD_STEPS, BadStepHistory, ChangeInfo
from mtrain.config import Config, adapters, known_issues
from mtrain.config.schema.sections import Sections
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.layer_spec import choose
from mtrain.core.loss.functions.sources import source_fingerprints
from mtrain.core.loss.objective import Objective, objective_of
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import on_all_ranks, on_first_rank, with_the_slowest
from mtrain.core.step.step import TrainingStep
from mtrain.core.step.teacher import Teacher
from mtrain.data.loader import StepLoader
from mtrain.hf.schema.description import notes_on_folder
from mtrain.runs.continuation import TEACHER
from mtrain.runs.folder import RunFolder
from mtrain.training.evaluate import ValidationSet
from mtrain.training.inputs import differing, of_validation
from mtrain.training.preferences.references import References
from mtrain.training.resume import announced, resume_or_initialize

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A training run on this rank."""

    model: RankModel
    objective: Objective
    teacher: Teacher | None
    """Teacher of the loss functions that compare with one, if any."""
    training: TrainingStep
    loader: StepLoader | None
    """Training data; None on ranks that receive them from tensor-parallel rank 0."""
    validation: tuple[ValidationSet, ...]
    """Validation sets in the order of the configuration."""
    start_step: int
    """Number of optimizer updates already completed."""
    changes: tuple[ChangeInfo, ...] = ()
    """Keys that the run has changed so far, with consent; those of `start_step` were changed by this start."""
    learning_rate: LearningRate = learning_rate
    """Function that returns the learning rate of a step."""
    history: BadStepHistory = NO_BAD_STEPS
    """Bad steps before `start_step`."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what this rank reads besides the training data, by key of the configuration."""


def load_teacher(config: Config, groups: Groups) -> Teacher | None:
    """Loads the teacher of `loss.teacher`, if any. Collective over the world.

    Raises:
        ConfigError: The teacher's model does not fit this run.
        DataError: There is no checkpoint, or it is damaged.
    """
    if config.loss.teacher is None:
        return None
    source = Path(config.loss.teacher.checkpoint)
    with opened_checkpoint(lambda unusable: checkpoint_at(source, unusable), _log.info) as newest:
        entry = announced(newest)
        assert entry is not None, "checkpoint_at raises where there is none"
        teachers = on_first_rank(lambda: teacher_config(config, entry.path))
        return loaded_teacher(teachers, entry, groups)


@dataclass(frozen=True)
class BuiltStep:
    """A training step on this rank, and the model that it trains."""

    model: RankModel
    teacher: Teacher | None
    training: TrainingStep


TeacherOf = Callable[[Config, Groups], Teacher | None]
"""Function that returns the teacher; None if no loss function compares with one."""


def build_step(
    config: Config,
    groups: Groups,
    objective: Objective,
    teacher_of: TeacherOf = load_teacher,
    weights_follow: bool = False,
) -> BuiltStep:
    """Builds the model with initial weights, its optimizer and its step. Collective over the world.

    Args:
        groups: Newly opened process groups: dropout draws from the random states that they seeded.
        weights_follow: Whether the caller loads or draws the weights; until then they are nan.

    Raises:
        ConfigError: A backend is not installed, or the teacher does not fit.
        DataError: The teacher is missing or damaged.
    """
    model = build_rank_model(config, groups, weights_follow)
    teacher = teacher_of(config, groups)
    return BuiltStep(model, teacher, TrainingStep(model, objective, teacher))


def build_run(config: Config, groups: Groups, folder: RunFolder, teacher_of: TeacherOf = load_teacher) -> Run:
    """Builds the model and the optimizer, and resumes from the newest checkpoint. Collective.

    Args:
        groups: Newly opened process groups: dropout draws from the random states that they seeded.
        folder: Run folder, whose lock the first rank holds.

    Raises:
        ConfigError: A loss function cannot be loaded, or a backend is not installed.
        DataError: Data or a checkpoint is missing or damaged.
        RunFolderError: checkpoint.resume=never, but the run folder holds a checkpoint.
    """
    objective = objective_of(config)
    sources = agreed(groups, lambda: source_fingerprints(config.loss))
    if groups.rank == 0:
        of_config = (*known_issues.notes(config), *adapters.notes(config), *objective.notes(config.loss))
        of_machine = (*_notes_on_packages(), *_notes_on_layers(config, groups))
        for note in (*of_config, *notes_on_folder(config.model.hf), *of_machine):
            _log.info(f"note: {note}")
    # before the model is built: bad data end the run early
    of_rank, extras = (groups.dp_rank, groups.layout.dp), objective.extras
    loader = opened_loader(groups, lambda: StepLoader(config, *of_rank, extras=extras))
    held_out = agreed(groups, lambda: of_validation({} if loader is None else loader.valid_fingerprints))
    validation = ValidationSet.open_all(loader)
    references = References(config, folder, groups, objective.preference, loader)
    references.score_apart()
    built = build_step(config, groups, objective, teacher_of, weights_follow=True)
    # before the run's own weights are loaded, since this overwrites the model's weights
    references.use(built.model)
    inputs = {**sources, **held_out, **of_teacher(built.teacher)}
    resumed = resume_or_initialize(built.model, folder, loader, inputs)
    return Run(
        built.model,
        objective,
        built.teacher,
        built.training,
        loader,
        validation,
        resumed.step,
        resumed.changes,
        history=resumed.history,
        inputs=inputs,
    )


def _notes_on_packages() -> list[str]:
    return [
        f"{package} is installed, but cannot be used and is left out, so torch's layers and optimizer take its place "
        f"({fault}); repair or remove it"
        for package, fault in faulty_gpu_packages().items()
    ]


def _notes_on_layers(config: Sections, groups: Groups) -> list[str]:
    note = choose(config, groups.device).note
    return [note] if note else []


def of_teacher(teacher: Teacher | None) -> dict[str, str]:
    """Returns the fingerprint of a teacher by the key that names it. Collective over the world."""
    return {} if teacher is None else {TEACHER: teacher_fingerprint(teacher)}


def agreed(groups: Groups, found: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns fingerprints by key as this rank finds them. Collective over the world.

    Raises:
        DataError: One differs from that of rank 0; on all ranks.
    """
    own = on_all_ranks(found)
    first = on_first_rank(lambda: own)

    def check() -> None:
        if (key := differing(own, first)) is not None:
            raise DataError(
                f"{key} is another one on rank {groups.rank} than on rank 0 (fingerprint {own[key]}, not "
                f"{first[key]}); give every node the same files"
            )

    on_all_ranks(check)
    return own


def opened_loader(groups: Groups, opened: Callable[[], StepLoader]) -> StepLoader | None:
    """Opens the data on rank 0 of each tensor-parallel group; returns None on the others, which receive rows from it.

    Collective; ranks wait for the slowest as long as it takes.

    Raises:
        DataError: The data cannot be read, or differ between ranks; on all ranks.
    """

    def open_data() -> StepLoader | None:
        return opened() if groups.tp_rank == 0 else None

    # one rank may tokenise for all, which can take longer than the timeout of a collective
    loader = on_all_ranks(lambda: with_the_slowest(open_data))
    first = on_first_rank(lambda: None if loader is None else loader.fingerprint)

    def check_agreement() -> None:
        if loader is not None and loader.fingerprint != first:
            raise DataError(
                f"rank {groups.rank} reads other training data than rank 0 (fingerprint {loader.fingerprint}, not "
                f"{first}); give every node the same files, and a data.cache_dir that they share"
            )

    on_all_ranks(check_agreement)
    if groups.rank == 0 and loader is not None:
        for note in loader.notes:
            _log.info(f"note: {note}")
    return loader

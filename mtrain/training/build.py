"""Builds all parts of a run, before anything is trained."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.base.errors import DataError
from mtrain.base.imports import faulty_gpu_packages
from mtrain.checkpoint.state.teacher import loaded_teacher, teacher_config, teacher_fingerprint
from mtrain.checkpoint.store.manifest import NO_BAD_STEPS, BadStepHistory, ChangeInfo
from mtrain.config import Config, adapters, known_issues
from mtrain.config.schema.model import ModelSection
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.layers.layer_spec import choose
from mtrain.core.loss.functions.sources import source_fingerprints
from mtrain.core.loss.objective import Objective, objective_of
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import on_all_ranks, on_first_rank, with_the_slowest
from mtrain.core.step.step import TrainingStep
from mtrain.core.step.teacher import Teacher
from mtrain.data.loader import StepLoader
from mtrain.hf.hub import revision_of
from mtrain.hf.schema.description import notes_on_folder
from mtrain.runs.continuation import TEACHER
from mtrain.runs.folder import RunFolder
from mtrain.training.changed import ORIGIN, validation_inputs
from mtrain.training.evaluate import ValidationSet
from mtrain.training.references import References
from mtrain.training.resume import opened, resume_or_initialize

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltStep:
    """A training step on this rank, and the model that it trains."""

    model: RankModel
    teacher: Teacher | None
    """Teacher of the loss functions that compare with one, if any."""
    training: TrainingStep


@dataclass(frozen=True, kw_only=True)
class Run(BuiltStep):
    """A training run on this rank."""

    objective: Objective
    loader: StepLoader | None
    """Training data; None on ranks that receive them from tensor-parallel rank 0."""
    validation: tuple[ValidationSet, ...]
    """Validation sets in the order of the configuration."""
    start_step: int
    """Number of optimizer updates already completed."""
    tokens: int = 0
    """Number of text tokens that these updates have read."""
    changes: tuple[ChangeInfo, ...] = ()
    """Keys that the run has changed so far, with consent; this start changed those of step `start_step`."""
    history: BadStepHistory = NO_BAD_STEPS
    """Bad steps before `start_step`."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what this rank reads besides the training data, by key of the configuration."""


def load_teacher(config: Config, groups: Groups) -> Teacher | None:
    """Loads the teacher of `loss.teacher`, if any. Collective over the world."""
    if config.loss.teacher is None:
        return None
    with opened(Path(config.loss.teacher.checkpoint)) as entry:
        teachers = on_first_rank(lambda: teacher_config(config, entry.path))
        return loaded_teacher(teachers, entry, groups)


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
        weights_follow: Whether the caller will load or draw the weights; until then they are nan.
    """
    model = build_rank_model(config, groups, weights_follow)
    teacher = teacher_of(config, groups)
    return BuiltStep(model, teacher, TrainingStep(model, objective, teacher))


def build_run(
    config: Config,
    groups: Groups,
    folder: RunFolder,
    teacher_of: TeacherOf = load_teacher,
    data_model: ModelSection | None = None,
) -> Run:
    """Builds the model and the optimizer, and resumes from the newest checkpoint; groups as for `build_step`. The first
    rank holds the folder's lock. Collective over the world.

    Args:
        data_model: Model whose token ids the data have; None for the run's own.
    """
    read = config if data_model is None else config.model_copy(update={"model": data_model})
    objective = objective_of(config)
    sources = agreed(groups, lambda: source_fingerprints(config.loss))
    if groups.rank == 0:
        notes = [*known_issues.notes(config), *adapters.notes(config), *objective.notes(config.loss)]
        notes += notes_on_folder(config.model.hf)
        notes += [
            f"{package} is installed but cannot be used, so torch's layers and optimizer replace it ({fault}); repair "
            "or remove it"
            for package, fault in faulty_gpu_packages().items()
        ]
        for note in filter(None, [*notes, choose(config, groups.device).note]):
            _log.info(f"note: {note}")
    # before the model is built: bad data end the run early
    of_rank, extras = (groups.dp_rank, groups.layout.dp), objective.extras
    loader = opened_loader(groups, lambda: StepLoader(read, *of_rank, extras=extras))
    held_out = agreed(groups, lambda: validation_inputs({} if loader is None else loader.valid_fingerprints))
    validation = ValidationSet.open_all(loader)
    references = References(config, folder, groups, objective.preference, loader)
    references.score_apart()
    built = build_step(config, groups, objective, teacher_of, weights_follow=True)
    # before the run's own weights are loaded, since this overwrites the model's weights
    references.use(built.model)
    revision = None if config.model.hf is None else revision_of(config.model.hf)
    origin = {} if revision is None else {ORIGIN: revision}
    inputs = {**sources, **held_out, **of_teacher(built.teacher), **origin}
    resumed = resume_or_initialize(built.model, folder, loader, inputs)
    return Run(
        **vars(built),
        objective=objective,
        loader=loader,
        validation=validation,
        start_step=resumed.step,
        tokens=resumed.tokens,
        changes=resumed.changes,
        history=resumed.history,
        inputs=inputs,
    )


def of_teacher(teacher: Teacher | None) -> dict[str, str]:
    """Returns the fingerprint of a teacher under the key that names it. Collective over the world."""
    return {} if teacher is None else {TEACHER: teacher_fingerprint(teacher)}


def agreed(groups: Groups, compute: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Computes fingerprints by key on each rank; raises DataError if they differ. Collective over the world."""
    fingerprints = on_all_ranks(compute)
    first = on_first_rank(lambda: fingerprints)

    def check() -> None:
        for key in sorted(fingerprints.keys() & first.keys()):
            if fingerprints[key] != first[key]:
                raise DataError(
                    f"{key} differs between rank {groups.rank} and rank 0 (fingerprint {fingerprints[key]}, not "
                    f"{first[key]}); give every node the same files"
                )

    on_all_ranks(check)
    return fingerprints


def opened_loader(groups: Groups, opened: Callable[[], StepLoader]) -> StepLoader | None:
    """Opens the data on rank 0 of each tensor-parallel group; returns None on other ranks, which receive rows from it.
    Collective over the world."""
    # one rank may tokenise for all, which can take longer than the timeout of a collective
    loader = on_all_ranks(lambda: with_the_slowest(lambda: opened() if groups.tp_rank == 0 else None))
    first = on_first_rank(lambda: None if loader is None else loader.fingerprint)

    def check_agreement() -> None:
        if loader is not None and loader.fingerprint != first:
            raise DataError(
                f"rank {groups.rank} and rank 0 read different training data (fingerprint {loader.fingerprint}, not "
                f"{first}); give every node the same files, and a data.cache_dir that they share"
            )

    on_all_ranks(check_agreement)
    if groups.rank == 0 and loader is not None:
        for note in loader.notes:
            _log.info(f"note: {note}")
    return loader

"""Teachers from checkpoints: their configuration, weights and fingerprint."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.base import model_fingerprint
from mtrain.checkpoint.state.load import load_frozen_weights
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.imported import MODEL_NAME, imported_model
from mtrain.config import Config
from mtrain.config.messages import readable
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import description_of
from mtrain.core.layers.build import build_frozen_model
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.teacher import Teacher
from mtrain.hf.configuration import load_config


def loaded_teacher(config: Config, entry: CheckpointEntry, groups: Groups) -> Teacher:
    """Builds a teacher and loads its weights. Collective over the world."""
    # the same process groups, but perhaps another number of layers, hence other stages
    teacher_groups = replace(groups, layout=Layout.from_config(config, groups.layout.world_size))
    chunks = build_frozen_model(config, teacher_groups)
    load_frozen_weights(entry, chunks, teacher_groups, config.model)
    return Teacher(config, chunks, teacher_groups)


def teacher_fingerprint(teacher: Teacher) -> str:
    """Returns the fingerprint of weights and architecture, the same under every layout; refuses weights that are not
    finite. One all-reduce over the world."""
    model = teacher.config.model
    weights = model_fingerprint(teacher.chunks, teacher.groups, model.vocab_size, with_adapters=False)
    # without defaults, so that a new key of the program changes no fingerprint
    known = model.model_dump(mode="json", exclude_defaults=True, exclude={"hf", "backend", "vocab_multiple"})
    shape = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return f"{weights}-{shape[:8]}"


def teacher_config(config: Config, checkpoint: Path) -> Config:
    """Returns the run's configuration with the teacher's architecture.

    Pads the tables like the run's, so that both models have the same vocabulary columns on each rank.

    Args:
        checkpoint: Checkpoint directory of the teacher inside its run folder, or an import.

    Raises:
        ConfigError: The teacher's architecture is unknown, its vocabulary differs, or the layout does not fit it.
    """
    # an import contains its architecture; for a run's checkpoint, the run folder has it
    path, model = checkpoint / MODEL_NAME, imported_model(checkpoint)
    if model is None:
        path = checkpoint.resolve().parent.parent / "config.yaml"
        if not path.exists():
            raise ConfigError(
                f"loss.teacher.checkpoint: {path}, which describes the model of {checkpoint}, does not exist; name a "
                "run folder, a checkpoint directory inside one, or an import"
            )
        model = load_config([path], []).model
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"loss.teacher.checkpoint: the teacher's vocabulary has {counted(model.vocab_size, 'token')} ({path}), but "
            f"model.vocab_size={config.model.vocab_size}; use a teacher with the same tokenizer"
        )
    vision = _tower_for(config.model.vision, model.vision, path)
    content = config.model_dump()
    run_values = {"vocab_multiple": config.model.vocab_multiple, "backend": config.model.backend, "hf": None}
    content["model"] = model.model_dump() | run_values | {"vision": vision}
    # only the student is trained, perhaps by an optimizer or rates that do not fit the teacher
    content["adapter"], content["optimizer"] = None, {"lr": config.optimizer.lr}
    if model.num_layers != config.model.num_layers:
        # these count the student's layers
        content["layout"] |= dict.fromkeys(("stage_layers", "first_stage_layers", "last_stage_layers"))
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise ConfigError(
            f"the layout does not fit the teacher of loss.teacher.checkpoint ({path}): {reasons}"
        ) from None


def _tower_for(run: VisionSection | None, teacher: VisionSection | None, path: Path) -> dict[str, Any] | None:
    """Returns the section of a teacher's tower with every part frozen; None if the run reads text alone.

    Raises:
        ConfigError: The teacher does not read the images that the run reads, as `path` shows.
    """
    if run is None:
        return None
    if teacher is None:
        raise ConfigError(
            f"loss.teacher.checkpoint: the teacher reads no images ({path}), but the run has model.vision; name a "
            "teacher with a vision tower, such as an import with --vision"
        )
    names = ("kind", "patch_elements", "patches_per_feature")
    values = [(name, getattr(teacher, name), getattr(run, name)) for name in names]
    sides = [description_of(vision).fixed_side(vision) for vision in (teacher, run)]
    for name, theirs, ours in [*values, ("fixed_side", *sides)]:
        if theirs != ours:
            raise ConfigError(
                f"loss.teacher.checkpoint: the teacher's tower has {name}={theirs} ({path}), but the run's has {ours}; "
                "use a teacher that reads the same patches of images"
            )
    frozen = {"freeze_tower": True, "freeze_projector": True, "freeze_language_model": False}
    return teacher.model_dump() | frozen

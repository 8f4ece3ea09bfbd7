"""A frozen model that runs forward next to the trained one, under the same layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError

from mtrain.base.errors import ConfigError
from mtrain.checkpoint.store.directory import CheckpointEntry
from mtrain.checkpoint.store.imported import MODEL_NAME, imported_model
from mtrain.config import Config
from mtrain.config.load import load_config
from mtrain.config.messages import readable
from mtrain.config.schema.model import ModelSection
from mtrain.data.batch import Microbatch
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.schedule import run_forward
from mtrain.mcore.model.build import build_frozen_model, run_chunk
from mtrain.mcore.model.output_layer import DeferredLogits, Logits
from mtrain.mcore.state.base import model_fingerprint
from mtrain.mcore.state.load import load_frozen_weights
from mtrain.plan.layout import Layout

LogitsOf = Callable[[Microbatch], DeferredLogits]
"""Sliced microbatch -> the teacher's deferred logits, on the last stage; called once per microbatch."""


class Teacher:
    """The teacher's stages on this rank."""

    def __init__(self, config: Config, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
        """
        Args:
            config: Configuration of the run, with the teacher's architecture in `model`; see `teacher_config`.
            chunks: Frozen chunks, one for each virtual stage.
            groups: The process groups.
        """
        self._config, self._chunks, self._groups = config, list(chunks), groups
        # its stages need a schedule of their own, which cannot run inside the student's forward step
        self._runs_alone = groups.layout.pp > 1

    @classmethod
    def load(cls, config: Config, entry: CheckpointEntry, groups: Groups) -> Teacher:
        """Builds the model and fills it. Collective over the world.

        Args:
            config: Configuration from `teacher_config`.
            entry: Checkpoint of the teacher.
            groups: The process groups of the run.

        Raises:
            ConfigError: The layout does not fit the teacher.
            DataError: The checkpoint is damaged or of another model.
        """
        # it may have another number of layers, hence other stages
        layout = Layout.from_config(config, groups.layout.world_size)
        # the same ranks and groups; only the division of layers into stages may differ
        own = replace(groups, layout=layout)
        chunks = build_frozen_model(config, own)
        load_frozen_weights(entry, chunks, own, config.model)
        return cls(config, chunks, own)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the weights and of the architecture, the same under every layout. One all-reduce
        over the world.

        Raises:
            DataError: A weight is not finite; on all ranks.
        """
        model = self._config.model
        weights = model_fingerprint(self._chunks, self._groups, model.vocab_size, with_adapters=False)
        # without defaults, so that a key that is added to the program changes none
        known = model.model_dump(mode="json", exclude_defaults=True, exclude={"hf", "backend", "vocab_multiple"})
        shape = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        return f"{weights}-{shape[:8]}"

    def logits_of(self, batches: Sequence[Microbatch]) -> LogitsOf:
        """Returns the teacher's logits of a step's microbatches. Collective over pipeline, tensor and context
        parallelism.

        Without a pipeline the teacher runs when a microbatch is asked for, and keeps nothing. With one it runs now, and
        the last stage holds the hidden states of each microbatch until they are asked for.

        Args:
            batches: All microbatches of the step, sliced for context parallelism.
        """
        if not self._runs_alone:
            return self._run_now  # nothing to exchange between stages: it runs inside the student's loss
        held: dict[
            int, DeferredLogits
        ] = {}  # by object: the schedules pass on the very microbatches that they were given

        def hold(logits: Logits, batch: Microbatch) -> None:
            # [seq_local, batch, hidden]: a pipeline costs the memory of a whole step's
            held[id(batch)] = logits.main

        run_forward(self._chunks, batches, hold, self._config)
        return lambda batch: held.pop(id(batch))  # popped, so that each is freed after its microbatch

    @torch.no_grad()
    def _run_now(self, batch: Microbatch) -> DeferredLogits:
        (chunk,) = self._chunks  # without a pipeline there is one, the last stage
        output = run_chunk(chunk, batch)
        assert isinstance(output, Logits), "the last stage gives logits"
        return output.main


def teacher_config(config: Config, checkpoint: Path) -> Config:
    """Returns the run's configuration with the teacher's architecture.

    The tables are padded like the run's, so that both models hold the same columns of the vocabulary on each rank.

    Args:
        config: Configuration of the run.
        checkpoint: Checkpoint directory of the teacher, inside its run folder, or an import.

    Raises:
        ConfigError: Nothing says what model it is, its vocabulary is another one, or the layout does not fit.
        DataError: The import's model cannot be understood.
    """
    # an import says itself what it holds; a run's checkpoint lies next to the configuration of its run
    path, model = checkpoint / MODEL_NAME, imported_model(checkpoint)
    if model is None:
        path, model = _run_model(checkpoint)
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"loss.teacher.checkpoint: the teacher's vocabulary has {model.vocab_size} tokens ({path}), but "
            f"model.vocab_size={config.model.vocab_size}; use a teacher with the same tokenizer"
        )
    content = config.model_dump()
    of_run = {"vocab_multiple": config.model.vocab_multiple, "backend": config.model.backend, "hf": None}
    content["model"] = model.model_dump() | of_run
    content["adapter"] = None  # only the student has it
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


def _run_model(checkpoint: Path) -> tuple[Path, ModelSection]:
    """Returns the configuration file of the run that a checkpoint lies in, and the model that it names."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.exists():
        raise ConfigError(
            f"loss.teacher.checkpoint: {path} is not there, which says what model {checkpoint} holds; name a run "
            "folder, a checkpoint directory inside one, or an import"
        )
    return path, load_config([path], []).model

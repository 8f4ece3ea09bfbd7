"""Text from a model on disk, to inspect the result of a run.

For serving use an inference engine.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.checkpoint.state.load import load_adapters, load_weights
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at
from mtrain.checkpoint.store.imported import imported_model
from mtrain.config import Config
from mtrain.config.load import with_overrides
from mtrain.config.schema.layout import LayoutSection
from mtrain.convert.origin import source_of_run
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.ranks.deterministic import deterministic
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.core.ranks.init import joined_distributed
from mtrain.core.ranks.party import purpose_of
from mtrain.hf.configuration import load_config, resolved
from mtrain.hf.schema.files import declared_ends
from mtrain.hf.schema.registry import ORIGIN
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_of
from mtrain.runs.folder import RunFolder
from mtrain.training.resume import initialize, load_base
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import Prompt, questions_of
from mtrain.training.sampling.sampler import Completion, generate

_HF_CONFIG = "config.json"


class Model(NamedTuple):
    """Model on disk."""

    config: Config
    """Configuration with the architecture, tokenizer and chat template."""
    entry: CheckpointEntry | None
    """Checkpoint with the weights; None: those of `model.hf`."""
    origin: Path | None
    """Hugging Face folder that the model comes from, as in `ModelSource.origin`, if any."""


def model_at(path: Path, overrides: Sequence[str] = ()) -> Model:
    """Finds the model of a run folder (newest good checkpoint), a checkpoint, an import or a Hugging Face folder.

    Args:
        overrides: Changes of the configuration, as `section.key=value`.

    Raises:
        ConfigError, DataError: Nothing at `path` says what model it is.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} is not there; name a run folder, a checkpoint, an import or a folder of Hugging Face"
        )
    if (path / _HF_CONFIG).exists() and not RunFolder(path).checkpoints.exists():
        return Model(_config_of(path, {"hf": str(path)}, overrides), None, path)
    entry = checkpoint_at(path).entry
    assert entry is not None, "checkpoint_at raises where there is none"
    model = imported_model(entry.path)
    if model is not None:
        config = _config_of(entry.path / ORIGIN, model.model_dump(exclude={"hf"}), overrides)
        return Model(config, entry, entry.path / ORIGIN)
    folder = RunFolder(entry.path.resolve().parent.parent)
    if not folder.config.exists():
        raise ConfigError(
            f"{folder.config} is not there, which says what model {path} holds; name a run folder, a checkpoint inside "
            "one, an import or a folder of Hugging Face"
        )
    config = load_config([folder.config], overrides)
    return Model(config, entry, source_of_run(config).origin)


def _config_of(side_files: Path, model: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Returns a configuration for weights that belong to no run."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    sections = {
        "run": {"dir": "unused"},
        "model": model,
        "train": {"global_batch_size": 1, "num_steps": 1, "precision": precision},
        "optimizer": {"lr": 1.0},
        # like a finetuning run, which has a chat template if the tokenizer has one
        "data": {"kind": "sft", "seq_length": 2, "train": [{"path": "unused"}], "tokenizer": str(side_files)},
    }
    return with_overrides(sections, overrides).config(resolved)


def generate_text(path: Path, prompts: Sequence[Prompt], sampling: SamplingParams, as_chat: bool = False) -> list[str]:
    """Continues each prompt, or answers it. With several ranks, on the layout of the run; collective.

    Args:
        prompts: Texts to continue, messages of a user, or conversations.
        sampling: Rules for drawing tokens; the tokens that end a text of this model are added.
        as_chat: Whether the chat template formats each text as a user's message.

    Returns:
        Continuations without the prompts; the same on all ranks.

    Raises:
        ConfigError: Nothing says what model it is, or its tokenizer or chat template is missing.
        DataError: Tokenizer or checkpoint is missing or damaged.
    """
    found = model_at(path)
    if found.config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name the tokenizer that the run was trained with")
    tokenizer = tokenizer_of(found.config)
    questions = questions_of(found.config, tokenizer, prompts, as_chat, declared_ends(found.origin))
    sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids.union(*(each.stop_ids for each in questions)))
    timeout_s = found.config.train.process_group_timeout_s
    asked = {"prompts": [each.ids for each in questions], **asdict(sampling)}
    purpose = purpose_of("generate", found.config, path, {name: str(value) for name, value in asked.items()})
    with (
        deterministic(found.config.train.deterministic),
        joined_distributed(found.config.train.device, timeout_s, purpose) as device,
    ):
        config = _for_generation(found.config, dist.get_world_size())
        layout = Layout.from_config(config, dist.get_world_size())
        with opened_groups(layout, device, config.train.seed, timeout_s) as groups:
            model = loaded_model(found.entry, config, groups)
            completions = generate(model, [each.ids for each in questions], sampling)
    return [answer_text(tokenizer, each, sampling.stop_token_ids) for each in completions]


def answer_text(tokenizer: Tokenizer, completion: Completion, stop_ids: Set[int]) -> str:
    """Decodes an answer, without the token that ended it."""
    ids = completion.token_ids
    return tokenizer.decode(ids[:-1] if ids[-1] in stop_ids else ids)


def _for_generation(config: Config, world_size: int) -> Config:
    """Returns the configuration for generation: layers with a cache, no dropped tokens, no layout on one rank."""
    model: dict[str, Any] = {"backend": "torch"}
    if config.model.experts is not None:
        of_ours = {"implementation": "auto"} if config.model.has_transformer_engine_experts else {}
        model["experts"] = config.model.experts.model_copy(update={"capacity_factor": None, **of_ours})
    changes: dict[str, Any] = {"model": config.model.model_copy(update=model)}
    if world_size == 1:
        changes["layout"] = LayoutSection()
    return config.model_copy(update=changes)


def loaded_model(entry: CheckpointEntry | None, config: Config, groups: Groups) -> RankModel:
    """Builds the model and loads its weights: a whole model, or adapters and their frozen model. Collective.

    Args:
        entry: Checkpoint with the weights; None: those that a run of `config` starts from.

    Raises:
        DataError: The weights are missing, damaged or of another model.
    """
    model = build_rank_model(config, groups, weights_follow=True)
    if entry is None:
        initialize(model)
    elif entry.manifest.base is None:
        load_weights(entry, model)
    else:
        load_base(model)
        load_adapters(entry, model)
    model.sharded.gather_parameters()
    return model

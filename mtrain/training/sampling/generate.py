"""Generates text from a model on disk, to inspect the result of a run, and sample answers during training (`eval.*`).

The latter do not change the run: tokens are drawn without the random states of training, and layers are left unchanged.
For serving use an inference engine.
"""

import json
import logging
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.checkpoint.state.load import load_adapters, load_weights
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at
from mtrain.checkpoint.store.imported import imported_model
from mtrain.config import Config
from mtrain.config.load import with_overrides
from mtrain.config.schema.layout import LayoutSection
from mtrain.convert.origin import source_of_run
from mtrain.core.batch.sample import HERE
from mtrain.core.engine.generation import refuse_uncachable
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.ranks.deterministic import deterministic
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.core.ranks.init import joined_distributed, on_first_rank
from mtrain.core.ranks.party import purpose_of
from mtrain.hf.configuration import load_config, resolved
from mtrain.hf.hub import cached, how_to_download
from mtrain.hf.schema.files import declared_ends
from mtrain.hf.schema.registry import ORIGIN
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_of
from mtrain.report.metrics.jsonl import AppendedFile
from mtrain.report.metrics.sinks import Sinks
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run
from mtrain.training.evaluate import Due, due_of_eval
from mtrain.training.resume import initialize, load_base
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.prompts import Prompt, Question, has_images, questions_of, read_prompts, shown
from mtrain.training.sampling.sampler import Completion, generate

_log = logging.getLogger(__name__)

_HF_CONFIG = "config.json"
_SHOWN_PROMPTS, _SHOWN_CHARACTERS = 2, 60
"""Numbers of prompts, and of characters of each text, that the console shows."""


class Model(NamedTuple):
    """Model on disk."""

    config: Config
    """Configuration with the architecture, tokenizer and chat template."""
    entry: CheckpointEntry | None
    """Checkpoint with the weights; None if they are those of `model.hf`."""
    origin: Path | None
    """Hugging Face folder that the model comes from, as in `ModelSource.origin`, if any."""


def model_at(path: Path, overrides: Sequence[str] = ()) -> Model:
    """Finds the model of a run folder (newest good checkpoint), a checkpoint, an import or a Hugging Face folder.

    Args:
        overrides: Changes of the configuration, as `section.key=value`.
    """
    path = Path(cached(str(path)))
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; name a run folder, a checkpoint, an import or a Hugging Face folder"
            f"{how_to_download(str(path))}"
        )
    if (path / _HF_CONFIG).exists() and not RunFolder(path).checkpoints.exists():
        return Model(_config_of(path, {"hf": str(path)}, overrides), None, path)
    entry = checkpoint_at(path).entry
    assert entry is not None, "checkpoint_at raises if it finds none"
    model = imported_model(entry.path)
    if model is not None:
        config = _config_of(entry.path / ORIGIN, model.model_dump(exclude={"hf"}), overrides)
        return Model(config, entry, entry.path / ORIGIN)
    folder = RunFolder(entry.path.resolve().parent.parent)
    if not folder.config.exists():
        raise ConfigError(
            f"{folder.config}, which describes the model in {path}, does not exist; name a run folder, a checkpoint in "
            "one, an import or a Hugging Face folder"
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


def generate_text(
    path: Path, prompts: Sequence[Prompt], sampling: SamplingParams, as_chat: bool = False, folder: Path = HERE
) -> list[str]:
    """Continues or answers each prompt, with several ranks on the layout of the run. Collective over the world.

    Args:
        prompts: Texts to continue, messages of a user, or conversations.
        sampling: Rules for drawing tokens; the tokens that end a text of this model are added.
        as_chat: Whether each text is a user's message, formatted by the chat template.
        folder: Folder from which the paths of images in prompts count.

    Returns:
        Continuations without the prompts; the same on all ranks.
    """
    source = _model_for(path, prompts)
    if source.config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name the tokenizer that the run was trained with")
    tokenizer = tokenizer_of(source.config)
    questions = questions_of(source.config, tokenizer, prompts, as_chat, declared_ends(source.origin), folder)
    sampling = replace(
        sampling, stop_token_ids=sampling.stop_token_ids.union(*(question.stop_ids for question in questions))
    )
    timeout_s = source.config.train.process_group_timeout_s
    arguments = {"prompts": [question.ids for question in questions], **asdict(sampling)}
    purpose = purpose_of("generate", source.config, path, {name: str(value) for name, value in arguments.items()})
    with (
        deterministic(source.config.train.deterministic),
        joined_distributed(source.config.train.device, timeout_s, purpose) as device,
    ):
        config = for_generation(source.config, dist.get_world_size())
        layout = Layout.from_config(config, dist.get_world_size())
        with opened_groups(layout, device, config.train.seed, timeout_s) as groups:
            model = loaded_model(source.entry, config, groups)
            completions = _answers(model, questions, sampling)
    return [answer_text(tokenizer, completion, sampling.stop_token_ids) for completion in completions]


def _model_for(path: Path, prompts: Sequence[Prompt]) -> Model:
    """Finds the model; of a Hugging Face folder also the vision tower, if a prompt has images."""
    source = model_at(path)
    if source.config.model.vision is not None or not any(map(has_images, prompts)):
        return source
    if source.entry is not None:
        raise ConfigError(
            f"a prompt has images, but {path} was trained without model.vision; export it, which copies the vision "
            "tower, and name the export"
        )
    try:
        return model_at(path, ["model.vision={}"])
    except DataError as fault:
        raise DataError(f"a prompt has images, but the model in {path} cannot read them: {fault}") from None


def _answers(model: RankModel, questions: Sequence[Question], sampling: SamplingParams) -> list[Completion]:
    ids, images = [question.ids for question in questions], [question.images for question in questions]
    return generate(model, ids, sampling, images=images)


def answer_text(tokenizer: Tokenizer, completion: Completion, stop_ids: Set[int]) -> str:
    """Decodes an answer, without the token that ended it."""
    ids = completion.token_ids
    return tokenizer.decode(ids[:-1] if ids[-1] in stop_ids else ids)


def for_generation(config: Config, world_size: int) -> Config:
    """Returns the configuration for generation: layers with a key/value cache, no dropped tokens, and on one rank no
    parallelism."""
    model: dict[str, Any] = {"backend": "torch"}
    if config.model.experts is not None:
        of_ours = {"implementation": "auto"} if config.model.has_transformer_engine_experts else {}
        model["experts"] = config.model.experts.model_copy(update={"capacity_factor": None, **of_ours})
    layout = LayoutSection() if world_size == 1 else config.layout
    return config.model_copy(update={"model": config.model.model_copy(update=model), "layout": layout})


def loaded_model(entry: CheckpointEntry | None, config: Config, groups: Groups) -> RankModel:
    """Builds the model and loads its weights: a whole model, or adapters and their frozen model. Collective over the
    world.

    Args:
        entry: Checkpoint with the weights; None: the weights that a run of `config` starts from.
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


class PromptSamples:
    """Answers the prompts of a run (`eval.*`), and writes the answers to its files."""

    def __init__(self, config: Config, folder: RunFolder, chunks: Sequence[Any], is_first_rank: bool) -> None:
        """Reads the prompts, on the first rank. Collective over the world."""
        self._section, self._folder = config.eval, folder
        self.due = due_of_eval(config.eval, config.valid)
        self._is_first_rank = is_first_rank
        self._prompts: list[Prompt] = []
        self._questions: list[Question] = []
        self._lines: AppendedFile | None = None
        if not self._section.has_prompts:
            self.due = Due()
            return
        refuse_uncachable(config.model, chunks)
        self._questions = on_first_rank(lambda: self._read(config))
        stops = frozenset[int]().union(*(question.stop_ids for question in self._questions))
        options = (self._section.temperature, self._section.top_p, self._section.top_k, self._section.seed)
        self._sampling = SamplingParams(self._section.max_new_tokens, *options, stops)

    def begin(self, start_step: int) -> None:
        """Opens the file for the steps after `start_step`; removes what an earlier start wrote for them."""
        self.close()
        if not self._section.has_prompts or not self._is_first_rank:
            return
        _rewind(self._folder.samples, start_step)
        self._lines = AppendedFile(self._folder.samples)

    def take(self, run: Run, step: int, sinks: Sinks) -> None:
        """Answers the prompts with the current weights; writes the answers to the file and to sinks that show texts.
        Collective over the world."""
        run.model.sharded.gather_parameters()
        completions = _answers(run.model, self._questions, self._sampling)
        if self._is_first_rank:
            self._write(completions, step, sinks)

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk refused answers until the end."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _read(self, config: Config) -> list[Question]:
        section, self._tokenizer = self._section, tokenizer_of(config)
        further = [] if section.prompts_file is None else read_prompts(Path(section.prompts_file))
        self._prompts = [*section.prompts, *further]
        ends = declared_ends(source_of_run(config).origin)
        folder = HERE if section.prompts_file is None else Path(section.prompts_file).parent
        return questions_of(config, self._tokenizer, self._prompts, section.chat, ends, folder)

    def _write(self, completions: Sequence[Completion], step: int, sinks: Sinks) -> None:
        assert self._lines is not None, "`begin` opens it"
        stops, lines = self._sampling.stop_token_ids, []
        for number, (prompt, completion) in enumerate(zip(self._prompts, completions, strict=True)):
            answer = answer_text(self._tokenizer, completion, stops)
            record = {
                "step": step,
                "prompt": prompt,
                "answer": answer,
                "finish_reason": completion.finish_reason,
                "num_tokens": len(completion.token_ids),
                "log_prob": sum(completion.log_probs),
            }
            self._lines.append(step, (json.dumps(record, ensure_ascii=False) + "\n").encode())
            lines.append(f"> {shown(prompt)}\n{answer}")
            if number < _SHOWN_PROMPTS:
                _log.info(f"sample after step {step}: {_short(shown(prompt))} -> {_short(answer)}")
        sinks.write_text("samples", "\n\n".join(lines), step)


def _short(text: str) -> str:
    """Shortens and escapes a text for one line: text of an untrained model may contain control characters."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…")


def _rewind(path: Path, start_step: int) -> None:
    """Rewinds the file to this step, and removes an incomplete last line; step 0 empties the file."""
    if not path.exists():
        return
    lines = []
    with disk_faults(f"rewind {path} to step {start_step}"), replacing(path) as new:
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{path}, line {number} is not a sample of a run; repair or remove that line") from None
            lines += [line] if 0 < start_step >= step else []
        new.write_bytes(b"".join(lines))

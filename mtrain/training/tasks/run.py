"""Tasks of a model on disk, and of a run while it trains (`eval.tasks`)."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config.schema.data import AnyData, SftSection
from mtrain.config.schema.train import EvalSection
from mtrain.convert.origin import source_of_run
from mtrain.core.engine.generation import refuse_uncachable
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.ranks.deterministic import deterministic
from mtrain.core.ranks.groups import opened_groups
from mtrain.core.ranks.init import joined_distributed, on_all_ranks, on_first_rank, with_the_slowest
from mtrain.core.ranks.party import purpose_of
from mtrain.data.encoding.encoder import chat_encoder
from mtrain.hf.schema.files import declared_ends, read_json
from mtrain.hf.tokenizer.tokenizer import Tokenizer, tokenizer_of
from mtrain.report.metrics.record import TaskRecord
from mtrain.training.best import Metric
from mtrain.training.build import Run
from mtrain.training.evaluate import Due, due_of_eval
from mtrain.training.sampling.generate import for_generation, loaded_model, model_at
from mtrain.training.tasks.harness import Harness, TaskResults
from mtrain.training.tasks.leading import led
from mtrain.training.tasks.model import TaskModel
from mtrain.training.tasks.requests import Answering, TextModel

_NUM_BOOTSTRAPS = 100_000
"""Resamples for standard errors, as many as in lm-eval; none during training, which would have to wait for them."""
_DEFAULT_LENGTH = 2048
"""Context length of a Hugging Face model whose config.json has none, as in lm-eval."""
_LENGTH_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")


def evaluate_model(path: Path, section: EvalSection, max_length: int | None = None) -> TaskResults:
    """Evaluates a model on disk, with several ranks on the layout of its run. Collective over the world.

    Args:
        max_length: Largest number of tokens that the model reads; None: that of config.json, else data.seq_length.

    Returns:
        Results, the same on all ranks.

    Raises:
        ConfigError: lm-eval is not installed, or the model or a task cannot be evaluated.
        DataError: The model or the data of a task cannot be loaded.
    """
    source = model_at(path)
    if source.config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name the tokenizer that the run was trained with")
    tokenizer = tokenizer_of(source.config)
    length = max_length
    if length is None:
        otherwise = _DEFAULT_LENGTH if source.entry is None else source.config.data.seq_length
        length = _context_length(source.origin, otherwise)
    timeout_s = source.config.train.process_group_timeout_s
    arguments = {**section.model_dump(mode="json"), "max_length": length}
    purpose = purpose_of("eval", source.config, path, {name: str(value) for name, value in arguments.items()})
    with (
        deterministic(source.config.train.deterministic),
        joined_distributed(source.config.train.device, timeout_s, purpose) as device,
    ):
        # before the weights are loaded: an unknown task ends the command early
        harness = _opened(section)
        config = for_generation(source.config, dist.get_world_size())
        layout = Layout.from_config(config, dist.get_world_size())
        with opened_groups(layout, device, config.train.seed, timeout_s) as groups:
            model = loaded_model(source.entry, config, groups)

            def evaluate(answering: Answering) -> TaskResults:
                assert harness is not None, "only the first rank leads"
                text_model = _text_model(answering, config.data, tokenizer, length, source.origin)
                return harness.evaluate(text_model, _NUM_BOOTSTRAPS)

            return led(TaskModel(model, tokenizer), evaluate)


def _opened(section: EvalSection) -> Harness | None:
    """Loads the tasks on the first rank, which may take longer than the timeout of a collective; None on others.
    Collective over the world."""
    return on_all_ranks(lambda: with_the_slowest(lambda: Harness(section) if dist.get_rank() == 0 else None))


def _context_length(origin: Path | None, otherwise: int) -> int:
    """Returns the context length in a model's config.json, or `otherwise` if it has none."""
    if origin is None:
        return otherwise
    content = read_json(origin / "config.json")
    config = content.get("text_config") or content
    return next((int(config[key]) for key in _LENGTH_KEYS if config.get(key) is not None), otherwise)


def _text_model(
    answering: Answering, data: AnyData, tokenizer: Tokenizer, max_length: int, origin: Path | None
) -> TextModel:
    section = data if isinstance(data, SftSection) else None
    encoder = None if section is None else chat_encoder(section, tokenizer)
    stops = frozenset[int]() if encoder is None else encoder.stop_ids()
    ends = stops.union(declared_ends(origin), {tokenizer.eos_id})
    return TextModel(answering, tokenizer, max_length, ends, None if encoder is None else encoder.text)


class RunTasks:
    """Tasks that a run evaluates while it trains (`eval.tasks`)."""

    def __init__(self, model: RankModel) -> None:
        """Loads the tasks on the first rank. Collective over the world.

        Raises:
            ConfigError: lm-eval is not installed, does not know a task or valid.metric, or the model cannot generate
                the text that a task needs.
            DataError: The data of a task cannot be loaded.
        """
        config = model.config
        self.metric = Metric(config.valid.metric)
        """Number that decides the best checkpoints."""
        self.due = Due()
        if not config.eval.tasks:
            return
        self.due = due_of_eval(config.eval, config.valid)
        self._harness = harness = _opened(config.eval)
        if on_first_rank(lambda: harness is not None and harness.generates):
            refuse_uncachable(config.model, model.chunks)
        if self.metric.is_of_tasks:
            name = str(config.valid.metric)
            is_higher = on_first_rank(lambda: harness is not None and harness.is_better_if_higher(name))
            self.metric = self.metric._replace(is_better_if_higher=is_higher)
        self._tokenizer = tokenizer_of(config)
        self._origin = source_of_run(config).origin
        self._max_length = _context_length(self._origin, config.data.seq_length)

    def take(self, run: Run, step: int) -> TaskRecord:
        """Evaluates the tasks with the current weights. Collective over the world."""
        began, harness, data = time.perf_counter(), self._harness, run.model.config.data

        def evaluate(answering: Answering) -> Mapping[str, float]:
            assert harness is not None, "only the first rank leads"
            model = _text_model(answering, data, self._tokenizer, self._max_length, self._origin)
            return harness.evaluate(model).metrics

        run.model.sharded.gather_parameters()
        metrics = led(TaskModel(run.model, self._tokenizer), evaluate)
        return TaskRecord(
            step=step,
            tasks=metrics,
            seconds=time.perf_counter() - began,
            layout_dependent=run.model.config.is_layout_dependent,
        )

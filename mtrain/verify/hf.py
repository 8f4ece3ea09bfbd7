"""Check `mtrain verify hf`: compares the first steps of a run from a Hugging Face checkpoint with transformers.

The model is not shrunk. One side is transformers, torch's AdamW, the loss sums of mtrain/hf/io/training.py and the
reference's rows, weights and learning rates; the other is the trainer's step under the layouts. Both use the same
samples and initial weights, in float32.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.arch.lr import learning_rate
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.config.schema.loss import MAIN_TERM, LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AdamWSection
from mtrain.config.schema.vision import VisionSection
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.data.encoding.compared import image_processor
from mtrain.data.loader import StepLoader
from mtrain.hf.images import ImageProcessor
from mtrain.hf.io.source import FolderTensors, source_for
from mtrain.hf.io.training import (
    StepInput,
    TrainingRows,
    image_inputs,
    open_trainable,
    parts_of,
    transformers_steps,
)
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of
from mtrain.hf.tokenizer.tokenizer import added_by
from mtrain.training.build import opened_loader
from mtrain.verify.core.activations import LOG_PROBS, RecordedOutput, assemble_outputs, recorded_log_probs
from mtrain.verify.core.compare import relative
from mtrain.verify.core.layouts import Prepared, Trial, layout_of_config, parse_trials, prepared
from mtrain.verify.core.ranks import Pool, attempted
from mtrain.verify.core.result import Deviation, HfReport, LayoutResult, StepValues, Tolerance, diagnosed, summary
from mtrain.verify.core.samples import SamplePositions, of_user
from mtrain.verify.core.shrink import in_float32, refuse_incomparable, replay_notes
from mtrain.verify.core.texts import texts_of
from mtrain.verify.core.tolerances import Sizes, denominator_tolerance
from mtrain.verify.core.worker import run_objective, step_values
from mtrain.verify.parity import Progress, Request, device_for, refuse_without_reference
from mtrain.verify.planted.faults import planted
from mtrain.verify.planted.inject import chosen
from mtrain.verify.reference.aggregation import divisor, token_weights
from mtrain.verify.reference.schedule import published_rate
from mtrain.verify.reference.text import Rows, rows_of

PRELOADED = ("mtrain.verify.hf", "mtrain.verify.planted.faults")
TIMEOUT_S = 6 * 3600
"""Time limit of a layout in seconds; long, because models have full size."""
TOLERANCE = 1e-4
"""Relative tolerance of loss and gradient norm. Every update amplifies the rounding of both sides, because Adam divides
gradients by their own size; a wrong computation differs in the first digits."""


def verify_hf(config: Config, request: Request, progress: Progress, pool: Pool | None = None) -> HfReport:
    """Runs the check; see `verify_parity`. Without layouts in the request, the configuration's is used."""
    refuse_without_reference(config)
    device, max_ranks = device_for(config.train, request.max_ranks)
    exact, changes = comparable(config)
    changes = (*changes, *replay_notes(config.data, progress))
    if request.layouts is None:
        trials = [layout_of_config(exact, max_ranks)]
    else:
        trials = [prepared(trial, exact) for trial in parse_trials(request.layouts, exact.layout, max_ranks)]
    if request.fault is not None:
        chosen(request.fault, exact, {axis for trial in trials for axis in trial.axes})
    pool = pool or Pool(device, PRELOADED, TIMEOUT_S, config.train.deterministic)
    tolerances = _tolerances(Sizes.of(exact))
    inputs = _inputs(exact, request.num_steps)
    reference = _reference(exact, inputs, progress)
    allowed = {tolerance.kind: tolerance.value for tolerance in tolerances}
    layouts = tuple(_Runs(inputs, reference, allowed, request, pool).all(trials, exact, progress))
    return HfReport(
        **request.origin(device),
        config=exact.model_dump(mode="json"),
        changes=(*changes, *reference.notes),
        data=_data(exact, inputs),
        num_steps=request.num_steps,
        tolerances=tolerances,
        tensors=(),
        reference=reference.result,
        layouts=layouts,
        diagnosis=diagnosed(layouts, lambda result, step: None, HfReport.text),
    )


def comparable(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Returns the configuration in float32 without features that transformers lacks, and the changes as lines.

    Raises ConfigError if it cannot be compared.
    """
    refuse_incomparable(config)
    plain, experts = LossSection(), config.model.experts
    names = ("function", "options", "side_terms", "teacher", "router")
    changed = [f"loss.{name}" for name in names if getattr(config.loss, name) != getattr(plain, name)]
    if experts is not None and experts.bias_update_rate > 0:
        changed.append("model.experts.bias_update_rate")
    if changed:
        raise ConfigError(
            f"{changed[0]} is set, but only the next-token loss is compared with transformers; remove it to compare "
            "the rest"
        )
    if config.adapter is not None:
        raise ConfigError(
            "the section adapter is set, but transformers trains the whole model in this check; remove the section, "
            "and compare adapters with mtrain verify parity"
        )
    overrides: dict[str, dict[str, Any]] = {**in_float32(config.model), "optimizer": {"kind": "adamw"}}
    if isinstance(config.data, SftSection) and config.data.too_long in ("start", "split", "drop"):
        # only cut at the end, each record is one sample, which the reference reads itself
        overrides["data"] = {"too_long": "end"}
    overrides["model"] = {"mtp_depths": 0} | overrides.get("model", {})
    lines = tuple(
        f"{name}.{key}: {getattr(getattr(config, name), key)} -> {value}"
        for name, values in overrides.items()
        for key, value in values.items()
        if getattr(getattr(config, name), key) != value
    )
    content = config.model_dump()
    for name, values in overrides.items():
        content[name] |= values
    content["optimizer"] = {name: content["optimizer"][name] for name in AdamWSection.model_fields}
    return Config.model_validate(content), lines


def _tolerances(sizes: Sizes) -> tuple[Tolerance, ...]:
    meaning = {
        "log_prob": (
            "The log-probability of each learned token before the update: the largest difference from transformers, "
            "relative to the largest log-probability of a token in the step."
        ),
        "loss": "The mean of the next-token loss over the global batch, relative to that of transformers.",
        "grad_norm": "The global norm of all gradients before clipping, relative to that of transformers.",
    }
    of_values = (Tolerance(kind, TOLERANCE, "", {}, words) for kind, words in meaning.items())
    return (denominator_tolerance(sizes), *of_values)


@dataclass(frozen=True)
class _StepInputs:
    step: StepInput
    is_text: Tensor
    """Marks the positions in `step.rows`, whose order is theirs, [batch, seq]."""
    adds_exactly: bool
    """Whether float64 adds the denominator without rounding."""


def _inputs(config: Config, num_steps: int) -> list[_StepInputs]:
    texts, processor = texts_of(config, of_user(num_steps, config.model)), None
    if isinstance(config.data, SftSection):
        processor = image_processor(config.data, config.model)
    if texts.order_faults:
        raise DataError(f"the order of samples is wrong: {texts.order_faults[0]}; report this")
    inputs = []
    for number, of_step in enumerate(texts.steps):
        rows = rows_of(of_step, config.data.seq_length, config.model.vocab_size, torch.device("cpu"))
        weights = token_weights(rows.weights, rows.sample_weights, config.loss)
        shares = divisor(rows.weights, rows.sample_weights, config.loss)
        lr = published_rate(number, config.optimizer, config.train.num_steps)
        documents = list(_documents(rows, weights, config.model.vision, processor))
        inputs.append(_StepInputs(StepInput(documents, shares.value, lr), rows.is_text, shares.is_exact))
    return inputs


def _data(config: Config, inputs: Sequence[_StepInputs]) -> str:
    """Describes the samples, and whether the tower was compared: its features depend on images alone."""
    data = "the first batches of the run's own data" if config.data.kind != "mock" else "random tokens"
    if config.model.vision is None:
        return data
    with_images = sum("pixel_values" in rows.images for each in inputs for rows in each.step.rows)
    return (
        f"{data}, {with_images or 'none'} of {counted(sum(len(each.step.rows) for each in inputs), 'sample')} with "
        "images"
    )


def _documents(
    rows: Rows, weights: Tensor, vision: VisionSection | None, processor: ImageProcessor | None
) -> Iterator[TrainingRows]:
    """Yields each document as its own row, without padding, with the images that transformers' processor reads."""
    for row, documents in enumerate(rows.documents):
        pictures = rows.pictures[row] if rows.pictures else ()
        for number in range(int(documents.max()) + 1):
            is_document = documents == number
            tokens, labels, of_row = (field[row, is_document][None] for field in (rows.tokens, rows.labels, weights))
            files, images = [picture.content for picture in pictures if is_document[picture.start]], {}
            if vision is not None:
                images = image_inputs(vision, tokens, processor.inputs(files) if processor and files else {})
            yield TrainingRows(tokens, labels, of_row, images)


class _Reference(NamedTuple):
    """Steps in transformers."""

    result: LayoutResult
    log_probs: Sequence[Tensor]
    """Log-probability of each label by step, [tokens] float64, in the order of its rows."""
    notes: tuple[str, ...]
    """How the model was changed for the comparison, if it was."""


def _reference(config: Config, inputs: Sequence[_StepInputs], progress: Progress) -> _Reference:
    """Runs the steps in transformers."""
    assert config.model.hf is not None, "the command line names it"
    assert isinstance(config.optimizer, AdamWSection), "`comparable` sets AdamW"
    began = time.monotonic()
    values = []
    steps = [step_inputs.step for step_inputs in inputs]
    model, padding_row = open_trainable(Path(config.model.hf), added_by(config.model), _dtypes(config.model))
    parts = dict[str, str]()
    if config.model.vision is not None:
        tower = family_of(read_json(Path(config.model.hf) / CONFIG_NAME)).tower
        assert tower is not None and tower.trained is not None, "model.vision is read from the folder"  # noqa: PT018
        parts = parts_of(model, tower.trained)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not getattr(config.model.vision, f"freeze_{parts[name]}"))
    log_probs = []
    for number, outcome in enumerate(transformers_steps(model, config.optimizer, steps, parts)):
        log_probs.append(outcome.log_probs)
        denominator = steps[number].denominator
        mean = outcome.numerator / denominator if denominator else 0.0
        terms = {MAIN_TERM: outcome.numerator}, {MAIN_TERM: denominator}
        values.append(StepValues(number + 1, mean, {MAIN_TERM: mean}, *terms, outcome.grad_norm))
        progress(f"transformers: step {number + 1} of {len(steps)} ({time.monotonic() - began:.1f} s)")
    seconds = time.monotonic() - began
    result = LayoutResult("transformers", {}, 1, seconds, steps=tuple(values), expected=tuple(values))
    if padding_row is None:
        return _Reference(result, log_probs, ())
    note = (
        f"transformers: padding_idx={padding_row} -> None (pad_token_id makes transformers drop the gradient of this "
        "token's embedding, even where the token is text)"
    )
    progress(note)
    return _Reference(result, log_probs, (note,))


def _dtypes(model: ModelSection) -> list[torch.dtype]:
    """Returns the dtypes of the folder's token tables, to which a new row is rounded."""
    assert model.hf is not None, "the command line names it"
    tensors = FolderTensors(source_for(Path(model.hf), model)).tensors
    return [tensors[key].dtype for key in ("embedding.word_embeddings.weight", "output_layer.weight") if key in tensors]


@dataclass(frozen=True)
class _Runs:
    """Runs the layouts, each from the weights of the Hugging Face checkpoint."""

    inputs: Sequence[_StepInputs]
    reference: _Reference
    tolerances: Mapping[str, float]
    request: Request
    pool: Pool

    def all(self, trials: Sequence[Prepared], config: Config, progress: Progress) -> list[LayoutResult]:
        """Runs all layouts; if one fails, also one process, to see whether the layout is at fault."""
        results = [self._layout(trial, progress) for trial in trials]
        if all(result.passed for result in results) or any(trial.layout.world_size == 1 for trial in trials):
            return results
        alone = prepared(Trial(micro_batch_size=1), config)
        progress(f"{alone.name}: to see whether the layout is at fault")
        return [self._layout(alone, progress), *results]

    def _layout(self, trial: Prepared, progress: Progress) -> LayoutResult:
        def find() -> dict[str, Any]:
            request = self.request
            ranks = self.pool.run(run_from_hf, trial.layout, trial.config, request.num_steps, request.fault)
            values, by_step = ranks[0].values, zip(*(rank.pieces for rank in ranks), strict=True)
            log_probs = [assemble_outputs(chain(*pieces), trial.config)[LOG_PROBS][..., 0] for pieces in by_step]
            return {"steps": tuple(values), "deviations": tuple(self._deviations(values, log_probs))}

        result = attempted(trial.name, trial.axes, trial.layout.world_size, find)
        result = replace(result, expected=self.reference.result.steps)
        progress(summary(result))
        return result

    def _deviations(self, steps: Sequence[StepValues], log_probs: Sequence[NDArray[np.float64]]) -> Iterator[Deviation]:
        expected_steps = zip(self.reference.result.steps, self.reference.log_probs, strict=True)
        for inputs, values, of_tokens, (expected, exact) in zip(self.inputs, steps, log_probs, expected_steps):
            denominators = values.denominators[MAIN_TERM], expected.denominators[MAIN_TERM]
            allowed = 0.0 if inputs.adds_exactly else self.tolerances["denominator"]
            yield Deviation("denominator", MAIN_TERM, values.step, relative(*denominators), allowed)
            name, value = _worst_token(inputs, torch.from_numpy(of_tokens.T), exact)
            yield Deviation("log_prob", name, values.step, value, self.tolerances["log_prob"])
            means = values.means[MAIN_TERM], expected.means[MAIN_TERM]
            yield Deviation("loss", MAIN_TERM, values.step, relative(*means), self.tolerances["loss"])
            norms = values.grad_norm, expected.grad_norm
            yield Deviation("grad_norm", "grad_norm", values.step, relative(*norms), self.tolerances["grad_norm"])


def _worst_token(inputs: _StepInputs, log_probs: Tensor, exact: Tensor) -> tuple[str, float]:
    """Returns the learned token of a step whose log-probability is farthest from that of transformers, in words, and
    the difference relative to the largest.

    Args:
        inputs: Inputs of the step.
        log_probs: Log-probability of the label at each position, [batch, seq].
        exact: Log-probabilities of transformers, [tokens], in the order of the rows of `inputs`.
    """
    is_learned = torch.cat([rows.weights.flatten() for rows in inputs.step.rows]) > 0
    off = torch.where(is_learned, (log_probs[inputs.is_text] - exact).abs(), 0.0)
    largest = torch.where(is_learned, exact.abs(), 0.0).max()
    sample, position = inputs.is_text.nonzero()[off.nan_to_num(math.inf).argmax()].tolist()
    # the label of a position is the next token
    return f"token {position + 2} of sample {sample + 1}", relative(float(largest + off.max()), float(largest))


class HfSteps(NamedTuple):
    """Steps of a rank."""

    values: list[StepValues]
    pieces: list[list[RecordedOutput]]
    """Log-probabilities of labels by step, before its update; of one rank for each part of the rows."""


def run_from_hf(groups: Groups, config: Config, num_steps: int, fault: str | None) -> HfSteps:
    """Trains the first steps of the run from the weights of `model.hf`, and returns their values. Collective."""
    assert config.model.hf is not None, "the command line names it"
    loader = opened_loader(groups, lambda: StepLoader(config, groups.dp_rank, groups.layout.dp))
    model = build_rank_model(config, groups, weights_follow=True)
    load_hf_weights(Path(config.model.hf), model)
    training = TrainingStep(model, run_objective(config))
    values, pieces = [], []
    with planted(fault):
        for number in range(num_steps):
            positions = None if loader is None else SamplePositions(loader.plan(number), loader.samples(number))
            with recorded_log_probs(model, positions) as of_step:
                totals = training.forward_backward(None if loader is None else loader.batches(number))
            pieces.append(of_step)
            update = training.update(totals, learning_rate(number, config.optimizer, config.train.num_steps))
            values.append(step_values(number, totals, 0.0 if update is None else update.grad_norm))
    return HfSteps(values, pieces)

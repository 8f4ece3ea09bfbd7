"""`mtrain verify hf`: the first steps of the user's run from a folder of Hugging Face, against transformers.

Nothing is made smaller. transformers, torch's AdamW and the sums of losses in mtrain/hf/training.py are one side; the
trainer's step under the layouts is the other. Both see the same samples and start from the same weights, in float32.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mtrain.config import Config
from mtrain.config.loss import LossSection
from mtrain.data.batch import Microbatch
from mtrain.data.loader import StepLoader
from mtrain.environment import program_versions
from mtrain.errors import ConfigError, MtrainError
from mtrain.hf.training import Rows, StepInput, transformers_steps
from mtrain.loss.pair import MAIN_TERM
from mtrain.verify.bisect import diagnosed
from mtrain.verify.compare import relative
from mtrain.verify.hf_worker import run_from_hf
from mtrain.verify.inject import chosen
from mtrain.verify.layouts import Prepared, own_layout, parse_trials, prepared
from mtrain.verify.parity import Progress, Request, device_for
from mtrain.verify.ranks import Pool, RankFailedError, reason_of
from mtrain.verify.result import Deviation, HfReport, LayoutResult, StepValues, Tolerance, told
from mtrain.verify.shrink import refuse_incomparable
from mtrain.verify.tolerances import denominator_tolerance
from mtrain.verify.worker import rate

PRELOADED = ("mtrain.verify.hf_worker", "mtrain.verify.faults")
TIMEOUT_S = 6 * 3600
"""Of a layout: models are as large as they are."""
TOLERANCE = 1e-4
"""Relative, of loss and gradient norm. Roundings of both sides are amplified by every update, since Adam divides
gradients by their own size; what is not the same computation is wrong in the first digits."""


def verify_hf(config: Config, request: Request, progress: Progress, pool: Pool | None = None) -> HfReport:
    """Runs everything.

    Args:
        config: The user's, with `model.hf`.
        request: The command line; without layouts the configuration's own.
        progress: Told of every run that is done.
        pool: Ranks that are at hand; None starts its own.

    Raises:
        ConfigError: transformers does not compute what the configuration asks for, or a layout is not possible.
        DataError: the weights or the data cannot be read.
        MachineError: the device that was asked for is not there.
    """
    device, max_ranks = device_for(config, request.max_ranks)
    exact, changes = comparable(config)
    trials = _trials(exact, request, max_ranks)
    if request.fault is not None:
        chosen(request.fault, exact, {axis for trial in trials for axis in trial.axes})
    pool = pool or Pool(device, PRELOADED, TIMEOUT_S)
    tolerances = _tolerances(exact)
    reference = _reference(exact, request.num_steps, progress)
    layouts = tuple(_layout(trial, reference.steps, tolerances, request, pool, progress) for trial in trials)
    versions = {key: str(value) for key, value in program_versions().items()}
    return HfReport(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=request.command,
        environment=versions | {"device": device, "backend": "gloo" if device == "cpu" else "nccl"},
        config=exact.model_dump(mode="json"),
        changes=changes,
        data="the first batches of the run's own data" if exact.data.kind != "mock" else "random tokens",
        num_steps=request.num_steps,
        tolerances=tolerances,
        tensors=(),
        reference=reference,
        layouts=layouts,
        injected=request.fault,
        diagnosis=diagnosed(layouts, lambda result, step: None, HfReport.wording),
    )


def comparable(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The configuration in float32 and without what transformers does not compute, and what that changed.

    Raises:
        ConfigError: it cannot be compared.
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
    wanted: dict[str, dict[str, Any]] = {"train": {"precision": "fp32"}, "model": {"mtp_depths": 0}}
    lines = tuple(
        f"{name}.{key}: {getattr(getattr(config, name), key)} -> {value}"
        for name, values in wanted.items()
        for key, value in values.items()
        if getattr(getattr(config, name), key) != value
    )
    content = config.model_dump()
    for name, values in wanted.items():
        content[name] |= values
    return Config.model_validate(content), lines


def _trials(config: Config, request: Request, max_ranks: int) -> list[Prepared]:
    if request.layouts is None:
        return [own_layout(config, max_ranks)]
    trials = parse_trials(request.layouts, config, max_ranks)
    return [prepared(trial, config) for trial in dict.fromkeys(trials)]


def _tolerances(config: Config) -> tuple[Tolerance, ...]:
    meaning = {
        "loss": "The mean of the next-token loss over the global batch, relative to that of transformers.",
        "grad_norm": "The global norm of all gradients before clipping, relative to that of transformers.",
    }
    of_values = (Tolerance(kind, TOLERANCE, "1e-4", {}, words) for kind, words in meaning.items())
    return (denominator_tolerance(config), *of_values)


def _reference(config: Config, num_steps: int, progress: Progress) -> LayoutResult:
    """The run in transformers."""
    assert config.model.hf is not None, "the command line names it"
    began = time.monotonic()
    inputs = [_step_input(config, number) for number in range(num_steps)]
    values = []
    for number, found in enumerate(transformers_steps(Path(config.model.hf), config.optimizer, inputs)):
        denominator = inputs[number].denominator
        mean = found.numerator / denominator if denominator else 0.0
        terms = {MAIN_TERM: found.numerator}, {MAIN_TERM: denominator}
        values.append(StepValues(number + 1, mean, {MAIN_TERM: mean}, *terms, found.grad_norm))
        progress(f"transformers: step {number + 1} of {num_steps} ({time.monotonic() - began:.1f} s)")
    seconds = time.monotonic() - began
    return LayoutResult("transformers", {}, 1, seconds, steps=tuple(values), expected=tuple(values))


def _step_input(config: Config, number: int) -> StepInput:
    alone = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": 1})})
    batches = StepLoader(alone, 0, 1).batches(number)
    denominator = math.fsum(share for batch in batches for share in batch.shares[MAIN_TERM].flatten().tolist())
    rows = [row for batch in batches for row in _documents(batch)]
    return StepInput(rows, denominator, rate(config, number))


def _documents(batch: Microbatch) -> Iterator[Rows]:
    """The one row of a batch, cut where a document begins that does not see the one before it."""
    starts = [0]
    if batch.document_starts is not None:
        starts = torch.unique(batch.document_starts[0]).tolist()
    for first, end in zip(starts, [*starts[1:], batch.tokens.shape[1]], strict=True):
        fields = (batch.tokens, batch.labels, batch.weights[MAIN_TERM])
        yield Rows(*(field[:, first:end] for field in fields))


def _layout(
    trial: Prepared,
    expected: Sequence[StepValues],
    tolerances: Sequence[Tolerance],
    request: Request,
    pool: Pool,
    progress: Progress,
) -> LayoutResult:
    began = time.monotonic()
    steps: tuple[StepValues, ...] = ()
    error = None
    try:
        steps = tuple(pool.run(run_from_hf, trial.layout, trial.config, request.num_steps, request.fault)[0])
    except (RankFailedError, MtrainError) as fault:
        error = reason_of(fault)
    deviations = tuple(_deviations(steps, expected, {each.kind: each.value for each in tolerances}))
    seconds, size = time.monotonic() - began, trial.layout.world_size
    result = LayoutResult(
        trial.name, trial.axes, size, seconds, steps, tuple(expected), deviations=deviations, error=error
    )
    progress(told(result))
    return result


def _deviations(
    steps: Sequence[StepValues], expected: Sequence[StepValues], tolerance: dict[str, float]
) -> Iterator[Deviation]:
    for found, wanted in zip(steps, expected):
        denominators = found.denominators[MAIN_TERM], wanted.denominators[MAIN_TERM]
        allowed = 0.0 if denominators[1].is_integer() else tolerance["denominator"]
        yield Deviation("denominator", MAIN_TERM, found.step, relative(*denominators), allowed)
        means = found.means[MAIN_TERM], wanted.means[MAIN_TERM]
        yield Deviation("loss", MAIN_TERM, found.step, relative(*means), tolerance["loss"])
        norms = found.grad_norm, wanted.grad_norm
        yield Deviation("grad_norm", "grad_norm", found.step, relative(*norms), tolerance["grad_norm"])

"""Check `mtrain verify rollout`: why an inference engine and the trainer disagree, and which is wrong."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.arch.features.feature import multiple_from
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.checkpoint.store.directory import load_entry
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config.schema.layout import LayoutSection
from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.datum import Datum
from mtrain.core.layers.transformer_config import DTYPES
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.results import ForwardResult
from mtrain.training.batches import AskedScores, GlobalBatches, token_scores
from mtrain.training.sampling.generate import Model, loaded_model, model_at
from mtrain.verify.core.layouts import Prepared, layout_of_config
from mtrain.verify.core.ranks import Pool, environment_of
from mtrain.verify.core.weights import Arrays, gathered
from mtrain.verify.parity import Progress, device_for
from mtrain.verify.reference.model.modules import ExpertChanges
from mtrain.verify.rollout.causes import Disagreement, Rounding, Tried, differences, named
from mtrain.verify.rollout.exact import (
    LIMIT,
    Passes,
    Reference,
    Spread,
    agreeing_routes,
    layer_differences,
    replayed,
)
from mtrain.verify.rollout.prompts import Prompts
from mtrain.verify.rollout.records import Rollout, read_rollouts, repeated_sources
from mtrain.verify.rollout.report import Finding, RolloutReport, Side
from mtrain.verify.rollout.settings import Cause

PRELOADED = ("mtrain.verify.rollout.run",)
TIMEOUT_S = 6 * 3600
"""Time limit of a layout in seconds; long, because models have full size."""
NOT_EXPLAINED = "not explained"
_MOST_STEPS = 8
"""Older checkpoints to try as stale weights, newest first."""


@dataclass(frozen=True)
class RolloutRequest:
    """Arguments of the command line."""

    model: Path
    rollouts: Path
    overrides: Sequence[str] = ()
    dtype: str | None = None
    """Name of the engine's precision in torch; None: the run's."""
    weights: Sequence[Path] = ()
    """Other models whose weights the engine may have had."""
    first: int = 64
    max_ranks: int = 8
    command: str = "mtrain verify rollout"


class Scored(NamedTuple):
    """Result of a rank."""

    log_probs: list[list[float]]
    routes: list[list[list[list[int]]]] | None
    """The trainer's experts for each answer, as in `Rollout.routes`; None if the model is dense or drops tokens."""
    weights: Arrays | None
    """Whole weights on rank 0; None elsewhere, or if not requested."""


def verify_rollout(request: RolloutRequest, progress: Progress, pool: Pool | None = None) -> RolloutReport:
    """Runs the check, on its own ranks if `pool` is None; `progress` gets a line for each finished part."""
    rollouts = read_rollouts(request.rollouts)
    if len(rollouts) > request.first:
        progress(
            f"the first {request.first} of {counted(len(rollouts), 'rollout')} {'is' if request.first == 1 else 'are'} "
            "compared; --first N takes more"
        )
    rollouts = rollouts[: request.first]
    if repeated := repeated_sources(rollouts):
        progress(f"the same prompt, answer and log-probabilities are in several rows: {'; '.join(repeated)}")
    model = model_at(request.model, request.overrides)
    if (head := model.config.model.head) is not None:
        raise ConfigError(f"{head} is a head, which draws no tokens; verify the rollouts of a policy")
    device, max_ranks = device_for(model.config.train, request.max_ranks)
    pool = pool or Pool(device, PRELOADED, TIMEOUT_S, model.config.train.deterministic)
    return _RolloutCheck(replace(request, max_ranks=max_ranks), model, rollouts, pool, progress).report()


class _RolloutCheck:
    def __init__(
        self, request: RolloutRequest, model: Model, rollouts: Sequence[Rollout], pool: Pool, progress: Progress
    ) -> None:
        self._request, self._rollouts, self._pool, self._progress = request, rollouts, pool, progress
        self._prompts = Prompts(model, any(rollout.prompt is not None for rollout in rollouts), progress)
        self._model = for_scoring(model, rollouts, request.max_ranks)
        self._config = self._model.config
        self._trainer_dtype = DTYPES[model.config.train.precision]
        self._dtype: torch.dtype = self._trainer_dtype if request.dtype is None else getattr(torch, request.dtype)

    def report(self) -> RolloutReport:
        """Compares everything; only the vocabulary if tokens are beyond it."""
        findings = self._exact_findings()
        if any(finding.cause == "other vocabulary" for finding in findings):
            return self._report(findings)
        self._prepared = layout_of_config(self._config, self._request.max_ranks)
        scored = self._scored(self._prepared)
        assert scored.weights is not None, "rank 0 holds them"
        self._reference = Reference(self._model, scored.weights)
        passes = self._passes(self._dtype)
        exact = [answer.log_probs(answer.exact) for answer in passes]
        self._progress("reference: float64")
        rounding = _rounding(passes, self._dtype)
        deviations = differences(self._rollouts, exact)
        side = _side("rollout", deviations, rounding)
        deviating = _deviating(side, deviations)
        tried: list[Tried] = []
        if deviating:
            answers = [passes[number] for number in deviating]
            selected = [deviations[number] for number in deviating]
            tried = self._disagreement(answers, rounding, selected).tried()
            findings += self._explained(tried, len(deviating))
        trainer, more = self._trainer(passes, scored)
        replayed_sides, broken_replay, replay_distance = self._replay(passes, scored)
        both_sides = [deviations, differences(_as_rollouts(self._rollouts, scored), exact)]
        layers = layer_differences(passes)
        # if the trainer deviates even without a replay, that fault comes first
        findings += [*more, *(broken_replay if trainer[0].passed else []), *_inner_finding(layers)]
        return self._report(
            findings,
            num_deviating=len(deviating),
            sides=(side, *trainer, *replayed_sides),
            tried=tuple((f"{trial.cause.name}: {trial.cause.fact}", trial.left, trial.explains) for trial in tried),
            tokens=_tokens(exact, both_sides),
            positions=_positions(both_sides),
            layers=layers,
            routes=agreeing_routes(passes),
            replay=replay_distance,
        )

    def _exact_findings(self) -> list[Finding]:
        """Returns a finding for each exact property that is violated, with its first rollout."""
        broken: dict[str, list[tuple[str, Cause]]] = {}
        for rollout in self._rollouts:
            if (cause := self._prompts.broken(rollout)) is not None:
                broken.setdefault(cause.name, []).append((rollout.source, cause))
        findings = []
        for name, violations in broken.items():
            source, cause = violations[0]
            where = f"in {len(violations)} of {counted(len(self._rollouts), 'rollout')}, first in {source}"
            findings.append(Finding(name, (f"{name}: {where}: {cause.fact}", cause.remedy)))
        return findings

    def _scored(self, trial: Prepared, replay: bool = False) -> Scored:
        model = self._model._replace(config=trial.config)
        scored: Scored = self._pool.run(scores, trial.layout, model, self._rollouts, True, replay)[0]
        self._progress(f"trainer: {trial.name}" + (", with the routes of the rollouts" if replay else ""))
        return scored

    def _replay(self, passes: Sequence[Passes], scored: Scored) -> tuple[list[Side], list[Finding], str | None]:
        """Compares the trainer with float64 while routes are replayed, and with the engine with and without replay."""
        count = sum(rollout.routes is not None for rollout in self._rollouts)
        if count < len(self._rollouts) or scored.routes is None:
            if count:
                lacking = "the trainer drops tokens" if scored.routes is None else "a replay needs those of all"
                self._progress(
                    f"routes are not replayed: {count} of {counted(len(self._rollouts), 'rollout')} "
                    f"{'has' if count == 1 else 'have'} them; {lacking}"
                )
            return [], [], None
        replayed_scores = self._scored(self._prepared, replay=True)
        sides = [self._replayed_side(f"trainer {self._prepared.name}, routes replayed", passes, replayed_scores)]
        distances = []
        for side in (scored, replayed_scores):
            log_probs = [torch.tensor(values, dtype=torch.float64) for values in side.log_probs]
            distances.append(Spread.of(differences(self._rollouts, log_probs)))
        shown = " nats; with the rollouts' routes replayed ".join(
            f"worst {distance.worst:.1e}, rms {distance.rms:.1e}" for distance in distances
        )
        lines = (
            f"routing replay: with the routes of the rollouts replayed the trainer under {self._prepared.name} "
            "deviates from float64 with the same replay",
            "run mtrain verify parity to see whether the layout agrees with one process without a replay",
        )
        findings = [] if sides[0].passed else [Finding("routing replay", lines)]
        return sides, findings, f"{shown} nats"

    def _replayed_side(self, name: str, passes: Sequence[Passes], scored: Scored) -> Side:
        """Compares the trainer with float64 passes through the experts of `Passes.rollout`."""
        dtype, replayed_passes = self._trainer_dtype, []
        for answer in passes:
            rollout, changes = answer.rollout, ExpertChanges(chosen=replayed(answer.rollout, answer.exact))
            replayed_passes.append(self._reference.passes(rollout, dtype, changes))
        return self._trainer_side(name, replayed_passes, scored)

    def _trainer_side(self, name: str, passes: Sequence[Passes], scored: Scored) -> Side:
        exact = [answer.log_probs(answer.exact) for answer in passes]
        deviations = differences(_as_rollouts(self._rollouts, scored), exact)
        return _side(name, deviations, _rounding(passes, self._trainer_dtype))

    def _passes(self, dtype: torch.dtype) -> list[Passes]:
        return [
            self._reference.passes(rollout, dtype, has_outputs=bool(rollout.hidden_states))
            for rollout in self._rollouts
        ]

    def _disagreement(
        self, answers: Sequence[Passes], rounding: Rounding, deviations: Sequence[Tensor], of_engine: bool = True
    ) -> Disagreement:
        rollouts = [answer.rollout for answer in answers]
        experts = self._config.model.experts
        return Disagreement(
            answers=answers,
            reference=self._reference,
            rounding=rounding,
            before=Spread.of(deviations),
            begin_ids=self._prompts.begin_ids if of_engine else (),
            prompts=self._prompts.alternatives(rollouts) if of_engine else {},
            other_weights=self._other_weights() if of_engine else {},
            num_experts=0 if experts is None else experts.num_experts,
            is_of_engine=of_engine,
        )

    def _other_weights(self) -> Mapping[str, Callable[[], Reference]]:
        """Returns loaders of other weights that the engine may have had, by description."""
        loaders: dict[str, Callable[[], Reference]] = {}
        entry = self._model.entry
        if entry is not None and entry.path.parent.name == "checkpoints":
            steps = [step for step in reversed(published_steps(entry.path.parent)) if step != entry.manifest.step]
            for step in steps[:_MOST_STEPS]:
                where = entry.path.parent / step_name(step)
                model = self._model._replace(entry=load_entry(where))
                name = f"step {step}, but the model is that of step {entry.manifest.step}"
                loaders[name] = partial(self._load, model)
            loaders["the start of the run"] = partial(self._load, self._model._replace(entry=None))
        for path in self._request.weights:
            loaders[str(path)] = partial(self._load, model_at(path, self._request.overrides))
        return loaders

    def _load(self, model: Model) -> Reference:
        config = for_scoring(model, self._rollouts).config.model_copy(update={"layout": LayoutSection()})
        alone = model._replace(config=config)
        scored: Scored = self._pool.run(scores, Layout(), alone, (), True)[0]
        assert scored.weights is not None, "they were requested"
        return Reference(alone, scored.weights)

    def _explained(self, tried: Sequence[Tried], count: int) -> list[Finding]:
        where = f"{count} of {counted(len(self._rollouts), 'rollout')}"
        causes = named(tried)
        if causes:
            first, other_names = causes[0].cause, [other.cause.name for other in causes[1:]]
            if causes[0].share < 1:
                first = replace(
                    first, fact=f"{first.fact} ({causes[0].share:.0%} of the tokens, others follow from it)"
                )
            addition = f" (on these tokens {', '.join(other_names)} would explain it as well)" if other_names else ""
            return [Finding(first.name, (f"{first.name}: in {where} {first.fact}{addition}", first.remedy))]
        best = min(tried, key=lambda trial: trial.left.rms, default=None)
        nearest = "" if best is None else f"; nearest is {best.cause.name}, which leaves {best.left.worst:.1e} nats"
        return [
            Finding(
                NOT_EXPLAINED,
                (
                    f"{NOT_EXPLAINED}: {where} deviate, and no single known cause gives their "
                    f"log-probabilities{nearest}",
                    "it may be two causes at once: correct what the page shows, or name other weights by --weights, "
                    "and run this again",
                ),
            )
        ]

    def _trainer(self, passes: Sequence[Passes], scored: Scored) -> tuple[list[Side], list[Finding]]:
        """Compares the trainer; if it deviates, runs it on fewer ranks to see whether the layout is at fault."""
        dtype, prepared = self._trainer_dtype, self._prepared
        if dtype != self._dtype:
            passes = self._passes(dtype)
        sides = [self._trainer_side(f"trainer {prepared.name}", passes, scored)]
        if sides[0].passed:
            return sides, []
        trainer_rollouts = _as_rollouts(self._rollouts, scored)
        answers = [replace(answer, rollout=own) for answer, own in zip(passes, trainer_rollouts, strict=True)]
        if scored.routes is not None:
            name = f"trainer {prepared.name}, its choice of experts in float64"
            chosen = self._replayed_side(name, answers, scored)
            if chosen.passed:
                lines = (
                    f"other routes: the trainer under {prepared.name} chose other experts than float64 "
                    f"({agreeing_routes(answers)}); where float64 takes them, it agrees",
                    "compute its routers in float32, or replay the rollouts' routes (Datum.routed_experts)",
                )
                return [*sides, chosen], [Finding("other routes", lines)]
        for name, trial in self._fewer(prepared):
            sides.append(self._trainer_side(f"trainer {trial.name}", passes, self._scored(trial)))
            if sides[-1].passed:
                lines = (
                    f"{name}: the trainer under {prepared.name} deviates from float64, under {trial.name} it does not",
                    f"run mtrain verify parity --layouts with {prepared.name} to see the first module that deviates",
                )
                return sides, [Finding(name, lines)]
        deviations = differences(trainer_rollouts, [answer.log_probs(answer.exact) for answer in passes])
        rounding = _rounding(passes, dtype)
        causes = named(self._disagreement(answers, rounding, deviations, of_engine=False).tried())
        fact = causes[0].cause.fact.replace("engine", "trainer") if causes else "deviates from float64 in every layout"
        name = causes[0].cause.name if causes else NOT_EXPLAINED
        lines = (f"{name}: the trainer: {fact}", "run mtrain verify parity to see the first module that deviates")
        return sides, [Finding(name, lines)]

    def _fewer(self, prepared: Prepared) -> list[tuple[str, Prepared]]:
        """Returns layouts with less parallelism, each with the cause to name if it agrees."""
        layout, layouts = self._config.layout, []
        if layout.ep > 1:
            section = layout.model_copy(update={"ep": 1, "etp": LayoutSection().etp})
            without = self._config.model_copy(update={"layout": section})
            # on as many ranks, so that nothing else changes
            same = Layout.from_config(without, prepared.layout.world_size)
            name = f"{same}-mbs{self._config.train.micro_batch_size}"
            layouts.append(("expert-parallel sum", Prepared(name, {}, without, same)))
        if prepared.layout.world_size > 1:
            alone = self._config.model_copy(update={"layout": LayoutSection()})
            layouts.append(("layout of the trainer", layout_of_config(alone, 1)))
        return layouts

    def _report(self, findings: Sequence[Finding], **compared: Any) -> RolloutReport:
        entry = self._model.entry
        return RolloutReport(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=self._request.command,
            environment=environment_of(self._pool.device),
            model=str(self._request.model) + ("" if entry is None else f", step {entry.manifest.step}"),
            file=str(self._request.rollouts),
            num_rollouts=len(self._rollouts),
            num_tokens=sum(sum(rollout.mask) for rollout in self._rollouts),
            findings=tuple(findings),
            **compared,
        )


def _inner_finding(layers: Mapping[str, float]) -> list[Finding]:
    """Names the first module whose output deviates."""
    first = next((name for name, excess in layers.items() if excess > LIMIT), None)
    if first is None:
        return []
    fact = f"{first} is the first that deviates, by {layers[first]:.1e} times the rounding of the engine's precision"
    return [Finding("hidden states", (f"hidden states: {fact}", "look for the difference in this part of the model"))]


def _as_rollouts(rollouts: Sequence[Rollout], scored: Scored) -> list[Rollout]:
    routes = [None] * len(rollouts) if scored.routes is None else scored.routes
    return [
        replace(rollout, log_probs=values, routes=chosen)
        for rollout, values, chosen in zip(rollouts, scored.log_probs, routes, strict=True)
    ]


def _deviating(side: Side, deviations: Sequence[Tensor]) -> list[int]:
    """Returns the numbers of deviating rollouts; all if only many small differences add up."""
    if side.passed:
        return []
    deviating = [number for number, row in enumerate(deviations) if not Spread.of([row]).within(side.allowed)]
    return deviating or list(range(len(deviations)))


def _rounding(passes: Sequence[Passes], dtype: torch.dtype) -> Rounding:
    # every engine rounds its logits, the largest one most
    largest = max(float((one.exact.logits / one.rollout.temperature).nan_to_num().abs().max()) for one in passes)
    drawn_rows = [(answer, slice(1, 1 + len(answer.rollout.ids))) for answer in passes]
    # over the whole vocabulary: the few tokens of a short answer may be exact by chance
    typical = Spread.of([
        (answer.rounded.logits[drawn] / answer.rollout.temperature).log_softmax(-1)
        - (answer.exact.logits[drawn] / answer.rollout.temperature).log_softmax(-1)
        for answer, drawn in drawn_rows
    ]).rms  # fmt: skip
    floor = max(torch.finfo(dtype).eps / 2 * largest, typical)
    measured = [answer.log_probs(answer.rounded) - answer.log_probs(answer.exact) for answer in passes]
    return Rounding(dtype, floor, Spread.of(measured).allowed(floor))


def _side(name: str, deviations: Sequence[Tensor], rounding: Rounding) -> Side:
    every = torch.cat(list(deviations))
    mean = float(every[~every.isnan()].mean())
    return Side(name, str(rounding.dtype).removeprefix("torch."), Spread.of(deviations), rounding.allowed, mean)


def _tokens(exact: Sequence[Tensor], both: Sequence[Sequence[Tensor]]) -> tuple[tuple[float, ...], ...]:
    columns = [torch.cat(list(tensors)) for tensors in (exact, *both)]
    drawn = ~columns[1].isnan()
    return tuple(tuple(row) for row in torch.stack(columns, 1)[drawn].tolist())


def _positions(both: Sequence[Sequence[Tensor]]) -> tuple[tuple[float, float], ...]:
    """Returns the rms of the differences by position in the answer; 0 if none was drawn."""
    longest = max(map(len, both[0]))
    sums = torch.zeros(2, longest, dtype=torch.float64)
    counts = torch.zeros(longest, dtype=torch.float64)
    for number, side in enumerate(both):
        for difference in side:
            sums[number, : len(difference)] += difference.nan_to_num().square()
            counts[: len(difference)] += ~difference.isnan() if number == 0 else 0
    return tuple((first, second) for first, second in (sums / counts.clamp(min=1)).sqrt().T.tolist())


def scores(
    groups: Groups, model: Model, rollouts: Sequence[Rollout], with_weights: bool, replay: bool = False
) -> Scored:
    """Loads the model and computes the log-probabilities as a loss of the run would. Collective.

    `replay` sends tokens to the engine's experts instead of the trainer's.
    """
    loaded = loaded_model(model.entry, model.config, groups)
    batch = [
        Datum(
            [*rollout.prompt_ids, *rollout.ids],
            temperature=rollout.temperature,
            routed_experts=rollout.routes if replay else None,
        )
        for rollout in rollouts
    ]
    experts = model.config.model.experts
    asked = AskedScores(routed_experts=experts is not None and experts.capacity_factor is None)
    result = token_scores(batch, asked, loaded, GlobalBatches(model.config, groups)) if batch else ForwardResult([], [])
    weights = gathered(parameter_shards(loaded.chunks, groups)) if with_weights else None
    return Scored(
        [tokens[-len(answer.ids) :].tolist() for tokens, answer in zip(result.log_probs, rollouts, strict=True)],
        [routes.tolist() for routes in result.routed_experts] or None,
        None if weights is None else weights.tensors,
    )


def for_scoring(model: Model, rollouts: Sequence[Rollout], max_ranks: int = 1) -> Model:
    """Returns the model with unpacked rows for the longest rollout, and a loss that needs no extras."""
    config = model.config
    length = multiple_from(max(rollout.num_read for rollout in rollouts), [2 * config.layout.cp * config.layout.tp])
    data = config.data.model_copy(update={"seq_length": length, "packing": None})
    # the batch size does not matter here, but layouts that do not divide it would be refused
    batch = config.train.micro_batch_size * math.lcm(*range(1, max_ranks + 1))
    train = config.train.model_copy(update={"tokens_per_micro_batch": None, "global_batch_size": batch})
    return model._replace(config=config.model_copy(update={"data": data, "train": train, "loss": LossSection()}))

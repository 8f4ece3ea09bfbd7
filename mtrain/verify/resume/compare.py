"""Bitwise comparison of a resumed run with one that never stopped, in the order of computation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.config import Config
from mtrain.report.metrics.jsonl import read_records
from mtrain.report.metrics.record import OF_THE_MACHINE, StepRecord, to_json_line
from mtrain.verify.core.compare import StepComparison, relative
from mtrain.verify.core.exact import Exact
from mtrain.verify.core.result import Deviation, StepValues, Tolerance
from mtrain.verify.core.weights import Arrays
from mtrain.verify.core.worker import Outcome, StepOutcome
from mtrain.verify.reference.optimizer import Moments
from mtrain.verify.reference.schedule import published_rate
from mtrain.verify.report.text import TITLES
from mtrain.verify.resume.worker import Print, SegmentResult, State

_LEAST = float(np.finfo(np.float32).tiny)
"""Reported deviation if bits differ, but no kept element does, or none as a number."""
_COMPARED_BY_KIND = ("lr", "denominator", "loss", "grad_norm", "terms", "kind", "step")


def records_of(run: Path) -> list[StepRecord]:
    """Returns the step records of a run folder in file order; see `read_records` for errors."""
    return [record for record in read_records(run / "metrics.jsonl") if isinstance(record, StepRecord)]


def step_values(record: StepRecord) -> StepValues:
    """Converts a record to report values."""
    objective = record.loss if record.objective is None else record.objective
    terms = {name: (each.loss, each.numerator, each.denominator) for name, each in record.terms.items()}
    return StepValues.of(record.step, objective, terms, record.grad_norm)


def same_layout(
    everyone: Sequence[SegmentResult],
    straight: Sequence[SegmentResult],
    records: Sequence[StepRecord],
    expected: Sequence[StepRecord],
) -> list[Deviation]:
    """Compares a run resumed on the layout that saved: no bit may differ.

    `everyone` and `straight` are results by rank of the resumed and the straight run, `records` and `expected` their
    records.
    """
    found = list(_start(everyone, straight))
    for own, other in zip(everyone, straight, strict=True):
        for step in sorted(own.states.keys() & other.states.keys()):
            found += _states(step, own.states[step], other.states[step])
    found += samples(everyone, straight)
    found += recorded(records, expected)
    return found


def other_layout(
    everyone: Sequence[SegmentResult],
    saved: Sequence[SegmentResult],
    straight: Sequence[SegmentResult],
    records: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    steps: Sequence[Deviation],
) -> list[Deviation]:
    """Compares a run resumed on another layout: it must load the bits of the files, and then be exact up to rounding.

    `saved` are the results of the run that stopped, by rank; `steps` come from `exact_deviations`.
    """
    found, start = list(_start(everyone, saved)), everyone[0].start_step
    for own in everyone:
        differing = {(kind, name): share for kind, name, share in own.unlike_files}
        found += [
            Deviation(kind, name, start, differing.get((kind, name), 0.0), 0.0)
            for kind, name in own.states[start].tensors
            if kind != "random"
        ]
        if start in saved[0].states:
            found += _counters(start, own.states[start], saved[0].states[start])
    found += samples(everyone, straight)
    found += _steps_recorded(records, expected)
    rates = {record.step: record.lr for record in expected}
    found += [_exact("lr", "lr", each.step, each.lr, rates[each.step]) for each in records if each.step > start]
    return [*found, *steps]


def exact_deviations(
    config: Config,
    tolerances: Sequence[Tolerance],
    tensors: Sequence[str],
    first: SegmentResult,
    records: Sequence[StepRecord],
    exact: Sequence[Exact],
) -> list[Deviation]:
    """Compares every step of a resumed run after its start with exact values at the run's own weights.

    `first` is the result of rank 0; `tensors` are in forward order.
    """
    values = [step_values(record) for record in records if record.step > first.start_step]
    steps = [StepOutcome(each, None, *seen) for each, seen in zip(values, first.steps)]
    num_updates = round(first.states[first.start_step].counters["adam_step"])
    start = Moments(num_updates, first.initial["exp_avg"].tensors, first.initial["exp_avg_sq"].tensors)
    outcome = Outcome(first.initial["weights"], steps, [])

    def rate(step: int) -> float:
        return published_rate(step - 1, config.optimizer, config.train.num_steps)

    return list(StepComparison(config, tolerances, tensors, rate, start).of(outcome, exact))


def weights_before_each_step(first: SegmentResult) -> list[Arrays]:
    """Returns the weights before each step from the result of rank 0 of a start that gathers."""
    return [first.initial["weights"].tensors, *(weights.tensors for _, weights in first.steps[:-1])]


def samples(everyone: Sequence[SegmentResult], straight: Sequence[SegmentResult]) -> Iterator[Deviation]:
    """Compares the samples of every step by slot in the global batch, whichever rank had them."""
    own, other = _all_samples(everyone), _all_samples(straight)
    for step in sorted(own.keys() & other.keys()):
        slots = own[step].keys() | other[step].keys()
        differing = sum(own[step].get(slot) != other[step].get(slot) for slot in slots)
        yield Deviation("samples", "samples", step, differing / len(slots), 0.0)


def _all_samples(everyone: Sequence[SegmentResult]) -> dict[int, dict[int, str]]:
    whole: dict[int, dict[int, str]] = {}
    for seen in everyone:
        for step, slots in seen.samples.items():
            for slot, digest in slots.items():
                known = whole.setdefault(step, {}).setdefault(slot, digest)
                whole[step][slot] = known if known == digest else "another on another rank"
    return whole


def _start(everyone: Sequence[SegmentResult], other: Sequence[SegmentResult]) -> Iterator[Deviation]:
    """Compares the steps at which the runs continued; `other` is watched from there."""
    expected = min(other[0].states)
    for seen in everyone:
        yield _exact("counters", "step", expected, float(seen.start_step), float(expected))


def _states(step: int, own: State, other: State) -> Iterator[Deviation]:
    yield from _counters(step, own, other)
    for key, expected in other.tensors.items():
        yield Deviation(*key, step, _difference(own.tensors[key], expected), 0.0)


def _counters(step: int, own: State, other: State) -> Iterator[Deviation]:
    for name, value in other.counters.items():
        yield _exact("counters", name, step, own.counters[name], value)


def _difference(own: Print, other: Print) -> float:
    """Returns the difference relative to the largest kept element; 0 only for equal bits."""
    if own.digest == other.digest:
        return 0.0
    if own.sample.shape != other.sample.shape:
        return float("inf")
    difference = float(np.abs(own.sample - other.sample).max(initial=0.0))
    largest = float(np.abs(other.sample).max(initial=0.0))
    return max(_LEAST, difference / largest if largest > 0 else float("inf") if difference > 0 else 0.0)


def recorded(records: Sequence[StepRecord], expected: Sequence[StepRecord]) -> Iterator[Deviation]:
    """Compares metrics.jsonl with that of the straight run, including the steps before the stop."""
    yield from _steps_recorded(records, expected)
    by_step = {record.step: record for record in records}
    for other in expected:
        own = by_step.get(other.step)
        if own is None:
            continue
        yield _exact("lr", "lr", other.step, own.lr, other.lr)
        for term, value in other.terms.items():
            yield _exact("denominator", term, other.step, own.terms[term].denominator, value.denominator)
            yield _exact("loss", term, other.step, own.terms[term].loss, value.loss)
        yield _exact("grad_norm", "grad_norm", other.step, own.grad_norm, other.grad_norm)
        differing = [name for name, value in _fields(other).items() if _fields(own)[name] != value]
        for name in _fields(other):
            yield Deviation("records", name, other.step, float(name in differing), 0.0)


def _steps_recorded(records: Sequence[StepRecord], expected: Sequence[StepRecord]) -> Iterator[Deviation]:
    """Checks that each step has one record, in order; reports the first that does not."""
    own, other = [record.step for record in records], [record.step for record in expected]
    same = next((number for number, (a, b) in enumerate(zip(own, other)) if a != b), min(len(own), len(other)))
    step = other[min(same, len(other) - 1)]
    yield Deviation("records", "steps", step, 0.0 if own == other else 1 - same / max(len(own), len(other)), 0.0)


def _fields(record: StepRecord) -> Mapping[str, Any]:
    content = json.loads(to_json_line(record))
    return {name: value for name, value in content.items() if name not in (*_COMPARED_BY_KIND, *OF_THE_MACHINE)}


def _exact(kind: str, name: str, step: int, found: float, expected: float) -> Deviation:
    value = 0.0 if repr(found) == repr(expected) else max(_LEAST, relative(found, expected))
    return Deviation(kind, name, step, value, 0.0)


def worst_in_order(found: Sequence[Deviation], tensors: Sequence[str]) -> list[Deviation]:
    """Returns the worst deviation of all ranks for each quantity and step, by time, then in forward order."""
    worst: dict[tuple[str, str, int], Deviation] = {}
    for each in found:
        key = (each.kind, each.name, each.step)
        if key not in worst or each.excess > worst[key].excess or each.value > worst[key].value:
            worst[key] = each
    order = {kind: number for number, kind in enumerate(TITLES)}
    place = {name: number for number, name in enumerate(tensors)}
    return sorted(worst.values(), key=lambda each: (each.step, order[each.kind], place.get(each.name, 0)))

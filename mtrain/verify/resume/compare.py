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
from mtrain.verify.resume.worker import Fingerprint, SegmentResult, State

_LEAST = float(np.finfo(np.float32).tiny)
"""Smallest reported deviation if bits differ: the kept elements may be equal, or equal as numbers."""
_COMPARED_BY_KIND = ("lr", "denominator", "loss", "grad_norm", "terms", "kind", "step")


def records_of(run: Path) -> list[StepRecord]:
    """Returns the step records of a run folder in file order; raises what `read_records` raises."""
    return [record for record in read_records(run / "metrics.jsonl") if isinstance(record, StepRecord)]


def step_values(record: StepRecord) -> StepValues:
    """Converts a record to report values."""
    objective = record.loss if record.objective is None else record.objective
    terms = {name: (term.loss, term.numerator, term.denominator) for name, term in record.terms.items()}
    return StepValues.of(record.step, objective, terms, record.grad_norm)


def same_layout(
    resumed: Sequence[SegmentResult],
    straight: Sequence[SegmentResult],
    records: Sequence[StepRecord],
    expected: Sequence[StepRecord],
) -> list[Deviation]:
    """Compares a run resumed on the layout that saved: no bit may differ.

    `resumed` and `straight` are the results by rank of the resumed and the straight run, `records` and `expected` their
    records.
    """
    deviations = list(_start(resumed, straight))
    for rank, straight_rank in zip(resumed, straight, strict=True):
        for step in sorted(rank.states.keys() & straight_rank.states.keys()):
            deviations += _states(step, rank.states[step], straight_rank.states[step])
    deviations += samples(resumed, straight)
    deviations += recorded(records, expected)
    return deviations


def other_layout(
    resumed: Sequence[SegmentResult],
    saved: Sequence[SegmentResult],
    straight: Sequence[SegmentResult],
    records: Sequence[StepRecord],
    expected: Sequence[StepRecord],
    steps: Sequence[Deviation],
) -> list[Deviation]:
    """Compares a run resumed on another layout: it must load the bits of the files and stay exact up to rounding.

    `saved` has the results of the run that stopped, by rank; `steps` comes from `exact_deviations`.
    """
    deviations, start = list(_start(resumed, saved)), resumed[0].start_step
    for rank in resumed:
        differing = {(kind, name): share for kind, name, share in rank.differing_tensors}
        deviations += [
            Deviation(kind, name, start, differing.get((kind, name), 0.0), 0.0)
            for kind, name in rank.states[start].tensors
            if kind != "random"
        ]
        if start in saved[0].states:
            deviations += _counters(start, rank.states[start], saved[0].states[start])
    deviations += samples(resumed, straight)
    deviations += _steps_recorded(records, expected)
    rates = {record.step: record.lr for record in expected}
    resumed_records = [record for record in records if record.step > start]
    deviations += [_exact("lr", "lr", record.step, record.lr, rates[record.step]) for record in resumed_records]
    return [*deviations, *steps]


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
    steps = [StepOutcome(value, None, *gathered) for value, gathered in zip(values, first.steps)]
    num_updates = round(first.states[first.start_step].counters["adam_step"])
    start = Moments(num_updates, first.initial["exp_avg"].tensors, first.initial["exp_avg_sq"].tensors)
    outcome = Outcome(first.initial["weights"], steps, [])

    def rate(step: int) -> float:
        return published_rate(step - 1, config.optimizer, config.train.num_steps)

    return list(StepComparison(config, tolerances, tensors, rate, start).of(outcome, exact))


def weights_before_each_step(first: SegmentResult) -> list[Arrays]:
    """Returns the weights before each step; `first` is the result of rank 0 of a start with `gathers`."""
    return [first.initial["weights"].tensors, *(weights.tensors for _, weights in first.steps[:-1])]


def samples(resumed: Sequence[SegmentResult], straight: Sequence[SegmentResult]) -> Iterator[Deviation]:
    """Compares the samples of every step by slot in the global batch, no matter which rank had them."""
    resumed_samples, straight_samples = _all_samples(resumed), _all_samples(straight)
    for step in sorted(resumed_samples.keys() & straight_samples.keys()):
        slots = resumed_samples[step].keys() | straight_samples[step].keys()
        differing = sum(resumed_samples[step].get(slot) != straight_samples[step].get(slot) for slot in slots)
        yield Deviation("samples", "samples", step, differing / len(slots), 0.0)


def _all_samples(results: Sequence[SegmentResult]) -> dict[int, dict[int, str]]:
    whole: dict[int, dict[int, str]] = {}
    for rank in results:
        for step, slots in rank.samples.items():
            for slot, digest in slots.items():
                known = whole.setdefault(step, {}).setdefault(slot, digest)
                whole[step][slot] = known if known == digest else "another on another rank"
    return whole


def _start(resumed: Sequence[SegmentResult], reference: Sequence[SegmentResult]) -> Iterator[Deviation]:
    """Compares the step at which each rank continued with the first one recorded in `reference`."""
    expected = min(reference[0].states)
    for rank in resumed:
        yield _exact("counters", "step", expected, float(rank.start_step), float(expected))


def _states(step: int, state: State, expected: State) -> Iterator[Deviation]:
    yield from _counters(step, state, expected)
    for key, summary in expected.tensors.items():
        yield Deviation(*key, step, _difference(state.tensors[key], summary), 0.0)


def _counters(step: int, state: State, expected: State) -> Iterator[Deviation]:
    for name, value in expected.counters.items():
        yield _exact("counters", name, step, state.counters[name], value)


def _difference(summary: Fingerprint, expected: Fingerprint) -> float:
    """Returns the difference relative to the largest kept element; 0 only for equal bits."""
    if summary.digest == expected.digest:
        return 0.0
    if summary.sample.shape != expected.sample.shape:
        return float("inf")
    difference = float(np.abs(summary.sample - expected.sample).max(initial=0.0))
    largest = float(np.abs(expected.sample).max(initial=0.0))
    if largest > 0:
        return max(_LEAST, difference / largest)
    return float("inf") if difference > 0 else _LEAST


def recorded(records: Sequence[StepRecord], expected: Sequence[StepRecord]) -> Iterator[Deviation]:
    """Compares metrics.jsonl with that of the straight run, including the steps before the stop."""
    yield from _steps_recorded(records, expected)
    by_step = {entry.step: entry for entry in records}
    for expected_record in expected:
        record = by_step.get(expected_record.step)
        if record is None:
            continue
        yield _exact("lr", "lr", expected_record.step, record.lr, expected_record.lr)
        for term, value in expected_record.terms.items():
            yield _exact("denominator", term, expected_record.step, record.terms[term].denominator, value.denominator)
            yield _exact("loss", term, expected_record.step, record.terms[term].loss, value.loss)
        yield _exact("grad_norm", "grad_norm", expected_record.step, record.grad_norm, expected_record.grad_norm)
        differing = [name for name, value in _fields(expected_record).items() if _fields(record)[name] != value]
        for name in _fields(expected_record):
            yield Deviation("records", name, expected_record.step, float(name in differing), 0.0)


def _steps_recorded(records: Sequence[StepRecord], expected: Sequence[StepRecord]) -> Iterator[Deviation]:
    """Checks that each step has one record, in order; reports the first that does not."""
    steps, expected_steps = [record.step for record in records], [record.step for record in expected]
    longest, shortest = max(len(steps), len(expected_steps)), min(len(steps), len(expected_steps))
    same = next((number for number, (a, b) in enumerate(zip(steps, expected_steps)) if a != b), shortest)
    share = 0.0 if steps == expected_steps else 1 - same / longest
    yield Deviation("records", "steps", expected_steps[min(same, len(expected_steps) - 1)], share, 0.0)


def _fields(record: StepRecord) -> Mapping[str, Any]:
    content = json.loads(to_json_line(record))
    return {name: value for name, value in content.items() if name not in (*_COMPARED_BY_KIND, *OF_THE_MACHINE)}


def _exact(kind: str, name: str, step: int, value: float, expected: float) -> Deviation:
    deviation = 0.0 if repr(value) == repr(expected) else max(_LEAST, relative(value, expected))
    return Deviation(kind, name, step, deviation, 0.0)


def worst_in_order(deviations: Sequence[Deviation], tensors: Sequence[str]) -> list[Deviation]:
    """Returns the worst deviation of all ranks for each quantity and step, by step, kind and forward order."""
    worst: dict[tuple[str, str, int], Deviation] = {}
    for deviation in deviations:
        key = (deviation.kind, deviation.name, deviation.step)
        known = worst.get(key)
        if known is None or deviation.excess > known.excess or deviation.value > known.value:
            worst[key] = deviation
    kind_order = {kind: number for number, kind in enumerate(TITLES)}
    forward_order = {name: number for number, name in enumerate(tensors)}
    return sorted(worst.values(), key=lambda item: (item.step, kind_order[item.kind], forward_order.get(item.name, 0)))

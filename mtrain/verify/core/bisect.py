"""Diagnosis of a failed check: the axis that fails alone, the first step, the first quantity, the first module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.verify.core.result import Deviation, Diagnosis, LayoutResult
from mtrain.verify.report.text import BEFORE_FORWARD, IN_WORDS, ReportText

EVERY_LAYOUT = "every layout"

Watched = Callable[[LayoutResult, int], str | None]
"""Function of a layout and a step, from 1: the first module whose output deviates, or None."""


def diagnosed(results: Sequence[LayoutResult], watched: Watched, text: ReportText) -> Diagnosis | None:
    """Returns the diagnosis; None if every layout passes.

    `watched` is called once, for the smallest layout that fails, and runs it again.
    """
    judged = _telling(results)
    axis = failing_axis(judged)
    if axis is None:
        return None
    if text.undecided and not any(each.passed for each in judged):
        axis = EVERY_LAYOUT  # nothing distinguishes the axes
    smallest = _smallest_failures(judged)[0]
    first = smallest.first_failure()
    module = watched(smallest, first.step) if first is not None and first.kind not in BEFORE_FORWARD else None
    return Diagnosis(
        axis=axis,
        layout=smallest.name,
        step=None if first is None else first.step,
        kind=None if first is None else first.kind,
        name=None if first is None else first.name,
        value=None if first is None else first.value,
        tolerance=None if first is None else first.tolerance,
        module=module,
        lines=(_where(axis, smallest, first, text), _what(smallest, first, module, text)),
    )


def _telling(results: Sequence[LayoutResult]) -> list[LayoutResult]:
    """Drops a one-process layout that could not run if others ran and none passes: it says nothing."""
    if any(each.passed for each in results) or all(each.error is not None for each in results):
        return list(results)
    return [each for each in results if each.num_ranks > 1 or each.error is None]


def with_advice(diagnosis: Diagnosis | None, functions: Sequence[str]) -> Diagnosis | None:
    """Adds the contract of the user's own loss functions, if there are any, to the diagnosis."""
    if diagnosis is None or not functions or diagnosis.axis == EVERY_LAYOUT:
        return diagnosis
    advice = (
        f"loss.function={', '.join(functions)} is yours: its numerator has to be a sum over tokens, since microbatches "
        "and ranks are added up; what is not linear in the tokens of a sequence takes their sum from "
        "TermInputs.sum_over_sequence and ends with weigh_sequences (docs/extending/loss.md)"
    )
    return replace(diagnosis, lines=(*diagnosis.lines, advice))


def failing_axis(results: Sequence[LayoutResult]) -> str | None:
    """Returns the axes that failing layouts share: `cp`, `tp x pp`, `dp, cp`, `every layout`; None if all pass.

    Axes of a smallest failing layout that pass in a subset of its axes are innocent. Axes that each fail alone are
    separated by commas; axes that fail only together are joined by x.
    """
    failures = _smallest_failures(results)
    if not failures:
        return None
    passing = [set(result.axes) for result in results if result.passed]
    names: dict[str, None] = {}
    for result in failures:
        used = set(result.axes)
        innocent = [axes for axes in passing if axes < used]
        left = [used - axes for axes in innocent if not any(axes < other for other in innocent)] or [used]
        together = set.union(*left) if len(left) > 1 and not set.intersection(*left) else set.intersection(*left)
        names[" x ".join(axis for axis in result.axes if axis in together) or EVERY_LAYOUT] = None
    return EVERY_LAYOUT if EVERY_LAYOUT in names else ", ".join(names)


def _smallest_failures(results: Sequence[LayoutResult]) -> list[LayoutResult]:
    """Returns failing layouts no subset of whose axes fails, smallest first."""
    failed = sorted((each for each in results if not each.passed), key=lambda each: (len(each.axes), each.num_ranks))
    return [each for each in failed if not any(set(other.axes) < set(each.axes) for other in failed)]


def _where(axis: str, result: LayoutResult, first: Deviation | None, text: ReportText) -> str:
    if axis == EVERY_LAYOUT:
        fails = text.undecided if text.undecided and result.num_ranks > 1 else text.everything
    else:
        fails = f"each of {axis} alone breaks the run" if ", " in axis else f"{axis} alone breaks the run"
    when = f", step {first.step}" if first is not None else ""
    shown = f"{text.noun} {result.name} ({result.num_ranks} ranks){when}"
    return f"mtrain verify {text.verb}: {fails}; smallest {shown}"


def _what(result: LayoutResult, first: Deviation | None, module: str | None, text: ReportText) -> str:
    if first is None:
        return f"stopped: {result.error or '; '.join(result.guards)}"
    quantity = IN_WORDS[first.kind].format(name=first.name)
    deviation = f"{first.value:.1e} (tolerance {first.tolerance:.1e})"
    agreed = text.agreed_before(first.kind, {each.kind for each in result.deviations if each.step == first.step})
    if "gradient" not in text.maps or first.kind in BEFORE_FORWARD:
        return f"first deviation: {quantity} by {deviation}{agreed}"
    forward = f"first module that deviates: {module}" if module else "outputs of all modules agree"
    return f"first deviation: {quantity} by {deviation}{agreed}; {forward}"


def first_deviating(
    found: Mapping[str, NDArray[Any]], exact: Mapping[str, NDArray[Any]], order: Sequence[str], tolerance: float
) -> str | None:
    """Returns the first module that differs by more than the tolerance x its largest exact element."""
    for module in order:
        if module not in found or module not in exact:
            continue
        difference = float(np.abs(found[module] - exact[module]).max())
        if not difference <= tolerance * float(np.abs(exact[module]).max()):
            return module
    return None

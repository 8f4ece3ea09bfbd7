"""Axes: where a value lies on the picture, and what is written beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_TICKS = 6
_BAND = 15.0
"""Height in pixels of the rooms for 0 and for what is no number on an axis of logarithms."""


@dataclass(frozen=True)
class Tick:
    """One label beside an axis."""

    label: str
    position: float
    """In pixels."""


@dataclass(frozen=True)
class Axis:
    """One direction of a picture."""

    ticks: tuple[Tick, ...]
    place: Callable[[float], float]
    """Value -> pixels."""


def linear_axis(values: Iterable[float], begin: float, end: float) -> Axis:
    """Spans the finite values, with some room around them.

    Args:
        values: What is to be shown; values that are not finite have no place.
        begin: Pixel of the smallest value.
        end: Pixel of the largest.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    # A spread that float64 cannot tell from nothing is shown as a flat line.
    room = 0.08 * (high - low) if high - low > 1e-12 * abs(high) else (abs(high) * 0.05 or 1.0)
    low, high = low - room, high + room

    def place(value: float) -> float:
        return begin + (end - begin) * (value - low) / (high - low)

    return Axis(tuple(Tick(label, place(value)) for value, label in _round_numbers(low, high)), place)


def step_axis(steps: Sequence[int], begin: float, end: float) -> Axis:
    """Whole numbers only, in even distances."""
    low, high = min(steps), max(steps)

    def place(value: float) -> float:
        return (begin + end) / 2 if low == high else begin + (end - begin) * (value - low) / (high - low)

    spacing = max(1, math.ceil((high - low) / MAX_TICKS))
    if spacing > 1:
        spacing = math.ceil(_round_up(spacing))
    shown = [low, *range(low - low % spacing + spacing, high + 1, spacing)]
    return Axis(tuple(Tick(str(step), place(step)) for step in shown), place)


def log_axis(values: Iterable[float], begin: float, end: float) -> Axis:
    """Whole decades around the positive values, a room below them for 0 and one above for what is no number.

    Args:
        values: Not negative, or not finite.
        begin: Pixel of the smallest value.
        end: Pixel of the largest.
    """
    known = list(values)
    positive = [value for value in known if 0 < value < math.inf] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = high if high > low else low + 1
    towards = math.copysign(1.0, end - begin)
    first = begin + (towards * _BAND if any(value == 0 for value in known) else 0.0)
    last = end - (towards * _BAND if any(not math.isfinite(value) for value in known) else 0.0)

    def place(value: float) -> float:
        if not math.isfinite(value):
            return end - towards * 4
        if value <= 0:
            return begin + towards * 4
        return first + (last - first) * (math.log10(value) - low) / (high - low)

    spacing = math.ceil((high - low) / (MAX_TICKS - 1))
    ticks = [Tick(f"1e{power}", place(10.0**power)) for power in range(low, high + 1, spacing)]
    zero = [Tick("0", begin + towards * 4)] if first != begin else []
    no_number = [Tick("∞, nan", end - towards * 4)] if last != end else []
    return Axis((*zero, *ticks, *no_number), place)


def _round_numbers(low: float, high: float) -> list[tuple[float, str]]:
    """Multiples of 1, 2 or 5 times a power of ten between the two, with digits enough to tell them apart."""
    spacing = _round_up((high - low) / MAX_TICKS)
    first, last = math.ceil(low / spacing), math.floor(high / spacing)
    values = [number * spacing for number in range(first, last + 1)]
    largest = max(abs(low), abs(high))
    if 1e-4 <= largest < 1e7:
        digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
        return [(value, f"{value:.{digits}f}") for value in values]
    digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(spacing) + 1e-9))
    return [(value, f"{value:.{min(digits, 16)}e}") for value in values]


def _round_up(spacing: float) -> float:
    power = 10.0 ** math.floor(math.log10(spacing))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= spacing * (1 - 1e-9))

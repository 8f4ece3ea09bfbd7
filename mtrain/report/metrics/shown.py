"""Display of numbers and curves: names, digits and colours for every view."""

import colorsys
import time

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.report.metrics.record import StepRecord, ValidRecord

LAYOUT_DEPENDENT = "(of this layout only)"
_UNIT_NAMES = frozenset({"tokens/s"})
"""Units that follow their number."""


def step_numbers(record: StepRecord) -> dict[str, str]:
    """Returns the numbers of a step by name, as text, in display order."""
    numbers = {
        "loss": "-" if record.empty else f"{record.loss:.4f}",
        **side_terms(record),
        "grad_norm": f"{record.grad_norm:.3f}",
        "lr": f"{record.lr:.2e}",
        "tokens/s": f"{record.tokens_per_second:,.0f}",
    }
    if record.loss_tokens is not None and record.loss_tokens != record.tokens and record.tokens:
        numbers["in the loss"] = f"{record.loss_tokens / record.tokens:.1%}"
    if record.padding_tokens:
        numbers["padding"] = f"{record.padding_tokens / (record.tokens + record.padding_tokens):.1%}"
    if record.mfu is not None:
        numbers["mfu"] = f"{record.mfu:.1%}"
    if record.memory_bytes is not None:
        numbers["memory"] = as_size(record.memory_bytes)
    return numbers


def as_line(numbers: dict[str, str]) -> str:
    return "  ".join(f"{text} {name}" if name in _UNIT_NAMES else f"{name} {text}" for name, text in numbers.items())


def side_terms(record: StepRecord | ValidRecord) -> dict[str, str]:
    """Returns the means of all terms except the main one, without coefficients, as text."""
    return {
        name: f"{term.loss:.4g}" if term.denominator else "-"
        for name, term in record.terms.items()
        if name != MAIN_TERM
    }


def as_duration(seconds: float | None) -> str:
    """Formats seconds as hours, minutes and seconds, such as 1:02:03."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def clock(time_s: float | None) -> str:
    """Formats a Unix time in UTC, as on all pages, without the zone; empty if the time is None."""
    return "" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def as_size(num_bytes: int) -> str:
    """Formats a size in the unit that fits, such as 3.2 GiB."""
    size, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


SATURATION, LIGHTNESS = 0.75, 0.40
"""Saturation and lightness of a curve on white paper: dark enough to be visible in every hue."""


def curve_hue(slot: int) -> int:
    """Returns the hue of curve `slot`, in degrees: they differ by the golden angle, so neighbours stay far apart."""
    return round(215 + 137.508 * slot) % 360


def curve_colour(slot: int) -> str:
    """Returns the colour of a curve on white paper, as `#rrggbb`."""
    channels = colorsys.hls_to_rgb(curve_hue(slot) / 360, LIGHTNESS, SATURATION)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)

"""Colours of curves, the same in every picture and on every page."""

from __future__ import annotations

import colorsys

SATURATION, LIGHTNESS = 0.75, 0.40
"""Saturation and lightness of a curve on white paper: dark enough to be visible in every hue."""


def curve_hue(slot: int) -> int:
    """Returns the hue of a curve, in degrees.

    Hues differ by the golden angle: that works for any number of curves, and neighbours stay far apart.

    Args:
        slot: Index of the curve in its picture, from 0.
    """
    return round(215 + 137.508 * slot) % 360


def curve_colour(slot: int) -> str:
    """Returns the colour of a curve on white paper, as `#rrggbb`."""
    channels = colorsys.hls_to_rgb(curve_hue(slot) / 360, LIGHTNESS, SATURATION)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)

"""Colours of curves: as many as there are curves, distinct and readable."""

import itertools

from mtrain.report.metrics.shown import curve_colour, curve_hue


def test_neighbours_are_far_apart_and_no_two_of_many_are_the_same() -> None:
    hues = [curve_hue(slot) for slot in range(60)]
    assert len({*hues}) == 60
    assert all(min((a - b) % 360, (b - a) % 360) > 90 for a, b in itertools.pairwise(hues))


def test_every_colour_can_be_seen_on_white_paper() -> None:
    """WCAG 2.1, 1.4.11 asks 3 to 1 of non-text; yellow and light green have less, as colour is never the only sign."""
    contrasts = [1.05 / (luminance(curve_colour(slot)) + 0.05) for slot in range(60)]
    assert min(contrasts) > 2.2
    assert sum(contrast < 3 for contrast in contrasts) < 25


def luminance(colour: str) -> float:
    """Computes the relative luminance of WCAG 2.1."""
    channels = [int(colour[begin : begin + 2], 16) / 255 for begin in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

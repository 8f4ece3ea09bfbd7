"""Draws the pictures of docs/explanation/architecture.md: python -m tests.docs.pictures

The picture of layers is drawn from the table with which tests/test_architecture.py checks the code; all numbers of the
other two are computed here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tests.paths import ROOT
from tests.test_architecture import PACKAGES

FOLDER = ROOT / "docs" / "pictures"

BANDS = (
    "without torch: answers on a login node",
    "one training step: loss, batch, ranks, layers, engine",
    "files: of Hugging Face, of data, of runs",
    "between formats, to people, on machines",
    "composition: who is built, in what order things happen",
    "checks, proofs and a service",
    "the command line",
)
"""Description of each layer."""

FILLS = ("#dfe6f0", "#fdf0d9", "#e4f2ea", "#e8eef7", "#f8e4e4", "#efe6f6", "#e9e9e9")
"""Colours of the layers, from the bottom up."""
INK, FAINT = "#1f2933", "#5b6775"


@dataclass(frozen=True)
class Box:
    """One labelled rectangle, in units of the picture."""

    x: float
    y: float
    width: float
    height: float
    text: str
    fill: str = "#ffffff"
    size: float = 9.5

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Creates an empty picture whose units are tenths of an inch, with the origin at the lower left."""
    figure = Figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def draw(axes: Axes, box: Box) -> None:
    """Draws the rectangle and its text, in the middle."""
    shape = FancyBboxPatch(
        (box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.6", fc=box.fill, ec=FAINT, lw=0.8
    )
    axes.add_patch(shape)
    axes.text(*box.middle, box.text, ha="center", va="center", size=box.size, color=INK, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draws an arrow from one point to another; the text stands next to its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.1, "shrinkA": 0, "shrinkB": 0})
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.text(middle[0] + 0.8, middle[1], text, ha="left", va="center", size=8.5, color=FAINT)


def packages(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the packages of each line, without the root, scripts and old names."""
    return [[name for name in line if not name.startswith("__") and name not in ("tools", "loss")] for line in table]


def layers_picture() -> Figure:
    """Draws one band a layer, the lowest at the bottom; imports go down."""
    height, gap, width = 7.0, 1.1, 92.0
    figure, axes = canvas(width, len(BANDS) * (height + gap) + gap)
    for layer, (names, said, fill) in enumerate(zip(packages(PACKAGES), BANDS, FILLS, strict=True)):
        y = gap + layer * (height + gap)
        draw(axes, Box(1, y, width - 2, height, "", fill))
        axes.text(2.2, y + height - 1.4, f"{layer} {said}", va="center", size=8.5, color=FAINT)
        step = (width - 6) / max(len(names), 4)
        left = (width - step * len(names)) / 2
        for place, name in enumerate(names):
            draw(axes, Box(left + place * step + 0.5, y + 0.9, step - 1, 3.6, name))
    return figure


STEP = (
    ("data", "rows of step k:\na function of (seed, k)", "#e4f2ea"),
    ("broadcast, slice", "to tp ranks; each cp rank\nkeeps its tokens", "#fdf0d9"),
    ("schedule", "microbatches through\nthe pipeline", "#fdf0d9"),
    ("finalize", "sum gradients over dp x cp,\nsum pairs over all ranks", "#fdf0d9"),
    ("divide", "gradients times 1/D,\nonce", "#fdf0d9"),
    ("check", "planned D = measured D,\nall finite, else stop", "#f8e4e4"),
    ("update", "clip, learning rate\nof step k, optimizer", "#f8e4e4"),
    ("record", "loss = N/D; metrics,\ncheckpoint if due", "#f8e4e4"),
)
"""Stations of a training step: name, what happens, colour of the layer that does it."""


def step_picture() -> Figure:
    """Draws two rows of four stations, and the work of the schedule for each microbatch below its station."""
    figure, axes = canvas(96, 40)
    places = [(2.0 + 24 * (n % 4), 31.0 if n < 4 else 3.0) for n in range(len(STEP))]
    boxes = [
        Box(x, y, 20, 7.4, f"{n + 1} {name}\n{what}", fill, 8.6)
        for n, ((x, y), (name, what, fill)) in enumerate(zip(places, STEP))
    ]
    for box in boxes:
        draw(axes, box)
    for box, following in itertools.pairwise(boxes):
        if box.y == following.y:
            arrow(axes, (box.x + box.width, box.middle[1]), (following.x, following.middle[1]))
    last, first = boxes[3], boxes[4]
    axes.plot([last.middle[0]] * 2 + [first.middle[0]], [last.y, 13.2, 13.2], color=INK, lw=1.1)
    arrow(axes, (first.middle[0], 13.2), (first.middle[0], first.y + first.height))
    inner = Box(26, 16.4, 44, 11.2, "", "#ffffff")
    draw(axes, inner)
    axes.text(27.2, 26.1, "for each microbatch", va="center", size=8.5, color=FAINT)
    for x, text in ((27.5, "forward"), (41.5, "loss function\n(N, D)"), (55.5, "backward of\nN, not N/D")):
        draw(axes, Box(x, 18.0, 12.5, 5.6, text, "#fdf0d9" if x != 41.5 else "#e4f2ea", 8.6))
    arrow(axes, (40, 20.8), (41.5, 20.8))
    arrow(axes, (54, 20.8), (55.5, 20.8))
    axes.plot([60] * 2, [31, 27.6], color=FAINT, lw=0.9, ls=":")
    return figure


MASKS = ((1, 1, 1, 0), (1, 0, 0, 0))
"""Loss masks of the row on each of two ranks, as counted in the example of the pair."""
TOKEN_LOSSES = ((2.0, 4.0, 3.0, 9.0), (7.0, 9.0, 9.0, 9.0))


def pair_of(mask: Sequence[int], losses: Sequence[float]) -> tuple[float, float]:
    """Returns (numerator, denominator) under token-mean."""
    return sum(counts * loss for counts, loss in zip(mask, losses)), float(sum(mask))


def pair_picture() -> Figure:
    """Draws two ranks with 3 and 1 loss tokens: their pairs are added and divided once; a mean of means differs."""
    pairs = [pair_of(mask, losses) for mask, losses in zip(MASKS, TOKEN_LOSSES)]
    total = (sum(n for n, _ in pairs), sum(d for _, d in pairs))
    figure, axes = canvas(96, 38)
    for rank, (pair, mask, losses) in enumerate(zip(pairs, MASKS, TOKEN_LOSSES)):
        y = 27.0 - 15 * rank
        axes.text(2, y + 6.6, f"rank {rank}: one row of four tokens", va="center", size=8.5, color=FAINT)
        for token, (m, loss) in enumerate(zip(mask, losses)):
            text = f"{loss:g}" if m else "masked"
            draw(axes, Box(2 + 6.4 * token, y, 6, 5, text, "#e4f2ea" if m else "#f3f4f6", 9 if m else 7.5))
        draw(axes, Box(36, y - 0.6, 17, 6.2, f"LossPair\nN = {pair[0]:g}, D = {pair[1]:g}", "#e4f2ea", 9))
        arrow(axes, (28, y + 2.5), (36, y + 2.5))
        arrow(axes, (53, y + 2.5), (61, 20.5 + (1.5 if rank == 0 else -1.5)))
    draw(axes, Box(61, 16.6, 15, 7.8, f"one all-reduce\nN = {total[0]:g}, D = {total[1]:g}", "#fdf0d9", 9))
    arrow(axes, (76, 20.5), (81, 20.5))
    draw(axes, Box(81, 16.6, 13, 7.8, f"one division\nN / D = {total[0] / total[1]:g}", "#f8e4e4", 9))
    means = " and ".join(f"{n / d:g}" for n, d in pairs)
    wrong = sum(n / d for n, d in pairs) / len(pairs)
    said = (
        f"A mean on each rank would be {means}, and their mean {wrong:g}:\nthe rank with one loss token would count as "
        "much as the rank with three."
    )
    axes.text(2, 4.2, said, va="center", size=9, color=INK, linespacing=1.4)
    return figure


PICTURES = {"layers.svg": layers_picture, "step.svg": step_picture, "pair.svg": pair_picture}


def write(folder: Path) -> None:
    """Writes all pictures; the same bytes each time with the same matplotlib."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "mtrain", "font.family": "sans-serif"}
    with mpl.rc_context(settings):
        for name, picture in PICTURES.items():
            picture().savefig(folder / name, format="svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

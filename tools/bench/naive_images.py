"""Context parallelism of images as others do it, against one process: `python tools/bench/naive_images.py`.

Trains Qwen3.5 of tests/parity for two steps on two context-parallel ranks, as it is and with a mistake of other
programs planted, and measures the deviation from the model of transformers in float64, one sample at a time. Writes a
picture and, next to it, its data as JSON.
"""

import json
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.figure import Figure

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.cli.messages import one_message
from tests.parity.cases import case
from tests.parity.models.test_images import TRAINED, compared
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "mtrain": None,
    "positions of one axis": "positions-by-time-alone",
    "positions counted\nin a rank's part": "positions-counted-in-slices",
    "features counted\nin a rank's part": "places-counted-in-slices",
    "an image ends at\nthe border of ranks": "images-cut-at-cp-border",
    "gradient of a feature:\nmean over ranks": "tower-gradient-mean-over-sharing",
    "gradient of a feature:\none rank's": "tower-gradient-of-one-rank",
}
"""Label -> fault of tests/verify/planted."""
_QUANTITIES = {"loss": "#E69F00", "gradient": "#0072B2"}
"""Quantity -> colour."""


def main(
    picture: Annotated[Path, typer.Option(help="The SVG; its data lie next to it.")] = ROOT
    / "docs"
    / "pictures"
    / "naive_images.svg",
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the data again.")] = False,
) -> None:
    """Measures each way, and draws."""
    data = picture.with_suffix(".json")
    with one_message():
        if not redraw:
            data.write_text(json.dumps(measure(), indent=1) + "\n")
        found = json.loads(data.read_text())
        with matplotlib.rc_context({"font.size": 11, "svg.hashsalt": "mtrain", "svg.fonttype": "path"}):
            draw(found, picture)
    for label, deviation in found.items():
        typer.echo(f"{label}: {deviation}")


def measure() -> dict[str, dict[str, float]]:
    """Returns the deviations of loss and gradients from the oracle for each run."""
    pool, layout = Pool(), case(4, num_layers=2, cp=2)
    found: dict[str, dict[str, float]] = {}
    for label, fault in RUNS.items():
        deviation = compared(pool, layout, "dense", TRAINED, fault)[1]
        found[" ".join(label.split())] = {name: float(f"{getattr(deviation, name):.1e}") for name in _QUANTITIES}
    return found


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draws both deviations of each run as bars on a logarithmic axis."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    for shift, (name, colour) in zip((0.2, -0.2), _QUANTITIES.items(), strict=True):
        places = [number + shift for number in range(len(found))]
        values = [deviation[name] for deviation in found.values()]
        bars = axes.barh(places, values, height=0.38, color=colour, label=name)
        axes.bar_label(bars, labels=[f"{value:.0e}" for value in values], padding=3, fontsize=9)
    axes.set_yticks(range(len(found)), list(RUNS))
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(1e-9, 1e3), xlabel="largest relative deviation from one process in float64")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)

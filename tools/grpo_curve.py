"""Rewards of examples/grpo_loop.py on two layouts of two ranks: `python tools/grpo_curve.py`.

Each layout is a launch by torchrun. Writes a picture and, next to it, its data as JSON; with --from-data it only draws.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"two data-parallel ranks": "layout.tp=1", "two tensor-parallel ranks": "layout.tp=2"}
_STYLES = (("#E69F00", "-", 4.5), ("#000000", ":", 2.0))
"""Colour, line and width of each layout: a dotted line stays visible on a wide one."""


def main(
    picture: Annotated[Path, typer.Option(help="The SVG; its data lie next to it.")] = ROOT
    / "docs"
    / "pictures"
    / "grpo_curve.svg",
    from_data: Annotated[bool, typer.Option("--from-data", help="Draw the data that are there.")] = False,
) -> None:
    """Runs the example and draws its rewards."""
    data = picture.with_suffix(".json")
    if not from_data:
        found = {name: rewards(override) for name, override in LAYOUTS.items()}
        rows = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
        data.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    draw(json.loads(data.read_text()), picture)


def rewards(override: str) -> list[float]:
    """Runs the example and returns the mean reward of each step."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "examples" / "grpo_loop.py"), override]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(reward) for reward in re.findall(r"reward (\S+)", output)]


def draw(found: dict[str, list[float]], picture: Path) -> None:
    """Draws all layouts in one picture; the same data give the same file."""
    matplotlib.rcParams["svg.hashsalt"] = "mtrain"
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), (colour, line, width) in zip(found.items(), _STYLES, strict=True):
        axes.plot(range(1, len(values) + 1), values, color=colour, linestyle=line, linewidth=width, label=name)
    axes.set(xlabel="step of rewards", ylabel="mean reward of 256 answers", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", handlelength=3.5)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)

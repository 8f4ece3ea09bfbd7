"""Loss curves of one run on three layouts, under naive normalisation and under the pair: python tools/bench/seed_curves.py

Four gloo ranks on this machine train a small model on question/answer pairs from Python's standard library, with SP
(Ulysses) over 1, 2 and 4 of them. Global batch, samples, initial weights and learning rate are the same everywhere, so
all curves should be one. Writes a picture and, beside it, its data as JSON.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure

from mtrain.__main__ import one_message
from mtrain.data.stdlib import build_stdlib_corpus
from mtrain.data.tokenizer_training import train_tokenizer
from mtrain.errors import MachineError
from mtrain.metrics.plot import load_curves

ROOT = Path(__file__).resolve().parents[2]
RANKS, VOCAB = 4, 1024
SP_SIZES = (1, 2, 4)
RULES = {
    "micro-steps": "each micro-step divided by its tokens",
    "ranks": "each rank divided by its own tokens",
    "pair": "mtrain: one division by all tokens",
}
"""Rule -> title of its column."""
_FUNCTIONS = {"micro-steps": "naive_losses:mean_of_micro_steps", "ranks": "naive_losses:mean_of_rank_means"}
_STYLES = {1: ("#E69F00", "-", 4.5), 2: ("#0072B2", "--", 2.0), 4: ("#000000", ":", 2.0)}
"""SP -> colour, line and width. Okabe and Ito's colours differ for every kind of colour vision, and their grey tones,
line styles and widths differ in print; wide, dashed and dotted lines stay visible on top of each other."""

Series = dict[str, list[float]]
"""Quantity -> value of each step."""


def main(
    picture: Annotated[Path, typer.Option(help="The PNG; its data lie beside it.")] = ROOT
    / "docs/pictures/seed_curves.png",
    work: Annotated[Path, typer.Option(help="Folder for corpus, tokenizer and runs.")] = ROOT / "build/seed_curves",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer updates of each run.")] = 60,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the data again.")] = False,
) -> None:
    """Trains nine times and draws."""
    data_path = picture.with_suffix(".json")
    with one_message():
        if not redraw:
            picture.parent.mkdir(parents=True, exist_ok=True)
            data_path.write_text(as_text(measure(work, steps)))
        found = json.loads(data_path.read_text())
        draw(found, picture)
    for rule, spread in found["largest_spread"].items():
        typer.echo(f"{rule:12} loss {spread['loss']:.1e}  grad-norm {spread['grad_norm']:.1e}")
    typer.echo(f"{picture} and {data_path}, measured in {found['seconds']:.0f} s")


def measure(work: Path, steps: int) -> dict[str, Any]:
    """Trains under each rule and layout."""
    started = time.monotonic()
    config = prepare(work, steps)
    runs = {rule: {str(sp): train(work, config, rule, sp) for sp in SP_SIZES} for rule in RULES}
    return {
        "command": f"python tools/bench/seed_curves.py --steps {steps}",
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{os.cpu_count()} CPU cores, {RANKS} gloo ranks",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "config": json.loads(config.read_text()),
        "largest_spread": {rule: largest_spread(list(of_rule.values())) for rule, of_rule in runs.items()},
        "runs": runs,
    }


def prepare(work: Path, steps: int) -> Path:
    """Corpus, tokenizer and the configuration that all runs share."""
    build_stdlib_corpus("qa", work)
    build_stdlib_corpus("text", work)
    train_tokenizer([work / "text-valid.jsonl"], work / "tokenizer.model", VOCAB, overwrite=True)
    content = {
        "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4},
        "train": {"global_batch_size": 16, "micro_batch_size": 1, "num_steps": steps, "precision": "fp32"},
        "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup_steps": 4},
        "data": {"kind": "jsonl", "seq_length": 128, "tokenizer": str(work / "tokenizer.model")},
        "checkpoint": {"at_end": False},
        "metrics": {"tensorboard": False, "console_interval_steps": 20},
    }
    content["model"] |= {"vocab_size": VOCAB, "tied_embeddings": True}
    content["data"] |= {"train": [{"path": str(work / "qa-train.jsonl")}]}
    path = work / "config.yaml"  # JSON is YAML
    path.write_text(json.dumps(content, indent=1))
    return path


def train(work: Path, config: Path, rule: str, sp: int) -> Series:
    """One run on real ranks, as a user starts it.

    Raises:
        MachineError: it did not end well.
    """
    folder = work / f"{rule}-sp{sp}-{time.time_ns()}"
    command = [sys.executable, "-W", "ignore", "-m", "mtrain", "launch", "local", "-n", str(RANKS), str(config)]
    command += [f"run.dir={folder}", f"layout.cp={sp}", "layout.cp_comm=ulysses"]
    if rule in _FUNCTIONS:
        command += [f"loss.function={_FUNCTIONS[rule]}", "loss.denominator=measured"]
    search_path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise MachineError(f"{' '.join(command)} ended with exit code {result.returncode}:\n{result.stderr[-2000:]}")
    records = load_curves(folder).steps
    return {
        "loss": [rounded(record.loss) for record in records],
        "grad_norm": [rounded(record.grad_norm) for record in records],
    }


def rounded(value: float) -> float:
    """Eight significant digits."""
    return float(f"{value:.8g}")


def as_text(found: dict[str, Any]) -> str:
    """JSON with one series a line."""
    runs = found.pop("runs")
    lines = [
        f'  "{rule}": {{\n' + ",\n".join(f'   "{sp}": {json.dumps(one)}' for sp, one in of_rule.items()) + "\n  }"
        for rule, of_rule in runs.items()
    ]
    return json.dumps(found, indent=1)[:-2] + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"


def largest_spread(runs: list[Series]) -> dict[str, float]:
    """(largest - smallest) / smallest over the runs, at the worst step."""
    return {
        name: rounded(max((max(step) - min(step)) / min(step) for step in zip(*(run[name] for run in runs))))
        for name in ("loss", "grad_norm")
    }


def draw(found: dict[str, Any], picture: Path) -> None:
    """Loss above grad-norm, one column a rule, the same scale in each row."""
    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    rows = figure.subplots(2, len(RULES), sharex=True, sharey="row")
    for column, (rule, title) in enumerate(RULES.items()):
        for axes, name in zip(rows[:, column], ("loss", "grad_norm"), strict=True):
            for sp in SP_SIZES:
                colour, line, width = _STYLES[sp]
                values = found["runs"][rule][str(sp)][name]
                steps = range(1, len(values) + 1)
                axes.plot(steps, values, color=colour, linestyle=line, linewidth=width, label=f"SP {sp}")
            spread = found["largest_spread"][rule][name]
            axes.text(0.97, 0.95, f"apart by up to {percent(spread)}", transform=axes.transAxes, ha="right", va="top")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        rows[0, column].set_title(title, fontsize=11)
        rows[1, column].set_xlabel("step")
    rows[0, 0].set_ylabel("logged training loss (nats)")
    rows[1, 0].set_ylabel("grad-norm")
    rows[0, -1].legend(loc="lower left", handlelength=3.5)
    figure.savefig(picture)


def percent(ratio: float) -> str:
    """As a reader says it."""
    return f"{100 * ratio:.0f} %" if ratio >= 0.005 else f"{100 * ratio:.1g} %"


if __name__ == "__main__":
    typer.run(main)

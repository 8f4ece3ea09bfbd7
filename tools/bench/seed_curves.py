"""Loss curves of one run on three layouts, naive normalisation against pairs: `python tools/bench/seed_curves.py`.

Four gloo ranks on this machine train a small model on question/answer pairs from Python's standard library, with SP
(Ulysses) over 1, 2 and 4 of them. Global batch, samples, initial weights and learning rate are the same everywhere, so
all curves should be one. Writes a picture and, next to it, its data as JSON.
"""

import itertools
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from matplotlib.figure import Figure

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.cli.messages import one_message
from mtrain.config import Config
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.data.formats.documents import TextFiles
from mtrain.data.loader import StepLoader
from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus
from mtrain.data.preparation.train_tokenizer import train_tokenizer
from mtrain.verify.core.ranks import Pool

ROOT = Path(__file__).resolve().parents[2]
RANKS, VOCAB = 4, 1024
HELD_OUT_PASSES = 8
"""Number of global batches that are evaluated after the last step."""
SP_SIZES = (1, 2, 4)
RULES = {
    "micro-steps": "each micro-step divided by its tokens",
    "ranks": "each rank divided by its own tokens",
    "pair": "mtrain: one division by all tokens",
}
"""Rule -> title of its column."""
FUNCTIONS = {"micro-steps": "naive_losses:mean_of_micro_steps", "ranks": "naive_losses:mean_of_rank_means"}
_STYLES = {1: ("#E69F00", "-", 4.5), 2: ("#0072B2", "--", 2.0), 4: ("#000000", ":", 2.0)}
"""SP -> colour, line and width. Okabe and Ito's colours differ for every kind of colour vision, and their grey tones,
line styles and widths differ in print; wide, dashed and dotted lines stay visible on top of each other."""

Series = dict[str, list[float]]
"""Quantity -> value of each step."""


def main(
    picture: Annotated[Path, typer.Option(help="The PNG; its data lie next to it.")] = ROOT
    / "docs/pictures/seed_curves.png",
    work: Annotated[Path, typer.Option(help="Folder for corpus, tokenizer and runs.")] = ROOT / "build/seed_curves",
    steps: Annotated[int, typer.Option(min=5, help="Optimizer updates of each run.")] = 30,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the data again.")] = False,
) -> None:
    """Trains nine times and draws."""
    data_path = picture.with_suffix(".json")
    with one_message():
        if not redraw:
            picture.parent.mkdir(parents=True, exist_ok=True)
            data_path.write_text(as_text(measure(work, steps)))
        found = json.loads(data_path.read_text())
        with matplotlib.rc_context({"font.size": 12, "axes.titlesize": 13}):
            draw(found, picture)
    for rule, spread in found["largest_spread"].items():
        typer.echo(f"{rule:12} loss {spread['loss']:.1e}  grad-norm {spread['grad_norm']:.1e}")
    typer.echo(f"{picture} and {data_path}, measured in {found['seconds']:.0f} s")


def measure(work: Path, steps: int) -> dict[str, Any]:
    """Trains under each rule and layout."""
    started = time.monotonic()
    content = prepare(work, steps)
    pool = Pool(preloaded=["__main__"])
    runs: dict[str, dict[str, Series]] = {
        rule: {str(sp): train(pool, content, rule, sp) for sp in SP_SIZES} for rule in RULES
    }
    return {
        "command": f"python tools/bench/seed_curves.py --steps {steps}",
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{os.cpu_count()} CPU cores, {RANKS} gloo ranks",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "config": {name: section for name, section in content.items() if name not in ("data", "run")},
        "largest_spread": {rule: largest_spread(list(of_rule.values())) for rule, of_rule in runs.items()},
        "held_out_loss": {rule: {sp: one.pop("held_out")[0] for sp, one in runs[rule].items()} for rule in runs},
        "runs": runs,
    }


def prepare(work: Path, steps: int) -> dict[str, Any]:
    """Writes corpus and tokenizer; returns the configuration that all runs share."""
    build_stdlib_corpus("qa", work)
    build_stdlib_corpus("text", work)
    train_tokenizer(TextFiles([work / "text-valid.jsonl"]), work / "tokenizer.model", VOCAB, overwrite=True)
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4}
    return {
        "run": {"dir": str(work)},
        "model": shape | {"vocab_size": VOCAB, "tied_embeddings": True},
        "train": {"global_batch_size": 16, "micro_batch_size": 1, "num_steps": steps, "precision": "fp32"},
        "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup_steps": 4},
        "data": {
            "kind": "sft",
            "seq_length": 128,
            "tokenizer": str(work / "tokenizer.model"),
            "ignore_keys": ["path"],
            "train": [{"path": str(work / "qa-train.jsonl")}],
            "valid": [{"path": str(work / "qa-valid.jsonl")}],
        },
    }


def train(pool: Pool, content: dict[str, Any], rule: str, sp: int) -> Series:
    """Trains one run; all ranks see the same numbers."""
    exact = Config.model_validate(content | {"layout": {"cp": sp, "cp_comm": "ulysses"}})
    logged = exact
    if rule in FUNCTIONS:
        loss = {"function": FUNCTIONS[rule], "denominator": "measured"}
        logged = Config.model_validate(content | {"layout": {"cp": sp, "cp_comm": "ulysses"}, "loss": loss})
    found: Series = pool.run(train_on_rank, Layout.from_config(exact, RANKS), logged, exact)[0]
    typer.echo(f"{rule} SP {sp}: loss {found['loss'][-1]:.4f}, held out {found['held_out'][0]:.4f}")
    return found


def train_on_rank(groups: Groups, config: Config, exact: Config) -> Series:
    """Trains by `config`, then computes the loss of held-out samples as `exact` defines it: one sum / one sum."""
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    model = build_rank_model(config, groups)
    step = TrainingStep(model, Objective.from_config(config.loss, config.model))
    found: Series = {"loss": [], "grad_norm": [], "held_out": []}
    for number in range(config.train.num_steps):
        totals = step.forward_backward(loader.batches(number))
        update = step.update(totals, learning_rate(number, config.optimizer, config.train.num_steps))
        assert update is not None, "no batch of 16 answers is empty"
        found["loss"].append(rounded(totals.loss))
        found["grad_norm"].append(rounded(update.grad_norm))
    held_out = loader.held_out()
    assert held_out is not None
    judge = TrainingStep(replace(model, config=exact), Objective.from_config(exact.loss, exact.model))
    terms = [judge.forward_backward(one).terms["main"] for one in itertools.islice(held_out.batches(), HELD_OUT_PASSES)]
    found["held_out"] = [rounded(sum(one.numerator for one in terms) / sum(one.denominator for one in terms))]
    return found


def rounded(value: float) -> float:
    """Rounds to eight significant digits."""
    return float(f"{value:.8g}")


def as_text(found: dict[str, Any]) -> str:
    """Formats the data as JSON with one series per line."""
    runs = found.pop("runs")
    lines = [
        f'  "{rule}": {{\n' + ",\n".join(f'   "{sp}": {json.dumps(one)}' for sp, one in of_rule.items()) + "\n  }"
        for rule, of_rule in runs.items()
    ]
    return json.dumps(found, indent=1)[:-2] + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"


def largest_spread(runs: list[Series]) -> dict[str, float]:
    """Returns (largest - smallest) / smallest over the runs, at the worst step."""
    return {
        name: rounded(max((max(step) - min(step)) / min(step) for step in zip(*(run[name] for run in runs))))
        for name in ("loss", "grad_norm")
    }


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draws the loss above the grad-norm, one column per rule, with the same scale in each row."""
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
            note = f"apart by up to {100 * spread:.0f} %" if spread >= 0.005 else f"agree to {spread:.0e}"
            axes.text(0.98, 1.0, note, transform=axes.transAxes, ha="right", va="top", backgroundcolor="white")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(y=0.15)
        rows[0, column].set_title(title)
        rows[1, column].set_xlabel("step")
    rows[0, 0].set_ylabel("logged training loss (nats)")
    rows[1, 0].set_ylabel("grad-norm")
    rows[0, -1].legend(loc="lower left", handlelength=3.5)
    figure.savefig(picture)


if __name__ == "__main__":
    typer.run(main)

"""Curves of a chat finetuning, packed on four ranks and not packed on one: `python tools/bench/packed_curves.py`.

Dialogues from Python's standard library in ChatML, the same initial weights and learning rates; on one side a row for
each dialogue on one rank, on the other several in a row, which is cut over four context-parallel ranks. Both are the
same run, so the curves should be one. With `--hybrid` three of four layers are gated delta nets, and two more packed
runs have a fault of tests/verify planted. Writes a picture and, next to it, its data as JSON.
"""

import json
import os
import platform
import time
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
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.data.formats.documents import TextFiles
from mtrain.data.loader import StepLoader
from mtrain.data.preparation.stdlib_corpus import build_stdlib_corpus
from mtrain.data.preparation.train_tokenizer import train_hf_tokenizer
from mtrain.verify.core.ranks import Pool
from tests.verify.planted.faults import PLANTS

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 2048
ALONE, PACKED = "CP 1, a row for each dialogue", "CP 4, packed rows of 512"
CARRIED, DROPPED = "packed, states carried across documents", "packed, states dropped between ranks"
FAULTS = {CARRIED: "state-across-documents", DROPPED: "state-dropped-at-parts"}
"""Run of a hybrid -> the fault that is planted in it."""
_STYLES = {
    ALONE: ("#E69F00", "-", 4.5),
    PACKED: ("#000000", ":", 2.0),
    CARRIED: ("#0072B2", "--", 1.5),
    DROPPED: ("#009E73", "-.", 1.5),
}
"""Colour, line and width: a dotted line stays visible on a wide one, also in print."""

Series = dict[str, list[float]]
"""Quantity -> value of each step."""


def main(
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Three of four layers are gated delta nets.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="The SVG, next to its data; docs/pictures has the usual place.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder for corpus, tokenizer and cache.")] = ROOT / "build/packed_curves",
    steps: Annotated[int, typer.Option(min=5, help="Optimizer updates of each run.")] = 80,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the data again.")] = False,
) -> None:
    """Trains each way and draws."""
    if picture is None:
        picture = ROOT / "docs/pictures" / ("hybrid_curves.svg" if hybrid else "packed_curves.svg")
    data_path = picture.with_suffix(".json")
    with one_message():
        if not redraw:
            picture.parent.mkdir(parents=True, exist_ok=True)
            data_path.write_text(as_text(measure(work, steps, hybrid)))
        found = json.loads(data_path.read_text())
        with matplotlib.rc_context({"font.size": 12, "svg.hashsalt": "mtrain", "svg.fonttype": "path"}):
            draw(found, picture)
    for name, differences in found["largest_difference"].items():
        typer.echo(f"{name}: {differences}")
    typer.echo(f"{picture} and {data_path}, measured in {found['seconds']:.0f} s")


def measure(work: Path, steps: int, hybrid: bool) -> dict[str, Any]:
    """Trains each way."""
    started = time.monotonic()
    content = prepare(work, steps)
    if hybrid:
        content["model"] |= HYBRID
    pool = Pool(timeout_s=900, preloaded=["__main__"])
    runs = {ALONE: train(pool, content, 1), PACKED: train(pool, packed(content), 4)}
    if hybrid:
        runs |= {name: train(pool, packed(content), 4, fault) for name, fault in FAULTS.items()}
    return {
        "command": f"python tools/bench/packed_curves.py{' --hybrid' if hybrid else ''} --steps {steps}",
        "seconds": round(time.monotonic() - started, 1),
        "machine": f"{os.cpu_count()} CPU cores, gloo ranks",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "config": {name: section for name, section in content.items() if name not in ("data", "run")},
        "largest_difference": {
            name: {quantity: difference(runs[ALONE][quantity], values) for quantity, values in run.items()}
            for name, run in runs.items()
            if name != ALONE
        },
        "runs": runs,
    }


def prepare(work: Path, steps: int) -> dict[str, Any]:
    """Writes corpus and tokenizer; returns the configuration that both runs share."""
    build_stdlib_corpus("chat", work)
    build_stdlib_corpus("text", work)
    train_hf_tokenizer(
        TextFiles([work / "text-valid.jsonl"]), work / "hf", VOCAB, chat_template="chatml", overwrite=True
    )
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4}
    return {
        "run": {"dir": str(work)},
        "model": shape | {"vocab_size": VOCAB, "tied_embeddings": True},
        "train": {"global_batch_size": 16, "micro_batch_size": 1, "num_steps": steps, "precision": "fp32"},
        "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup_steps": 4},
        "loss": {"aggregation": "seq-mean-token-mean"},
        "data": {
            "kind": "sft",
            "seq_length": 256,
            "ignore_keys": ["path"],
            "cache_dir": str(work / "cache"),
            "tokenizer": str(work / "hf"),
            "train": [{"path": str(work / "chat-train.jsonl")}],
        },
    }


HYBRID: dict[str, Any] = {
    "num_layers": 4,
    "attention_gate": True,
    "delta_net": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16},
}
"""Keys of the model that make it a small Qwen3-Next."""


def packed(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the same run, packed and cut."""
    return content | {
        "layout": {"cp": 4},
        "train": content["train"] | {"tokens_per_micro_batch": 512},
        "data": content["data"] | {"packing": {}},
    }


def train(pool: Pool, content: dict[str, Any], ranks: int, fault: str | None = None) -> Series:
    """Trains one run; all ranks see the same numbers."""
    config = Config.model_validate(content)
    found: Series = pool.run(train_on_rank, Layout.from_config(config, ranks), config, fault)[0]
    typer.echo(f"{ranks} ranks{f', {fault}' if fault else ''}: loss {found['loss'][0]:.4f} to {found['loss'][-1]:.4f}")
    return found


def train_on_rank(groups: Groups, config: Config, fault: str | None) -> Series:
    """Returns loss and grad-norm of each step."""
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    sharded = build_model(config, groups)
    if fault is not None:
        change = PLANTS[fault].change_model
        assert change is not None, "both faults are of the model"
        change(sharded.chunks)
    model = RankModel(config, groups, sharded, Optimizer(config, sharded, groups))
    step = TrainingStep(model, Objective.from_config(config.loss, config.model))
    found: Series = {"loss": [], "grad_norm": []}
    for number in range(config.train.num_steps):
        totals = step.forward_backward(loader.batches(number))
        update = step.update(totals, learning_rate(number, config.optimizer, config.train.num_steps))
        assert update is not None, "no batch of 16 dialogues is empty"
        found["loss"].append(float(f"{totals.loss:.9g}"))
        found["grad_norm"].append(float(f"{update.grad_norm:.9g}"))
    return found


def difference(one: list[float], other: list[float]) -> float:
    """Returns the largest relative difference of a step."""
    return float(f"{max(abs(a - b) / a for a, b in zip(one, other, strict=True)):.2g}")


def as_text(found: dict[str, Any]) -> str:
    """Formats the data as JSON with one series per line."""
    runs = {name: {quantity: str(values) for quantity, values in one.items()} for name, one in found["runs"].items()}
    text = json.dumps(found | {"runs": runs}, indent=1)
    for values in (values for one in runs.values() for values in one.values()):
        text = text.replace(json.dumps(values), values)
    return text + "\n"


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draws the loss next to the grad-norm; of more than two runs, how far each is from the first."""
    runs = found["runs"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, name, title in zip(
        figure.subplots(1, 2), ("loss", "grad_norm"), ("training loss (nats)", "grad-norm"), strict=True
    ):
        for label, run in runs.items():
            colour, line, width = _STYLES[label]
            values, steps = run[name], range(1, len(run[name]) + 1)
            if len(runs) > 2:
                if label == ALONE:
                    continue
                values = [abs(one - other) / one for one, other in zip(runs[ALONE][name], values, strict=True)]
            axes.plot(steps, values, color=colour, linestyle=line, linewidth=width, label=label)
        if len(runs) > 2:
            axes.set(xlabel="step", ylabel=f"distance of the {name.replace('_', '-')} from CP 1", yscale="log")
        else:
            note = f"never further apart than {found['largest_difference'][PACKED][name]:.1e}"
            axes.text(0.98, 1.0, note, transform=axes.transAxes, ha="right", va="bottom")
            axes.set(xlabel="step", ylabel=title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), handlelength=3.5, fontsize=10)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)

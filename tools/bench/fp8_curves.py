"""Losses of one run in bf16 and in fp8, on one rank and on two: `python tools/bench/fp8_curves.py`.

A small model learns answers about Python's standard library, from the same initial weights, samples and learning rates
in every recipe of our own layers. CPUs multiply what the codes of fp8 mean, so the losses are those of a GPU to its
rounding; the times are not. Two ranks of tensor and sequence parallelism repeat two of the runs, which shows what
rounding alone does. Prints a table: the loss of held-out answers, the mean training loss of the second half, and its
mean distance from bf16 on one rank.
"""

from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.arch.layout import Layout
from mtrain.cli.messages import one_message
from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from tools.bench.seed_curves import ROOT, Series, prepare, train_on_rank

SHAPE = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "backend": "torch"}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "rowwise, hybrid": {"fp8": "hybrid"},
    "rowwise, e4m3": {"fp8": "e4m3"},
    "blockwise, e4m3": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


def main(
    work: Annotated[Path, typer.Option(help="Folder for corpus, tokenizer and runs.")] = ROOT / "build/fp8_curves",
    steps: Annotated[int, typer.Option(min=5, help="Optimizer updates of each run.")] = 60,
) -> None:
    """Trains six times."""
    with one_message():
        content = prepare(work, steps)
        content["model"] |= SHAPE
        content["train"] |= {"micro_batch_size": 8}
        content["optimizer"] |= {"lr": 1e-3}
        pool = Pool(preloaded=["__main__", "tools.bench.seed_curves"])
        runs = {name: trained(pool, content, keys, {}) for name, keys in RECIPES.items()}
        for name in ("bf16", "rowwise, hybrid"):
            runs[f"{name}, tp2 sp"] = trained(pool, content, RECIPES[name], {"tp": 2, "sp": True})
    typer.echo("| run | held-out loss | training loss, second half | distance from bf16 |\n|---|--:|--:|--:|")
    exact = runs["bf16"]["loss"][steps // 2 :]
    for name, found in runs.items():
        losses = found["loss"][steps // 2 :]
        distance = sum(abs(one - other) for one, other in zip(losses, exact, strict=True)) / len(losses)
        typer.echo(f"| {name} | {found['held_out'][0]:.4f} | {sum(losses) / len(losses):.4f} | {distance:.4f} |")


def trained(pool: Pool, content: dict[str, Any], keys: dict[str, Any], layout: dict[str, Any]) -> Series:
    """Trains one run; all ranks see the same numbers."""
    train = content["train"] | {"precision": "bf16"} | keys
    config = Config.model_validate(content | {"train": train, "layout": layout})
    ranks = 2 if layout else 1
    found: Series = pool.run(train_on_rank, Layout.from_config(config, ranks), config, config)[0]
    return found


if __name__ == "__main__":
    typer.run(main)

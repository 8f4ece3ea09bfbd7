"""Losses of a fixed small run on one process, at full precision.

`python -m tests.golden.golden_losses` writes them anew. Do so only for a change that is meant to change them, and say
in the commit why they had to: initial weights, data order, loss and optimizer all show up here.
"""

from __future__ import annotations

import json
from pathlib import Path

from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from tests.config.samples import content
from tests.parity.ranks import build
from tests.pool import Pool

GOLDEN = Path(__file__).with_name("losses.json")
NUM_STEPS = 5


def fixed_config() -> Config:
    """Nothing here may change."""
    return Config.model_validate(
        content(
            model__num_layers=2,
            model__num_query_groups=2,
            model__vocab_size=97,
            model__qkv_bias=True,
            train__global_batch_size=8,
            train__micro_batch_size=2,
            train__num_steps=NUM_STEPS,
            train__precision="fp32",
            train__seed=1234,
            data__seq_length=32,
            optimizer__lr=0.01,
            optimizer__warmup_steps=2,
        )
    )


def losses(groups: Groups, config: Config) -> list[float]:
    """The reported loss of each step, from the initial weights and the random tokens that the seed gives."""
    built, loader = build(groups, config), StepLoader(config, groups.dp_rank, groups.layout.dp)
    found = []
    for step in range(NUM_STEPS):
        totals = built.training.forward_backward(loader.batches(step))
        built.training.update(totals, learning_rate(step, config.optimizer, NUM_STEPS))
        found.append(totals.loss)
    return found


def measured(pool: Pool) -> list[float]:
    """The losses now."""
    found: list[float] = pool.run(losses, Layout(), fixed_config())[0]
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(measured(Pool()), indent=1) + "\n")

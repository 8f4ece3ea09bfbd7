"""Train with your own loop: `python examples/own_training_loop.py`, or on two ranks with

    torchrun --nproc-per-node 2 examples/own_training_loop.py layout.tp=2

The losses are the same, up to float32 rounding, under any layout that two ranks allow: try layout.pp=2.
"""

import random
import sys
from pathlib import Path

from mtrain import Datum, Engine, load_config

TINY = Path(__file__).parent.parent / "configs" / "model" / "tiny.yaml"
SETTINGS = [
    "run.dir=runs/own_loop",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.num_steps=6",
    "train.precision=fp32",
    "optimizer.lr=1e-2",
    "data.kind=mock",  # the samples come from this program
    "data.seq_length=32",
]


def batch_of(step: int) -> list[Datum]:
    """Makes eight counting rows, such as 17 18 19 ...; the first three tokens are a prompt without a loss."""
    starts = random.Random(step).sample(range(100), 8)
    return [Datum(range(start, start + 33), weights=[0.0] * 3 + [1.0] * 30) for start in starts]


def main() -> None:
    """Trains six steps of two calls each, then validates."""
    with Engine(load_config([TINY], SETTINGS + sys.argv[1:])) as engine:
        for step in range(engine.config.train.num_steps):
            batch = batch_of(step)  # pass the whole batch on every rank: the engine takes this rank's part
            engine.forward_backward(batch[:4])
            engine.forward_backward(batch[4:])  # accumulates; the same bits as one call with all eight
            done = engine.optim_step()  # one division by the denominator of both calls, clipping, AdamW
            if engine.rank == 0:
                print(f"step {done.step}  loss {done.loss:.6f}  grad_norm {done.grad_norm:.4f}  lr {done.lr:.1e}")
        held_out = engine.evaluate([batch_of(1000), batch_of(1001)])
        if engine.rank == 0:
            print(f"held out: loss {held_out.loss:.6f} over {held_out.denominator:.0f} tokens")


if __name__ == "__main__":
    main()

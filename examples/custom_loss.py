"""Train with your own loss function: focal loss, which gives less weight to tokens that are predicted well.

A loss function returns a pair of sums, never a mean: the engine adds the pairs of all microbatches and ranks and
divides once, so the loss does not depend on how the batch is split. `weigh` turns token losses into such a pair.

With this folder on PYTHONPATH, `mtrain train` uses the same function by its configuration:
    loss.function=custom_loss:focal_loss loss.options.gamma=1.5
"""

import functools
import sys
from pathlib import Path

from mtrain import Datum, Engine, LossPair, TermInputs, load_config, weigh

TINY = Path(__file__).parent.parent / "configs" / "model" / "tiny.yaml"
SETTINGS = [
    "run.dir=runs/focal",
    "train.global_batch_size=4",
    "train.num_steps=4",
    "train.precision=fp32",
    "optimizer.lr=3e-3",
    "data.kind=mock",
    "data.seq_length=32",
]


def focal_loss(inputs: TermInputs, gamma: float = 2.0) -> LossPair:
    """Weighs (1 - p)^gamma x -log p of each label (Lin et al. 2017); gamma = 0 is the usual loss."""
    losses = inputs.logits.cross_entropy(inputs.labels)  # [batch, seq] nats; the vocabulary may be split over ranks
    return weigh((1 - (-losses).exp()) ** gamma * losses, inputs)


def main() -> None:
    """Trains four steps on one batch; the usual loss also falls, although another one is minimised."""
    batch = [Datum(range(start, start + 20)) for start in (3, 500, 1000, 1500)]
    with Engine(load_config([TINY], SETTINGS + sys.argv[1:])) as engine:
        for _ in range(engine.config.train.num_steps):
            engine.forward_backward(batch, loss=functools.partial(focal_loss, gamma=1.5))
            done = engine.optim_step()
            usual = engine.evaluate([batch])
            if engine.rank == 0:
                print(f"step {done.step}  focal loss {done.loss:.6f}  cross entropy {usual.loss:.6f}")


if __name__ == "__main__":
    main()

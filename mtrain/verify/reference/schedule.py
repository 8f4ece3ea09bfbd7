"""Learning rate of every update of a run, as Megatron-LM and Hugging Face define it.

After k completed updates (one more in runs whose `optimizer.schedule_convention` is one_ahead), the rate of the next
update is

    lr k / warmup                      while k < warmup
    min_lr + (lr - min_lr) h           after it, with h of the schedule

    constant   h = 1
    linear     h = 1 - r               r = (k - warmup) / (end - warmup), from 0 to 1
    cosine     h = (1 + cos(pi r)) / 2
    wsd        h = 1 - r               r = (k - begin) / (end - begin), end = num_steps, begin = end - decay_steps

Source: Megatron-LM, core/optimizer_param_scheduler.py (get_lr); transformers, optimization.py (get_*_schedule_with_*).
"""

import math
from typing import assert_never

from mtrain.config.schema.train import OptimizerSection


def published_rate(completed: int, optimizer: OptimizerSection, num_steps: int) -> float:
    """Returns the learning rate of the next update after `completed` ones."""
    match optimizer.schedule_convention:
        case "megatron":
            pass
        case "one_ahead":
            completed += 1
        case _:
            assert_never(optimizer.schedule_convention)
    warmup = optimizer.warmup_steps
    if completed < warmup:
        return optimizer.lr * completed / warmup
    begin, end = _decay(optimizer, num_steps)
    done = min(1.0, max(0.0, (completed - begin) / (end - begin)))
    match optimizer.schedule:
        case "constant":
            return optimizer.lr
        case "linear" | "wsd":
            height = 1 - done
        case "cosine":
            height = (1 + math.cos(math.pi * done)) / 2
        case _:
            assert_never(optimizer.schedule)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * height


def _decay(optimizer: OptimizerSection, num_steps: int) -> tuple[int, int]:
    """Returns the updates at which the decay begins and ends; for a constant rate, begin and end of the run."""
    match optimizer.schedule:
        case "constant":
            return 0, num_steps
        case "linear" | "cosine":
            return optimizer.warmup_steps, num_steps if optimizer.decay_steps is None else optimizer.decay_steps
        case "wsd":
            length = max(1, num_steps // 10) if optimizer.decay_steps is None else optimizer.decay_steps
            return num_steps - length, num_steps
        case _:
            assert_never(optimizer.schedule)


def telling_steps(optimizer: OptimizerSection, num_steps: int) -> list[int]:
    """Returns updates, from 0, at which a wrong schedule shows: around phase changes, and some between."""
    ends = [0, optimizer.warmup_steps, num_steps - 1, *_decay(optimizer, num_steps)]
    around = [end + offset for end in ends for offset in range(-3, 4)]
    between = [num_steps * part // 64 for part in range(64)]
    return sorted({step for step in (*around, *between) if 0 <= step < num_steps})

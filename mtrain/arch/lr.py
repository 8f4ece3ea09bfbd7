"""The learning rate, a pure function of the step."""

import math
from typing import assert_never

from mtrain.config.schema.train import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection, num_steps: int) -> float:
    """Computes the learning rate of one update, by `optimizer.schedule_convention`.

    megatron: n = step is the number of updates before this one. The rate is lr x n / warmup_steps while
    0 < warmup_steps and n <= warmup_steps (so a warm-up starts at rate 0), and then:

    - constant: stays lr.
    - linear, cosine: falls to min_lr, which it reaches at n = decay_steps (by default num_steps, so the last update,
      n = num_steps - 1, is one step above min_lr).
    - wsd: stays lr until n = num_steps - decay_steps (decay_steps is by default a tenth of num_steps, at least one),
      then falls linearly towards min_lr at n = num_steps.

    These numbers equal Megatron-LM's scheduler bit for bit if it counts updates; if it counts samples, as with
    `--train-iters`, it rounds the warm-up once more. transformers' get_*_schedule_with_warmup agrees up to rounding,
    except that its get_wsd_schedule warms up from min_lr, not from 0, and its
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate is one update ahead.

    one_ahead: n = step + 1, with the rounding of version 0.1.0.

    Args:
        step: Index of the update, from 0.

    Source: megatron-core 0.16.1, optimizer_param_scheduler.py; transformers 5.23, optimization.py. wsd: MiniCPM
        (arXiv 2404.06395), section 4; cosine: SGDR (arXiv 1608.03983), equation 5 without restarts.
    """
    lr, min_lr, warmup = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps
    match optimizer.schedule_convention:
        case "megatron":
            if warmup > 0 and step <= warmup:
                return lr * step / warmup
            height = _height(step, optimizer, num_steps)
            return lr if height is None else min_lr + height * (lr - min_lr)
        case "one_ahead":
            if step + 1 <= warmup:
                return lr * ((step + 1) / warmup)
            height = _height(step + 1, optimizer, num_steps)
            return lr if height is None else min_lr * (1 - height) + lr * height
        case _ as never:
            assert_never(never)


def decay_steps(optimizer: OptimizerSection, num_steps: int) -> int:
    """Returns `optimizer.decay_steps` or its default; meaningless for a constant rate."""
    if optimizer.decay_steps is not None:
        return optimizer.decay_steps
    match optimizer.decay:
        case "at_end":
            return max(1, num_steps // 10)
        case "none" | "from_warmup":
            return num_steps
        case _:
            assert_never(optimizer.decay)


def _height(n: int, optimizer: OptimizerSection, num_steps: int) -> float | None:
    """Returns (rate - min_lr) / (lr - min_lr) after the warm-up; None if the schedule is constant."""
    decay = decay_steps(optimizer, num_steps)
    match optimizer.schedule:
        case "constant":
            return None
        case "linear":
            return 1 - _progress(n, optimizer.warmup_steps, decay)
        case "cosine":
            return (1 + math.cos(math.pi * _progress(n, optimizer.warmup_steps, decay))) / 2
        case "wsd":
            return 1 - _progress(n, num_steps - decay, num_steps)
        case _ as never:
            assert_never(never)


def _progress(n: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (n - start) / (end - start)))

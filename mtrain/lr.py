"""The learning rate, a pure function of the step."""

import math

from mtrain.config.train import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection, num_steps: int) -> float:
    """Learning rate of one update.

    With n = step + 1, the number of updates once this one is made, the rate rises as lr x n / warmup_steps, is exactly
    lr at n = warmup_steps, and from there:

    - constant: stays.
    - linear, cosine: falls to min_lr, which it reaches at n = decay_steps (by default num_steps) and keeps.
    - wsd: stays, then falls linearly over the last decay_steps updates (by default a tenth of num_steps, at least one)
      and reaches min_lr at n = num_steps.

    Args:
        step: Index of the update about to be made, from 0.
        optimizer: The schedule.
        num_steps: Updates of the whole run.

    Source: wsd: MiniCPM (arXiv 2404.06395), section 4; cosine: SGDR (arXiv 1608.03983), equation 5 without restarts.
    """
    done = step + 1
    if done <= optimizer.warmup_steps:
        return optimizer.lr * (done / optimizer.warmup_steps)
    match optimizer.schedule:
        case "constant":
            return optimizer.lr
        case "linear":
            return _between(optimizer, 1 - _progress(done, optimizer.warmup_steps, _end(optimizer, num_steps)))
        case "cosine":
            turn = math.pi * _progress(done, optimizer.warmup_steps, _end(optimizer, num_steps))
            return _between(optimizer, (1 + math.cos(turn)) / 2)
        case "wsd":
            length = max(1, num_steps // 10) if optimizer.decay_steps is None else optimizer.decay_steps
            return _between(optimizer, 1 - _progress(done, num_steps - length, num_steps))


def _end(optimizer: OptimizerSection, num_steps: int) -> int:
    return num_steps if optimizer.decay_steps is None else optimizer.decay_steps


def _progress(done: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (done - start) / (end - start)))


def _between(optimizer: OptimizerSection, height: float) -> float:
    """min_lr at height 0, lr at height 1, exactly."""
    return optimizer.min_lr * (1 - height) + optimizer.lr * height

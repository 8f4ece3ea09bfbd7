"""Distance of settings from an engine's log-probabilities, and its minimum by least squares."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtrain.verify.rollout.columns import Columns
from mtrain.verify.rollout.settings import Settings, truncated

_STEP = 1e-6
"""Step of derivatives."""
_SCALE = 0.05
"""Largest difference in nats at which a token counts as half missed."""


class Distances:
    """Compares settings with the log-probabilities of drawn tokens."""

    def __init__(self, columns: Columns, tolerance: float) -> None:
        """Takes the drawn tokens; `tolerance` is the rounding of a log-probability."""
        self.columns, self.tokens, self.tolerance = columns, columns.tokens, tolerance
        self._known: dict[Settings, Tensor] = {}
        """Differences by settings; half of all tries repeat."""
        # small deviations need a smaller scale
        self._scale = max(min(_SCALE, 0.25 * math.sqrt(self.distance(Settings()))), 4 * tolerance)

    def distance(self, settings: Settings) -> float:
        return float(self.errors(settings).square().mean())

    def score(self, settings: Settings) -> float:
        return float(self.misses(self.errors(settings)).mean())

    def misses(self, errors: Tensor) -> Tensor:
        """Returns how far each token is missed, from 0 to 1."""
        squares = errors.square()
        return squares / (squares + self._scale**2)

    def is_exact(self, settings: Settings) -> bool:
        return self.distance(settings) <= self.tolerance**2

    def errors(self, settings: Settings) -> Tensor:
        """Returns differences from the engine's log-probabilities, finite even if a token would be cut."""
        if settings not in self._known:
            self._known[settings] = self._differences(settings, self.are_left(settings))
        return self._known[settings]

    def _differences(self, settings: Settings, are_left: Tensor | None) -> Tensor:
        logits = self.tokens.processed(settings)
        left = logits if are_left is None else logits.masked_fill(~are_left, -math.inf)
        errors = self.tokens.of_drawn(logits) - (left + self.columns.sizes).logsumexp(-1) - self.tokens.engine_log_probs
        return errors.nan_to_num(posinf=1e3, neginf=-1e3)

    def are_left(self, settings: Settings) -> Tensor | None:
        """Returns which columns truncation leaves, [tokens, columns] bool; None: all."""
        if not settings.has_truncation:
            return None
        return self.left(settings) > -math.inf

    def left(self, settings: Settings) -> Tensor:
        return truncated(self.tokens.processed(settings), settings, self.columns.sizes)

    def shares(self, settings: Settings) -> Tensor:
        """Returns the probability of each column, [tokens, columns]."""
        return (self.left(settings) + self.columns.sizes).softmax(-1)

    def least_squares(self, settings: Settings, names: Sequence[str | int], share: float = 1.0) -> Settings:
        """Moves the continuous settings and token biases in `names` to the optimum by Levenberg-Marquardt.

        Truncation leaves the same tokens all the way. Only the nearest `share` of tokens counts: while the truncation
        is wrong, it spoils the rest.
        """
        if not names:
            return settings
        damping, now, are_left = 1e-3, settings, self.are_left(settings)
        errors = self.errors(now)
        count = max(len(names) + 1, round(share * len(errors)))

        def sum_of(differences: Tensor) -> Tensor:
            return differences.square().sort().values[:count].sum()

        for _ in range(40):
            rows = errors.abs().argsort()[:count]
            slope = self._slopes(now, names, are_left)[rows]
            square = slope.T @ slope
            step = torch.linalg.lstsq(square + damping * square.diagonal().diag(), -(slope.T @ errors[rows])).solution
            trial = _moved(now, dict(zip(names, step.clamp(-1, 1).tolist(), strict=True)))
            after = self._differences(trial, are_left)
            remaining, before = sum_of(after), sum_of(errors)
            if remaining < before:
                now, errors, damping = trial, after, damping / 10
                if before - remaining < 1e-6 * before:
                    break
            elif (damping := damping * 10) > 1e9:
                break
        return now

    def _slopes(self, settings: Settings, names: Sequence[str | int], are_left: Tensor | None) -> Tensor:
        """Returns the derivatives of all differences by each setting or token bias, [tokens, names]."""
        logits = self.tokens.processed(settings)
        left = logits if are_left is None else logits.masked_fill(~are_left, -math.inf)
        shares = (left + self.columns.sizes).softmax(-1)
        tokens = [name for name in names if isinstance(name, int)]
        # a bias moves only its own column, so all biases move at once
        pushed = self.tokens.processed(_moved(settings, dict.fromkeys(tokens, _STEP))) - logits if tokens else logits
        slopes = []
        for name in names:
            if isinstance(name, int):
                slopes.append(pushed[:, name] * ((self.tokens.ids == name).double() - shares[:, name]))
            else:
                moved = (self.tokens.processed(_moved(settings, {name: _STEP})) - logits).nan_to_num()
                slopes.append(self.tokens.of_drawn(moved) - (shares * moved).sum(-1))
        return torch.stack(slopes, -1) / _STEP


def pushed(settings: Settings) -> list[int]:
    """Returns the tokens that have a finite bias."""
    return [token for token, value in settings.bias if value != -math.inf]


def _moved(settings: Settings, steps: dict[str | int, float]) -> Settings:
    """Returns settings after a step: factors move in log space, and a token names its bias."""
    bias = tuple((token, value + steps.get(token, 0.0)) for token, value in settings.bias)
    moved: dict[str, Any] = {"bias": bias}
    for name, step in steps.items():
        if isinstance(name, str):
            value = getattr(settings, name)
            is_factor = name in ("temperature", "repetition_penalty")
            moved[name] = value * math.exp(step) if is_factor else value + step
    return replace(settings, **moved)

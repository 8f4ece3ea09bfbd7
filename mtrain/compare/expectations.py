"""Tolerances between two runs: what rounding allows in their precision, and whether a difference is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.config.derived import DROPOUT_KEYS, LAYOUT_DEPENDENT_KEYS
from mtrain.runs.changes import Change

FULL_RTOL = 1e-5
"""Tolerance of float32, and of learning rates, which are float64 in every precision."""

UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of the precisions below float32, the finer first: 2^-p for p significant bits."""

NORM_ROUNDINGS = 10
"""Factor for gradient norms. A gradient has about 26 roundings per layer, forward and backward; independent ones add up
as squares, to 10 for four layers. A loss has half of them, and its mean over tokens makes their errors smaller: 1."""


@dataclass(frozen=True)
class Allowed:
    """Largest relative differences that count as equal."""

    loss: float
    grad_norm: float
    lr: float
    reason: str
    """Origin of the tolerances, for people."""

    def __str__(self) -> str:
        if self.loss == self.grad_norm:
            return f"{self.loss:.0e}"
        return f"{self.loss:.0e} (losses) and {self.grad_norm:.0e} (gradient norms)"


def allowed(rtol: float | None, precisions: Sequence[str | None]) -> Allowed:
    """Returns the tolerances of `--rtol`, else those that rounding in the coarser of the runs' precisions needs.

    Args:
        rtol: Tolerance that the user gave; None where the precision decides.
        precisions: Value of `train.precision` of each run; None where a run has not recorded it.
    """
    if rtol is not None:
        return Allowed(rtol, rtol, rtol, "--rtol")
    coarse = [precision for precision in UNIT_ROUNDOFF if precision in precisions]
    if not coarse:
        return Allowed(FULL_RTOL, FULL_RTOL, FULL_RTOL, "for fp32; --rtol sets another")
    unit = UNIT_ROUNDOFF[coarse[-1]]
    reason = f"by the rounding of {coarse[-1]}, at first: later steps amplify it; --rtol sets another"
    return Allowed(unit, NORM_ROUNDINGS * unit, FULL_RTOL, reason)


def expected_difference(
    configs: Sequence[Mapping[str, Any]],
    changes: Sequence[Change],
    environments: Sequence[Mapping[str, str] | None],
) -> str | None:
    """Explains why the two runs differ by definition; None where they should not.

    Args:
        configs: Dotted key -> value, for each run.
        changes: Changes between the configurations.
        environments: Environments of both runs; None where one is not recorded.
    """
    keys = [key for key in (*DROPOUT_KEYS, *LAYOUT_DEPENDENT_KEYS) if any(config.get(key) for config in configs)]
    if not keys:
        return None
    places = [change.key for change in changes if change.key.startswith("layout.")]
    places += [change.key for change in changes if change.key == "train.micro_batch_size"]
    a, b = environments
    if a is None or b is None:
        places.append("the world size (not recorded)")
    else:
        places += [name for name in ("world_size", "device") if a.get(name) != b.get(name)]
    if not places:
        return None
    return (
        f"{' and '.join(keys)} above 0 {'makes' if len(keys) == 1 else 'make'} the numbers follow {', '.join(places)}"
    )

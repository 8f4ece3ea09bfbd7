"""Hidden states and expert choices of an engine, compared with the reference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch

from mtrain.base.errors import DataError
from mtrain.verify.core.tolerances import amplified
from mtrain.verify.rollout.causes import Passes
from mtrain.verify.rollout.exact import replayed

LIMIT = amplified(1.0)
"""Largest difference that rounding explains, in units of the measured one."""


def layer_differences(passes: Sequence[Passes]) -> Mapping[str, float]:
    """Returns the largest difference of each module's output in units of its rounding; above LIMIT it is a fault.

    Raises:
        DataError: A module is unknown, or its output has another size.
    """
    found: dict[str, tuple[float, float]] = {}
    for each in passes:
        for name in each.exact.outputs:
            if name not in each.rollout.hidden_states:
                continue
            given = torch.tensor(each.rollout.hidden_states[name], dtype=torch.float64)
            exact = each.exact.outputs[name][: len(given)]
            if given.shape != exact.shape:
                raise DataError(
                    f"{each.rollout.place}: hidden_states[{name!r}] has {given.shape[-1]} columns, but the model has "
                    f"{exact.shape[-1]} there; give the output of this module"
                )
            own = float((given - exact).abs().max())
            rounding = float((each.rounded.outputs[name][: len(given)] - exact).abs().max())
            worst = found.get(name, (0.0, 0.0))
            found[name] = max(worst[0], own), max(worst[1], rounding)
        known = each.exact.outputs
        if unknown := [name for name in each.rollout.hidden_states if name not in known]:
            shown = ", ".join(name for name in known if " " not in name or re.fullmatch(r"layer \d+", name))
            raise DataError(
                f"{each.rollout.place}: hidden_states has {unknown[0]!r}, which is no module; name one of {shown}"
            )
    return {name: own / rounding if rounding else (math.inf if own else 0.0) for name, (own, rounding) in found.items()}


def agreeing_routes(passes: Sequence[Passes]) -> str | None:
    """Counts the engine's choices of experts that equal the reference's, in words; None if it gave none.

    Raises:
        DataError: The routes belong to another model.
    """
    own = [each for each in passes if each.rollout.routes is not None]
    if not own:
        return None
    same = total = 0
    for each in own:
        assert each.rollout.routes is not None
        length = len(each.rollout.routes)
        for name, chosen in replayed(each.rollout, each.exact).items():
            found, exact = chosen[0, :length], each.exact.chosen[name][:length]
            same, total = same + int((found == exact).all(-1).sum()), total + length
    return f"{same} of {total} choices of experts are those of float64"

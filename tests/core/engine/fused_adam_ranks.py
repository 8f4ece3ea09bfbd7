"""Runs whose Adam counts updates by group of parameters, as the fused ones of TransformerEngine and apex do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from tests.core.state import checkpoint_ranks
from tests.core.state.checkpoint_ranks import Outcome


class AdamByGroup(torch.optim.Optimizer):
    """Has the arguments, state and counting of the fused Adams, on any device; the arithmetic is torch's."""

    def __init__(self, params: Any, adam_w_mode: bool, **defaults: Any) -> None:
        assert adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            for state in (self.state[parameter] for parameter in learning):
                assert "step" not in state, "a count of each parameter is torch's"
            for parameter in learning:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            states = [self.state[parameter] for parameter in learning]
            adamw(
                learning,
                [parameter.grad for parameter in learning],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in learning],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def train(
    groups: Groups, config: Config, folder: Path, resume_at: int | None, stop: int, save_at: int | None = None
) -> tuple[Outcome, bool]:
    """Trains like `checkpoint_ranks.train`; also says whether this rank holds nothing of some group of parameters."""
    empty = []

    class Seen(AdamByGroup):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            empty.append(any(not group["params"] for group in self.param_groups))

    with (
        mock.patch.object(megatron_optimizer, "Adam", Seen),
        mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(distrib_optimizer, "Adam", Seen),
    ):
        found = checkpoint_ranks.train(groups, config, folder, resume_at, stop, save_at)
    return found, any(empty)

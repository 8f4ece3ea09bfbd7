"""megatron-core's optimizer, stepped in the open: unscale, norm, guard, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mtrain.config import Config
from mtrain.errors import NumericError
from mtrain.mcore.groups import Groups
from mtrain.mcore.translate import optimizer_config


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the normalised gradient, before clipping; NaN or inf where fp16 overflowed."""
    overflowed: bool
    """fp16: gradients were not finite, the loss scale went down and the weights stayed."""


class Optimizer:
    """AdamW on this rank's shard; parameters are gathered after each update."""

    def __init__(self, config: Config, chunks: Sequence[DistributedDataParallel], groups: Groups) -> None:
        self.chunks = list(chunks)
        translated = optimizer_config(config)
        overrides = {} if config.optimizer.decay_norms_and_biases else get_standard_config_overrides(translated)
        self.inner: MegatronOptimizer = get_megatron_optimizer(
            translated,
            self.chunks,
            config_overrides=overrides,
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )
        self._clip_grad = config.optimizer.clip_grad
        self._weight_decay = config.optimizer.weight_decay
        self._overlaps_gather = config.train.overlap_param_gather
        if self._overlaps_gather:
            self._set_gather_hooks(False, sync=False)  # nothing to gather before the first update

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies by the fp16 loss scale; 1 in other precisions."""
        return self.inner.scale_loss(loss)

    def loss_scale(self) -> float:
        """The current fp16 loss scale. Synchronises with the device."""
        return float(self.inner.get_loss_scale().item())

    def zero_grad(self) -> None:
        """Clears gradients before a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def update(self, lr: float) -> Update:
        """One AdamW step on the normalised, reduced gradients.

        The clipping factor is clip_grad / (norm + 1e-6), as in torch and Megatron-LM.

        Raises:
            NumericError: The gradient norm is not finite (fp32, bf16); weights and state are untouched.
        """
        for group in self.inner.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
        overflowed = bool(self.inner.prepare_grads())
        if overflowed:
            return Update(math.nan, overflowed=True)
        grad_norm = float(self.inner.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NumericError(f"the gradient norm is {grad_norm}; the weights were not updated")
        self._clip(grad_norm)
        self.inner.step_with_ready_grads()
        if self._overlaps_gather and not self.gathers_ahead:
            self._set_gather_hooks(True, sync=False)
        return Update(grad_norm, overflowed=False)

    def _clip(self, grad_norm: float) -> None:
        if self._clip_grad == 0:
            return
        for optimizer in getattr(self.inner, "chained_optimizers", [self.inner]):
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._clip_grad, total_norm=grad_norm)

    @property
    def gathers_ahead(self) -> bool:
        """Whether updated parameters arrive during the next forward pass (overlap_param_gather after an update)."""
        return self._overlaps_gather and bool(self.chunks[0].remove_forward_pre_hook_handles)

    def gather_parameters(self) -> None:
        """Makes the parameters of all chunks complete now; before validation, checkpoints and comparisons."""
        if self.gathers_ahead:
            self._set_gather_hooks(False, sync=True)

    def _set_gather_hooks(self, enabled: bool, sync: bool) -> None:
        for chunk in self.chunks:
            hooks: Any = chunk
            if enabled:
                hooks.enable_forward_pre_hook()
            else:
                hooks.disable_forward_pre_hook(param_sync=sync)

"""megatron-core's optimizer in explicit steps: norm, check, clip, update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from mtrain.base.errors import ConfigError, NonFiniteError, NumericError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.schema.bounds import FLOAT32_LARGEST
from mtrain.config.schema.train import AdamWSection, MuonSection
from mtrain.core.engine.host_moments import HostMoments
from mtrain.core.engine.muon import Muon
from mtrain.core.engine.optimizer_state import OptimizerState
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.transformer_config import SMALLEST_LOSS_SCALE
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.megatron import gradients_of_norm

_MOST_SKIPS_AT_SMALLEST_SCALE = 2
"""Number of skips in a row at the smallest loss scale that ends the run; one skip may be due to a bad batch."""

_SMALLEST_EPS = 2.0**-126
"""Smallest normal float32 number. With an epsilon that rounds to 0, the update of a zero gradient is nan."""
_LARGEST_RATIO = 1e18
"""Largest learning rate / (epsilon x (1 - beta1)). Gradients are below 2e19, since the squares of larger ones overflow
in float32; so updates are below 2e37, even if the second moment underflows."""
BLOCK = 2**16
"""Number of elements converted to float64 at a time: half a MiB, which fits into the cache of a core."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the normalized gradient, before clipping; NaN if fp16 overflowed."""
    overflowed: bool
    """Whether fp16 gradients were not finite, so the loss scale was lowered and the weights did not change."""


@dataclass(frozen=True)
class AdamOptions:
    """Options of AdamW that replace `optimizer.*`."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_grad: float = 0.0
    """Largest gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        """Raises ValueError if a value is out of range."""
        rules = {
            "beta1 must be at least 0 and below 1": 0 <= self.beta1 < 1,
            "beta2 must be at least 0 and below 1": 0 <= self.beta2 < 1,
            "eps must be a normal number of float32": _SMALLEST_EPS <= self.eps <= FLOAT32_LARGEST,
            "weight_decay must be at least 0": 0 <= self.weight_decay < math.inf,
            "clip_grad must be at least 0": 0 <= self.clip_grad < math.inf,
        }
        broken = [f"{rule}, but is {getattr(self, rule.split()[0])}" for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError("; ".join(broken))

    def check_rate(self, lr: float) -> None:
        """Refuses a learning rate at which an update could leave the range of float32.

        Raises:
            ValueError: The update could, or the number is not a learning rate.
        """
        if not 0 <= lr <= FLOAT32_LARGEST * (1 - self.beta1):
            raise ValueError(f"lr must be at least 0, and lr / (1 - beta1) a number of float32, but lr is {lr}")
        if lr * self.weight_decay > 1:
            raise ValueError(
                f"lr={lr} times weight_decay={self.weight_decay} is above 1, which would flip the sign of weights; "
                "lower one"
            )
        if lr > _LARGEST_RATIO * self.eps * (1 - self.beta1):
            raise ValueError(
                f"lr={lr} is too large for eps={self.eps} and beta1={self.beta1}: an update could leave the range of "
                "float32; lower lr, or raise eps"
            )


class Skips:
    """Counts fp16 overflows in a row, to end a run that would silently skip every step."""

    def __init__(self, most: int) -> None:
        """Makes a counter; `most` is the number of skips in a row that ends the run."""
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Starts over after an applied update."""
        self._in_a_row = self._at_smallest_scale = 0
        # the first overflow never counts as one at the smallest scale
        self._scale = math.inf  # scale of the next gradients, where it is known

    def count(self, loss_scale: float) -> None:
        """Counts one more overflow; `loss_scale` is that of the next gradients.

        Raises:
            NumericError: There were too many overflows in a row.
        """
        self._in_a_row += 1
        # `_scale` is the scale of this overflow; `loss_scale` is that of the next gradients
        self._at_smallest_scale += self._scale <= SMALLEST_LOSS_SCALE
        self._scale = loss_scale
        if self._in_a_row < self._most and self._at_smallest_scale < _MOST_SKIPS_AT_SMALLEST_SCALE:
            return
        raise NumericError(
            f"{counted(self._in_a_row, 'update')} in a row {'was' if self._in_a_row == 1 else 'were'} skipped, because "
            f"gradients overflowed in fp16; the loss scale has fallen to {loss_scale:g} "
            f"(train.max_skipped_steps={self._most}), the weights are those before them. Use train.precision=bf16, "
            "lower optimizer.lr, look at the data, or raise train.max_skipped_steps"
        )


class Optimizer:
    """AdamW on this rank's shard, with Muon if configured; parameters are gathered after each update."""

    host_moments: HostMoments | None = None
    """Moments on the host between updates; None if they stay on the device."""

    def __init__(self, config: Config, sharded: ShardedModel, groups: Groups) -> None:
        self.sharded, self.inner = sharded, sharded.optimizer()
        self.state = OptimizerState(self.inner, sharded)
        self.state.fuse()
        if config.train.offload_optimizer:
            self.host_moments = HostMoments(self.state, groups.device)
        self._device, self._collection = groups.device, groups.collection
        self._known_scale: tuple[Tensor | None, float] = (None, 1.0)
        self.scales_loss = config.train.precision == "fp16"
        """Whether the loss is multiplied by a scale that is lowered when a gradient overflows."""
        self._skips = Skips(config.train.max_skipped_steps)
        self._clip_grad = config.optimizer.clip_grad
        self._weight_decay = config.optimizer.weight_decay
        self._muon: Muon | None = None
        match config.optimizer:
            case AdamWSection():
                pass
            case MuonSection():
                self._muon = Muon(config.optimizer, config.model, self.state, sharded, groups)
            case _:
                assert_never(config.optimizer)

    def use(self, options: AdamOptions) -> None:
        """Sets the options of AdamW from the next update on.

        Raises:
            ConfigError: Matrices are updated by Muon, which has other options.
        """
        if self._muon is not None:
            raise ConfigError("options of AdamW were given, but optimizer.name=muon; set optimizer.name=adamw")
        self._clip_grad, self._weight_decay = options.clip_grad, options.weight_decay
        for group in self.inner.param_groups:
            group["betas"], group["eps"] = (options.beta1, options.beta2), options.eps

    def check_rate(self, lr: float) -> None:
        """Refuses a learning rate at which the next update could leave the range of float32.

        Raises:
            ValueError: The update could, or the number is not a learning rate.
        """
        for group in self.inner.param_groups:
            beta1, beta2 = group["betas"]
            AdamOptions(beta1, beta2, group["eps"], self._weight_decay).check_rate(lr * group.get("lr_mult", 1.0))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiplies the loss by the fp16 loss scale; 1 in other precisions."""
        return self.inner.scale_loss(loss)

    def loss_scale(self) -> float:
        """Returns the current fp16 loss scale. The host waits for the device if the scale has changed."""
        scale = self.inner.get_loss_scale()
        # the scaler makes a new tensor whenever it moves the scale
        if scale is not self._known_scale[0]:
            self._known_scale = (scale, float(scale.item()))
        return self._known_scale[1]

    def take_weights(self) -> None:
        """Copies the model weights, which were set from outside, to the main weights."""
        self.sharded.take_weights(self.inner)

    def zero_grad(self) -> None:
        """Clears gradients before a step."""
        self.sharded.zero_grad()  # backward passes add to these; `.grad` of parameters and main weights is cleared next
        self.inner.zero_grad()

    def overflowed(self, grad_norm: float) -> bool:
        """Says whether a norm shows that a gradient overflowed, so that `update` skips it and lowers the scale."""
        return self.scales_loss and not math.isfinite(grad_norm)

    @torch.no_grad()
    def local_grad_norm_sq(self) -> Tensor:
        """Returns this rank's summand of the squared global L2 norm of the reduced gradients, a float64 scalar on the
        device.

        Does not communicate, and the host does not wait. The gradients may still be scaled in place afterwards, since
        the optimizer has views of the same memory. The result is not finite only if a gradient is not, since float64
        holds the squares of all float32 values.
        """
        for part in self._optimizers():
            # points `.grad` of the main weights at the reduced buffers
            if not self.scales_loss:
                part.prepare_grads()  # does nothing else without a scaler
            elif not part.is_stub_optimizer:
                # `prepare_grads` would judge dense and expert gradients separately, and the host would wait for each
                part._copy_model_grads_to_main_grads()
        return self._sum_of_squares()

    @torch.no_grad()
    def update(self, lr: float, grad_norm: float) -> Update:
        """Updates the weights by the gradients with this norm; in fp16 skips them if they overflowed.

        The host waits once if the loss scale has changed.

        Raises:
            NonFiniteError: The gradient norm is not finite, or overflows or underflows in float32; weights and state
                are unchanged.
            NumericError: There were too many fp16 overflows, see `Skips.count`.
        """
        if self.overflowed(grad_norm):
            self._move_scales(overflowed=True)
            # The same scale on all ranks, so a run that gives up does so everywhere.
            self._skips.count(self.loss_scale())
            return Update(math.nan, overflowed=True)
        # before anything is changed: the norm is the same number on all ranks, so all of them raise or none
        check_norm(grad_norm, self._clip_grad)
        for group in self.inner.param_groups:
            # set at every step: the schedule is a function of completed updates, not megatron-core's scheduler
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
        self._clip(grad_norm)  # before Muon too: its momentum takes the clipped gradient, like Adam's moments
        if self._muon is not None:
            self._muon.update(lr)  # removes the gradients of matrices: AdamW steps on what has one
        # Not `step()`, which would unscale, take the norm and clip once more. Main weights are updated, then the
        # parameters; a distributed optimizer gathers them over DP x CP here, or in the next forward pass if that
        # overlaps.
        self.inner.step_with_ready_grads()
        self.sharded.gather_in_forward()
        if self.scales_loss:
            self._move_scales(overflowed=False)
            self._skips.clear()
        return Update(grad_norm, overflowed=False)

    def _move_scales(self, overflowed: bool) -> None:
        """Updates the scalers of dense parameters and experts, which megatron-core keeps separate, alike."""
        for part in self._optimizers():
            # On stubs too: every scaler of every rank counts the same successes and overflows.
            part.grad_scaler.update(overflowed)

    def _sum_of_squares(self) -> Tensor:
        """Sums the squares of this rank's gradients; every element counts on exactly one rank of the world."""
        # megatron-core leaves out copies over TP (no tensor_model_parallel mark) and shared tables of other stages.
        own = [gradients_of_norm(part) for part in self._optimizers() if self._counts_here(part)]
        return _sum_of_squares([gradient for gradients in own for gradient in gradients], self._device)

    def _counts_here(self, part: Any) -> bool:
        """Says whether this rank's gradients count: if no other rank has them, or on the first of the replicas."""
        if self.sharded.is_divided:
            return True
        is_of_experts = any(group["is_expert_parallel"] for group in part.param_groups)
        replicas = self._collection.expt_dp if is_of_experts else self._collection.dp_cp
        return int(replicas.rank()) == 0

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    def _clip(self, grad_norm: float) -> None:
        factor = _clipping_factor(grad_norm, self._clip_grad)
        if factor == 1.0:
            return
        # one norm for dense parameters and experts: separately, each would clip by its own share
        parameters = [parameter for optimizer in self._optimizers() for parameter in optimizer.get_parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:  # a rank may hold no part of any parameter
            # in place: without apex, megatron-core's own function copies each gradient and copies it back
            torch._foreach_mul_(gradients, factor)


def check_norm(grad_norm: float, clip_grad: float) -> None:
    """Checks a gradient by its norm before clipping, a float64 number that bounds each element.

    The gradient itself is divided, clipped and squared (for the second moment) in float32.

    Raises:
        NonFiniteError: The norm is not finite, or one of the three operations could overflow or underflow.
    """
    if not math.isfinite(grad_norm):
        raise NonFiniteError(f"the gradient norm is {grad_norm}; the weights were not updated")
    clipping = _clipping_factor(grad_norm, clip_grad)
    # Conservative: no element exceeds the norm, so what passes cannot overflow anywhere in Adam.
    largest = torch.finfo(torch.float32).max
    if grad_norm > largest or (grad_norm * clipping) ** 2 > largest or clipping < torch.finfo(torch.float32).tiny:
        raise NonFiniteError(
            f"the gradient norm is {grad_norm}: with optimizer.clip_grad={clip_grad} the gradient, its clipping factor "
            "or its square leaves the range of float32; the weights were not updated. Look at the sample weights and "
            "the loss function, or set optimizer.clip_grad to about 1"
        )


def _clipping_factor(grad_norm: float, clip_grad: float) -> float:
    """Returns the factor of the gradient, at most 1; 1 if `clip_grad` is 0."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0


def _sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sums squares to a float64 scalar on the device; float32 on a CPU is off by 8e-5 for 4 million elements."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":
        return _sum_by_blocks(gradients)
    # the third argument is the dtype in which squares are added
    return torch.stack(torch._foreach_norm(list(gradients), 2, torch.float64)).square().sum()


def _sum_by_blocks(gradients: Sequence[Tensor]) -> Tensor:
    """Computes `_sum_of_squares` in blocks, since CPUs would convert whole tensors, which doubles their memory."""
    wide = torch.empty(BLOCK, dtype=torch.float64)
    sums = []
    for gradient in gradients:
        for part in torch.split(gradient.reshape(-1), BLOCK):
            widened = wide[: len(part)].copy_(part)
            sums.append(torch.dot(widened, widened))
    return torch.stack(sums).sum()

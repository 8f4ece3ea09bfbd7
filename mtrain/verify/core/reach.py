"""Bounds and constants that a small model would not reach, moved to where they act.

A fault at the edge of a block, in a clamp or in a small summand changes nothing in a model that never gets there.
Config keys change in the configuration, kernel sizes in the ranks, and drawn weights are scaled.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection
from mtrain.config.schema.train import AnyOptimizer
from mtrain.core.engine import optimizer as optimizers
from mtrain.core.layers.attention.recurrent.core import RecurrentCore
from mtrain.core.layers.offload import activations
from mtrain.core.loss.vocab_parallel import cross_entropy

_CHUNK = 3
"""Tokens per chunk of a recurrent layer, so that even 4 tokens of a context-parallel rank make several chunks."""
_ELEMENTS = 500
"""Elements in a block of logits or of a gradient."""
_EPSILON = 3e-4
"""Epsilon of norms; mean squares are 0.001 in recurrent layers to 1 elsewhere."""
_BASE, _LOCAL_BASE = 100.0, 30.0
"""Rotary bases at which the slowest pair of a 4-wide head still turns by one radian in a row."""
_SOFTCAP = 1.0
"""Bound of logits; their standard deviation is about 0.6."""
_STEP_MIN = 0.35
"""Smallest step of Mamba: the softplus of a drawn number is below it for one token in fifteen."""
_RATE = 0.02
"""Learning rate at which a thousandth of an update exceeds the rounding of a weight."""
_COEFFICIENT = 0.1
"""Coefficient at which the gradient of a term stands out."""
_TO_THE_CLAMP = 3.5
"""Factor of the first projection before clamps at 7: a few of its outputs in ten thousand exceed them."""
_TO_THE_OFFSET = 0.1
"""Factor of queries and keys before normalisation, so that 1e-6 is not negligible next to their squares."""


def model_keys(model: ModelSection) -> dict[str, Any]:
    """Returns the `model.*` keys that change, without keys of sections."""
    softcap = model.logit_softcap
    return {
        "norm_epsilon": model.norm_epsilon * epsilon_factor(model),
        "logit_softcap": None if softcap is None else min(softcap, _SOFTCAP),
    }


def epsilon_factor(model: ModelSection) -> float:
    """Returns the factor of all norm epsilons; it keeps their ratios."""
    return max(1.0, _EPSILON / model.norm_epsilon)


def section_keys(model: ModelSection, rotary_size: int) -> dict[str, dict[str, Any]]:
    """Returns the changed keys of the model's sections; `rotary_size`: rotated dimensions of a small head."""
    changed: dict[str, dict[str, Any]] = {"rope": _rotations(model.rope, rotary_size)}
    if model.mamba is not None and model.mamba.step_min > 0:
        changed["mamba"] = {"step_min": max(model.mamba.step_min, _STEP_MIN)}
    return changed


def _rotations(rope: RopeSection, size: int) -> dict[str, Any]:
    """Returns frequencies that short rows tell apart, and an original length that puts the middle pair of a head
    between scaled and unscaled pairs."""
    base = min(rope.base, _BASE)
    changed: dict[str, Any] = {"base": base}
    if rope.local_base is not None:
        changed["local_base"] = min(rope.local_base, _LOCAL_BASE)
    bounds = {
        "llama3": (rope.low_freq_factor, rope.high_freq_factor),
        "yarn": (rope.beta_slow, rope.beta_fast),
    }.get(rope.scaling)
    if bounds is not None and rope.attention_temperature == 0:  # else the length sets the temperature's steps
        turn = 2 * math.pi * math.pow(base, 2.0 * (size // 4) / size)
        changed["original_max_positions"] = max(1, round(math.sqrt(bounds[0] * bounds[1]) * turn))
    return changed


def optimizer_keys(optimizer: AnyOptimizer) -> dict[str, Any]:
    """Returns the `optimizer.*` keys that change; the schedule keeps its form."""
    factor = max(1.0, _RATE / optimizer.lr)
    rates = {"lr": optimizer.lr, "min_lr": optimizer.min_lr, **optimizer.lr_of_parts}
    return {key: rate * factor for key, rate in rates.items()}


def loss_keys(loss: LossSection) -> dict[str, Any]:
    """Returns the `loss.*` keys that change: every nonzero coefficient is large enough."""
    return {
        "side_terms": {
            name: term.model_dump() | {"coefficient": _raised(term.coefficient)}
            for name, term in loss.side_terms.items()
        },
        "router": {name: _raised(value) for name, value in loss.router.model_dump().items()},
        "mtp_coefficient": _raised(loss.mtp_coefficient),
    }


def _raised(coefficient: float) -> float:
    return coefficient and math.copysign(max(abs(coefficient), _COEFFICIENT), coefficient)


def scaled(name: str, values: Tensor, model: ModelSection) -> Tensor:
    """Scales the drawn values of a parameter, which lie around 0 (norms: 1), so that bounds act."""
    experts, net = model.experts, model.delta_net
    if name.endswith("router.expert_bias") and experts is not None:
        # makes about half of the biased scores negative; logits need no shift
        mean = {"sigmoid": 0.5, "softmax": 1 / experts.num_experts if experts.pre_softmax else 0.0}[experts.score]
        return values - mean
    if name.endswith("linear_fc1.weight") and model.activation == "swiglu_clamped":
        return values * _TO_THE_CLAMP
    if name.endswith("conv1d.weight") and net is not None:
        by_head = values.clone().view(net.num_key_heads, -1, *values.shape[1:])
        by_head[:, : 2 * net.key_head_dim] *= _TO_THE_OFFSET
        return by_head.view(values.shape)
    return values


@contextmanager
def small_blocks() -> Iterator[None]:
    """Makes the kernel blocks of this process small."""
    before = cross_entropy.ELEMENTS_AT_A_TIME, optimizers.BLOCK, activations.SMALLEST_MOVED_BYTES
    cross_entropy.ELEMENTS_AT_A_TIME = optimizers.BLOCK = _ELEMENTS
    activations.SMALLEST_MOVED_BYTES = 1
    try:
        yield
    finally:
        cross_entropy.ELEMENTS_AT_A_TIME, optimizers.BLOCK, activations.SMALLEST_MOVED_BYTES = before


def shrink_chunks(modules: Sequence[nn.Module]) -> None:
    """Shortens the chunks of recurrent layers."""
    for module in (module for chunk in modules for module in chunk.modules()):
        if isinstance(module, RecurrentCore):
            module.chunk = _CHUNK

"""Errors of a layer's tensors, and their limits for a candidate.

A candidate and our torch layers compute the same function in the same precision, in another order and with other
roundings. No formula bounds that for every layer, but the error of our own layers from float64 can be measured. Errors
are modelled as independent roundings with mean 0 (mtrain/verify/core/tolerances.py). Then

- the root mean square of a tensor's error does not depend on the number of elements: a candidate may round four times
  as often as our layers, which doubles it;
- the largest error comes from the tail: another draw of as many elements, with four times as many roundings, stays
  within four times ours;
- a candidate may round its result once more than our layers: u / sqrt(3) for roundings spread evenly over +-u, and 2 u
  in the largest, because later operations may halve the largest element.

An 8-bit product rounds both operands to b bits after the leading one, to 2^-(b + 1) of an element: forward to e4m3's 3
bits, backward, if the format is hybrid, to e5m2's 2. A layer has two projections in each of its two halves, whose
errors add as squares, and as many again in backward. So forward adds sqrt(4 x 2) 2^-4, backward sqrt(4 x 2 + 8 x 2)
2^-3 (2^-4 in e4m3 alone), and the largest errors four times that.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.train import TrainSection
from mtrain.verify.core.result import Tolerance

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
MEASURES = ("root mean square", "largest")
FACTORS = {"root mean square": 2.0, "largest": 4.0}
"""Allowed multiple of our own layers' error."""
_ROUNDINGS = {"root mean square": 3**-0.5, "largest": 2.0}
_TAIL = {"root mean square": 1.0, "largest": 4.0}
_NUM_PRODUCTS = 4


class TensorError(NamedTuple):
    """Error of a tensor by one measure, relative to the same measure of the exact tensor."""

    kind: str
    """layer_output, input_gradient or gradient."""
    name: str
    measure: str
    own: float
    """Error of our torch layers."""
    candidate: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Says whether rounding explains the candidate's error; False if the error is not finite."""
        return math.isfinite(self.candidate) and self.candidate <= self.tolerance


def errors_of(tensor: Tensor | None, exact: Tensor) -> dict[str, float]:
    """Returns the error in each measure; inf for a missing tensor, another shape, or a nonzero value for an exact 0."""
    if tensor is None or tensor.shape != exact.shape:
        return dict.fromkeys(MEASURES, math.inf)
    difference = tensor.detach().to(torch.float64) - exact
    measured = {
        "root mean square": (difference.square().mean().sqrt(), exact.square().mean().sqrt()),
        "largest": (difference.abs().max(), exact.abs().max()),
    }
    return {name: _relative(float(error), float(size)) for name, (error, size) in measured.items()}


def _relative(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size > 0 else math.inf


def floor(train: TrainSection, kind: str, measure: str) -> float:
    """Returns the part of a tolerance that is independent of our own layers' error."""
    return _ROUNDINGS[measure] * UNIT_ROUNDOFF[train.precision] + _TAIL[measure] * _in_8_bits(train, kind)


def _in_8_bits(train: TrainSection, kind: str) -> float:
    if train.fp8 is None:
        return 0.0
    if kind == "layer_output":
        return math.sqrt(2 * _NUM_PRODUCTS) * 2.0**-4
    return math.sqrt(3 * 2 * _NUM_PRODUCTS) * (2.0**-3 if train.fp8 == "hybrid" else 2.0**-4)


def compared(
    train: TrainSection, kind: str, name: str, torch_tensor: Tensor | None, candidate: Tensor | None, exact: Tensor
) -> list[TensorError]:
    """Compares one tensor of our torch layers and of a candidate with the exact one, float64; None: missing."""
    ours, theirs = errors_of(torch_tensor, exact), errors_of(candidate, exact)
    return [
        TensorError(
            kind,
            name,
            measure,
            ours[measure],
            theirs[measure],
            FACTORS[measure] * ours[measure] + floor(train, kind, measure),
        )
        for measure in MEASURES
    ]


def tolerances(train: TrainSection) -> tuple[Tolerance, ...]:
    """Returns the parts of tolerances that are independent of the tensor, with derivations."""
    meanings = {"layer_output": "The output of a layer.", "input_gradient": "The gradient of a layer's input."}
    return tuple(
        Tolerance(
            kind,
            floor(train, kind, "largest"),
            "4 e + 2 u + 4 q (largest element), 2 e + u / sqrt(3) + q (root mean square); e is the error of our torch "
            "layers, here 0",
            {"u": UNIT_ROUNDOFF[train.precision], "q": _in_8_bits(train, kind)},
            meanings.get(kind, "The gradient of a weight.") + " e is the error of our torch layers from float64, q the "
            "rounding of products in 8 bits, u that of the run's precision.",
        )
        for kind in ("layer_output", "input_gradient", "gradient")
    )

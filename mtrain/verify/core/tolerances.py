"""Bounds of the distance between a float32 run and the exact one, from the precision and the number of summands.

u = 2^-24 is the unit roundoff of float32, u64 = 2^-53 that of float64.

- samples: rows are copied, not computed; they must be equal, weights of tokens up to one rounding to float32.
- lr: a formula of a dozen operations in float64: within 8 u64 of the highest rate.
- denominator: shares are added in float64. Shares that are whole multiples of a power of two, such as counts and
  halves, add without rounding while the sum is below 2^53 multiples, so sums must be equal. Any other sum of n shares
  that are not negative is within n u64, whatever the order (Higham, Accuracy and Stability of Numerical Algorithms,
  section 4.2), even where its exact value is a whole number.
- loss, gradient, grad_norm: rounding errors of float32 are modelled as independent and of mean 0; then a sum of n
  products is within s u sqrt(n) of the exact one, with probability above 1 - 2 exp(-s^2 / 2) (Higham and Mary 2019,
  theorem 3.1; s = 4: 0.07 %), relative to the size of what is added. Independent errors of sums that feed each other
  add as squares: a quantity after sums of n1, n2, ... summands is within s u sqrt(N), N = n1 + n2 + ... A loss comes
  after the forward pass (N), a gradient after twice as many sums and its own sum over all T tokens of the batch, the
  gradient norm after these and the sum over all P parameters. Cancellation makes a sum smaller than what was added, so
  gradients are compared with the largest element of their tensor and not element by element. This is a model and not a
  worst case: the worst case, u N, assumes that all errors have one sign and would be a thousand times too lax to see a
  fault.
  Delta nets bring queries, keys and outputs to a length, which may be small before: a document's first output has the
  factor k^T q, any number around 0. How much rounding that amplifies depends on the weights, so the reference measures
  it: it computes the gradients in float32 too, and D is the largest distance between the two, over the largest element
  of a tensor. Gradients of the step, and their norm, are then within s D where that is more: errors of another order
  of the operations are as large, but others; measured: at most 3 D from exact. Norms of values and of branches of
  experts bring to a length what may be small, too, and Gemma 4, which has them, divides no scores.
- update: no model is needed, because the new weights are compared with exact AdamW on the layout's OWN gradients, so
  that no error of a gradient is amplified by the division by sqrt(v). The roundings of a dozen operations on each
  element remain, and of 8 more for every earlier step that the moments remember: u (16 + 8 k) in step k, relative to
  |w| + lr m / (sqrt(v) + epsilon), where m is the moving mean of |gradient|. This bound is elementwise and holds for
  every epsilon. Muon's iteration amplifies the rounding of a matrix, by up to 3.4445 per step in directions of small
  singular values, and spreads it to all elements. The factor depends on the matrix, so the reference measures it: it
  computes the update in float32 too, and D is the largest distance between the two. The new weights of the matrix are
  within the same u (16 + 8 k) relative to |w| + lr (largest element of the update + D / u), which lets the trainer be
  as far from exact as one float32 process, times 16 + 8 k; measured: another order of the operations is at most 1.9 D
  from exact.

Each step of a layout is compared with the exact values AT THE LAYOUT'S OWN WEIGHTS before that step, so that no
deviation carries over to the next: if every step is the exact function of the weights before it, the runs are the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AnyOptimizer
from mtrain.plan import num_parameters
from mtrain.verify.core.result import Tolerance

UNIT_ROUNDOFF = 2.0**-24
UNIT_ROUNDOFF_64 = 2.0**-53
_CONFIDENCE = 4.0
RATE_TOLERANCE = 8 * UNIT_ROUNDOFF_64
"""Tolerance of the learning rate, relative to the highest one."""


class Sizes(NamedTuple):
    """Sizes of a shrunk configuration on which the tolerances depend."""

    summands: int
    """N: summands of all consecutive sums in a forward pass."""
    parameters: int
    """P: parameters of the model."""
    tokens: int
    """T: tokens of a global batch."""

    @classmethod
    def of(cls, config: Config) -> Sizes:
        """Counts them."""
        model, length = config.model, config.data.seq_length
        wide = model.with_global_heads()
        of_layers = (wide if model.attention(each) == "global" else model for each in range(model.num_layers))
        layers = sum(_of_layer(each, length) for each in of_layers)
        summands = layers + 2 * model.hidden_size + model.vocab_size  # final norm, logits, softmax
        return cls(summands, num_parameters(model), config.train.global_batch_size * length)


def _of_layer(model: ModelSection, length: int) -> int:
    """Counts the summands of a layer with the model's heads."""
    heads = model.num_attention_heads * model.head_size
    attention = model.hidden_size + model.head_size + 2 * length + heads  # qkv, scores, softmax, values, projection
    return 2 * model.hidden_size + attention + model.hidden_size + model.ffn_hidden_size  # norms, fc1, fc2


def tolerances(config: Config, num_steps: int) -> tuple[Tolerance, ...]:
    """Returns the tolerances of all kinds of quantities for some steps of a shrunk configuration, in order."""
    sizes = Sizes.of(config)
    values = _values(sizes, _OF_LENGTHS if amplifies_rounding(config.model) else "")
    return (*_inputs(), denominator_tolerance(sizes), *values, _update(config.optimizer, num_steps))


def amplifies_rounding(model: ModelSection) -> bool:
    """Says whether the model brings what may be small to a length, so that the weights decide how much rounding is
    amplified."""
    has_branches = model.experts is not None and model.experts.branch_norms
    return model.delta_net is not None or model.value_norm or has_branches


def update_tolerance(step: int) -> float:
    """Returns the tolerance of new weights in a step, counted from 1."""
    return UNIT_ROUNDOFF * (16 + 8 * step)


def amplified(rounding: float) -> float:
    """Returns the tolerance of gradients that one process in float32 has at this distance from the exact ones."""
    return _CONFIDENCE * rounding


def forward_tolerance(sizes: Sizes) -> float:
    """Returns the tolerance of module outputs, relative to the module's largest."""
    return _CONFIDENCE * UNIT_ROUNDOFF * math.sqrt(sizes.summands)


def _inputs() -> tuple[Tolerance, Tolerance]:
    return (
        Tolerance(
            "samples",
            0.0,
            "0",
            {},
            "Share of the rows of a global batch that are not those of the raw samples: tokens, labels, positions, "
            "documents, padding, and what each token counts in each term.",
        ),
        Tolerance(
            "lr",
            RATE_TOLERANCE,
            "8 u64",
            {"u64": UNIT_ROUNDOFF_64},
            "The run's own learning rate around every turn of its schedule and between, against the published formula, "
            "relative to the highest rate.",
        ),
    )


def denominator_tolerance(sizes: Sizes) -> Tolerance:
    """Returns the tolerance of sums of shares."""
    return Tolerance(
        kind="denominator",
        value=sizes.tokens * UNIT_ROUNDOFF_64,
        formula="T u64; 0 where all shares are whole or halves, quarters, ...",
        inputs={"T": sizes.tokens, "u64": UNIT_ROUNDOFF_64},
        meaning=(
            "What a term is divided by, relative to the exact sum over whole rows. T shares are added in float64: "
            "counts must be equal to the last bit, other weights within the rounding of T additions."
        ),
    )


_OF_LENGTHS = (
    " In a model with delta nets, or with norms of values or of branches of experts, within s D where that is more: D "
    "is how far the gradients of one process in float32 are from the exact ones, in the same step."
)


def _values(sizes: Sizes, of_gradients: str) -> tuple[Tolerance, ...]:
    summands, parameters, tokens = sizes
    inputs = {"s": _CONFIDENCE, "u": UNIT_ROUNDOFF, "N": float(summands)}
    unit = _CONFIDENCE * UNIT_ROUNDOFF
    return (
        Tolerance(
            "loss",
            unit * math.sqrt(summands),
            "s u sqrt(N)",
            inputs,
            "The mean of each loss term over the global batch, relative to its exact value. N summands follow each "
            "other in a forward pass.",
        ),
        Tolerance(
            "gradient",
            unit * math.sqrt(2 * summands + tokens),
            "s u sqrt(2 N + T)",
            inputs | {"T": float(tokens)},
            "Every gradient after its division, relative to the largest element of the exact one. The N summands of "
            f"the forward pass are doubled by the backward pass, and T tokens are added up.{of_gradients}",
        ),
        Tolerance(
            "grad_norm",
            unit * math.sqrt(2 * summands + tokens + parameters),
            "s u sqrt(2 N + T + P)",
            inputs | {"T": float(tokens), "P": float(parameters)},
            "The global norm of all gradients before clipping, relative to the exact one: no element of a gradient may "
            f"be further off than above, and the squares of P parameters are added up.{of_gradients}",
        ),
    )


_OF_MATRICES = (
    " Of a matrix that Muon updates: relative to |w| + lr (largest element of the update + D / u), where D is how far "
    "the update of one process in float32 is from the exact one."
)


def _update(optimizer: AnyOptimizer, num_steps: int) -> Tolerance:
    meaning = (
        "Every new weight against exact AdamW on the layout's own gradients, relative to |w| + lr m / (sqrt(v) + "
        "epsilon) element by element: roundings of a dozen operations, and "
        "of 8 more for each of the k steps so far. The value here is that of the last step."
    )
    return Tolerance(
        "update",
        update_tolerance(num_steps),
        "u (16 + 8 k)",
        {"u": UNIT_ROUNDOFF, "k": float(num_steps)},
        meaning + (_OF_MATRICES if optimizer.kind == "muon" else ""),
    )

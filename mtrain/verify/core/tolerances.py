"""Bounds of the distance between a run and the exact one, from precision and number of summands.

u = 2^-24, u64 = 2^-53 and v = 2^-9 are the unit roundoffs of float32, float64 and bfloat16.

- samples: rows are copied and must be equal; weights of tokens up to one rounding to float32.
- lr: a dozen float64 operations: within 8 u64 of the highest rate.
- denominator: shares are added in float64. Whole multiples of a power of two, such as counts and halves, add without
  rounding while the sum is below 2^53 multiples, so sums must be equal. Any other sum of n non-negative shares is
  within n u64 in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), even if its exact
  value is whole.
- loss, gradient: float32 rounding errors are modelled as independent with mean 0; then a sum of n products is within
  s u sqrt(n) of the exact one, relative to the size of the summands, with probability above 1 - 2 exp(-s^2 / 2)
  (Higham and Mary 2019, theorem 3.1; s = 4: 0.07 %). Errors of consecutive sums add as squares: after sums of n1, n2,
  ... summands the bound is s u sqrt(N), N = n1 + n2 + ... A loss follows the forward pass (N), a gradient twice as many
  sums and its own sum over all T tokens. Cancellation makes sums smaller than their summands, so gradients are compared
  with the largest element of their tensor. The worst case, u N, assumes errors of one sign and would be a thousand
  times too lax to see a fault.
- loss, gradient in float64: delta nets normalise queries, keys and outputs, which may be small: a document's first
  output has the factor k^T q, any number around 0. Norms of values and of expert branches do the same. How much
  rounding this amplifies depends on the weights, so the float32 model does not hold. Such models, and all that keep a
  state, also compute each step in float64 at the same weights, and that is judged. The tolerance is s u, one float32
  rounding without amplification. Float64 rounding would need amplification by u / u64 = 2^29 to be as large; measured:
  3e5 at most.
- rounding: float32 losses and gradients of such a run are reported and limited: amplified float32 rounding must not
  exceed s v, one bfloat16 rounding without amplification. Some weights amplify more, in float64 as in float32: with E
  the largest float64 deviation of a gradient in the step, float32 should be off by E u / u64, and may be off by
  s E u / u64 if that is more; measured: 0.9 to 3 E u / u64.
- grad_norm: the norm is compared with that of the layout's OWN gradients, so no model is needed. Squares are added in
  float64 before the division, which rounds 1 / D and each product to float32: 2 u, and a third u for all of float64.
- update: new weights are compared with exact AdamW on the layout's OWN gradients, so division by sqrt(v) amplifies no
  gradient error. What remains are the roundings of a dozen operations per element, and 8 more for every earlier step
  that the moments remember: u (16 + 8 k) in step k, relative to |w| + lr m / (sqrt(v) + epsilon), where m is the moving
  mean of |gradient|; elementwise, for every epsilon. Muon's iteration amplifies the rounding of a matrix by up to
  3.4445 per step in directions of small singular values and spreads it to all elements. The factor depends on the
  matrix, so the reference measures it: D is the largest distance between its float32 and its exact update. New weights
  are within the same u (16 + 8 k) relative to |w| + lr (largest element of the update + D / u): as far from exact as
  one float32 process, times 16 + 8 k; measured: another order of operations is at most 1.9 D from exact.

Each step of a layout is compared with exact values AT THE LAYOUT'S OWN WEIGHTS before it, so no deviation carries over:
if every step is the exact function of the weights before it, the runs are the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import AnyOptimizer
from mtrain.verify.core.result import Tolerance

UNIT_ROUNDOFF = 2.0**-24
UNIT_ROUNDOFF_64 = 2.0**-53
UNIT_ROUNDOFF_BF16 = 2.0**-9
_CONFIDENCE = 4.0
RATE_TOLERANCE = 8 * UNIT_ROUNDOFF_64
"""Tolerance of the learning rate, relative to the highest."""


_SAMPLES = Tolerance(
    "samples",
    0.0,
    "0",
    {},
    "Share of the rows of a global batch that differ from those of the raw samples: tokens, labels, positions, "
    "documents, padding, and each token's weight in each term.",
)
_RATE = Tolerance(
    "lr",
    RATE_TOLERANCE,
    "8 u64",
    {"u64": UNIT_ROUNDOFF_64},
    "The run's own learning rate around every turn of its schedule and between, against the published formula, "
    "relative to the highest rate.",
)
_NORM = Tolerance(
    "grad_norm",
    3 * UNIT_ROUNDOFF,
    "3 u",
    {"u": UNIT_ROUNDOFF},
    "The global norm before clipping, relative to that of the layout's own gradients: dividing them rounds each "
    "element twice after its square was added up.",
)
_LOSS = "The mean of each loss term over the global batch, relative to its exact value."
_GRADIENT = "Every gradient after its division, relative to the largest element of the exact one."
_VALUES = {"loss": _LOSS, "gradient": _GRADIENT}
_IN_FLOAT64 = "Computed in float64, at the weights of the run: float64 rounding is far smaller, even amplified."
_ROUNDING = (
    "Losses and gradients of the run itself in float32, compared like those in float64. s E u / u64 if that is more: "
    "E is the largest deviation of a float64 gradient in the same step."
)


class Sizes(NamedTuple):
    """Sizes on which the tolerances depend."""

    summands: int
    """N: summands of all consecutive sums in a forward pass."""
    tokens: int
    """T: tokens of a global batch."""

    @classmethod
    def of(cls, config: Config) -> Sizes:
        """Counts the sizes of a shrunk configuration."""
        model, length = config.model, config.data.seq_length
        wide = model.with_global_heads()
        of_layers = (wide if model.attention(layer) == "global" else model for layer in range(model.num_layers))
        layers = sum(_of_layer(layer_model, length) for layer_model in of_layers)
        summands = layers + 2 * model.hidden_size + model.vocab_size  # final norm, logits, softmax
        return cls(summands, config.train.global_batch_size * length)


def _of_layer(model: ModelSection, length: int) -> int:
    heads = model.num_attention_heads * model.head_size
    attention = model.hidden_size + model.head_size + 2 * length + heads  # qkv, scores, softmax, values, projection
    return 2 * model.hidden_size + attention + model.hidden_size + model.ffn_hidden_size  # norms, fc1, fc2


def tolerances(config: Config, num_steps: int, has_float64: bool = True) -> tuple[Tolerance, ...]:
    """Returns the tolerances of all kinds, in order, for some steps of a shrunk configuration.

    A model that needs float64 steps but does not make them (`has_float64` is False) gets a limit for float32.
    """
    sizes, once = Sizes.of(config), {"s": _CONFIDENCE, "u": UNIT_ROUNDOFF}
    always = (_NORM, _update(config.optimizer, num_steps))
    before = (_SAMPLES, _RATE, denominator_tolerance(sizes))
    if not needs_float64(config.model):
        return (*before, *_values(sizes, once), *always)
    if not has_float64:
        return (*before, _limit("loss", _LOSS), _limit("gradient", _GRADIENT), *always)
    unit = once["s"] * once["u"]
    judged = (Tolerance(kind, unit, "s u", once, f"{of} {_IN_FLOAT64}") for kind, of in _VALUES.items())
    return (*before, *judged, *always, _limit("rounding", _ROUNDING))


def needs_float64(model: ModelSection) -> bool:
    """Says whether steps are judged in float64: the model keeps a state or normalises what may be small, so its weights
    decide how much rounding is amplified."""
    has_branches = model.experts is not None and model.experts.branch_norms
    return bool(model.recurrent) or model.value_norm or has_branches


def update_tolerance(step: int) -> float:
    """Returns the tolerance of new weights in a step, from 1."""
    return UNIT_ROUNDOFF * (16 + 8 * step)


def rounding_limit(least: float, in_float64: float) -> float:
    """Returns the limit of float32 rounding: `least`, or more if a float64 gradient deviates by `in_float64`."""
    return max(least, amplified(in_float64 * UNIT_ROUNDOFF / UNIT_ROUNDOFF_64))


def amplified(rounding: float) -> float:
    """Returns the tolerance for another low-precision computation whose rounding has this size."""
    return _CONFIDENCE * rounding


def denominator_tolerance(sizes: Sizes) -> Tolerance:
    """Returns the tolerance of sums of shares."""
    return Tolerance(
        kind="denominator",
        value=sizes.tokens * UNIT_ROUNDOFF_64,
        formula="T u64; 0 where all shares are whole or halves, quarters, ...",
        inputs={"T": sizes.tokens, "u64": UNIT_ROUNDOFF_64},
        meaning=(
            "A term's denominator, relative to the exact sum over whole rows. T shares are added in float64: counts "
            "must be equal to the last bit, other weights within the rounding of T additions."
        ),
    )


def _values(sizes: Sizes, once: dict[str, float]) -> tuple[Tolerance, Tolerance]:
    summands, tokens = sizes
    unit, inputs = once["s"] * once["u"], once | {"N": float(summands)}
    in_gradient, with_tokens = unit * math.sqrt(2 * summands + tokens), inputs | {"T": float(tokens)}
    loss = f"{_LOSS} N summands follow each other in a forward pass."
    gradient = (
        f"{_GRADIENT} The N summands of the forward pass are doubled by the backward pass, and T tokens are added up."
    )
    return (
        Tolerance("loss", unit * math.sqrt(summands), "s u sqrt(N)", inputs, loss),
        Tolerance("gradient", in_gradient, "s u sqrt(2 N + T)", with_tokens, gradient),
    )


def _limit(kind: str, meaning: str) -> Tolerance:
    why = (
        "A limit, not a bound: the weights decide how much the model amplifies rounding. Amplified float32 rounding "
        "must not exceed one unamplified rounding to bfloat16; mtrain verify parity judges such models in float64."
    )
    inputs = {"s": _CONFIDENCE, "v": UNIT_ROUNDOFF_BF16}
    return Tolerance(kind, _CONFIDENCE * UNIT_ROUNDOFF_BF16, "s v", inputs, f"{meaning} {why}")


_OF_MATRICES = (
    " Of a matrix that Muon updates: relative to |w| + lr (largest element of the update + D / u), where D is how far "
    "the update of one process in float32 is from the exact one."
)


def _update(optimizer: AnyOptimizer, num_steps: int) -> Tolerance:
    meaning = (
        "Every new weight against exact AdamW on the layout's own gradients, relative to |w| + lr m / (sqrt(v) + "
        "epsilon) element by element: roundings of a dozen operations, and of 8 more for each of the k steps so far. "
        "The value here is that of the last step."
    )
    meaning += _OF_MATRICES if optimizer.kind == "muon" else ""
    inputs = {"u": UNIT_ROUNDOFF, "k": float(num_steps)}
    return Tolerance("update", update_tolerance(num_steps), "u (16 + 8 k)", inputs, meaning)

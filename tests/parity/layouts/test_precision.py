"""bf16 and fp16 agree with float64 as far as their rounding lets them, under every kind of layout.

A value of p significant bits carries a relative error of at most u = 2^-p: 2^-8 for bf16, 2^-11 for fp16. The longest
path through the four layers rounds about 13 times a layer on the way forward (norm, qkv, rotation, scores,
probabilities, context, projection, residual; norm, fc1, activation, fc2, residual), and as often on the way back:
K = 2 x 4 x 13 = 104 for a gradient; latent attention rounds two times more in a layer, a latent and its norm.
Independent roundings add up in quadrature to u x sqrt(K) = 10 u for the 2-norm of a tensor's gradient, and over the
half of them to 7 u for a token's loss, whose errors the mean over tokens makes only smaller. Bounds are twice that.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config import Config
from tests.parity import ranks
from tests.parity.batches import three_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import at_night, initial_parameters, relative, run_case, run_oracle, without_padding
from tests.parity.families import DEEPSEEK_ATTENTION, GEMMA, GPT_OSS
from tests.parity.ranks import Arrays
from tests.pool import Pool
from tests.reference import StepResult

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
LOSS_ROUNDINGS, GRADIENT_ROUNDINGS = 52, 104
MORE_BY_LATENTS = 8
"""Number of additional roundings on the way forward; as many on the way back."""
MORE_BY_NORMS, MORE_BY_BIASES = 17, 16
"""Number of additional roundings. Gemma: four norms in each of four layers, scaled embeddings; GPT-OSS: four biases
each."""
GPT_OSS_ATTENTION = {key: value for key, value in GPT_OSS.items() if key != "model__experts"}
CASES = [
    lean(each, 4)
    for each in (case(), case(tp=2, sp=True, pp=2), case(pp=2, vpp=2, dp=2), case(cp=2, cp_comm="ulysses", dp=2))
]


def worst_distance(found: Arrays | None, exact: StepResult, config: Config) -> float:
    """Returns the largest relative distance of a tensor in the 2-norm."""
    real = without_padding(found, config.model.vocab_size)
    expected = {name: value.numpy() for name, value in exact.gradients.items()}
    return max(float(np.linalg.norm(real[name] - value) / np.linalg.norm(value)) for name, value in expected.items())


def assert_near_the_oracle(
    pool: Pool, precision: str, case: Case, num_steps: int = 2, more: int = 0, **architecture: Any
) -> None:
    """Checks a step whose model has `more` roundings on the way forward than a plain one."""
    changes = {"train__precision": precision, "train__initial_loss_scale": 2.0**10, **architecture}
    batches, config = three_steps()[:num_steps], case.config(**changes)
    steps = run_case(pool, case, batches, **changes).steps
    oracle, unit = run_oracle(config, batches), ROUNDING[precision]
    of_loss = 2 * math.sqrt(LOSS_ROUNDINGS + more) * unit
    of_gradient = 2 * math.sqrt(GRADIENT_ROUNDINGS + 2 * more) * unit
    for step, exact in zip(steps, oracle, strict=True):
        assert step.terms["main"].denominator == exact.denominators["main"]
        assert relative(step.loss, exact.loss) < of_loss
        assert relative(step.grad_norm, exact.grad_norm) < of_gradient
        assert worst_distance(step.gradients, exact, config) < of_gradient


@pytest.mark.parametrize(
    ("precision", "case"),
    [
        ("fp16", CASES[2]),
        ("fp16", lean(case(pp=2, dp=2, shard="weights"), 4)),
        ("bf16", lean(case(tp=2, sp=True, dp=2, shard="weights"), 4)),
        # the day has bf16 under tp and cp in one of the families
        *(at_night("bf16", each) for each in CASES),
        at_night("fp16", CASES[1]),
    ],
    ids=str,
)
def test_half_precision_is_near_the_oracle(pool: Pool, precision: str, case: Case) -> None:
    assert_near_the_oracle(pool, precision, case)


@pytest.mark.nightly  # the day has latents in float32, and every other module in half precision
@pytest.mark.parametrize("case", [case(8, tp=2, sp=True, cp=2), case(8, pp=2, vpp=2, cp=2, cp_comm="ulysses")], ids=str)
def test_latents_in_half_precision_are_near_the_oracle(pool: Pool, case: Case) -> None:
    """Tests one step: the few tokens of the second one amplify rounding by two, on one process as on four."""
    assert_near_the_oracle(pool, "bf16", case, 1, MORE_BY_LATENTS, **DEEPSEEK_ATTENTION)


@pytest.mark.nightly  # the day has depths in float32, and the layers of which they are made in half precision
@pytest.mark.parametrize("precision", ROUNDING)
def test_depths_in_half_precision(pool: Pool, precision: str) -> None:
    """Allows for one more layer, and four more roundings: two norms, the joint projection and the final norm."""
    one = case(8, tp=2, sp=True, pp=2)
    roundings = GRADIENT_ROUNDINGS + 2 * (13 + 4)
    changes = {"train__precision": precision, "train__initial_loss_scale": 2.0**10, "model__mtp_depths": 1}
    batches, config = three_steps()[:2], one.config(**changes)
    oracle, bound = run_oracle(config, batches), 2 * math.sqrt(roundings) * ROUNDING[precision]
    for step, exact in zip(run_case(pool, one, batches, **changes).steps, oracle, strict=True):
        assert {term: total.denominator for term, total in step.terms.items()} == exact.denominators
        assert relative(step.loss, exact.loss) < bound
        assert relative(step.grad_norm, exact.grad_norm) < bound
        assert worst_distance(step.gradients, exact, config) < bound


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param(GEMMA, MORE_BY_NORMS, id="gemma"),
        # the day has its sinks and biases in float32
        pytest.param(GPT_OSS_ATTENTION, MORE_BY_BIASES, id="gpt_oss", marks=pytest.mark.nightly),
    ],
)
def test_families_in_half_precision_are_near_the_oracle(pool: Pool, family: dict[str, Any], more: int) -> None:
    """Leaves experts out: a token whose two best are nearly alike goes elsewhere under rounding."""
    assert_near_the_oracle(pool, "bf16", case(8, tp=2, sp=True, cp=2, cp_comm="ulysses"), 1, more, **family)


@pytest.mark.parametrize(
    "case",
    [
        lean(case(pp=2)),
        lean(case(dp=2, shard="weights")),
        *map(at_night, [lean(case()), lean(case(tp=2, sp=True, pp=2))]),
    ],
    ids=str,
)
def test_an_overflow_is_skipped_and_lowers_the_loss_scale(pool: Pool, case: Case) -> None:
    config = case.config(train__precision="fp16", train__initial_loss_scale=2.0**22)
    batch = three_steps()[0]
    everyone = pool.run(ranks.scaled_steps, case.resolved(config), config, initial_parameters(config), [batch] * 6)
    for steps in everyone:
        assert [step.overflowed for step in steps] == [step.overflowed for step in everyone[0]]
        assert [step.loss_scale for step in steps] == [step.loss_scale for step in everyone[0]]
        assert all(step.changed != step.overflowed for step in steps)
    steps = everyone[0]
    first_good = [step.overflowed for step in steps].index(False)
    assert first_good >= 2
    # megatron-core halves from the second overflow in a row on
    scales = [2.0 ** (22 - overflows) for overflows in range(first_good)]
    assert [step.loss_scale for step in steps[:first_good]] == scales
    (exact,) = run_oracle(config, [batch])
    distance = relative(steps[first_good].grad_norm, exact.grad_norm)
    assert distance < 2 * math.sqrt(GRADIENT_ROUNDINGS) * ROUNDING["fp16"]


@pytest.mark.parametrize("case", [lean(case(pp=2, cp=2)), at_night(lean(case(tp=2, dp=2)))], ids=str)
def test_the_numerator_scale_changes_no_bit(pool: Pool, case: Case) -> None:
    config = case.config()
    arguments = (config, initial_parameters(config), three_steps()[0], [1.0, 2.0**-9, 2.0**7])
    plain, small, large = pool.run(ranks.scaled_gradients, case.resolved(config), *arguments)[0]
    for name, value in plain.items():
        assert value.any()
        assert value.tobytes() == small[name].tobytes() == large[name].tobytes()


def test_plain_sums_would_overflow_in_fp16(pool: Pool) -> None:
    """Loses a step with the usual loss scale without the numerator_scale; with it, the step is near the oracle."""
    one = case(4)
    config = one.config(train__precision="fp16", train__initial_loss_scale=2.0**16)
    batch = three_steps()[0]
    tokens = sum(sample.mask.sum() for sample in batch)
    near = 2.0 ** -round(math.log2(tokens))
    plain, tamed = pool.run(
        ranks.scaled_gradients, one.resolved(config), config, initial_parameters(config), batch, [1.0, near]
    )[0]
    assert not all(np.isfinite(value).all() for value in plain.values())
    (exact,) = run_oracle(config, [batch])
    bound = 2 * math.sqrt(GRADIENT_ROUNDINGS) * ROUNDING["fp16"]
    assert worst_distance(tamed, exact, config) < bound
    (step,) = run_case(pool, one, [batch], train__precision="fp16", train__initial_loss_scale=2.0**16).steps
    assert worst_distance(step.gradients, exact, config) < bound
    assert torch.finfo(torch.float16).max < 2.0**16

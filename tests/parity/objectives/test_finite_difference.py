"""Gradients match the logged loss: (L(w + e v) - L(w - e v)) / 2e = <gradient, v>.

The oracle is not used. In float32 a logged loss of 4 is rounded at 3e-7; with e = 0.008 the
differences are about 0.03, so rounding leaves 3e-5, and combining two step sizes cancels the error in e^2.
"""

from typing import Any

import numpy as np
import pytest

from tests.parity import ranks
from tests.parity.batches import weighted_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import at_night, initial_parameters, run_case, without_padding
from tests.pool import Pool

E = 0.008
OBJECTIVES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"loss__aggregation": "seq-mean-token-mean"},
    "with-z-loss": {
        "loss__aggregation": "seq-mean-token-sqrt",
        "loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.05}},
    },
}
CASES = [*map(lean, [case(tp=2, sp=True, pp=2), case(cp=2, dp=2), case(pp=2, vpp=2), case(cp=4, cp_comm="ulysses")])]


DAY = [("seq-mean-token-mean", lean(case(cp=2)))]
RUNS = [
    ("with-z-loss", CASES[2]),
    ("token-mean", CASES[0]),
    ("seq-mean-token-mean", CASES[1]),
    ("with-z-loss", CASES[3]),
]
"""Runs with every objective and every layout: test_aggregations.py has them by day."""


@pytest.mark.parametrize(("objective", "case"), [*DAY, *(at_night(*run) for run in RUNS)], ids=str)
def test_logged_losses_have_the_slope_of_the_gradient(pool: Pool, objective: str, case: Case) -> None:
    config, batch = case.config(**OBJECTIVES[objective]), weighted_steps()[0]
    (step,) = run_case(pool, case, [batch], **OBJECTIVES[objective]).steps
    gradients = without_padding(step.gradients, config.model.vocab_size)
    rng = np.random.default_rng(5)
    # half along the gradient, so that the slope is not small by chance, and half anywhere
    size = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in gradients.values()))
    anywhere = {name: rng.standard_normal(value.shape) for name, value in gradients.items()}
    length = np.sqrt(sum(float((value**2).sum()) for value in anywhere.values()))
    direction = {name: 0.5 * value / size + 0.5 * anywhere[name] / length for name, value in gradients.items()}
    slope = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    arguments = (config, initial_parameters(config), direction, [E, -E, 2 * E, -2 * E], batch)
    one, minus_one, two, minus_two = pool.run(ranks.losses_along, case.resolved(config), *arguments)[0]
    found = (8 * (one - minus_one) - (two - minus_two)) / (12 * E)
    assert slope > 0.3
    assert found == pytest.approx(slope, rel=1e-4)

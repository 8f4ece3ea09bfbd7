"""Random layouts, models, losses, masks and packings: the law is checked against the float64 oracle.

In the suite a fixed handful along each axis. At night any number, from new seeds, with shrinking and a database of the
examples that failed:

    python -m pytest tests/parity/layouts/test_property_search.py --max-examples 500
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from mtrain.verify.reference.objective import cross_entropy, weighted
from tests.parity.compare import TOLERANCE
from tests.parity.draws import AXES, trials
from tests.parity.draws_of_models import PLAIN
from tests.parity.search import TieError, Trial, judge
from tests.paths import ROOT
from tests.pool import Pool
from tests.reference import USER_TERMS

NUM_EXAMPLES, NUM_RANKS = 2, 4
"""Number of examples along each axis and of their ranks, in the suite."""
NUM_AT_A_TIME = 10
"""Number of examples of one search: later ones would be variants of earlier ones."""
DATABASE = ROOT / ".hypothesis" / "parity"
_SLOW_IS_FINE = settings(deadline=None, suppress_health_check=list(HealthCheck))
_FIXED = settings(_SLOW_IS_FINE, derandomize=True, database=None, phases=[Phase.generate])


@pytest.mark.nightly  # by day a search along cp finds a fault, below; layouts: test_layouts.py
@pytest.mark.parametrize("axis", [*AXES, "ep", "ring"])
def test_random_runs_are_those_of_one_process(pool: Pool, axis: str, request: pytest.FixtureRequest) -> None:
    def law_holds(trial: Trial) -> None:
        try:
            verdict = judge(pool, trial)
        except TieError:
            reject()
        verdict.assert_holds()

    num_examples = request.config.getoption("--max-examples")
    if num_examples is None:
        settings(_FIXED, max_examples=NUM_EXAMPLES)(given(trials(axis, max_ranks=NUM_RANKS))(law_holds))()
    else:
        search(law_holds, axis, num_examples // (len(AXES) + 2))


def search(law: Callable[[Trial], None], axis: str, num_examples: int) -> None:
    """Tries new examples; a failing one is shrunk, shown and kept."""
    database = DirectoryBasedExampleDatabase(DATABASE)
    options = settings(_SLOW_IS_FINE, derandomize=False, database=database, print_blob=True)
    for done in range(0, num_examples, NUM_AT_A_TIME):
        seed = random.SystemRandom().getrandbits(32)
        size = min(NUM_AT_A_TIME, num_examples - done)
        try:
            hypothesis.seed(seed)(settings(options, max_examples=size)(given(trials(axis))(law)))()
        except BaseException as error:
            error.add_note(f"seed {seed}; failing examples are kept in {DATABASE}: the next search tries them first")
            raise


def test_a_mean_of_means_is_found(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the search sees a fault: each microbatch divided by its own tokens."""
    name = "tests.parity.naive:mean_of_means"
    plain = lambda scene: weighted(cross_entropy(scene.logits, scene.labels), scene.weights)  # noqa: E731
    monkeypatch.setitem(USER_TERMS, name, plain)
    planted: dict[str, Any] = {
        "loss__function": name,
        "loss__denominator": "measured",
        "loss__aggregation": "token-mean",
    }
    planted |= {"loss__norm_length": None, "loss__length_power": None, "loss__side_terms": {}}
    deviations = []

    @settings(_FIXED, max_examples=2 * NUM_EXAMPLES)
    @given(trials("cp", max_ranks=2, kinds=PLAIN))
    def observe(trial: Trial) -> None:
        rows = tuple(tuple(replace(row, weight=1.0, is_fractional=False) for row in step) for step in trial.steps)
        verdict = judge(pool, replace(trial, steps=rows, changes={**trial.changes, **planted}))
        deviations.append(verdict.deviation.gradient if verdict.wrong_sums else 0.0)

    observe()
    assert max(deviations) > 1000 * TOLERANCE

"""Random layouts, models, losses, masks and packings: the law is checked against the float64 oracle.

In the suite a fixed handful. At night as many as asked for, from a new seed, with shrinking and a database of examples:

    python -m pytest tests/parity/test_property_search.py --max-examples 500
"""

import random
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.parity.compare import TOLERANCE
from tests.parity.search import Trial, judge, trials
from tests.pool import Pool

NUM_EXAMPLES = 24
DATABASE = Path(__file__).parents[2] / ".hypothesis" / "parity"
_SLOW_IS_FINE = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_random_runs_are_those_of_one_process(pool: Pool, request: pytest.FixtureRequest) -> None:
    @given(trials())
    def law_holds(trial: Trial) -> None:
        found, wrong = judge(pool, trial)
        assert not wrong
        assert max(found) <= TOLERANCE, f"{found} is not within {TOLERANCE}"

    num_examples = request.config.getoption("--max-examples")
    if num_examples is None:
        fixed = settings(
            _SLOW_IS_FINE, max_examples=NUM_EXAMPLES, derandomize=True, database=None, phases=[Phase.generate]
        )
        fixed(law_holds)()
        return
    number = random.SystemRandom().getrandbits(32)
    database = DirectoryBasedExampleDatabase(DATABASE)
    searching = settings(
        _SLOW_IS_FINE, max_examples=num_examples, derandomize=False, database=database, print_blob=True
    )
    try:
        hypothesis.seed(number)(searching(law_holds))()
    except BaseException as error:
        error.add_note(f"seed {number}; the failing examples are in {DATABASE} and are tried first by the next search")
        raise

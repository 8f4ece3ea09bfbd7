"""A fixed run gives the losses that it always gave."""

import json

import pytest

from tests.golden.golden_losses import GOLDEN, NUM_STEPS, measured
from tests.pool import Pool


def test_losses_are_the_recorded_ones(pool: Pool) -> None:
    recorded = json.loads(GOLDEN.read_text())
    assert len(recorded) == NUM_STEPS
    # other processors add in another order: 1e-6, where a real change shows at 1e-4 and more
    assert measured(pool) == pytest.approx(recorded, rel=1e-6), (
        "the run has changed; if it was meant to, `python -m tests.golden.golden_losses` records it, and the commit "
        "says why"
    )

"""What a step reports."""

import math

from mtrain.loss.pair import MAIN_TERM
from mtrain.mcore.engine.loss_reduction import NO_TOKENS, StepTotals, TermTotals

COEFFICIENTS = {MAIN_TERM: 1.0, "z": 0.25}


def totals(**terms: tuple[float, float]) -> StepTotals:
    """Builds totals from (numerator, denominator) by term; the squared norm is 36."""
    found = {term: TermTotals(*pair, planned=pair[1]) for term, pair in terms.items()}
    return StepTotals(found, False, NO_TOKENS, 64, 36.0, COEFFICIENTS)


def test_the_objective_adds_means_by_their_coefficients() -> None:
    step = totals(main=(6.0, 4.0), z=(14.0, 7.0))
    assert (step.loss, step.objective) == (1.5, 2.0)
    assert step.grad_norm == 6.0 / 4.0


def test_an_empty_term_reports_0() -> None:
    step = totals(main=(6.0, 4.0), z=(0.0, 0.0))
    assert step.terms["z"].mean == 0.0
    assert step.objective == 1.5


def test_an_empty_batch_has_no_gradient() -> None:
    step = totals(main=(0.0, 0.0), z=(3.0, 1.0))
    assert step.is_empty
    assert step.grad_norm == 0.0
    assert not math.isnan(step.loss)

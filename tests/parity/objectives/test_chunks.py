"""Logits a few tokens at a time, and only of tokens that a term counts: the same run as with whole logits.

By default every parity test of masked batches selects tokens; here they are cut into chunks as well.
"""

from typing import Any

import numpy as np
import pytest

from mtrain.base.errors import ConfigError
from mtrain.config.schema.loss import LossSection
from mtrain.core.loss.objective import Objective
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity import teacher_ranks
from tests.parity.batches import documents_steps, three_steps, weighted_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    TEACHER_SEED,
    at_night,
    between,
    deviation,
    initial_parameters,
    relative,
    run_case,
    run_oracle,
)
from tests.parity.ranks import Run, train_each
from tests.pool import Pool

CHUNK = {"loss__chunk_tokens": 7}
TERMS: dict[str, Any] = CHUNK | {
    "loss__aggregation": "seq-mean-token-mean",
    "loss__options": {"label_smoothing": 0.1},
    "loss__empty_sequences": "include",
    "loss__side_terms": {
        "z": {"function": "z_loss", "coefficient": 0.05, "aggregation": "token-mean"},
        "entropy": {"function": "entropy", "coefficient": -0.2, "aggregation": "seq-mean-token-sum"},
    },
}
TIED: dict[str, Any] = {"model__tied_embeddings": True}
AHEAD: dict[str, Any] = {"model__mtp_depths": 2, "loss__mtp_coefficient": 0.6}
OVERLAPPED: dict[str, Any] = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
RUNS: list[tuple[Case, dict[str, Any]]] = [
    (lean(case()), TIED),
    (lean(case(tp=2, dp=2)), TIED | OVERLAPPED),
    # four layers: with two the terms cancel so far that float32 leaves 1e-5 of their sum
    (case(4, tp=2, sp=True, pp=2), TIED),
    (lean(case(pp=2, vpp=2, cp=2)), AHEAD | OVERLAPPED),
]
DAY: list[tuple[Case, dict[str, Any]]] = [
    (lean(case(cp=2)), OVERLAPPED),
    (lean(case(tp=2, sp=True, pp=2)), AHEAD | TIED),
]
"""Cases with every axis, and every model that shares its table."""


@pytest.mark.parametrize(
    ("case", "model"),
    [*DAY, *(at_night(*run) for run in RUNS)],
    ids=lambda each: str(each) if isinstance(each, Case) else "-",
)
def test_several_terms_in_chunks(pool: Pool, case: Case, model: dict[str, Any]) -> None:
    """Has weights of all sizes, and a step whose loss tokens are all on one context-parallel rank."""
    changes = TERMS | model
    batches = [*weighted_steps()[:1], *([three_steps()[1]] if "cp" in case.layout else [])]
    config = case.config(**changes)
    deviation(run_case(pool, case, batches, **changes), run_oracle(config, batches), config).assert_below()


def test_a_teacher_in_chunks(pool: Pool) -> None:
    """Tests a pipeline, in which the teacher's hidden states wait for the student."""
    terms = {
        "loss__teacher": {"checkpoint": "not read here"},
        "loss__side_terms": {"kl": {"function": "distillation", "coefficient": 0.7, "aggregation": "token-mean"}},
    }
    one, other = (
        case(4, num_layers=2, tp=2, sp=True, pp=2),
        {"model__hidden_size": 48, "model__ffn_hidden_size": 64} | TIED,
    )
    config, teacher = one.config(**CHUNK, **terms), one.config(**other)
    batches = weighted_steps()[:1]
    given = (config, initial_parameters(config), teacher, initial_parameters(teacher, TEACHER_SEED), batches)
    reports = pool.run(teacher_ranks.train_with_teacher, one.resolved(config), *given)
    deviation(reports[0].outcome, run_oracle(config, batches, teacher), config).assert_below()


@pytest.mark.parametrize("precision", ["bf16", at_night("fp16")])
@pytest.mark.nightly  # by day in float32, above; half precision of whole logits: tests/parity/layouts/test_precision.py
def test_half_precision_is_that_of_whole_logits(pool: Pool, precision: str) -> None:
    """Bounds are tighter than half precision's: only the order of sums differs, in values that are rounded to 8
    bits."""
    one = case(4, num_layers=2, tp=2, sp=True)
    changes = {"train__precision": precision, "train__initial_loss_scale": 2.0**10}
    configs = [one.config(**changes, loss__chunk_tokens=chunk) for chunk in (7, "whole")]
    runs = [Run(config, initial_parameters(config), three_steps()[:1]) for config in configs]
    cut, whole = pool.run(train_each, one.resolved(configs[0]), runs)[0]
    (found,), (expected,) = cut.steps, whole.steps
    assert found.terms["main"].denominator == expected.terms["main"].denominator
    assert relative(found.loss, expected.loss) < 1e-5
    assert found.gradients is not None
    assert expected.gradients is not None
    for name, value in expected.gradients.items():
        assert np.linalg.norm(found.gradients[name] - value) <= 2.0**-7 * np.linalg.norm(value)


def test_documents_that_count_whole_are_left_whole_to_the_bit(pool: Pool) -> None:
    """Checks that auto changes nothing where nearly every token counts and the microbatch is small."""
    one = case(8, num_layers=2)
    batches = documents_steps()[:1]
    every = [[sample_with_every_token(sample) for sample in batch] for batch in batches]
    auto, whole = (run_case(pool, one, every, loss__chunk_tokens=chunk) for chunk in ("auto", "whole"))
    assert max(between(auto, whole, one.config())) == 0.0


def sample_with_every_token(sample: Any) -> Any:
    """Returns the same row with every token counted."""
    return sample.__class__(tokens=sample.tokens, labels=sample.tokens, mask=np.ones(len(sample.mask)), weight=1.0)


UNMARKED = "tests.parity.losses:preference"


@pytest.mark.fault(
    "input",
    "a number as loss.chunk_tokens with a loss function that may look at whole sequences",
    happens="refused before the run starts, naming the function and its term",
    exit_code=2,
)
def test_a_function_that_needs_whole_logits_is_refused_under_a_number(notice: Notice) -> None:
    section = LossSection(function=UNMARKED, options={"slope": 0.1}, chunk_tokens=64)
    with (
        notice,
        refuses(ConfigError, "'main'", "per_token") as refused,
    ):
        Objective.from_config(section)
    assert refused.value.exit_code == notice.exit_code
    for chunk_tokens in ("auto", "whole"):
        Objective.from_config(section.model_copy(update={"chunk_tokens": chunk_tokens}))
    Objective.from_config(LossSection(chunk_tokens=64))

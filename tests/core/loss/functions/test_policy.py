"""Policy losses of one process: however rollouts are cut, their pairs and diagnostics add up to the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config.schema.loss import MAIN_TERM, LossSection
from mtrain.core.loss.functions.divergence import kl_loss
from mtrain.core.loss.functions.likelihood import dft_loss
from mtrain.core.loss.functions.load import extras_of, load_loss_function
from mtrain.core.loss.functions.policy import cispo_loss, gspo_loss, ppo_loss
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import Extras, LossPair, TermInputs, diagnosed, joined, reports
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from tests.core.loss.microbatches import term_inputs
from tests.messages import refuses

VOCAB, SEQ = 5, 6
LOSSES: dict[str, Callable[[TermInputs], LossPair]] = {
    "ppo": partial(ppo_loss, clip_high=0.3, dual_clip=2.0, rollout_cap=1.5),
    "ppo of sequences": partial(
        ppo_loss, rollout_cap=1.5, rollout_floor=0.7, rollout_correction="sequence-mean-mask", temperature=0.6
    ),
    "gspo": partial(gspo_loss, clip_low=0.1, clip_high=0.2),
    "gspo with weights": partial(gspo_loss, rollout_cap=2.0, rollout_correction="sequence-truncate"),
    "cispo": partial(cispo_loss, clip_low=0.5),
    "k3": kl_loss,
    "k2": partial(kl_loss, estimator="k2"),
    "dft": dft_loss,
}
SEQUENCES = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=SEQ, max_size=SEQ),  # all masked, and answers of one token, among them
        st.sampled_from([0.0, 1.0, -1.5]),  # nothing to win
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=5,
)


def inputs_of(rows: list[tuple[list[bool], float, int]], leaf: Tensor, numbers: list[int]) -> TermInputs:
    """Builds a microbatch of some sequences; masked tokens have numbers that no policy gives."""
    masks = torch.tensor([rows[number][0] for number in numbers])
    drawn = [torch.randn(3, SEQ, generator=torch.Generator().manual_seed(rows[number][2])) for number in numbers]
    # exp of these before the mask would give inf, and a gradient of nan
    absurd = {"old_logprobs": -300.0, "rollout_logprobs": -900.0, "ref_logprobs": 300.0}
    others = {
        name: torch.where(masks, torch.stack([each[number] for each in drawn]) - 1.6, value)
        for number, (name, value) in enumerate(absurd.items())
    }
    advantages = torch.tensor([[rows[number][1]] * SEQ for number in numbers])
    labels = torch.tensor([[(rows[number][2] + t) % VOCAB for t in range(SEQ)] for number in numbers])
    logits = leaf[numbers].transpose(0, 1)
    extras = Extras(advantages=advantages, **others)
    given = (VocabParallelLogits(logits, None, 0, VOCAB), labels, masks.float(), masks.double(), labels)
    return TermInputs(*given, extras=extras)


def evaluated(
    loss: Any, rows: Any, leaf: Tensor, parts: list[list[int]]
) -> tuple[list[float], Tensor, Mapping[str, Any]]:
    """Returns sums of numerators and denominators, the gradient, and the diagnostics of all parts."""
    pairs = [loss(inputs_of(rows, leaf, part)) for part in parts]
    (gradient,) = torch.autograd.grad(sum(pair.numerator for pair in pairs), leaf)
    found: dict[str, Tensor] = {}
    for pair in pairs:
        found = {name: joined(found[name], each) if name in found else each for name, each in pair.diagnostics.items()}
    sums = [sum(float(part.detach()) for part in kind) for kind in zip(*pairs, strict=True)]
    return sums, gradient, {name: each.tolist() for name, each in found.items()}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(rows=SEQUENCES, data=st.data())
def test_rollouts_add_up_however_they_are_cut(name: str, rows: Any, data: st.DataObject) -> None:
    leaf = torch.randn(len(rows), SEQ, VOCAB, generator=torch.Generator().manual_seed(len(rows))).requires_grad_()
    numbers = list(range(len(rows)))
    cuts = sorted(data.draw(st.sets(st.sampled_from(numbers[1:]))) if len(rows) > 1 else set())
    parts = [numbers[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    whole, cut = (evaluated(LOSSES[name], rows, leaf, each) for each in ([numbers], parts))
    assert cut[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-5)
    torch.testing.assert_close(cut[1], whole[1])
    assert cut[2].keys() == whole[2].keys()
    for diagnostic, value in whole[2].items():
        assert cut[2][diagnostic] == pytest.approx(value, rel=1e-6), diagnostic
    masked = ~torch.tensor([row[0] for row in rows])
    assert not whole[1][masked].any(), "what is masked has a gradient of exactly 0, and no nan"
    has_advantage = torch.tensor([row[1] != 0 for row in rows])
    if name.startswith(("ppo", "gspo", "cispo")):
        assert not whole[1][~has_advantage].any(), "where there is nothing to win nothing moves"


def test_without_a_loss_token_there_is_nothing_to_report() -> None:
    rows = [([False] * SEQ, 1.0, 3)]
    leaf = torch.zeros(1, SEQ, VOCAB, requires_grad=True)
    sums, gradient, found = evaluated(LOSSES["ppo"], rows, leaf, [[0]])
    assert (sums, bool(gradient.any())) == ([0.0, 0.0], False)
    nothing = [0.0, 0.0]
    assert found == {
        "clip_fraction": nothing,
        "approximate_kl": nothing,
        "ratio": nothing,
        "ratio_max": -math.inf,
    }


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_the_policy_as_it_is_can_be_the_old_one(name: str) -> None:
    """Ratios are 1 to the bit; loss and gradient equal those with old_logprobs of the policy itself."""
    rows = [([True, True, False, True, True, True], 1.5, 3), ([False, True, False, False, False, False], -1.0, 4)]
    leaf = torch.randn(2, SEQ, VOCAB, generator=torch.Generator().manual_seed(2), requires_grad=True)
    function = load_loss_function(name, {"old_logprobs": False})
    assert extras_of(function) == ("advantages",)
    assert extras_of(load_loss_function(name, {"rollout_floor": 0.5})) == (
        "advantages",
        "old_logprobs",
        "rollout_logprobs",
    )
    inputs = inputs_of(rows, leaf, [0, 1])
    known = -inputs.logits.cross_entropy(inputs.labels).detach()
    given = replace(inputs, extras=Extras({**inputs.extras, "old_logprobs": known}))
    bare = replace(inputs, extras=Extras(advantages=inputs.extras["advantages"]))
    found, expected = function(bare), load_loss_function(name, {})(given)
    assert found.diagnostics["ratio"].tolist() == [6.0, 6.0]
    assert found.diagnostics["ratio_max"] == 1
    assert found.numerator == expected.numerator
    gradients = [torch.autograd.grad(each.numerator, leaf, retain_graph=True)[0] for each in (found, expected)]
    assert gradients[0].any()
    assert torch.equal(*gradients)


@reports("margin")
def forgetful(inputs: TermInputs) -> LossPair:
    """Reports other diagnostics than it declares."""
    pair = LossPair(inputs.logits.cross_entropy(inputs.labels).sum(), inputs.denominator_weights.sum())
    return diagnosed(pair, inputs, {"margins": inputs.weights})


def test_a_function_that_reports_something_else_than_it_says_is_refused() -> None:
    objective = Objective.from_config(LossSection(function="tests.core.loss.functions.test_policy:forgetful"))
    with refuses(ConfigError, "'margins'", "'margin'"):
        objective.pairs({MAIN_TERM: term_inputs(torch.ones(1, 3))})


@pytest.mark.parametrize(
    ("function", "options", "fact"),
    [
        ("ppo", {"clip_low": 1.5}, "clip_low=1.5"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip=1.0"),
        ("cispo", {"rollout_cap": 0}, "rollout_cap=0"),
        ("kl", {"estimator": "k4"}, "estimator='k4'"),
        ("gspo", {"rollout_floor": 2.0, "rollout_cap": 1.0}, "rollout_floor=2.0 is above options.rollout_cap=1.0"),
        ("ppo", {"rollout_cap": 2.0, "rollout_correction": "sequence"}, "sequence-mean-mask"),
        ("ppo", {"rollout_correction": "token-mask"}, "rollout_correction needs a bound"),
        ("kl", {"temperature": 0}, "temperature=0"),
    ],
)
def test_options_that_mean_nothing_are_refused(function: str, options: dict[str, Any], fact: str) -> None:
    with refuses(ValueError, fact):
        LossSection(function=function, options=options)

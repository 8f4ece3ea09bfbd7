"""Losses of the reference: those of policies from TRL, those of distributions from torch, those of routers by hand."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from mtrain.config.schema.experts import ExpertsSection
from mtrain.verify.reference.model.experts import Routed, moved_bias, routed, router_numerator, router_shares
from mtrain.verify.reference.objective import known_losses, replayed
from mtrain.verify.reference.policy import policy_losses
from mtrain.verify.reference.text import Rows
from tests.config.samples import config
from tests.trl_losses import policy_loss

MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
WITHOUT_OLD = {"old_logprobs": False}


def drawn(seed: int, scale: float = 1.0, shape: tuple[int, ...] = (3, 7)) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def extras(p: Tensor) -> dict[str, Tensor]:
    """Draws other policies near this one, so that some ratios are beyond every bound and some within."""
    old = p + drawn(2, 0.4)
    return {"old_logprobs": old, "rollout_logprobs": old + drawn(3, 0.3), "ref_logprobs": p + drawn(4, 0.5)}


def values(function: str, options: dict[str, Any], p: Tensor, given: dict[str, Tensor]) -> Tensor:
    losses = policy_losses(function, options)
    assert losses is not None
    return losses(p, MASK > 0, given)


@pytest.mark.parametrize(
    ("function", "options", "theirs"),
    [
        ("ppo", {}, {}),
        ("ppo", {"clip_high": 0.28, "clip_low": 0.1}, {"epsilon_low": 0.1, "epsilon_high": 0.28}),
        ("ppo", {"dual_clip": 1.3}, {"delta": 1.3}),
        ("ppo", {"rollout_cap": 1.1}, {"rollout_cap": 1.1}),
        ("ppo", WITHOUT_OLD, {}),
        *(
            (
                "ppo",
                {"rollout_cap": 1.3, "rollout_floor": 0.7, "rollout_correction": mode},
                {"rollout_cap": 1.3, "rollout_floor": 0.7, "rollout_mode": mode.replace("-", "_")},
            )
            for mode in ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
        ),
        ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        (
            "cispo",
            {"clip_high": 0.1, "rollout_cap": 1.2},
            {"loss_type": "cispo", "epsilon_high": 1.1, "rollout_cap": 1.2},
        ),
        ("cispo", WITHOUT_OLD, {"loss_type": "cispo", "epsilon_high": 1.2}),
        ("kl", {}, {"beta": 1.0}),
    ],
    ids=str,
)
def test_losses_of_policies_are_trls(function: str, options: dict[str, Any], theirs: dict[str, Any]) -> None:
    p = (drawn(0) - 2).requires_grad_()
    given = extras(p.detach()) | {"advantages": torch.zeros(3, 7).double() if function == "kl" else drawn(1)}
    if options == WITHOUT_OLD:
        del given["old_logprobs"]
    ours = (values(function, options, p, given) * MASK).sum() / MASK.sum()
    bounds: dict[str, Any] = {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    expected = policy_loss(p, MASK, given, **bounds | theirs)
    assert_same(ours, expected, p)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": 0.05, "clip_high": 0.1},
        {},
        WITHOUT_OLD,
        {"clip_high": 0.1, "rollout_cap": 1.4, "rollout_correction": "sequence-mask"},
    ],
    ids=str,
)
def test_ratios_of_sequences_are_trls(options: dict[str, Any]) -> None:
    p, advantages = (drawn(0) - 2).requires_grad_(), torch.tensor([0.7, -1.2, 0.4]).double()
    given = extras(p.detach()) | {"advantages": advantages[:, None].expand(3, 7)}
    bounds: dict[str, Any] = {
        "epsilon_low": options.get("clip_low", 3e-4),
        "epsilon_high": options.get("clip_high", 4e-4),
    }
    if options == WITHOUT_OLD:
        del given["old_logprobs"]
    if "rollout_cap" in options:
        bounds |= {"rollout_cap": 1.4, "rollout_mode": "sequence_mask"}
    ours = ((values("gspo", options, p, given) * MASK).sum(1) / MASK.sum(1)).mean()
    by_sequence = given | {"advantages": advantages}
    bounds |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    assert_same(ours, policy_loss(p, MASK, by_sequence, **bounds), p)


def test_sequences_beyond_a_geometric_mean_are_left_out() -> None:
    """Compares with seq-mask-tis of NeMo-RL: the others keep the weights of their tokens, without bounds."""
    p = torch.zeros(3, 4).double().requires_grad_()
    weights = torch.tensor([[2.0, 0.5, 1.0, 9.0], [3.0, 1.0, 1.0, 9.0], [0.2, 1.0, 1.0, 9.0]]).double()
    counts = torch.tensor([[1, 1, 1, 0]] * 3) > 0  # geometric means 1, 3^(1/3) = 1.44, 0.2^(1/3) = 0.58
    given = {"old_logprobs": torch.zeros(3, 4).double(), "rollout_logprobs": -weights.log()}
    losses = policy_losses(
        "cispo", {"rollout_cap": 1.4, "rollout_floor": 0.6, "rollout_correction": "sequence-mean-mask"}
    )
    assert losses is not None
    (gradient,) = torch.autograd.grad(losses(p, counts, given | {"advantages": torch.ones(3, 4).double()}).sum(), p)
    torch.testing.assert_close(gradient[:, :3], torch.tensor([[-2.0, -0.5, -1.0], [0.0] * 3, [0.0] * 3]).double())


def assert_same(ours: Tensor, expected: Tensor, p: Tensor) -> None:
    """Compares the losses and their gradients."""
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    (found,), (exact,) = (torch.autograd.grad(each, p) for each in (ours, expected))
    assert exact.any()
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-14)


def test_a_sequence_without_loss_tokens_has_a_finite_loss() -> None:
    p, nothing = drawn(0) - 2, torch.zeros(3, 7, dtype=torch.bool)
    losses = policy_losses("gspo", {})
    assert losses is not None
    assert losses(p, nothing, extras(p) | {"advantages": drawn(1)}).isfinite().all()


def test_ratios_are_bounded_from_below_where_a_bound_is_set() -> None:
    """TRL's CISPO has no lower bound."""
    p, ratios = torch.zeros(1, 3).double().requires_grad_(), torch.tensor([[0.5, 0.9, 1.5]]).double()
    given = {"old_logprobs": -ratios.log(), "advantages": torch.tensor([[2.0, 3.0, -1.0]]).double()}
    losses = policy_losses("cispo", {"clip_low": 0.3, "clip_high": 0.2})
    assert losses is not None
    (gradient,) = torch.autograd.grad(losses(p, torch.ones(1, 3) > 0, given).sum(), p)
    torch.testing.assert_close(gradient, torch.tensor([[-0.7 * 2, -0.9 * 3, 1.2]]).double())


def test_estimators_of_divergence_are_schulmans() -> None:
    """Compares with -log q, (log q)^2 / 2 and (q - 1) - log q, where q = reference / policy."""
    p, q = drawn(0) - 2, drawn(5, 0.4).exp()
    given = {"ref_logprobs": p + q.log()}
    expected = {"k1": -q.log(), "k2": q.log() ** 2 / 2, "k3": (q - 1) - q.log()}
    for estimator, losses in expected.items():
        torch.testing.assert_close(values("kl", {"estimator": estimator}, p, given), losses)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("next_token", {}),
        ("next_token", {"label_smoothing": 0.2}),
        ("entropy", {}),
        ("distillation", {}),
        ("distillation", {"direction": "reverse"}),
        ("distillation", {"temperature": 3.0}),
        ("distillation", {"direction": "reverse", "temperature": 3.0}),
    ],
    ids=str,
)
def test_losses_of_distributions_are_torchs(function: str, options: dict[str, Any]) -> None:
    shape = (2, 5, 11)
    logits, teacher, labels = drawn(0, 2.0, shape).requires_grad_(), drawn(1, 2.0, shape), torch.arange(10).view(2, 5)
    one, other = (Categorical(logits=each / options.get("temperature", 1.0)) for each in (logits, teacher))
    match function:
        case "next_token":
            expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", **options)
        case "entropy":
            expected = one.entropy()
        case _:
            expected = kl_divergence(*((one, other) if options.get("direction") == "reverse" else (other, one)))
    losses = known_losses(function, options)
    assert losses is not None
    found = losses(logits, labels, teacher)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    ours, theirs = (torch.autograd.grad(each.sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_the_square_of_the_partition_function_is_by_hand() -> None:
    losses = known_losses("z_loss", {})
    assert losses is not None
    found = losses(torch.tensor([[[1.0, 2.0, 5.0]]]).log().double(), torch.zeros(1, 1, dtype=torch.int64), None)
    assert found.item() == pytest.approx(math.log(8) ** 2, rel=1e-6)


def test_a_dynamic_loss_is_differentiated_with_its_probability_held_constant() -> None:
    """Each gradient is that of -log p times p; finite differences of the value would be others."""
    logits, labels = drawn(0, 2.0, (2, 5, 11)).requires_grad_(), torch.arange(10).view(2, 5)
    losses = known_losses("dft", {})
    assert losses is not None
    found = losses(logits, labels, None)
    probabilities = logits.detach().softmax(-1)
    own = probabilities.gather(-1, labels.unsqueeze(-1))
    torch.testing.assert_close(found, -(own * own.log()).squeeze(-1))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, own * (probabilities - F.one_hot(labels, 11)))


EXPERTS = ExpertsSection(num_experts=4, top_k=2, ffn_hidden_size=8, score="sigmoid", expert_bias=True)
LOGITS = torch.tensor([[[0.0, 1.0, 2.0, -1.0], [3.0, 1.0, -2.0, 0.0], [9.0, 9.0, 9.0, 9.0]]]).double()
IS_TEXT = torch.tensor([[True, True, False]])


def test_losses_of_routers_are_by_hand() -> None:
    """Counts text alone; the balance is that of sigmoids, and softmax has transformers' in test_steps.py."""
    chosen, _ = routed(LOGITS, None, EXPERTS)
    seen = [Routed("router", LOGITS, chosen, IS_TEXT)]
    z = sum(math.log(sum(map(math.exp, row))) ** 2 for row in LOGITS[0, :2].tolist())
    assert router_numerator("router_z", seen, EXPERTS).item() == pytest.approx(z, rel=1e-14)
    scores = [[1 / (1 + math.exp(-x)) for x in row] for row in LOGITS[0, :2].tolist()]
    means = [sum(row[e] / sum(row) for row in scores) / 2 for e in range(4)]
    shares = [1 / 4, 2 / 4, 1 / 4, 0.0]  # of the four choices: experts 2 and 1, then 0 and 1
    balance = 4 * sum(share * mean for share, mean in zip(shares, means, strict=True))
    assert router_numerator("router_sequence_balance", seen, EXPERTS).item() == pytest.approx(balance, rel=1e-14)
    rows = torch.tensor([[True, True, False], [False, False, False]])
    assert (router_shares("router_z", rows), router_shares("router_sequence_balance", rows)) == ((2, 0), (1, 0))


def test_a_lone_expert_keeps_its_score() -> None:
    """Divides the scores of several experts by their sum, but not that of one."""
    chosen, weights = routed(LOGITS[:, :1], None, EXPERTS.model_copy(update={"top_k": 1}))
    assert chosen[0, 0].tolist() == [False, False, True, False]
    assert weights[0, 0, 2].item() == pytest.approx(1 / (1 + math.exp(-2)), rel=1e-14)


def test_a_router_takes_a_choice_where_one_is_named() -> None:
    """Weighs experts that are named by their own scores; the router chooses where none are, and in layers ahead."""
    named = torch.tensor([[[[3, 0]], [[-1, -1]], [[1, 2]]]])
    model = config(model__experts=EXPERTS.model_dump()).model
    nothing = torch.zeros(1, 3)
    rows = Rows(nothing, nothing, nothing, nothing, nothing, nothing[:, 0], routed_experts=named)
    choice = replayed(rows, model)
    assert choice.keys() == {"decoder.layers.0.mlp.router"}
    chosen, weights = routed(LOGITS, None, EXPERTS, choice["decoder.layers.0.mlp.router"])
    own, _ = routed(LOGITS, None, EXPERTS)
    assert chosen[0].int().tolist() == [[1, 0, 0, 1], own[0, 1].int().tolist(), [0, 1, 1, 0]]
    scores = [1 / (1 + math.exp(-x)) for x in LOGITS[0, 0].tolist()]
    assert weights[0, 0, 3].item() == pytest.approx(scores[3] / (scores[0] + scores[3]), rel=1e-14)


def test_groups_are_ranked_by_as_many_experts_as_a_token_takes_from_them() -> None:
    section = EXPERTS.model_copy(update={"num_groups": 2, "group_top_k": 1})
    logits = torch.tensor([[[3.0, -9.0, 2.0, 2.0]]]).double()
    assert routed(logits, None, section)[0][0, 0].tolist() == [False, False, True, True]


def test_biases_rise_below_the_mean_load_and_fall_above_it() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0]).double()
    chosen, weights = routed(LOGITS, bias, EXPERTS)  # expert 3 by its bias, and the best of the others
    assert chosen[0, :2].int().tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    assert weights[0, 0].sum().item() == pytest.approx(1.0)
    moved = moved_bias(bias, Routed("router", LOGITS, chosen, IS_TEXT), 0.01)
    torch.testing.assert_close(moved, bias + 0.01 * torch.tensor([0.0, 1.0, 0.0, -1.0]).double())

"""Terms, gradients and gradient norm of one step at given weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import LossSection, TermSection
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.aggregation import Divisor, divisor, token_weights
from mtrain.verify.reference.model.adapters import is_trained, merged
from mtrain.verify.reference.model.experts import coefficients, moved_bias, router_numerator, router_shares
from mtrain.verify.reference.model.modules import ExpertChanges
from mtrain.verify.reference.model.shapes import UNTRAINED
from mtrain.verify.reference.model.transformer import Forward, Transformer
from mtrain.verify.reference.policy import POLICY_LOSSES, policy_losses
from mtrain.verify.reference.text import Rows

TokenLosses = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns losses in nats, [batch, seq], from logits, labels and the teacher's logits."""


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Computes -log p(label), smoothed evenly over the vocabulary. Source: Szegedy et al. 2016, section 7."""
    negative = -torch.log_softmax(logits, -1)
    losses = negative.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (1 - label_smoothing) * losses + label_smoothing * negative.mean(-1)


def squared_logsumexp(logits: Tensor) -> Tensor:
    """Computes (log Z)^2. Source: PaLM (Chowdhery et al. 2022), section 5."""
    return torch.logsumexp(logits, -1) ** 2


def entropy(logits: Tensor) -> Tensor:
    """Computes -sum p log p."""
    logs = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -(logs.exp() * logs).sum(-1)


def divergence(logits: Tensor, teacher: Tensor, direction: str = "forward", temperature: float = 1.0) -> Tensor:
    """Computes KL(teacher || model), or KL(model || teacher) if reverse. Source: Hinton et al. 2015; Gu et al. 2023."""
    student = torch.log_softmax(logits / temperature, -1)
    fixed = torch.log_softmax(teacher / temperature, -1)
    first, second = {"forward": (fixed, student), "reverse": (student, fixed)}[direction]
    return (first.exp() * (first - second)).sum(-1)


def dynamic(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes -sg(p) log p of the label. Source: Wu et al. 2025, equation 9."""
    losses = cross_entropy(logits, labels)
    return losses * torch.exp(-losses).detach()


def known_losses(function: str, options: dict[str, Any]) -> TokenLosses | None:
    """Returns the token losses of a built-in function; None for a user's."""

    def distilled(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        assert teacher is not None, "the objective is refused without a teacher"
        return divergence(logits, teacher, **options)

    known: dict[str, TokenLosses] = {
        "next_token": lambda logits, labels, teacher: cross_entropy(logits, labels, **options),
        "z_loss": lambda logits, labels, teacher: squared_logsumexp(logits),
        "entropy": lambda logits, labels, teacher: entropy(logits),
        "distillation": distilled,
        "dft": lambda logits, labels, teacher: dynamic(logits, labels),
    }
    return known.get(function)


@dataclass(frozen=True)
class Scene:
    """Input of a user's loss function, [batch, seq, ...]."""

    logits: Tensor
    labels: Tensor
    tokens: Tensor
    documents: Tensor
    weights: Tensor
    """Factor of each token's loss."""
    token_shares: Tensor
    """Share of each token in the denominator; a sequence's share belongs to its first token."""
    teacher: Tensor | None
    extras: Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """Term of the objective."""

    numerator: Tensor
    denominator: float
    adds_exactly: bool
    """Whether float64 adds the denominator without rounding in any order."""

    @property
    def mean(self) -> Tensor:
        """Returns the mean; 0 if the denominator is 0."""
        return self.numerator / self.denominator if self.denominator else self.numerator * 0.0


TEMPERED = frozenset({"entropy", "kl", *POLICY_LOSSES})
"""Losses at the sampler's temperature."""

UserTerm = Callable[[TermSection, Scene], tuple[Tensor, float]]
"""Evaluates a user's loss function; returns numerator and denominator."""


@dataclass(frozen=True)
class Evaluated:
    """Values of one step."""

    terms: dict[str, Term]
    objective: float
    gradients: dict[str, Tensor]
    """Gradients of the objective before clipping, by name; 0 if the main denominator is 0."""
    biases: dict[str, Tensor]
    """Expert biases after the step; empty if not updated."""
    forward: Forward

    @property
    def grad_norm(self) -> float:
        """Returns the global norm of the gradients."""
        return math.sqrt(math.fsum(float((gradient**2).sum()) for gradient in self.gradients.values()))


def evaluated(
    config: Config, tensors: Mapping[str, Tensor], rows: Rows, teacher: Transformer | None, user_term: UserTerm
) -> Evaluated:
    """Computes loss and gradients of a global batch.

    `tensors` are the float64 weights; `teacher` may be None if no term needs one; `user_term` evaluates the user's own
    losses.
    """
    vision = config.model.vision
    learns = {name: is_trained(name, config.adapter, vision) and not name.endswith(UNTRAINED) for name in tensors}
    leaves = {name: tensor.detach().clone().requires_grad_(learns[name]) for name, tensor in tensors.items()}
    replay = ExpertChanges(chosen=replayed(rows, config.model))
    forward = Transformer(config.model, merged(config, leaves), replay).forward(rows)
    with torch.no_grad():
        taught = None if teacher is None else teacher.forward(rows, looks_ahead=False).logits
    terms = _terms(config, rows, forward, taught, user_term)
    factors = term_coefficients(config.loss, config.model.mtp_depths)
    objective = torch.stack([factors[name] * term.mean for name, term in terms.items()]).sum()
    trained = {name: leaf for name, leaf in leaves.items() if learns[name]}
    is_empty = terms["main"].denominator == 0
    gradients = torch.autograd.grad(objective * float(not is_empty), list(trained.values()), materialize_grads=True)
    return Evaluated(
        terms=terms,
        objective=float(objective.detach()),
        gradients=dict(zip(trained, gradients, strict=True)),
        biases=_moved_biases(config.model, leaves, forward),
        forward=forward,
    )


def replayed(rows: Rows, model: ModelSection) -> dict[str, Tensor]:
    """Returns the rows' own choices, [batch, seq, experts] bool, by router; MTP routers have none."""
    choices: dict[str, Tensor] = {}
    if rows.routed_experts is None or model.experts is None:
        return choices
    for layer, chosen in enumerate(rows.routed_experts.unbind(2)):
        is_expert = chosen.unsqueeze(-1) == torch.arange(model.experts.num_experts, device=chosen.device)
        choices[f"decoder.layers.{layer}.mlp.router"] = is_expert.any(-2)
    return choices


def term_coefficients(loss: LossSection, mtp_depths: int) -> dict[str, float]:
    """Returns the coefficient of each term; MTP depths share `mtp_coefficient` equally."""
    depths = {f"mtp_{depth}": loss.mtp_coefficient / mtp_depths for depth in range(1, mtp_depths + 1)}
    sides = {name: side.coefficient for name, side in loss.side_terms.items()}
    return {"main": 1.0, **sides, **depths, **coefficients(loss.router)}


def _terms(config: Config, rows: Rows, forward: Forward, taught: Tensor | None, user_term: UserTerm) -> dict[str, Term]:
    sections: dict[str, TermSection] = {"main": config.loss, **config.loss.side_terms}
    terms = {name: _term(section, config.loss, rows, forward, taught, user_term) for name, section in sections.items()}
    for depth, logits in enumerate(forward.ahead, start=1):
        ahead = rows.ahead(depth)
        weights = token_weights(ahead.weights, rows.sample_weights, config.loss).to(rows.carried)
        numerator = weighted(cross_entropy(logits, ahead.labels), weights)
        terms[f"mtp_{depth}"] = _planned(numerator, divisor(ahead.weights, rows.sample_weights, config.loss))
    for name in coefficients(config.loss.router):
        assert config.model.experts is not None, "a rule of the configuration"
        numerator = router_numerator(name, forward.seen, config.model.experts)
        terms[name] = _planned(numerator, Divisor(router_shares(name, rows.is_text)))
    return terms


def _term(
    section: TermSection, loss: LossSection, rows: Rows, forward: Forward, taught: Tensor | None, user_term: UserTerm
) -> Term:
    weights = token_weights(rows.weights, rows.sample_weights, section).to(rows.carried)
    planned = divisor(rows.weights, rows.sample_weights, section)
    logits, options = forward.logits, section.options
    if section.function in TEMPERED:
        options = {name: value for name, value in options.items() if name != "temperature"}
        logits = logits / temperatures(section, rows)
    token_losses = known_losses(section.function, options)
    if token_losses is not None:
        return _planned(weighted(token_losses(logits, rows.labels, taught), weights), planned)
    of_policy = policy_losses(section.function, options)
    if of_policy is not None:
        log_probs = -cross_entropy(logits, rows.labels)
        return _planned(weighted(of_policy(log_probs, weights != 0, rows.extras), weights), planned)
    shares = token_shares(rows, section)
    scene = Scene(forward.logits, rows.labels, rows.tokens, rows.documents, weights, shares, taught, rows.extras)
    numerator, measured = user_term(section, scene)
    if loss.denominator == "measured":
        return Term(numerator, measured, adds_exactly=False)  # only the function knows its summands
    return _planned(numerator, planned)


def temperatures(section: TermSection, rows: Rows) -> Tensor:
    """Returns the divisor of each token's logits, [batch, seq, 1]."""
    fixed = section.options.get("temperature")
    values = rows.extras.get("temperature", torch.ones_like(rows.weights))
    if fixed is not None:
        values = torch.full_like(rows.weights, fixed)
    return torch.where(values > 0, values, 1.0).unsqueeze(-1)


def _planned(numerator: Tensor, denominator: Divisor) -> Term:
    return Term(numerator, denominator.value, denominator.is_exact)


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Sums weight x loss over tokens with nonzero weight."""
    return torch.where(weights != 0, losses * weights, 0.0).sum()


def token_shares(rows: Rows, section: TermSection) -> Tensor:
    """Returns each token's share of the denominator, [batch, seq].

    A sequence's share belongs to its first token, that of the whole step to the first token of the batch.
    """
    if section.aggregation == "token-mean":
        return rows.weights * rows.sample_weights.unsqueeze(1)
    shares = torch.zeros_like(rows.weights)
    if section.aggregation in ("sum", "token-sum-norm"):
        shares[0, 0] = 1.0
        return shares
    for row in range(len(shares)):
        alone = slice(row, row + 1)
        shares[row, 0] = divisor(rows.weights[alone], rows.sample_weights[alone], section).value
    return shares


def _moved_biases(model: ModelSection, tensors: Mapping[str, Tensor], forward: Forward) -> dict[str, Tensor]:
    rate = 0.0 if model.experts is None else model.experts.bias_update_rate
    if not rate:
        return {}
    names = {f"{seen.name}.expert_bias": seen for seen in forward.seen}
    return {name: moved_bias(tensors[name].detach(), seen, rate) for name, seen in names.items()}

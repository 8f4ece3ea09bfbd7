"""The objective straight from its definitions: means are taken as means, over whole sequences, in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.loss import LossSection, TermSection
from mtrain.config.schema.model import ModelSection
from mtrain.data.samples.sample import Sample
from tests.oracle import distributions, multi_token, routers
from tests.oracle.model import Parameters, logits_of
from tests.oracle.policy import POLICY_LOSSES


@dataclass(frozen=True)
class Sequence:
    """One sequence of the global batch, without padding."""

    tokens: Tensor
    """[length] int64."""
    labels: Tensor
    """[length] int64, already shifted; any value where the weight is 0."""
    weights: Tensor
    """[length] float64, w_it: 0 where there is no loss."""
    sample_weight: float = 1.0
    """Weight v_i of the sequence."""
    document_starts: tuple[int, ...] = (0,)
    """Positions where a document begins; attention does not reach back over them."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [length] float64: values that the data bring along."""

    @classmethod
    def of_sample(cls, sample: Sample, with_text: bool = False) -> "Sequence":
        """Builds the sequence of a sample up to its last loss token: no loss of logits depends on what follows.

        Args:
            sample: Sample of the batch.
            with_text: Keeps all its text: routers count text without a loss too.
        """
        (places,) = sample.mask.nonzero()
        length = places[-1].item() + 1 if len(places) > 0 else 1
        if with_text:
            length = len(sample.tokens)
        extras = {name: each[:length][: len(sample.tokens)] for name, each in sample.extras.items()}
        starts = (0,) if sample.document_starts is None else sorted(set(sample.document_starts[:length].tolist()))
        return cls(
            tokens=torch.from_numpy(sample.tokens[:length]),
            labels=torch.from_numpy(sample.labels[:length]),
            weights=torch.from_numpy(sample.mask[:length]),
            sample_weight=sample.weight,
            document_starts=tuple(starts),
            extras={name: torch.from_numpy(each).double() for name, each in extras.items()},
        )

    def documents(self) -> list[Tensor]:
        """Splits the tokens at the starts of documents."""
        return [tokens for (tokens,) in self.per_document(self.tokens)]

    def per_document(self, *values: Tensor) -> list[tuple[Tensor, ...]]:
        """Splits values [length] of the sequence at the starts of documents."""
        ends = (*self.document_starts[1:], len(self.tokens))
        pieces = zip(self.document_starts, ends, strict=True)
        return [tuple(value[start:end] for value in values) for start, end in pieces]


@dataclass(frozen=True)
class TermValue:
    """One term over the global batch: numerator / denominator."""

    numerator: Tensor
    """Scalar float64 with a graph."""
    denominator: float

    @property
    def mean(self) -> Tensor:
        """The term's mean; 0 where there is nothing to learn."""
        return self.numerator / self.denominator if self.denominator != 0 else self.numerator * 0.0


class Teacher(NamedTuple):
    """A frozen model with its parameters."""

    parameters: Parameters
    model: ModelSection


def term_values(
    parameters: Parameters,
    model: ModelSection,
    loss: LossSection,
    batch: list[Sequence],
    teacher: Teacher | None = None,
) -> dict[str, TermValue]:
    """Computes every term of the objective over a global batch; the main one is named "main"."""
    logits, seen = _run(parameters, model, batch)
    further = _further(parameters, model, batch)
    others = logits if teacher is None else _logits(*teacher, batch)  # unused where there is no teacher
    values = {}
    for name, term in {"main": loss, **loss.side_terms}.items():
        if term.function in SEQUENCE_LOSSES:
            judged = SEQUENCE_LOSSES[term.function]
            values[name] = _of_sequences([judged(*each, **term.options) for each in zip(logits, batch)], batch, term)
            continue
        losses = [
            _masked(_term_losses(term, each, sequence, other), sequence)
            for each, sequence, other in zip(logits, batch, others, strict=True)
        ]
        values[name] = aggregate(losses, batch, term)
    for name in routers.coefficients(loss.router):
        values[name] = _router_value(name, [own | each.routers for own, each in zip(seen, further, strict=True)], model)
    return values | {f"mtp_{depth + 1}": _depth_value(depth, further, loss, batch) for depth in range(model.mtp_depths)}


def _further(parameters: Parameters, model: ModelSection, batch: list[Sequence]) -> list[multi_token.Further]:
    """Computes the depths of multi-token prediction of each sequence."""
    return [
        multi_token.further(parameters, model, each.documents(), each.per_document(each.labels, each.weights))
        for each in batch
    ]


def _depth_value(depth: int, further: list[multi_token.Further], loss: LossSection, batch: list[Sequence]) -> TermValue:
    """Aggregates a depth like the main term, over the further tokens of each sequence."""
    depths = [each.depths[depth] for each in further]
    sequences = [replace(each, weights=depth.weights) for each, depth in zip(batch, depths, strict=True)]
    return aggregate([depth.losses for depth in depths], sequences, loss)


def _router_value(name: str, seen: list[routers.Routers], model: ModelSection) -> TermValue:
    assert model.experts is not None
    if name == "router_z":
        return TermValue(routers.z(seen), sum(float(len(next(iter(each.values())).logits)) for each in seen))
    return TermValue(routers.sequence_balance(seen, model.experts), float(len(seen)))


def routers_of(parameters: Parameters, model: ModelSection, batch: list[Sequence]) -> list[routers.Routers]:
    """Returns what every router sees of each sequence."""
    further = _further(parameters, model, batch)
    return [own | each.routers for own, each in zip(_run(parameters, model, batch)[1], further, strict=True)]


def _term_losses(term: TermSection, logits: Tensor, sequence: Sequence, teacher_logits: Tensor) -> Tensor:
    labels = torch.where(sequence.weights > 0, sequence.labels, 0)
    match term.function:
        case "next_token" if term.options:
            return distributions.smoothed_cross_entropy(logits, labels, **term.options)
        case "entropy":
            return distributions.entropy(logits)
        case "distillation":
            return distributions.divergence(logits, teacher_logits, **term.options)
        case "topk_distillation":
            return distributions.top_k_divergence(logits, sequence.extras, sequence.weights > 0, **term.options)
        case name if name in POLICY_LOSSES:
            return POLICY_LOSSES[name](logits, sequence, **term.options)
        case _:
            return TOKEN_LOSSES[term.function](logits, sequence)


def token_losses_of(parameters: Parameters, model: ModelSection, batch: list[Sequence]) -> list[Tensor]:
    """Returns the cross entropy of each token, 0 where masked: [length] of each sequence."""
    logits = _logits(parameters, model, batch)
    return [
        _masked(_negative_log_probability(each, sequence), sequence)
        for each, sequence in zip(logits, batch, strict=True)
    ]


def objective(values: dict[str, TermValue], loss: LossSection) -> Tensor:
    """Adds coefficient x numerator / denominator of all terms."""
    side_terms = [side.coefficient * values[name].mean for name, side in loss.side_terms.items()]
    of_routers = [coefficient * values[name].mean for name, coefficient in routers.coefficients(loss.router).items()]
    depths = [value.mean for name, value in values.items() if name.startswith("mtp_")]
    further = [loss.mtp_coefficient * torch.stack(depths).mean()] if depths else []
    return torch.stack([values["main"].mean, *side_terms, *of_routers, *further]).sum()


def aggregate(losses: list[Tensor], batch: list[Sequence], term: TermSection) -> TermValue:
    """Combines the token losses of all sequences by the named aggregation.

    Args:
        losses: Token losses of each sequence, [length]; finite, but any value where the weight is 0.
        batch: Sequences of the global batch.
        term: Aggregation, its constant L, and whether sequences without loss tokens count.
    """
    sums = [(sequence.weights * loss).sum() for sequence, loss in zip(batch, losses, strict=True)]
    counts = [sequence.weights.sum().item() for sequence in batch]
    v = [sequence.sample_weight for sequence in batch]
    counted = [count > 0 or term.empty_sequences == "include" for count in counts]
    num_sequences = math.fsum(v_i for v_i, counts_too in zip(v, counted, strict=True) if counts_too)
    length = 1.0 if term.norm_length is None else float(term.norm_length)
    means = [total / count if count > 0 else total * 0.0 for total, count in zip(sums, counts, strict=True)]
    match term.aggregation:
        case "token-mean":
            per_sequence, denominator = sums, math.fsum(v_i * n_i for v_i, n_i in zip(v, counts, strict=True))
        case "seq-mean-token-sum":
            per_sequence, denominator = sums, num_sequences
        case "seq-mean-token-mean":
            per_sequence, denominator = means, num_sequences
        case "seq-mean-token-sum-norm":
            per_sequence, denominator = [total / length for total in sums], num_sequences
        case "token-sum-norm":
            per_sequence, denominator = [total / length for total in sums], 1.0
        case "seq-mean-token-sqrt":
            per_sequence = [mean * math.sqrt(count) for mean, count in zip(means, counts, strict=True)]
            denominator = math.fsum(v_i * math.sqrt(n_i) for v_i, n_i in zip(v, counts, strict=True))
        case "seq-mean-token-power":
            assert term.length_power is not None
            lengths = [count ** (1.0 - term.length_power) if count > 0 else 0.0 for count in counts]
            per_sequence = [mean * length for mean, length in zip(means, lengths, strict=True)]
            denominator = math.fsum(v_i * length for v_i, length in zip(v, lengths, strict=True))
        case "sum":
            per_sequence, denominator = sums, 1.0
    numerator = torch.stack([v_i * value for v_i, value in zip(v, per_sequence, strict=True)]).sum()
    return TermValue(numerator, denominator)


def _of_sequences(losses: list[Tensor], batch: list[Sequence], term: TermSection) -> TermValue:
    """Averages over sequences; each counts by its sample weight, or by its loss tokens where those are counted."""
    counts = [sequence.weights.sum().item() for sequence in batch]
    is_counted = [count > 0 or term.empty_sequences == "include" for count in counts]
    by_tokens = term.aggregation == "token-mean"
    shares = [
        sequence.sample_weight * (count if by_tokens else float(counts_too))
        for sequence, count, counts_too in zip(batch, counts, is_counted, strict=True)
    ]
    numerator = torch.stack([share * loss for share, loss in zip(shares, losses, strict=True)]).sum()
    return TermValue(numerator, math.fsum(shares))


def _logits(parameters: Parameters, model: ModelSection, batch: list[Sequence]) -> list[Tensor]:
    """Returns the logits of each sequence, [length, vocab_size]."""
    return _run(parameters, model, batch)[0]


def _run(
    parameters: Parameters, model: ModelSection, batch: list[Sequence]
) -> tuple[list[Tensor], list[routers.Routers]]:
    """Returns the logits of each sequence and what routers see of it; documents of one length share a call."""
    documents = [document for sequence in batch for document in sequence.documents()]
    by_length: dict[int, list[int]] = {}
    for index, document in enumerate(documents):
        by_length.setdefault(len(document), []).append(index)
    found: dict[int, Tensor] = {}
    seen: dict[int, routers.Routers] = {}
    for indices in by_length.values():
        with routers.recorded() as of_all:
            found |= zip(
                indices, logits_of(parameters, model, torch.stack([documents[i] for i in indices])), strict=True
            )
        for row, index in enumerate(indices):
            seen[index] = {name: routers.Seen(each.logits[row], each.chosen[row]) for name, each in of_all.items()}
    order = iter(range(len(documents)))
    own = [[next(order) for _ in sequence.document_starts] for sequence in batch]
    return (
        [torch.cat([found[index] for index in indices]) for indices in own],
        [routers.joined([seen[index] for index in indices]) for indices in own],
    )


def _masked(losses: Tensor, sequence: Sequence) -> Tensor:
    return torch.where(sequence.weights > 0, losses, 0.0)


def _negative_log_probability(logits: Tensor, sequence: Sequence) -> Tensor:
    labels = torch.where(sequence.weights > 0, sequence.labels, 0)
    return -logits.log_softmax(-1)[torch.arange(len(labels)), labels]


def _squared_log_partition(logits: Tensor, sequence: Sequence) -> Tensor:
    return logits.logsumexp(-1) ** 2


TOKEN_LOSSES: dict[str, Callable[[Tensor, Sequence], Tensor]] = {
    "next_token": _negative_log_probability,
    "z_loss": _squared_log_partition,
}
"""Name in the configuration -> token losses of one sequence, float64; tests add their own."""

SEQUENCE_LOSSES: dict[str, Callable[..., Tensor]] = {}
"""Name in the configuration -> the loss of a sequence from its logits, itself and options; tests add their own."""

"""The objective: sum over terms of coefficient x numerator / denominator, in one backward pass.

The main term stays un-normalised and is divided once, when gradients are finalised, by its denominator D_main. A side
term therefore enters multiplied by coefficient x D_main / D_k, with denominators that are known before the forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config.schema.loss import (
    HEAD_LOSSES,
    LOSS_FUNCTIONS,
    SCORE_AGGREGATIONS,
    LossSection,
    TermSection,
    depth_term,
)
from mtrain.loss.diagnostics import Reported, shown_name
from mtrain.loss.functions.load import asks_for_teacher, extras_of, is_per_token, load_loss_function, reported_by
from mtrain.loss.functions.next_token import next_token_loss
from mtrain.loss.pair import MAIN_TERM, LossFunction, LossPair, TermInputs
from mtrain.loss.preference.scores import PreferenceLoss, preference_marks
from mtrain.loss.preference.term import head_term, score_term

_EXPONENT = 0x7FF << 52
"""Of a positive float64: its bits without those of the mantissa."""

AnyLoss = LossFunction | PreferenceLoss


@dataclass(frozen=True)
class Objective:
    """The loss functions of a run and how they are added."""

    functions: dict[str, LossFunction]
    """By term that is computed from logits; the main one first."""
    coefficients: dict[str, float]
    """By term; 1 for the main one, and behind those of `functions` the terms that routers compute inside the layers."""
    names: dict[str, str]
    """By term, the function's name in the configuration, for messages."""
    apart: frozenset[str]
    """Side terms whose denominator can be another one than the main term's, because they are aggregated otherwise or
    over other tokens, or belong to routers."""
    preference: PreferenceLoss | None = None
    """Where groups of sequences are compared; the main term of `functions` then carries its gradient."""
    has_head: bool = False
    """Whether a head judges sequences, in the place of logits of tokens."""

    @classmethod
    def from_config(cls, section: LossSection, mtp_depths: int = 0, has_head: bool = False) -> Objective:
        """Loads every term's function.

        Args:
            section: The terms.
            mtp_depths: How many further tokens are predicted; each depth is a side term.
            has_head: Whether the model has a head in the place of its output layer.

        Raises:
            ConfigError: A function cannot be loaded; one needs a teacher and there is none, or the other way round;
                logits are to be cut into chunks, and one is not made for that.
        """
        terms = {MAIN_TERM: section, **section.side_terms}
        # the coefficients of all depths add up to mtp_coefficient, whatever their number
        share = section.mtp_coefficient / max(mtp_depths, 1)
        depths = [depth_term(depth) for depth in range(1, mtp_depths + 1)]
        loaded = {name: load_loss_function(term.function, term.options) for name, term in terms.items()}
        sides = {name: side.coefficient for name, side in section.side_terms.items()}
        # by the options, not by the values: whether a plan is needed has to be known before any batch
        preference = _preference(loaded[MAIN_TERM], section)
        _check_head(loaded[MAIN_TERM], section.function, has_head)
        if preference is not None:
            loaded[MAIN_TERM] = head_term if has_head else score_term
        # groups are counted by no other term
        apart = [
            name
            for name, term in terms.items()
            if _divisor(term) != _divisor(section) or (preference and name in sides)
        ]
        objective = cls(
            # The main term is first and routers are last: PairAccumulator.terms has the same order, and vectors of
            # planned denominators are matched with `coefficients` by place.
            functions=loaded | dict.fromkeys(depths, next_token_loss),
            coefficients={MAIN_TERM: 1.0} | sides | dict.fromkeys(depths, share) | section.router.coefficients,
            names={name: term.function for name, term in terms.items()} | dict.fromkeys(depths, "next_token_loss"),
            # a depth loses the tokens at each row's end, a router counts text: never the main denominator
            apart=frozenset([*apart, *depths, *section.router.coefficients]),
            preference=preference,
            has_head=has_head,
        )
        objective._check_teacher(section)
        objective._check_chunks(section)
        return objective

    def with_main(
        self, loss: AnyLoss | str, section: LossSection, options: Mapping[str, Any] | None = None
    ) -> Objective:
        """The same with another function as the main term, whose weights come as `section` says.

        Args:
            loss: A function, or a name as `loss.function` takes it.
            section: Of the run.
            options: Of a function that is named, as `loss.options`.

        Raises:
            ConfigError: It cannot be loaded or does not take the options; it needs a teacher and there is none, or the
                other way round; or chunks, as `from_config`.
        """
        if isinstance(loss, str):
            function, name = load_loss_function(loss, options or {}), loss
        elif options is None:
            function, name = cast(LossFunction, loss), getattr(loss, "__qualname__", repr(loss))
        else:
            raise ConfigError(
                "options belong to a loss that is given by its name; bind those of a function of your own with "
                "functools.partial"
            )
        preference = _preference(function, section)
        if (preference is None) != (self.preference is None):
            raise ConfigError(
                f"{name} and loss.function={section.function} cannot take each other's place: one compares groups of "
                "sequences, the other does not; make an Engine with such a loss.function"
            )
        _check_head(function, name, self.has_head)
        term = function if preference is None else head_term if self.has_head else score_term
        functions = self.functions | {MAIN_TERM: term}
        objective = replace(self, functions=functions, names=self.names | {MAIN_TERM: name}, preference=preference)
        objective._check_teacher(section)
        objective._check_chunks(section)
        return objective

    @property
    def router_terms(self) -> tuple[str, ...]:
        """Terms that are computed inside the layers, on every pipeline stage."""
        return tuple(term for term in self.coefficients if term not in self.functions)

    @property
    def teacher_terms(self) -> list[str]:
        """Terms whose functions read the teacher's logits."""
        return [term for term, function in self.functions.items() if asks_for_teacher(function)]

    @property
    def extras(self) -> tuple[str, ...]:
        """What the functions of all terms read beside the weights, each name once."""
        return tuple(dict.fromkeys(name for function in self.functions.values() for name in extras_of(function)))

    @property
    def reported(self) -> Reported:
        """The diagnostics of all terms, by the names that people see."""
        found = [(term, reported_by(function)) for term, function in self.functions.items()]
        return Reported(
            means=tuple(shown_name(term, name) for term, each in found for name in each.means),
            maxima=tuple(shown_name(term, name) for term, each in found for name in each.maxima),
        )

    @property
    def whole_microbatch_terms(self) -> list[str]:
        """Terms whose functions may look at all tokens of a microbatch together."""
        return [term for term, function in self.functions.items() if not is_per_token(function)]

    def notes(self, section: LossSection) -> list[str]:
        """What the user of a run should know of it."""
        if section.chunk_tokens != "auto" or not self.whole_microbatch_terms:
            return []
        return [
            f"the logits of all tokens of a microbatch are kept whole, because {', '.join(self._need_whole)} is not "
            "marked with mtrain.loss.pair.per_token; loss.chunk_tokens=whole leaves this note out"
        ]

    @property
    def _need_whole(self) -> list[str]:
        return [f"{self.names[term]} (term {term!r})" for term in self.whole_microbatch_terms]

    def _check_chunks(self, section: LossSection) -> None:
        askers = self._need_whole
        if askers and isinstance(section.chunk_tokens, int):
            raise ConfigError(
                f"loss.chunk_tokens={section.chunk_tokens} shows a loss function a few tokens at a time, but "
                f"{', '.join(askers)} is not marked with mtrain.loss.pair.per_token; mark it if what it adds for a "
                "token follows from that token alone, or set loss.chunk_tokens=auto, which keeps whole logits for it"
            )

    def _check_teacher(self, section: LossSection) -> None:
        askers = [f"{self.names[term]} (term {term!r})" for term in self.teacher_terms]
        if askers and section.teacher is None:
            raise ConfigError(
                f"loss.teacher is not given, but {', '.join(askers)} compares with one; set loss.teacher.checkpoint to "
                "a run folder"
            )
        # refused, not ignored: a teacher costs a forward pass of every microbatch and the memory of its weights
        if section.teacher is not None and not askers:
            raise ConfigError(
                f"loss.teacher.checkpoint={section.teacher.checkpoint!r} is given, but no loss function asks for a "
                "teacher; add such a term, mark your function with mtrain.loss.pair.needs_teacher, or remove the "
                "teacher"
            )

    def pairs(self, inputs_by_term: Mapping[str, TermInputs]) -> dict[str, LossPair]:
        """Evaluates the given terms, every one of one microbatch or those of one distribution of it.

        Raises:
            ConfigError: A function did not return a pair.
        """
        # in the order of the functions on every rank, whatever order the terms are given in: they communicate
        return {
            term: _checked(
                function(inputs_by_term[term]), self.names[term], inputs_by_term[term], reported_by(function)
            )
            for term, function in self.functions.items()
            if term in inputs_by_term
        }

    def scalar(
        self,
        pairs: Mapping[str, LossPair],
        factors: Mapping[str, float | Tensor],
        numerator_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """What a microbatch back-propagates from its logits: (N_main + sum_k factor_k N_k) x numerator_scale.

        Args:
            pairs: As `pairs` gives them; what is not there is left out of the sum.
            factors: One a side term: its coefficient, or from `side_term_factors` where a term is `apart`.
            numerator_scale: An exact power of two near 1 / D_main for fp16, whose gradients would overflow as plain
                sums; the caller takes it out again when it divides by D_main. A number, or a scalar on the device.
        """
        # A factor may be a float64 scalar on the device; both are scalars, so the product is float64: back to float32,
        # since the main numerator, alone or not, is differentiated in one dtype.
        parts = [
            pair.numerator if term == MAIN_TERM else (pair.numerator * factors[term]).to(pair.numerator.dtype)
            for term, pair in pairs.items()
        ]
        # a power of two moves exponents only, so the division takes it out without rounding; 1.0 outside fp16
        scalar = functools.reduce(torch.add, parts)
        return (scalar * numerator_scale).to(scalar.dtype)


def side_term_factors(planned: Tensor, coefficients: Mapping[str, float]) -> dict[str, Tensor]:
    """What each side term's numerator is multiplied by before backward: c_k x D_main / D_k.

    Args:
        planned: [terms] float64, denominators over the global batch, in the order of `coefficients`.
        coefficients: c_k by term, the main one first.

    Returns:
        One factor a side term, float64 scalar on the device of `planned`; 0 where D_k is 0.
    """
    # scalars stay on the device: reading D_k on the host would wait for all work queued there
    terms = list(zip(coefficients.items(), planned))
    return {
        # where, not a clamp: nan and inf of the other branch are dropped, and no graph exists to carry them. The same
        # order of operations as `check_factors`, so the number that is checked is the one that was used.
        term: torch.where(denominator == 0, 0.0, coefficient * (planned[0] / denominator))
        for (term, coefficient), denominator in terms[1:]
    }


def power_of_two_near(x: Tensor) -> Tensor:
    """The exact power of two 2^round(log2 x), without a host synchronisation.

    Multiplying by it only moves exponents, so it can be taken out again without rounding.

    Args:
        x: Float64 scalar.

    Returns:
        Float64 scalar on the same device; 1 where `x` is not a positive finite number.
    """
    # An exponent alone is a power of two, whatever the device rounds; with a factor of sqrt(2) in front the next lower
    # one is the nearest.
    power = ((x * math.sqrt(2)).view(torch.int64) & _EXPONENT).view(torch.float64)
    return torch.where(x.isfinite() & (x > 0), power, 1.0)


def _preference(function: Callable[..., Any], section: LossSection) -> PreferenceLoss | None:
    """The function, where it is marked as a loss of groups.

    Raises:
        ConfigError: Its aggregation makes no score.
    """
    if preference_marks(function) is None:
        return None
    if section.aggregation not in SCORE_AGGREGATIONS:
        raise ConfigError(
            f"loss.aggregation={section.aggregation} makes no score of a sequence, which a preference loss compares; "
            f"set it to {' or '.join(SCORE_AGGREGATIONS)}"
        )
    return function


def _check_head(function: Callable[..., Any], name: str, has_head: bool) -> None:
    """
    Raises:
        ConfigError: It reads tokens and the model has a head, or the other way round.
    """
    marks = preference_marks(function)
    if marks is not None:
        reads_head = marks.scores_by_head
    elif name in LOSS_FUNCTIONS:
        reads_head = name in HEAD_LOSSES
    else:
        return  # of the user's own, who alone knows
    if reads_head != has_head:
        raise ConfigError(
            f"{name} {'reads a head' if reads_head else 'predicts tokens'}, but the model has "
            f"{'a head' if has_head else 'none'}; set model.num_labels, or take another loss"
        )


def _divisor(term: TermSection) -> dict[str, object]:
    """What decides a term's denominator, beside the batch: all that a term has but its function."""
    # every other field, so that a field added later makes terms differ until it is proved not to matter
    return {key: getattr(term, key) for key in TermSection.model_fields if key not in ("function", "options")}


def _checked(pair: object, name: str, inputs: TermInputs, reported: Reported) -> LossPair:
    """Returns what a loss function returned, if it is a pair."""
    if not isinstance(pair, LossPair):
        raise ConfigError(
            f"loss.function={name!r} returned a {type(pair).__name__}, but has to return a "
            "mtrain.loss.pair.LossPair(numerator, denominator)"
        )
    # one dtype each, so that pairs of any functions can be added; denominators are float64 as the plan is
    _check_part(pair.numerator, "numerator", torch.float32, name)
    _check_part(pair.denominator, "denominator", torch.float64, name)
    # D divides after backward, so the gradient that such a function expects through it would never flow
    if pair.denominator.requires_grad:
        raise ConfigError(f"loss.function={name!r} returned a denominator with a graph; detach it")
    # megatron-core's backward_step (pipeline_parallel/schedules.py) passes over an output without a graph: the
    # microbatch would add nothing to the gradient, and nothing would say so.
    if torch.is_grad_enabled() and inputs.logits.local.requires_grad and not pair.numerator.requires_grad:
        raise ConfigError(
            f"loss.function={name!r} returned a numerator without a graph; compute it from inputs.logits even where "
            "every weight is 0, as mtrain.loss.pair.weigh does"
        )
    _check_diagnostics(pair, name, reported)
    return pair


def _check_diagnostics(pair: LossPair, name: str, reported: Reported) -> None:
    """They are those that every rank waits for."""
    wanted = dict.fromkeys(reported.means, (2,)) | dict.fromkeys(reported.maxima, ())
    found = {each: tuple(value.shape) for each, value in pair.diagnostics.items()}
    if found != wanted:
        raise ConfigError(
            f"loss.function={name!r} returned the diagnostics {found}, but is marked for {wanted} (name: shape); make "
            "them with mtrain.loss.diagnostics.diagnosed, and mark the function with mtrain.loss.diagnostics.reports"
        )


def _check_part(part: object, role: str, dtype: torch.dtype, name: str) -> None:
    """One field of the pair: a scalar tensor of its dtype."""
    if not isinstance(part, Tensor):
        found = type(part).__name__
    elif part.ndim != 0 or part.dtype != dtype:
        found = f"{part.dtype} tensor of shape {list(part.shape)}"
    else:
        return
    raise ConfigError(
        f"loss.function={name!r} returned a {role} that is a {found}; it has to be a {dtype} scalar tensor"
    )

"""The objective: sum over terms of coefficient x numerator / denominator, in one backward pass.

The numerator of the main term is divided by its denominator D_main once, when gradients are finalised. A side term is
therefore multiplied by coefficient x D_main / D_k, with denominators that are known before the forward pass.
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
from mtrain.config import Config
from mtrain.config.derived import label_columns
from mtrain.config.extras import TEMPERATURE, as_configured
from mtrain.config.schema.loss import (
    HEAD_LOSSES,
    LOSS_FUNCTIONS,
    MAIN_TERM,
    SCORE_AGGREGATIONS,
    LossSection,
    TermSection,
    depth_term,
    wrong_options,
)
from mtrain.config.schema.model import ModelSection
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.functions.load import (
    asks_for_teacher,
    extras_of,
    is_per_token,
    load_loss_function,
    reads_temperature,
    reported_by,
)
from mtrain.core.loss.pair import LossFunction, LossPair, Reported, TermInputs, shown_name
from mtrain.core.loss.preference.scores import PreferenceLoss, head_term, preference_marks, score_term

_EXPONENT = 0x7FF << 52
"""Bits of the exponent of a positive float64; those of its mantissa are masked out."""

AnyLoss = LossFunction | PreferenceLoss


@dataclass(frozen=True)
class Objective:
    """The loss functions of a run and how they are added."""

    functions: dict[str, LossFunction]
    """Loss function of each term that is computed from logits; the main term first."""
    coefficients: dict[str, float]
    """Coefficient of each term, 1 for the main term: first the terms of `functions`, then those that routers
    compute."""
    names: dict[str, str]
    """Name of each term's function in the configuration, for messages."""
    apart: frozenset[str]
    """Side terms whose denominator can differ from the main term's: those of another aggregation or other tokens, and
    routers."""
    preference: PreferenceLoss | None = None
    """Preference loss, if groups of sequences are compared; the main term of `functions` then carries its gradient."""
    has_head: bool = False
    """Whether a head judges whole sequences, instead of logits of tokens."""
    has_temperatures: bool = False
    """Whether the data give the temperature of each sample."""
    choices: tuple[str, ...] = ()
    """Names of the choices that layers take from the data."""

    @classmethod
    def from_config(cls, section: LossSection, model: ModelSection | None = None) -> Objective:
        """Loads every term's function; each token further ahead that the model predicts is a side term.

        Raises:
            ConfigError: A function cannot be loaded; a function needs a teacher but none is configured, or the reverse;
                logits are computed in chunks, but a function is not marked for that.
        """
        terms = {MAIN_TERM: section, **section.side_terms}
        # the coefficients of all depths add up to mtp_coefficient, whatever their number
        ahead, has_head = (0, False) if model is None else (len(model.layers_ahead), model.output.head_rows > 0)
        share = section.mtp_coefficient / max(ahead, 1)
        depths = [depth_term(depth) for depth in range(1, ahead + 1)]
        loaded = {name: load_loss_function(term.function, term.options) for name, term in terms.items()}
        sides = {name: side.coefficient for name, side in section.side_terms.items()}
        preference = _preference(loaded[MAIN_TERM], section)
        _check_head(loaded[MAIN_TERM], section.function, has_head)
        if preference is not None:
            loaded[MAIN_TERM] = head_term if has_head else score_term
        # a preference loss counts groups, and no side term does; decided by the options, before any batch is known
        apart = [
            name
            for name, term in terms.items()
            if _denominator_fields(term) != _denominator_fields(section) or (preference and name in sides)
        ]
        objective = cls(
            # The main term first, routers last, as in PairAccumulator.terms: vectors of planned denominators are
            # matched with `coefficients` by position.
            functions=loaded | dict.fromkeys(depths, next_token_loss),
            coefficients={MAIN_TERM: 1.0} | sides | dict.fromkeys(depths, share) | section.router.coefficients,
            names={name: term.function for name, term in terms.items()} | dict.fromkeys(depths, "next_token_loss"),
            # a depth has no targets at each row's end, and a router counts text
            apart=frozenset([*apart, *depths, *section.router.coefficients]),
            preference=preference,
            has_head=has_head,
        )
        return objective._checked_with(section)

    def with_main(
        self, loss: AnyLoss | str, section: LossSection, options: Mapping[str, Any] | None = None
    ) -> Objective:
        """Returns the objective with another function as the main term, weighted as `section` says.

        `options` belong to a loss that is given by a name of `loss.function`; None for a function.

        Raises:
            ConfigError: The function cannot take the place of the configured one; see `from_config`.
        """
        if isinstance(loss, str):
            wrong = wrong_options(options or {}) if loss in LOSS_FUNCTIONS else []
            if wrong:
                raise ConfigError(f"loss {loss}: {'; '.join(wrong)}")
            function, name = load_loss_function(loss, options or {}), loss
        elif options is None:
            function, name = cast(LossFunction, loss), getattr(loss, "__qualname__", repr(loss))
        else:
            raise ConfigError(
                "options belong to a loss given by name; bind those of your own function with functools.partial"
            )
        preference = _preference(function, section)
        if (preference is None) != (self.preference is None):
            raise ConfigError(
                f"{name} and loss.function={section.function} cannot replace each other: one compares groups of "
                "sequences, the other does not; make an Engine with such a loss.function"
            )
        _check_head(function, name, self.has_head)
        term = function if preference is None else head_term if self.has_head else score_term
        functions = self.functions | {MAIN_TERM: term}
        objective = replace(self, functions=functions, names=self.names | {MAIN_TERM: name}, preference=preference)
        return objective._checked_with(section)

    @property
    def router_terms(self) -> tuple[str, ...]:
        """Returns the terms that are computed inside the layers, on every pipeline stage."""
        return tuple(term for term in self.coefficients if term not in self.functions)

    @property
    def teacher_terms(self) -> list[str]:
        """Returns the terms whose functions read the teacher's logits."""
        return [term for term, function in self.functions.items() if asks_for_teacher(function)]

    @property
    def extras(self) -> tuple[str, ...]:
        """Returns the names of the extras that the functions of all terms, and layers, read, each name once."""
        functions = self.functions.values()
        names = dict.fromkeys(name for function in functions for name in extras_of(function))
        if self.has_temperatures and any(reads_temperature(function) for function in functions):
            names[TEMPERATURE] = None
        return (*names, *self.choices)

    @property
    def reported(self) -> Reported:
        """Returns the diagnostics of all terms, under the names that appear in records."""
        found = [(term, reported_by(function)) for term, function in self.functions.items()]
        return Reported(
            means=tuple(shown_name(term, name) for term, each in found for name in each.means),
            maxima=tuple(shown_name(term, name) for term, each in found for name in each.maxima),
        )

    @property
    def whole_microbatch_terms(self) -> list[str]:
        """Returns the terms whose functions may look at all tokens of a microbatch together."""
        return [term for term, function in self.functions.items() if not is_per_token(function)]

    def notes(self, section: LossSection) -> list[str]:
        """Returns a note for the user about loss functions that keep the logits of a microbatch whole."""
        if section.chunk_tokens != "auto" or not self.whole_microbatch_terms:
            return []
        return [
            f"the logits of all tokens of a microbatch are kept whole, because {', '.join(self._need_whole)} is not "
            "marked with mtrain.per_token; loss.chunk_tokens=whole leaves this note out"
        ]

    @property
    def _need_whole(self) -> list[str]:
        return self._shown(self.whole_microbatch_terms)

    def _shown(self, terms: list[str]) -> list[str]:
        return [f"{self.names[term]} (term {term!r})" for term in terms]

    def _checked_with(self, section: LossSection) -> Objective:
        self._check_teacher(section)
        askers = self._need_whole
        if askers and isinstance(section.chunk_tokens, int):
            raise ConfigError(
                f"loss.chunk_tokens={section.chunk_tokens} shows a loss function a few tokens at a time, but "
                f"{', '.join(askers)} is not marked with mtrain.per_token; mark it if what it adds for a "
                "token follows from that token alone, or set loss.chunk_tokens=auto, which keeps whole logits for it"
            )
        return self

    def _check_teacher(self, section: LossSection) -> None:
        askers = self._shown(self.teacher_terms)
        if askers and section.teacher is None:
            raise ConfigError(
                f"loss.teacher is not given, but {', '.join(askers)} compares with one; set loss.teacher.checkpoint to "
                "a run folder"
            )
        # a teacher costs a forward pass of every microbatch and the memory of its weights
        if section.teacher is not None and not askers:
            raise ConfigError(
                f"loss.teacher.checkpoint={section.teacher.checkpoint!r} is given, but no loss function asks for a "
                "teacher; add such a term, mark your function with mtrain.needs_teacher, or remove the "
                "teacher"
            )

    def pairs(self, inputs_by_term: Mapping[str, TermInputs]) -> dict[str, LossPair]:
        """Evaluates the given terms of one microbatch.

        Raises:
            ConfigError: A function did not return a pair.
        """
        pairs = {}
        for term, function in self.functions.items():  # in one order on every rank, as functions communicate
            if term in inputs_by_term:
                inputs = inputs_by_term[term]
                pairs[term] = _checked(function(inputs), self.names[term], inputs, reported_by(function))
        return pairs

    def scalar(
        self,
        pairs: Mapping[str, LossPair],
        factors: Mapping[str, float | Tensor],
        numerator_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Returns the scalar that a microbatch is differentiated from: (N_main + sum_k factor_k N_k) x numerator_scale.

        Factors of side terms are their coefficients, or those of `side_term_factors` for terms of `apart`. The scale is
        an exact power of two near 1 / D_main for fp16, whose gradients would overflow as plain sums; the caller divides
        by it again.
        """
        # a float64 factor makes the product float64: back to the dtype of the main numerator
        parts = [
            pair.numerator if term == MAIN_TERM else (pair.numerator * factors[term]).to(pair.numerator.dtype)
            for term, pair in pairs.items()
        ]
        scalar = functools.reduce(torch.add, parts)
        return (scalar * numerator_scale).to(scalar.dtype)


def side_term_factors(planned: Tensor, coefficients: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns c_k x D_main / D_k of each side term, a float64 scalar on the device; 0 where D_k is 0. `planned` are the
    denominators over the global batch, [terms] float64, in the order of `coefficients`."""
    # scalars stay on the device: reading D_k on the host would wait for all queued work
    terms = list(zip(coefficients.items(), planned))
    return {
        # the order of operations is that of `check_factors`, so that the checked number is the one that is used
        term: torch.where(denominator == 0, 0.0, coefficient * (planned[0] / denominator))
        for (term, coefficient), denominator in terms[1:]
    }


def power_of_two_near(x: Tensor) -> Tensor:
    """Returns 2^round(log2 x) as a float64 scalar on the device of x; 1 where x is not a positive finite number.

    Multiplying by it only changes exponents, so that dividing by it later does not round.
    """
    # the exponent bits alone are the largest power of two up to a number; up to sqrt(2) x, that is the one nearest to x
    power = ((x * math.sqrt(2)).view(torch.int64) & _EXPONENT).view(torch.float64)
    return torch.where(x.isfinite() & (x > 0), power, 1.0)


def _preference(function: Callable[..., Any], section: LossSection) -> PreferenceLoss | None:
    """Returns the function if it is marked as a preference loss, else None; refuses aggregations without a score."""
    if preference_marks(function) is None:
        return None
    if section.aggregation not in SCORE_AGGREGATIONS:
        raise ConfigError(
            f"loss.aggregation={section.aggregation} gives no score of a sequence, which a preference loss needs; set "
            f"it to {' or '.join(SCORE_AGGREGATIONS)}"
        )
    return function


def _check_head(function: Callable[..., Any], name: str, has_head: bool) -> None:
    """Refuses a loss of tokens for a model with a head, and a loss of a head for a model without one."""
    marks = preference_marks(function)
    if marks is not None:
        reads_head = marks.scores_by_head
    elif name in LOSS_FUNCTIONS:
        reads_head = name in HEAD_LOSSES
    else:
        return  # a function of the user's own may read either
    if reads_head != has_head:
        raise ConfigError(
            f"{name} {'reads a head' if reads_head else 'predicts tokens'}, but the model has "
            f"{'a head' if has_head else 'none'}; set model.num_labels, or use another loss"
        )


def _denominator_fields(term: TermSection) -> dict[str, object]:
    """Returns the fields of a term that, with the batch, determine its denominator: all but function and options."""
    return {key: getattr(term, key) for key in TermSection.model_fields if key not in ("function", "options")}


def _checked(pair: object, name: str, inputs: TermInputs, reported: Reported) -> LossPair:
    """Refuses a value that is not a valid pair."""
    if not isinstance(pair, LossPair):
        raise ConfigError(
            f"loss.function={name!r} returned a value of type {type(pair).__name__}, but has to return a "
            "mtrain.LossPair(numerator, denominator)"
        )
    _check_part(pair.numerator, "numerator", (torch.float32, inputs.logits.dtype), name)
    _check_part(pair.denominator, "denominator", (torch.float64,), name)
    # D divides after backward, so the gradient that such a function expects through D would never flow
    if pair.denominator.requires_grad:
        raise ConfigError(f"loss.function={name!r} returned a denominator with a graph; detach it")
    # megatron-core's backward_step (pipeline_parallel/schedules.py) silently skips an output without a graph
    if torch.is_grad_enabled() and inputs.logits.local.requires_grad and not pair.numerator.requires_grad:
        raise ConfigError(
            f"loss.function={name!r} returned a numerator without a graph; compute it from inputs.logits even where "
            "every weight is 0, as mtrain.weigh does"
        )
    _check_diagnostics(pair, name, reported)
    return pair


def _check_diagnostics(pair: LossPair, name: str, reported: Reported) -> None:
    """Refuses diagnostics other than those that the function is marked for, for which every rank waits."""
    wanted = dict.fromkeys(reported.means, (2,)) | dict.fromkeys(reported.maxima, ())
    found = {each: tuple(value.shape) for each, value in pair.diagnostics.items()}
    if found != wanted:
        raise ConfigError(
            f"loss.function={name!r} returned the diagnostics {found}, but is marked for {wanted} (name: shape); make "
            "them with mtrain.diagnosed, and mark the function with mtrain.reports"
        )


def _check_part(part: object, role: str, dtypes: tuple[torch.dtype, ...], name: str) -> None:
    """Refuses a field of the pair that is not a scalar tensor of one of its dtypes."""
    if not isinstance(part, Tensor):
        found = type(part).__name__
    elif part.ndim != 0 or part.dtype not in dtypes:
        found = f"{part.dtype} tensor of shape {list(part.shape)}"
    else:
        return
    raise ConfigError(
        f"loss.function={name!r} returned a {role} that is a {found}; it has to be a {dtypes[0]} scalar tensor"
    )


def objective_of(config: Config) -> Objective:
    """Returns the objective of a run.

    Raises:
        ConfigError: A loss function cannot be loaded, or the records lack extras that it reads.
    """
    objective = Objective.from_config(config.loss, config.model)
    needed = as_configured(objective.extras)
    there = {*config.data.extra_columns, *label_columns(config.loss)}
    missing = [name for name, columns in needed.items() if not {*columns} <= there]
    if missing:
        raise ConfigError(
            f"data.extras={list(config.data.extras)} lacks {', '.join(missing)}, but the loss functions read "
            f"{', '.join(needed)} of each token; set data.extras=[{','.join(needed)}] with "
            "data.kind=sft, and give records these keys"
        )
    has_temperatures = TEMPERATURE in config.data.extra_columns
    return replace(objective, has_temperatures=has_temperatures, choices=config.data.choices)

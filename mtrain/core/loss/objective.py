"""The objective: the sum over terms of coefficient x numerator / denominator, in one backward pass.

Gradients are divided once, by the denominator D_main of the main term, when they are finalised. The numerator of side
term k is therefore multiplied by coefficient x D_main / D_k, with denominators known before the forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
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
    is_consuming,
    is_per_token,
    load_loss_function,
    reads_temperature,
    reported_by,
    with_options,
)
from mtrain.core.loss.pair import LossFunction, LossPair, Reported, TermInputs, shown_name
from mtrain.core.loss.preference.scores import PreferenceLoss, head_term, preference_marks, score_term

_EXPONENT = 0x7FF << 52
"""Mask that keeps the exponent bits of a positive float64 and clears its mantissa."""

AnyLoss = LossFunction | PreferenceLoss


@dataclass(frozen=True)
class Objective:
    """The loss functions of a run and how their terms are added."""

    functions: dict[str, LossFunction]
    """Loss function of each term computed from logits; the main term first."""
    coefficients: dict[str, float]
    """Coefficient of each term (1 for the main term): the terms of `functions` in their order, then router terms."""
    names: dict[str, str]
    """Name of each term's function in the configuration, for messages."""
    apart: frozenset[str]
    """Side terms whose denominator can differ from the main term's, because they have another aggregation, count other
    tokens, or belong to routers."""
    preference: PreferenceLoss | None = None
    """Preference loss, which compares groups of sequences; the main term of `functions` then carries its gradient."""
    has_head: bool = False
    """Whether the model has a head that scores whole sequences instead of predicting tokens."""
    has_temperatures: bool = False
    """Whether the data contain the temperature of each sample."""
    choices: tuple[str, ...] = ()
    """Names of the choices, such as routed experts, that layers read from the data."""

    @classmethod
    def from_config(cls, section: LossSection, model: ModelSection | None = None) -> Objective:
        """Loads the loss function of every term; each MTP depth of the model is a side term.

        Raises:
            ConfigError: A function cannot be loaded; a function needs a teacher but none is configured, or the reverse;
                logits are computed in chunks, but a function is not marked for that.
        """
        terms = {MAIN_TERM: section, **section.side_terms}
        # the coefficients of all depths add up to mtp_coefficient
        num_depths, has_head = (0, False) if model is None else (len(model.layers_ahead), model.output.head_rows > 0)
        share = section.mtp_coefficient / max(num_depths, 1)
        depths = [depth_term(depth) for depth in range(1, num_depths + 1)]
        loaded = {name: load_loss_function(term.function, term.options) for name, term in terms.items()}
        side_coefficients = {name: side.coefficient for name, side in section.side_terms.items()}
        preference = _preference(loaded[MAIN_TERM], section)
        _check_head(loaded[MAIN_TERM], section.function, has_head)
        if preference is not None:
            loaded[MAIN_TERM] = head_term if has_head else score_term
        # decided by the configuration alone; a preference loss counts groups, which no side term does
        apart = [
            name
            for name, term in terms.items()
            if _denominator_fields(term) != _denominator_fields(section) or (preference and name in side_coefficients)
        ]
        objective = cls(
            # main term first, routers last, as in PairAccumulator.terms: vectors of planned denominators are matched
            # with `coefficients` by position
            functions=loaded | dict.fromkeys(depths, next_token_loss),
            coefficients={MAIN_TERM: 1.0}
            | side_coefficients
            | dict.fromkeys(depths, share)
            | section.router.coefficients,
            names={name: term.function for name, term in terms.items()} | dict.fromkeys(depths, "next_token_loss"),
            # a depth has no targets at the end of each row, and routers count all text tokens
            apart=frozenset([*apart, *depths, *section.router.coefficients]),
            preference=preference,
            has_head=has_head,
        )
        return objective._checked_with(section)

    def with_main(
        self, loss: AnyLoss | str, section: LossSection, options: Mapping[str, Any] | None = None
    ) -> Objective:
        """Returns the objective with another main term, weighted as `section` says.

        Args:
            loss: A loss function, or a name that `loss.function` accepts.
            options: Options of the loss, by name.

        Raises:
            ConfigError: The loss cannot replace the configured one; see `from_config`.
        """
        if isinstance(loss, str):
            wrong = wrong_options(options or {}) if loss in LOSS_FUNCTIONS else []
            if wrong:
                raise ConfigError(f"loss {loss}: {'; '.join(wrong)}")
            function, name = load_loss_function(loss, options or {}), loss
        else:
            name = getattr(loss, "__qualname__", repr(loss))
            function = cast(LossFunction, loss if options is None else with_options(loss, f"loss {name}", options))
        preference = _preference(function, section)
        if (preference is None) != (self.preference is None):
            raise ConfigError(
                f"{name} and loss.function={section.function} cannot replace each other: one compares groups of "
                "sequences, the other does not; make an Engine with such a loss.function"
            )
        _check_head(function, name, self.has_head)
        if preference is not None:
            function = head_term if self.has_head else score_term
        functions = self.functions | {MAIN_TERM: function}
        objective = replace(self, functions=functions, names=self.names | {MAIN_TERM: name}, preference=preference)
        return objective._checked_with(section)

    @property
    def router_terms(self) -> tuple[str, ...]:
        """Returns the terms computed by routers inside the layers, on every pipeline stage."""
        return tuple(term for term in self.coefficients if term not in self.functions)

    @property
    def teacher_terms(self) -> list[str]:
        """Returns the terms whose functions read the teacher's logits."""
        return [term for term, function in self.functions.items() if asks_for_teacher(function)]

    @property
    def extras(self) -> tuple[str, ...]:
        """Returns the names of all extras that loss functions or layers read, without duplicates."""
        functions = self.functions.values()
        names = dict.fromkeys(name for function in functions for name in extras_of(function))
        if self.has_temperatures and any(reads_temperature(function) for function in functions):
            names[TEMPERATURE] = None
        return (*names, *self.choices)

    @property
    def reported(self) -> Reported:
        """Returns the diagnostics that all terms declare, under the names shown in records."""
        declared = [(term, reported_by(function)) for term, function in self.functions.items()]
        return Reported(
            means=tuple(shown_name(term, name) for term, diagnostics in declared for name in diagnostics.means),
            maxima=tuple(shown_name(term, name) for term, diagnostics in declared for name in diagnostics.maxima),
        )

    @property
    def whole_microbatch_terms(self) -> list[str]:
        """Returns the terms whose functions need all tokens of a microbatch at once."""
        return [term for term, function in self.functions.items() if not is_per_token(function)]

    def consumes_logits(self, terms: Collection[str]) -> bool:
        """Says whether the logits that these terms read are needed by only one call of `cross_entropy`."""
        return len(terms) == 1 and all(is_consuming(self.functions[term]) for term in terms)

    def notes(self, section: LossSection) -> list[str]:
        """Returns a note for the user if a loss function forces whole logits, which take more memory."""
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
        functions = self._need_whole
        if functions and isinstance(section.chunk_tokens, int):
            raise ConfigError(
                f"loss.chunk_tokens={section.chunk_tokens} calls loss functions with a few tokens at a time, but "
                f"{', '.join(functions)} is not marked with mtrain.per_token; mark it if its value for a token "
                "depends on that token alone, or set loss.chunk_tokens=auto, which keeps whole logits for it"
            )
        return self

    def _check_teacher(self, section: LossSection) -> None:
        functions = self._shown(self.teacher_terms)
        if functions and section.teacher is None:
            raise ConfigError(
                f"loss.teacher is not given, but {', '.join(functions)} compares with a teacher; set "
                "loss.teacher.checkpoint to a run folder"
            )
        # a teacher costs a forward pass of every microbatch and the memory of its weights
        if section.teacher is not None and not functions:
            raise ConfigError(
                f"loss.teacher.checkpoint={section.teacher.checkpoint!r} is given, but no loss function asks for a "
                "teacher; add such a term, mark your function with mtrain.needs_teacher, or remove the "
                "teacher"
            )

    def pairs(self, inputs_by_term: Mapping[str, TermInputs]) -> dict[str, LossPair]:
        """Evaluates the terms of one microbatch for which inputs are given.

        Raises:
            ConfigError: A function did not return a pair.
        """
        pairs = {}
        for term, function in self.functions.items():  # in the same order on every rank, since functions communicate
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
        """Returns the scalar to differentiate for a microbatch: (N_main + sum_k factor_k N_k) x numerator_scale.

        The factor of a side term is its coefficient, or that of `side_term_factors` for terms in `apart`. With fp16,
        whose gradients would overflow as plain sums, the scale is an exact power of two near 1 / D_main; the caller
        divides by it again.
        """
        # a float64 factor makes the product float64; it is cast back to the dtype of the numerator
        parts = [
            pair.numerator if term == MAIN_TERM else (pair.numerator * factors[term]).to(pair.numerator.dtype)
            for term, pair in pairs.items()
        ]
        scalar = functools.reduce(torch.add, parts)
        return (scalar * numerator_scale).to(scalar.dtype)


def side_term_factors(planned: Tensor, coefficients: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the factor c_k x D_main / D_k of each side term, a float64 scalar on the device; 0 where D_k is 0.

    `planned` has the denominators over the global batch, [terms] float64, in the order of `coefficients`.
    """
    # everything stays on the device: reading D_k on the host would wait for all queued work
    terms = list(zip(coefficients.items(), planned))
    return {
        # same order of operations as in `check_factors`, so that the checked number is the one in use
        term: torch.where(denominator == 0, 0.0, coefficient * (planned[0] / denominator))
        for (term, coefficient), denominator in terms[1:]
    }


def power_of_two_near(x: Tensor) -> Tensor:
    """Returns 2^round(log2 x) as a float64 scalar on the device of x; 1 where x is not a positive finite number.

    Multiplying by it changes only exponents, so a later division does not round.
    """
    # exponent bits alone give the largest power of two <= a number; for sqrt(2) x it is the one nearest to x
    power = ((x * math.sqrt(2)).view(torch.int64) & _EXPONENT).view(torch.float64)
    return torch.where(x.isfinite() & (x > 0), power, 1.0)


def _preference(function: Callable[..., Any], section: LossSection) -> PreferenceLoss | None:
    """Returns the function if it is marked as a preference loss, else None; refuses aggregations that give no score."""
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
    """Returns the fields of a term that determine its denominator for a batch: all but function and options."""
    return {key: getattr(term, key) for key in TermSection.model_fields if key not in ("function", "options")}


def _checked(pair: object, name: str, inputs: TermInputs, reported: Reported) -> LossPair:
    """Returns the value of a loss function if it is a valid pair, else refuses it."""
    if not isinstance(pair, LossPair):
        raise ConfigError(
            f"loss.function={name!r} returned a value of type {type(pair).__name__}, but has to return an "
            "mtrain.LossPair(numerator, denominator)"
        )
    _check_part(pair.numerator, "numerator", (torch.float32, inputs.logits.dtype), name)
    _check_part(pair.denominator, "denominator", (torch.float64,), name)
    # D divides after backward, so no gradient could flow through it
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
    """Refuses diagnostics that differ from the declared ones, since all ranks must reduce the same list."""
    declared = dict.fromkeys(reported.means, (2,)) | dict.fromkeys(reported.maxima, ())
    returned = {key: tuple(value.shape) for key, value in pair.diagnostics.items()}
    if returned != declared:
        raise ConfigError(
            f"loss.function={name!r} returned the diagnostics {returned}, but is marked for {declared} (name: shape); "
            "make them with mtrain.diagnosed, and mark the function with mtrain.reports"
        )


def _check_part(part: object, role: str, dtypes: tuple[torch.dtype, ...], name: str) -> None:
    """Refuses a field of the pair that is not a scalar tensor of one of its dtypes."""
    if not isinstance(part, Tensor):
        actual = type(part).__name__
    elif part.ndim != 0 or part.dtype not in dtypes:
        actual = f"{part.dtype} tensor of shape {list(part.shape)}"
    else:
        return
    raise ConfigError(
        f"loss.function={name!r} returned a {role} that is a {actual}; it has to be a {dtypes[0]} scalar tensor"
    )


def objective_of(config: Config) -> Objective:
    """Returns the objective of a run.

    Raises:
        ConfigError: A loss function cannot be loaded, or the records lack extras that it reads.
    """
    objective = Objective.from_config(config.loss, config.model)
    needed = as_configured(objective.extras)
    available = {*config.data.extra_columns, *label_columns(config.loss)}
    missing = [name for name, columns in needed.items() if not {*columns} <= available]
    if missing:
        raise ConfigError(
            f"data.extras={list(config.data.extras)} lacks {', '.join(missing)}, but the loss functions read "
            f"{', '.join(needed)} of each token; set data.extras=[{','.join(needed)}] with "
            "data.kind=sft, and give records these keys"
        )
    has_temperatures = TEMPERATURE in config.data.extra_columns
    return replace(objective, has_temperatures=has_temperatures, choices=config.data.choices)

"""Causes of a disagreement: each is another way of computing, and the right one gives the engine's own numbers.

A cause is named only if the log-probabilities that it predicts are the engine's within rounding. How much rounding is
to be expected is measured for each cause: the same prediction is computed in the engine's precision, too.

Where the cause is a rounding to bfloat16, a number that lies between two of its values may fall to either side, in the
engine to another one than here, and changes all that is computed from it, as do experts whose scores become equal. So
such a cause has to give most log-probabilities within the rounding of the engine's precision, not all: by chance, or
together with a second cause, it gives none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain.verify.core.tolerances import amplified
from mtrain.verify.reference.model.modules import AS_DEFINED, ExpertChanges
from mtrain.verify.rollout.exact import Pass, Reference, log_probs, replayed
from mtrain.verify.rollout.fits import fitted_padding, fitted_temperature, fitted_top_k, fitted_top_p, truncated
from mtrain.verify.rollout.records import Rollout

_IMPROVEMENT = 4.0
"""Factor by which a cause has to reduce the deviation: rounding that is as large as the deviation explains nothing."""
_MOST = 0.5
"""Share of the tokens that a cause has to predict if it is a rounding."""


@dataclass(frozen=True)
class Spread:
    """Size of the differences between two computations of the same log-probabilities, in nats."""

    worst: float
    rms: float

    @classmethod
    def of(cls, differences: Sequence[Tensor]) -> Spread:
        """Measures differences; those that are nan were not computed."""
        every = torch.cat([each.flatten() for each in differences])
        every = every[~every.isnan()]
        if not len(every):
            return cls(0.0, 0.0)
        return cls(float(every.abs().max()), float(every.square().mean().sqrt()))

    def allowed(self, floor: float) -> Spread:
        """Returns the largest differences that rounding explains, where this is the measured rounding.

        Args:
            floor: Rounding of the logits themselves.
        """
        return Spread(amplified(max(self.worst, floor)), amplified(max(self.rms, floor)))

    def within(self, allowed: Spread) -> bool:
        """Says whether rounding explains the differences; never for infinite ones."""
        return self.worst <= allowed.worst and self.rms <= allowed.rms


@dataclass(frozen=True)
class Predicted:
    """Log-probabilities that a cause predicts for each answer, exact and in the engine's precision."""

    exact: list[Tensor]
    rounded: list[Tensor]


@dataclass(frozen=True)
class Cause:
    """Cause that may explain the deviation."""

    name: str
    """Name, such as `temperature`."""
    fact: str
    """What the engine did, as a sentence without its end."""
    remedy: str
    """What to change."""
    is_rounding: bool = False
    """Whether the engine rounds to bfloat16 somewhere, so that single tokens may be predicted wrongly."""


@dataclass(frozen=True)
class Tried:
    """Cause with what is left of the deviation under it."""

    cause: Cause
    left: Spread
    allowed: Spread
    share: float
    """Share of the tokens that it predicts within rounding."""
    explains: bool


@dataclass(frozen=True)
class Rounding:
    """Rounding of a precision."""

    dtype: torch.dtype
    floor: float
    """Rounding of the logits themselves, or the root mean square of all log-probabilities' where that is larger."""
    allowed: Spread
    """Largest differences that it explains."""


@dataclass(frozen=True)
class Passes:
    """Passes over an answer in float64 and in the engine's precision."""

    rollout: Rollout
    exact: Pass
    rounded: Pass


@dataclass(frozen=True)
class Disagreement:
    """Answers whose log-probabilities deviate, and all that predicts others."""

    answers: Sequence[Passes]
    reference: Reference
    rounding: Rounding
    """Rounding of the engine."""
    before: Spread
    """Deviation that is to be explained."""
    begin_ids: Sequence[int]
    """Tokens that the tokenizer puts before a text."""
    prompts: Mapping[str, Sequence[Sequence[int] | None]]
    """Other token ids of each answer's prompt, by what they are; None where there are none."""
    others: Mapping[str, Callable[[], Reference]]
    """Models with other weights, by what they are."""
    num_experts: int
    """Number of experts of a layer; 0 if the model has none."""

    def tried(self) -> list[Tried]:
        """Tries all causes, and returns them in the order in which they are tried."""
        found: list[Tried] = []
        for cause, predicted in self._predictions():
            if predicted is None or all(each.isnan().all() for each in predicted.exact):
                continue
            found.append(self._judged(cause, predicted))
        return found

    def _judged(self, cause: Cause, predicted: Predicted) -> Tried:
        missed = differences([each.rollout for each in self.answers], predicted.exact)
        left, every = Spread.of(missed), torch.cat(missed)
        if cause.is_rounding:
            allowed = self.rounding.allowed
        else:
            pairs = zip(predicted.rounded, predicted.exact, strict=True)
            allowed = Spread.of([rounded - exact for rounded, exact in pairs]).allowed(self.rounding.floor)
        share = float((every[~every.isnan()].abs() <= allowed.worst).double().mean())
        if cause.is_rounding:
            explains = share > _MOST and self.before.rms > _IMPROVEMENT * allowed.rms
        else:
            explains = left.within(allowed) and left.rms * _IMPROVEMENT <= self.before.rms
        return Tried(cause, left, allowed, share, explains)

    def _predictions(self) -> Iterator[tuple[Cause, Predicted | None]]:
        yield from self._of_logits()
        yield from self._of_truncation()
        yield from self._of_prompts()
        yield from self._of_experts()
        for name, load in self.others.items():
            yield _stale(name), self._rerun(reference=load())

    def _of_logits(self) -> Iterator[tuple[Cause, Predicted | None]]:
        said = sorted({each.rollout.temperature for each in self.answers})
        fitted = fitted_temperature([(each.exact.logits, each.rollout) for each in self.answers])
        # another one than the file's: that is no cause
        for temperature in {each: None for each in (1.0, fitted) if [each] != said}:
            yield _temperature(temperature, said), self._of_each(_at(temperature))
        for shift in (1, -1):
            yield _moved(shift), self._of_each(_neighbour(shift))
            yield _label_shift(shift), self._of_each(_other_position(shift))

    def _of_truncation(self) -> Iterator[tuple[Cause, Predicted | None]]:
        places = [(each.exact.logits, each.rollout) for each in self.answers]
        k, p = fitted_top_k(places), fitted_top_p(places, max(1e-9, self.rounding.floor))
        yield _truncation(f"top_k={k}"), self._of_each(lambda logits, rollout: truncated(logits, rollout, top_k=k))
        if p is not None:
            yield (
                _truncation(f"top_p={p:g}"),
                self._of_each(lambda logits, rollout: truncated(logits, rollout, top_p=p)),
            )
        rows = fitted_padding(places)
        if rows > 0:
            yield _padding(rows), self._of_each(lambda logits, rollout: log_probs(
                torch.nn.functional.pad(logits, (0, rows)), rollout.ids, rollout.temperature))  # fmt: skip

    def _of_prompts(self) -> Iterator[tuple[Cause, Predicted | None]]:
        given = [each.rollout.prompt_ids for each in self.answers]
        begin = list(self.begin_ids)
        if begin:
            size = len(begin)
            without = [ids[size:] if ids[:size] == begin and len(ids) > size else None for ids in given]
            yield _begin("without the tokens that begin a text (bos)"), self._rerun(prompts=without)
            yield (
                _begin("with the tokens that begin a text (bos) put first once more"),
                self._rerun(prompts=[begin + ids for ids in given]),
            )
        for name, prompts in self.prompts.items():
            yield _template(name), self._rerun(prompts=prompts)

    def _of_experts(self) -> Iterator[tuple[Cause, Predicted | None]]:
        if not self.num_experts:
            return
        router = ExpertChanges(router_dtype=torch.bfloat16)
        yield _ROUTER, self._rerun(changes=[router] * len(self.answers))
        for ranks in range(2, self.num_experts + 1):
            if self.num_experts % ranks == 0:
                sums = ExpertChanges(num_partial_sums=ranks)
                yield _sums(ranks), self._rerun(changes=[sums] * len(self.answers))
        if all(each.rollout.routes is not None for each in self.answers):
            changes = [ExpertChanges(chosen=replayed(each.rollout, each.exact)) for each in self.answers]
            yield _ROUTES, self._rerun(changes=changes)

    def _of_each(self, predict: Callable[[Tensor, Rollout], Tensor]) -> Predicted:
        """Predicts from the logits that are there."""
        return Predicted(
            [predict(each.exact.logits, each.rollout) for each in self.answers],
            [predict(each.rounded.logits, each.rollout) for each in self.answers],
        )

    def _rerun(
        self,
        prompts: Sequence[Sequence[int] | None] | None = None,
        changes: Sequence[ExpertChanges] | None = None,
        reference: Reference | None = None,
    ) -> Predicted | None:
        """Predicts by new passes; None if an answer has no other prompt."""
        reference = reference or self.reference
        found = Predicted([], [])
        for number, each in enumerate(self.answers):
            rollout, prompt = each.rollout, each.rollout.prompt_ids if prompts is None else prompts[number]
            if not prompt:
                return None
            change = AS_DEFINED if changes is None else changes[number]
            for dtype, where in ((torch.float64, found.exact), (self.rounding.dtype, found.rounded)):
                passed = reference.run(prompt, rollout.ids, dtype, change)
                where.append(log_probs(passed.logits, rollout.ids, rollout.temperature))
        return found


def differences(rollouts: Sequence[Rollout], exact: Sequence[Tensor]) -> list[Tensor]:
    """Returns the engine's log-probabilities minus others, nan where the model did not draw the token."""
    return [
        (torch.tensor(each.log_probs, dtype=torch.float64) - values).masked_fill(~torch.tensor(each.mask), math.nan)
        for each, values in zip(rollouts, exact, strict=True)
    ]


def _at(temperature: float) -> Callable[[Tensor, Rollout], Tensor]:
    return lambda logits, rollout: log_probs(logits, rollout.ids, temperature)


def _neighbour(shift: int) -> Callable[[Tensor, Rollout], Tensor]:
    def predict(logits: Tensor, rollout: Rollout) -> Tensor:
        own = log_probs(logits, rollout.ids, rollout.temperature)
        missing = torch.full((1,), math.nan, dtype=own.dtype)
        return torch.cat([own[1:], missing] if shift > 0 else [missing, own[:-1]])

    return predict


def _other_position(shift: int) -> Callable[[Tensor, Rollout], Tensor]:
    return lambda logits, rollout: log_probs(logits, rollout.ids, rollout.temperature, shift)


def _temperature(temperature: float, said: Sequence[float]) -> Cause:
    given = ", ".join(f"{each:g}" for each in said)
    return Cause(
        "temperature",
        f"the log-probabilities are those at temperature {temperature:g}, but the file says {given}",
        "let the engine give those after the temperature (vLLM: logprobs_mode=processed_logprobs), or say temperature "
        f"{temperature:g} in the file and in Datum.temperature",
    )


def _moved(shift: int) -> Cause:
    return Cause(
        "off by one",
        f"the log-probability of each token is given to the one {'before' if shift > 0 else 'after'} it",
        "shift log_probs by one: the first is that of the first token of the answer",
    )


def _label_shift(shift: int) -> Cause:
    where = "after the token itself" if shift > 0 else "one token too early"
    return Cause(
        "off by one",
        f"the log-probability of each token is taken from the logits {where}",
        "take it from the logits of the position before the token",
    )


def _truncation(what: str) -> Cause:
    return Cause(
        "truncated vocabulary",
        f"the log-probabilities are divided by the probability of the tokens that {what} leaves",
        "let the engine give those of the whole vocabulary (vLLM: logprobs_mode=raw_logprobs at temperature 1), or "
        "draw without top_k and top_p: a loss takes the whole distribution",
    )


def _padding(rows: int) -> Cause:
    return Cause(
        "padded vocabulary",
        f"the softmax of the engine counts {rows} rows more than the vocabulary has, with logits of 0",
        "let the engine leave out the rows that pad its table",
    )


def _begin(what: str) -> Cause:
    return Cause(
        "missing bos" if what.startswith("without") else "doubled bos",
        f"the engine read the prompt {what}",
        "give the engine the token ids of the prompt instead of a text, or compare add_special_tokens on both sides",
    )


def _template(name: str) -> Cause:
    return Cause(
        "other template",
        f"the engine read {name} instead of the token ids in the file",
        "give the engine the token ids that the run's chat template makes",
    )


_ROUTER = Cause(
    "bf16 router",
    "the routers of the engine compute in bfloat16, so that experts are weighed, and some chosen, otherwise",
    "let the engine compute its routers in float32, or replay its routes in the trainer",
    is_rounding=True,
)


def _sums(ranks: int) -> Cause:
    return Cause(
        "expert-parallel sum",
        f"the engine rounds the sum of the experts of each of {ranks} expert-parallel ranks to bfloat16 before it adds "
        "them up",
        "let the engine add up experts in float32, or with another number of expert-parallel ranks",
        is_rounding=True,
    )


_ROUTES = Cause(
    "other routes",
    "the engine chose other experts; with its routes replayed its log-probabilities are right",
    "replay the routes in the trainer, or compute routers on both sides in float32",
)


def _stale(name: str) -> Cause:
    return Cause(
        "stale weights",
        f"the log-probabilities are those of {name}",
        "send the weights before drawing, and empty the engine's prefix cache after it",
    )


def named(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the causes that explain the deviation, the one to name first: it predicts most tokens.

    Of those that predict as many, the one that leaves less, within a factor of 2; else the one that was tried first, as
    it is the more particular one.
    """
    found = [each for each in tried if each.explains]
    most = [each for each in found if each.share == max(other.share for other in found)]
    first = next((each for each in most if each.left.rms <= 2 * min(other.left.rms for other in most)), None)
    if first is None:
        return []
    return [first, *(each for each in found if each.cause.name != first.cause.name)]

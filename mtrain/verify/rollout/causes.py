"""Causes of a disagreement: each is another computation, and the right one gives the engine's own numbers.

A cause is named only if its predicted log-probabilities equal the engine's within rounding. The expected rounding is
measured for each cause by repeating the prediction in the engine's precision.

If the cause is bfloat16 rounding, a number between two bfloat16 values may round differently in the engine, as may
experts with nearly equal scores, which changes everything computed from it. Such a cause must predict most, not all,
log-probabilities within the rounding of the engine's precision; chance or a second cause would predict none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtrain.verify.reference.model.modules import AS_DEFINED, ExpertChanges
from mtrain.verify.rollout.exact import Passes, Reference, Spread, log_probs, replayed
from mtrain.verify.rollout.fits import SEVERAL, SINGLES, Search, fitted_padding
from mtrain.verify.rollout.records import Rollout
from mtrain.verify.rollout.settings import Cause, DrawnTokens, Settings

_IMPROVEMENT = 4.0
"""Smallest factor by which a cause must reduce the deviation: rounding as large as the deviation explains nothing."""
_MOST_CUTS = 64
"""Longest prompt that is cut to every length; an engine may have cut it."""
_USUAL_CUTS = sorted(
    {*(1 << power for power in range(4, 18)), *(256 * number for number in range(1, 33))}, reverse=True
)
"""Tried lengths of longer prompts."""
_MOST = 0.5
"""Share of tokens that a rounding cause must predict."""


ROUTER = Cause(
    "bf16 router",
    "the routers of the engine compute in bfloat16, so some experts get other weights, and some others are chosen",
    "let the engine compute its routers in float32, or replay its routes in the trainer",
    is_rounding=True,
)
ROUTES = Cause(
    "other routes",
    "the engine chose other experts; with its routes replayed its log-probabilities are right",
    "replay the routes in the trainer, or compute routers on both sides in float32",
)


@dataclass(frozen=True)
class Predicted:
    """Log-probabilities that a cause predicts by answer, exact and in the engine's precision."""

    exact: list[Tensor]
    rounded: list[Tensor]


@dataclass(frozen=True)
class Tried:
    """Cause with the deviation that it leaves."""

    cause: Cause
    left: Spread
    allowed: Spread
    share: float
    explains: bool


@dataclass(frozen=True)
class Rounding:
    """Rounding of a precision."""

    dtype: torch.dtype
    floor: float
    """Rounding of the logits, or the rms over all log-probabilities if that is larger."""
    allowed: Spread


@dataclass(frozen=True)
class Disagreement:
    """Deviating answers, with everything that predicts others."""

    answers: Sequence[Passes]
    reference: Reference
    rounding: Rounding
    before: Spread
    begin_ids: Sequence[int]
    """Tokens that the tokenizer puts before a text."""
    prompts: Mapping[str, Sequence[Sequence[int] | None]]
    """Alternative prompt ids by description, one for each answer; None if there is none."""
    others: Mapping[str, Callable[[], Reference]]
    num_experts: int
    """Experts per layer; 0 for a dense model."""
    is_of_engine: bool = True
    """Whether the answers are an engine's, not the trainer's, whose settings and precision are known."""

    def tried(self) -> list[Tried]:
        """Tries all causes; returns them in that order."""
        found: list[Tried] = []
        for cause, predicted in self._predictions():
            if predicted is None or all(each.isnan().all() for each in predicted.exact):
                continue
            found.append(self._judged(cause, predicted))
        if self.is_of_engine and not any(each.explains for each in found):
            for cause, predicted in (each for names in SEVERAL for each in self._of_settings(names)):
                found += [] if predicted is None else [self._judged(cause, predicted)]
                if found[-1].explains:  # chance does not give the numbers of so many tokens
                    break
        if self.is_of_engine and not any(each.explains for each in found):
            found += self._coarser()
        return found

    def _coarser(self) -> Iterator[Tried]:
        """Tries each precision below the one that the engine is said to have."""
        exact = [answer.log_probs(answer.exact) for answer in self.answers]
        missed = differences([answer.rollout for answer in self.answers], exact)
        for dtype in (torch.float16, torch.bfloat16):
            if torch.finfo(dtype).eps <= torch.finfo(self.rounding.dtype).eps:
                continue
            passed = [
                self.reference.run(answer.rollout.prompt_ids, answer.rollout.ids, dtype) for answer in self.answers
            ]
            pairs = zip(self.answers, passed, strict=True)
            measured = Spread.of([each.log_probs(one) - each.log_probs(each.exact) for each, one in pairs])
            # far less than its rounding is no rounding of it
            explains = self.before.within(measured.allowed(0.0)) and self.before.rms * _IMPROVEMENT >= measured.rms
            name = str(dtype).removeprefix("torch.")
            cause = Cause(
                "precision",
                f"the differences are as large as the rounding of an engine that computes in {name}",
                f"if the engine computes in {name}, say so by --dtype {name}; if not, it may have other weights "
                "(--weights)",
            )
            yield Tried(cause, Spread.of(missed), measured.allowed(0.0), 1.0, explains)

    def _judged(self, cause: Cause, predicted: Predicted) -> Tried:
        missed = differences([answer.rollout for answer in self.answers], predicted.exact)
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
        yield from self._of_padding()
        yield from self._of_prompts()
        if self.is_of_engine:
            yield from self._of_order()
            yield from self._of_cut_prompts()
        yield from self._of_experts()
        for name, load in self.others.items():
            cause = Cause(
                "stale weights",
                f"the log-probabilities are those of {name}",
                "send the weights before sampling, and then empty the engine's prefix cache",
            )
            yield cause, self._rerun(reference=load())

    def _of_logits(self) -> Iterator[tuple[Cause, Predicted | None]]:
        for names in SINGLES:
            yield from self._of_settings(names)
        if self._said != [1.0]:
            yield self._settings(Settings(temperature=1.0))
        for shift, neighbour, where in ((1, "before", "after the token itself"), (-1, "after", "one token too early")):
            cause = Cause(
                "off by one",
                f"the log-probability of each token is given to the one {neighbour} it",
                "shift log_probs by one: the first is that of the first token of the answer",
            )
            yield cause, self._of_each(_neighbour, shift)
            cause = Cause(
                "off by one",
                f"the log-probability of each token is taken from the logits {where}",
                "take it from the logits of the position before the token",
            )
            yield cause, self._of_each(_other_position, shift)

    @property
    def _places(self) -> list[tuple[Tensor, Rollout]]:
        return [(answer.exact.logits, answer.rollout) for answer in self.answers]

    @cached_property
    def _search(self) -> Search:
        return Search(self._places, max(1e-9, self.rounding.floor))

    @property
    def _said(self) -> list[float]:
        return sorted({answer.rollout.temperature for answer in self.answers})

    def _of_settings(self, names: Sequence[str]) -> Iterator[tuple[Cause, Predicted | None]]:
        found = self._search.fitted(names)
        if found is not None and [found.temperature] != self._said:  # that of the file is no cause
            yield self._settings(found)

    def _settings(self, settings: Settings) -> tuple[Cause, Predicted | None]:
        return settings.cause(self._said), self._of_each(_drawn_under, settings)

    def _of_padding(self) -> Iterator[tuple[Cause, Predicted | None]]:
        rows = fitted_padding(self._places)
        if rows > 0:
            cause = Cause(
                "padded vocabulary",
                f"the softmax of the engine includes {rows} rows beyond the vocabulary, with logits of 0",
                "let the engine leave out the rows that pad its table",
            )
            yield cause, self._of_each(_padded, rows)

    def _of_prompts(self) -> Iterator[tuple[Cause, Predicted | None]]:
        given = [answer.rollout.prompt_ids for answer in self.answers]
        begin = list(self.begin_ids)
        if begin:
            size = len(begin)
            without = [ids[size:] if ids[:size] == begin and len(ids) > size else None for ids in given]
            doubled = [begin + ids for ids in given]
            for name, what, prompts in (
                ("missing bos", "without the tokens that begin a text (bos)", without),
                ("doubled bos", "with the tokens that begin a text (bos) put first once more", doubled),
            ):
                cause = Cause(
                    name,
                    f"the engine read the prompt {what}",
                    "give the engine the token ids of the prompt instead of a text, or compare add_special_tokens on "
                    "both sides",
                )
                yield cause, self._rerun(prompts=prompts)
        for name, others in self.prompts.items():
            cause = Cause(
                "other template",
                f"the engine read {name} instead of the token ids in the file",
                "give the engine the token ids that the run's chat template makes",
            )
            yield cause, self._rerun(prompts=others)

    def _of_order(self) -> Iterator[tuple[Cause, Predicted | None]]:
        """Gives each answer the log-probabilities, or the prompt, of the row that fits best."""
        exact = [answer.log_probs(answer.exact) for answer in self.answers]
        rows = []
        for each in self.answers:
            near = {
                number: Spread.of(differences([each.rollout], [values])).rms
                for number, values in enumerate(exact)
                if len(values) == len(each.rollout.ids)
            }
            rows.append(min(near, key=lambda number: near[number]))
        if rows != list(range(len(rows))):
            taken = [self.answers[row] for row in rows]
            yield (
                self._other_order("log-probabilities", rows),
                Predicted(
                    [each.log_probs(each.exact) for each in taken], [each.log_probs(each.rounded) for each in taken]
                ),
            )
        prompts = self._prompts_of_other_rows()
        if prompts is not None:
            yield (
                self._other_order("prompt", prompts),
                self._rerun(prompts=[self.answers[row].rollout.prompt_ids for row in prompts]),
            )

    def _other_order(self, what: str, rows: Sequence[int]) -> Cause:
        number, row = next((number, row) for number, row in enumerate(rows) if number != row)
        return Cause(
            "rows in another order",
            f"each answer has the {what} of another row: {self.answers[number].rollout.place} has that of "
            f"{self.answers[row].rollout.place}",
            "put the engine's outputs in the order of its prompts (vLLM: request_id)",
        )

    def _prompts_of_other_rows(self) -> list[int] | None:
        """Returns, for each answer, the other row whose prompt gives its log-probabilities; None if any has none.

        The first answer tries all prompts; the others try the same shift first."""
        rows: list[int] = []
        count = len(self.answers)
        for number, each in enumerate(self.answers):
            shift = rows[0] if rows else 1
            likely = sorted(range(count), key=lambda row: (row - number - shift) % count)
            found = next(
                (row for row in likely if row != number and self._gives(each, self.answers[row].rollout.prompt_ids)),
                None,
            )
            if found is None:
                return None
            rows.append(found)
        return rows

    def _gives(self, answer: Passes, prompt: Sequence[int]) -> bool:
        """Says whether this prompt gives the answer's log-probabilities up to rounding."""
        passed = self.reference.run(prompt, answer.rollout.ids)
        missed = differences([answer.rollout], [answer.log_probs(passed)])
        return Spread.of(missed).within(self.rounding.allowed)

    def _of_cut_prompts(self) -> Iterator[tuple[Cause, Predicted | None]]:
        """Cuts all prompts to the length that fits the longest one."""
        longest = max(self.answers, key=lambda each: len(each.rollout.prompt_ids))
        size = len(longest.rollout.prompt_ids)
        counts = range(1, size) if size <= _MOST_CUTS else [each for each in _USUAL_CUTS if each < size]
        for is_end in (True, False):
            for count in counts:
                if self._gives(longest, _cut(longest.rollout.prompt_ids, count, is_end)):
                    prompts = [_cut(answer.rollout.prompt_ids, count, is_end) for answer in self.answers]
                    cause = Cause(
                        "cut prompt",
                        f"the engine read the {'last' if is_end else 'first'} {count} tokens of the prompt alone",
                        "let the engine read whole prompts (vLLM: truncate_prompt_tokens, max_model_len), or write "
                        "those that it read",
                    )
                    yield cause, self._rerun(prompts=prompts)
                    break

    def _of_experts(self) -> Iterator[tuple[Cause, Predicted | None]]:
        if not self.num_experts:
            return
        router = ExpertChanges(router_dtype=torch.bfloat16)
        yield ROUTER, self._rerun(changes=[router] * len(self.answers))
        for ranks in range(2, self.num_experts + 1):
            if self.num_experts % ranks == 0:
                sums = ExpertChanges(num_partial_sums=ranks)
                cause = Cause(
                    "expert-parallel sum",
                    f"the engine rounds the sum of the experts of each of {ranks} expert-parallel ranks to bfloat16 "
                    "before it adds them up",
                    "let the engine add up experts in float32, or with another number of expert-parallel ranks",
                    is_rounding=True,
                )
                yield cause, self._rerun(changes=[sums] * len(self.answers))
        if all(answer.rollout.routes is not None for answer in self.answers):
            changes = [ExpertChanges(chosen=replayed(answer.rollout, answer.exact)) for answer in self.answers]
            yield ROUTES, self._rerun(changes=changes)

    def _of_each(self, predict: Callable[[Tensor, Rollout, Any], Tensor], given: Any) -> Predicted:
        return Predicted(
            [predict(answer.exact.logits, answer.rollout, given) for answer in self.answers],
            [predict(answer.rounded.logits, answer.rollout, given) for answer in self.answers],
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
    """Returns the engine's log-probabilities minus `exact`; nan for tokens that the model did not draw."""
    return [
        (torch.tensor(each.log_probs, dtype=torch.float64) - values).masked_fill(~torch.tensor(each.mask), math.nan)
        for each, values in zip(rollouts, exact, strict=True)
    ]


def _drawn_under(logits: Tensor, rollout: Rollout, settings: Settings) -> Tensor:
    return DrawnTokens.of(logits, rollout).log_probs(settings)


def _padded(logits: Tensor, rollout: Rollout, rows: int) -> Tensor:
    return log_probs(torch.nn.functional.pad(logits, (0, rows)), rollout.ids, rollout.temperature)


def _neighbour(logits: Tensor, rollout: Rollout, shift: int) -> Tensor:
    own = log_probs(logits, rollout.ids, rollout.temperature)
    missing = torch.full((1,), math.nan, dtype=own.dtype)
    return torch.cat([own[1:], missing] if shift > 0 else [missing, own[:-1]])


def _other_position(logits: Tensor, rollout: Rollout, shift: int) -> Tensor:
    return log_probs(logits, rollout.ids, rollout.temperature, shift)


def _cut(prompt: Sequence[int], count: int, is_end: bool) -> list[int]:
    return list(prompt[-count:] if is_end else prompt[:count])


def named(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the causes that explain the deviation, first the one to name.

    That one predicts most tokens; among equals it leaves at most twice the smallest deviation; among these it was tried
    first, as the most specific.
    """
    found = [each for each in tried if each.explains]
    most = [each for each in found if each.share == max(other.share for other in found)]
    first = next((each for each in most if each.left.rms <= 2 * min(other.left.rms for other in most)), None)
    if first is None:
        return []
    return [first, *(each for each in found if each.cause.name != first.cause.name)]

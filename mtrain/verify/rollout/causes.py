"""Causes of a disagreement: each computes something else, and the right one gives the engine's numbers.

A cause is named only if its predicted log-probabilities equal the engine's within rounding. The expected rounding is
measured for each cause by repeating the prediction in the engine's precision.

If the cause is bfloat16 rounding, the engine may round a number between two bfloat16 values the other way, or choose
the other of two nearly equal experts, which changes everything computed from it. Such a cause must predict most, not
all, log-probabilities within the rounding of the engine's precision; chance or a second cause would predict none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mtrain.base.spelling import counted
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
    """Deviating answers, with everything needed to predict their log-probabilities."""

    answers: Sequence[Passes]
    reference: Reference
    rounding: Rounding
    before: Spread
    begin_ids: Sequence[int]
    """Tokens that the tokenizer puts before a text."""
    prompts: Mapping[str, Sequence[Sequence[int] | None]]
    """Alternative prompt ids by description, one for each answer; None if an answer has none."""
    other_weights: Mapping[str, Callable[[], Reference]]
    num_experts: int
    """Experts per layer; 0 for a dense model."""
    is_of_engine: bool = True
    """Whether the answers are an engine's; False for the trainer's, whose settings and precision are known."""

    def tried(self) -> list[Tried]:
        """Tries all causes; returns them in the order of trying."""
        results: list[Tried] = []
        for cause, predicted in self._predictions():
            if predicted is None or all(values.isnan().all() for values in predicted.exact):
                continue
            results.append(self._judged(cause, predicted))
        if self.is_of_engine and not any(result.explains for result in results):
            for cause, predicted in chain.from_iterable(map(self._settings_causes, SEVERAL)):
                results += [] if predicted is None else [self._judged(cause, predicted)]
                if results[-1].explains:  # chance does not give the numbers of so many tokens
                    break
        if self.is_of_engine and not any(result.explains for result in results):
            results += self._precision_causes()
        return results

    def _precision_causes(self) -> Iterator[Tried]:
        """Tries each precision coarser than the one stated for the engine."""
        exact = [answer.log_probs(answer.exact) for answer in self.answers]
        deviations = differences([answer.rollout for answer in self.answers], exact)
        for dtype in (torch.float16, torch.bfloat16):
            if torch.finfo(dtype).eps <= torch.finfo(self.rounding.dtype).eps:
                continue
            lower = [
                self.reference.run(answer.rollout.prompt_ids, answer.rollout.ids, dtype) for answer in self.answers
            ]
            pairs = zip(self.answers, lower, strict=True)
            measured = Spread.of([answer.log_probs(low) - answer.log_probs(answer.exact) for answer, low in pairs])
            # deviations far below the rounding of a precision do not come from it
            explains = self.before.within(measured.allowed(0.0)) and self.before.rms * _IMPROVEMENT >= measured.rms
            name = str(dtype).removeprefix("torch.")
            cause = Cause(
                "precision",
                f"the differences are as large as the rounding of an engine that computes in {name}",
                f"if the engine computes in {name}, say so by --dtype {name}; if not, it may have other weights "
                "(--weights)",
            )
            yield Tried(cause, Spread.of(deviations), measured.allowed(0.0), 1.0, explains)

    def _judged(self, cause: Cause, predicted: Predicted) -> Tried:
        deviations = differences([answer.rollout for answer in self.answers], predicted.exact)
        left, joined = Spread.of(deviations), torch.cat(deviations)
        if cause.is_rounding:
            allowed = self.rounding.allowed
        else:
            pairs = zip(predicted.rounded, predicted.exact, strict=True)
            allowed = Spread.of([rounded - exact for rounded, exact in pairs]).allowed(self.rounding.floor)
        share = float((joined[~joined.isnan()].abs() <= allowed.worst).double().mean())
        if cause.is_rounding:
            explains = share > _MOST and self.before.rms > _IMPROVEMENT * allowed.rms
        else:
            explains = left.within(allowed) and left.rms * _IMPROVEMENT <= self.before.rms
        return Tried(cause, left, allowed, share, explains)

    def _predictions(self) -> Iterator[tuple[Cause, Predicted | None]]:
        yield from self._logit_causes()
        yield from self._padding_causes()
        yield from self._prompt_causes()
        if self.is_of_engine:
            yield from self._order_causes()
            yield from self._cut_prompt_causes()
        yield from self._expert_causes()
        for name, load in self.other_weights.items():
            cause = Cause(
                "stale weights",
                f"the log-probabilities are those of {name}",
                "send the weights before sampling, and then empty the engine's prefix cache",
            )
            yield cause, self._rerun(reference=load())

    def _logit_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        for names in SINGLES:
            yield from self._settings_causes(names)
        if self._temperatures != [1.0]:
            yield self._settings(Settings(temperature=1.0))
        for shift, neighbour, where in ((1, "before", "after the token itself"), (-1, "after", "one token too early")):
            cause = Cause(
                "off by one",
                f"the log-probability of each token is given to the one {neighbour} it",
                "shift log_probs by one: the first is that of the first token of the answer",
            )
            yield cause, self._by_answer(_neighbour, shift)
            cause = Cause(
                "off by one",
                f"the log-probability of each token is taken from the logits {where}",
                "take it from the logits of the position before the token",
            )
            yield cause, self._by_answer(_other_position, shift)

    @property
    def _logits(self) -> list[tuple[Tensor, Rollout]]:
        return [(answer.exact.logits, answer.rollout) for answer in self.answers]

    @cached_property
    def _search(self) -> Search:
        return Search(self._logits, max(1e-9, self.rounding.floor))

    @property
    def _temperatures(self) -> list[float]:
        return sorted({answer.rollout.temperature for answer in self.answers})

    def _settings_causes(self, names: Sequence[str]) -> Iterator[tuple[Cause, Predicted | None]]:
        settings = self._search.fitted(names)
        # the file's own temperature is not a cause
        if settings is not None and [settings.temperature] != self._temperatures:
            yield self._settings(settings)

    def _settings(self, settings: Settings) -> tuple[Cause, Predicted | None]:
        return settings.cause(self._temperatures), self._by_answer(_log_probs_under, settings)

    def _padding_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        rows = fitted_padding(self._logits)
        if rows > 0:
            cause = Cause(
                "padded vocabulary",
                f"the softmax of the engine includes {counted(rows, 'row')} beyond the vocabulary, with logits of 0",
                "let the engine leave out the rows that pad its table",
            )
            yield cause, self._by_answer(_padded, rows)

    def _prompt_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        prompt_ids = [answer.rollout.prompt_ids for answer in self.answers]
        begin = list(self.begin_ids)
        if begin:
            size = len(begin)
            without = [ids[size:] if ids[:size] == begin and len(ids) > size else None for ids in prompt_ids]
            doubled = [begin + ids for ids in prompt_ids]
            for name, difference, prompts in (
                ("missing bos", "without the tokens that begin a text (bos)", without),
                ("doubled bos", "with the tokens that begin a text (bos) put first once more", doubled),
            ):
                cause = Cause(
                    name,
                    f"the engine read the prompt {difference}",
                    "give the engine the token ids of the prompt instead of a text, or compare add_special_tokens on "
                    "both sides",
                )
                yield cause, self._rerun(prompts=prompts)
        for name, alternatives in self.prompts.items():
            cause = Cause(
                "other template",
                f"the engine read {name} instead of the token ids in the file",
                "give the engine the token ids that the run's chat template makes",
            )
            yield cause, self._rerun(prompts=alternatives)

    def _order_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        """Gives each answer the log-probabilities, or the prompt, of the row that fits best."""
        exact = [answer.log_probs(answer.exact) for answer in self.answers]
        rows = []
        for answer in self.answers:
            distances = {
                number: Spread.of(differences([answer.rollout], [values])).rms
                for number, values in enumerate(exact)
                if len(values) == len(answer.rollout.ids)
            }
            rows.append(min(distances, key=lambda number: distances[number]))
        if rows != list(range(len(rows))):
            sources = [self.answers[row] for row in rows]
            yield (
                self._other_order("log-probabilities", rows),
                Predicted(
                    [row.log_probs(row.exact) for row in sources], [row.log_probs(row.rounded) for row in sources]
                ),
            )
        prompts = self._prompts_of_other_rows()
        if prompts is not None:
            yield (
                self._other_order("prompt", prompts),
                self._rerun(prompts=[self.answers[row].rollout.prompt_ids for row in prompts]),
            )

    def _other_order(self, kind: str, rows: Sequence[int]) -> Cause:
        number, row = next((number, row) for number, row in enumerate(rows) if number != row)
        return Cause(
            "rows in another order",
            f"each answer has the {kind} of another row: {self.answers[number].rollout.source} has that of "
            f"{self.answers[row].rollout.source}",
            "put the engine's outputs in the order of its prompts (vLLM: request_id)",
        )

    def _prompts_of_other_rows(self) -> list[int] | None:
        """Returns, for each answer, another row whose prompt gives its log-probabilities; None if an answer lacks one.

        The first answer tries all prompts; later ones try the same shift first."""
        rows: list[int] = []
        count = len(self.answers)
        for number, answer in enumerate(self.answers):
            shift = rows[0] if rows else 1
            likely = sorted(range(count), key=lambda row: (row - number - shift) % count)
            match = next(
                (row for row in likely if row != number and self._fits(answer, self.answers[row].rollout.prompt_ids)),
                None,
            )
            if match is None:
                return None
            rows.append(match)
        return rows

    def _fits(self, answer: Passes, prompt: Sequence[int]) -> bool:
        """Says whether this prompt gives the answer's log-probabilities up to rounding."""
        passed = self.reference.run(prompt, answer.rollout.ids)
        deviations = differences([answer.rollout], [answer.log_probs(passed)])
        return Spread.of(deviations).within(self.rounding.allowed)

    def _cut_prompt_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        """Cuts all prompts to the length that fits the longest one."""
        longest = max(self.answers, key=lambda answer: len(answer.rollout.prompt_ids))
        size = len(longest.rollout.prompt_ids)
        counts = range(1, size) if size <= _MOST_CUTS else [cut for cut in _USUAL_CUTS if cut < size]
        for is_end in (True, False):
            for count in counts:
                if self._fits(longest, _cut(longest.rollout.prompt_ids, count, is_end)):
                    prompts = [_cut(answer.rollout.prompt_ids, count, is_end) for answer in self.answers]
                    cause = Cause(
                        "cut prompt",
                        f"the engine read the {'last' if is_end else 'first'} {counted(count, 'token')} of the prompt "
                        "alone",
                        "let the engine read whole prompts (vLLM: truncate_prompt_tokens, max_model_len), or write "
                        "those that it read",
                    )
                    yield cause, self._rerun(prompts=prompts)
                    break

    def _expert_causes(self) -> Iterator[tuple[Cause, Predicted | None]]:
        if not self.num_experts:
            return
        router = ExpertChanges(router_dtype=torch.bfloat16)
        yield ROUTER, self._rerun(changes=[router] * len(self.answers))
        for ranks in range(2, self.num_experts + 1):
            if self.num_experts % ranks == 0:
                sums = ExpertChanges(num_partial_sums=ranks)
                cause = Cause(
                    "expert-parallel sum",
                    f"the engine rounds the sum of the experts of each of {counted(ranks, 'expert-parallel rank')} to "
                    "bfloat16 before it adds them up",
                    "let the engine add up experts in float32, or with another number of expert-parallel ranks",
                    is_rounding=True,
                )
                yield cause, self._rerun(changes=[sums] * len(self.answers))
        if all(answer.rollout.routes is not None for answer in self.answers):
            changes = [ExpertChanges(chosen=replayed(answer.rollout, answer.exact)) for answer in self.answers]
            yield ROUTES, self._rerun(changes=changes)

    def _by_answer(self, predict: Callable[[Tensor, Rollout, Any], Tensor], argument: Any) -> Predicted:
        return Predicted(
            [predict(answer.exact.logits, answer.rollout, argument) for answer in self.answers],
            [predict(answer.rounded.logits, answer.rollout, argument) for answer in self.answers],
        )

    def _rerun(
        self,
        prompts: Sequence[Sequence[int] | None] | None = None,
        changes: Sequence[ExpertChanges] | None = None,
        reference: Reference | None = None,
    ) -> Predicted | None:
        """Predicts with new passes; None if `prompts` lacks the prompt of an answer."""
        reference = reference or self.reference
        predicted = Predicted([], [])
        for number, answer in enumerate(self.answers):
            rollout, prompt = answer.rollout, answer.rollout.prompt_ids if prompts is None else prompts[number]
            if not prompt:
                return None
            change = AS_DEFINED if changes is None else changes[number]
            for dtype, values in ((torch.float64, predicted.exact), (self.rounding.dtype, predicted.rounded)):
                passed = reference.run(prompt, rollout.ids, dtype, change)
                values.append(log_probs(passed.logits, rollout.ids, rollout.temperature))
        return predicted


def differences(rollouts: Sequence[Rollout], exact: Sequence[Tensor]) -> list[Tensor]:
    """Returns the engine's log-probabilities minus `exact`; nan for tokens that the model did not draw."""
    return [
        (torch.tensor(row.log_probs, dtype=torch.float64) - values).masked_fill(~torch.tensor(row.mask), math.nan)
        for row, values in zip(rollouts, exact, strict=True)
    ]


def _log_probs_under(logits: Tensor, rollout: Rollout, settings: Settings) -> Tensor:
    return DrawnTokens.of(logits, rollout).log_probs(settings)


def _padded(logits: Tensor, rollout: Rollout, rows: int) -> Tensor:
    return log_probs(torch.nn.functional.pad(logits, (0, rows)), rollout.ids, rollout.temperature)


def _neighbour(logits: Tensor, rollout: Rollout, shift: int) -> Tensor:
    values = log_probs(logits, rollout.ids, rollout.temperature)
    missing = torch.full((1,), math.nan, dtype=values.dtype)
    return torch.cat([values[1:], missing] if shift > 0 else [missing, values[:-1]])


def _other_position(logits: Tensor, rollout: Rollout, shift: int) -> Tensor:
    return log_probs(logits, rollout.ids, rollout.temperature, shift)


def _cut(prompt: Sequence[int], count: int, is_end: bool) -> list[int]:
    return list(prompt[-count:] if is_end else prompt[:count])


def named(tried: Sequence[Tried]) -> list[Tried]:
    """Returns the causes that explain the deviation, the one to name first.

    It predicts the most tokens. Among equals it leaves at most twice the smallest deviation, and is the first tried:
    the order of trying begins with the most specific causes.
    """
    causes = [result for result in tried if result.explains]
    if not causes:
        return []
    most = max(result.share for result in causes)
    likely = [result for result in causes if result.share == most]
    limit = 2 * min(result.left.rms for result in likely)
    first = next((result for result in likely if result.left.rms <= limit), None)
    if first is None:
        return []
    return [first, *(result for result in causes if result.cause.name != first.cause.name)]

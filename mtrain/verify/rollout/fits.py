"""Sampler settings, inferred from log-probabilities."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtrain.verify.rollout.records import Rollout
from mtrain.verify.rollout.settings import TRUNCATIONS, DrawnTokens, Settings, truncated

BIASED = "bias"
"""Name for `logit_bias`, `bad_words`, `allowed_token_ids` and `min_tokens`."""
CONTINUOUS = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty")
SINGLES = (*((each,) for each in (*CONTINUOUS, *TRUNCATIONS)), (BIASED,))
"""Settings tried alone."""
SEVERAL = (
    *itertools.combinations((*CONTINUOUS, *TRUNCATIONS, BIASED), 2),
    ("temperature", "top_k", "top_p"),  # as many models have them in their generation_config.json
)
"""Settings tried together."""
MOST_TOKENS = 256
"""Tokens that a search uses; all tokens judge its result."""
_MOST_NUMBERS = 2**22
"""Logits that a search reads repeatedly; a large vocabulary leaves fewer tokens."""
_FEWEST_TOKENS = 8
"""Tokens that a search needs: settings of any kind fit fewer."""
_OF_ANY_NUMBER = (("temperature",), ("top_k",), ("top_p",))
"""Settings so likely that any number of tokens may suggest them."""
_MOST_BIASED = 8
_MOST_STARTS = 12
"""Nearest settings without bias that get one."""
_KEPT_SHARE = 0.75
_MOST_OFTEN, _FEWEST_MORE = 3, 3
_COLDEST, _HOTTEST = 0.02, 50.0
_STARTS = {
    "temperature": [_COLDEST * (_HOTTEST / _COLDEST) ** (step / 40) for step in range(41)],
    "repetition_penalty": [0.5 * 8 ** (step / 12) for step in range(13)],
    "frequency_penalty": [step / 4 for step in range(-8, 9)],
    "presence_penalty": [step / 4 for step in range(-8, 9)],
}
_TIDY = (*(number / 100 for number in range(1, 100)), 0.001, 0.002, 0.005, 0.995, 0.998, 0.999)
"""Values of top_p and min_p to try besides those that log-probabilities imply."""
_USUAL_TOP_K = (*range(1, 21), 24, 25, 30, 32, 40, 50, 60, 64, 80, 100, 128, 200, 256)
"""Values of top_k to try with top_p."""


def fitted(answers: Sequence[tuple[Tensor, Rollout]], names: Sequence[str], tolerance: float) -> Settings | None:
    """Returns the settings of these names whose log-probabilities are nearest to the engine's.

    Prefers round numbers within 0.1 %. None if none are near, or too few tokens can tell. `answers` are logits as in
    `Pass`, with the rollout; `tolerance` is the rounding of a log-probability.
    """
    most = MOST_TOKENS if len(names) == 1 else MOST_TOKENS // 4
    most = max(2 * _FEWEST_TOKENS, min(most, _MOST_NUMBERS // answers[0][0].shape[-1]))
    places = DrawnTokens.drawn(answers, most)
    if len(places.ids) < _FEWEST_TOKENS and tuple(names) not in _OF_ANY_NUMBER:
        return None
    return _Fit(places, tolerance).found(names)


class _Fit:
    def __init__(self, places: DrawnTokens, tolerance: float) -> None:
        """Searches the drawn tokens; `tolerance` is the rounding of a log-probability."""
        self._places, self._tolerance = places, tolerance
        self._known: dict[Settings, Tensor] = {}
        """Differences under tried settings; half of all tries repeat."""

    def found(self, names: Sequence[str]) -> Settings | None:
        """Returns the nearest settings of these names."""
        continuous = [name for name in CONTINUOUS if name in names]
        truncations = [name for name in TRUNCATIONS if name in names]
        # several at once are refined from fewer points
        stride = 4 if len(continuous) > 1 else 2 if len(names) > 2 else 1
        grids = [_STARTS[name][::stride] for name in continuous]
        starts = [Settings(**dict(zip(continuous, values))) for values in itertools.product(*grids)]
        late = []
        if BIASED in names:  # what truncation leaves is only known with the bias
            late = self._of_late_places(names)
            values = [each for name in truncations for each in self._values(name)] or [{}]
            starts = [replace(start, **value) for start in starts for value in values]
            starts = [self._biased(each) for each in sorted(starts, key=self._distance)[:_MOST_STARTS]]
        near = [each for start in starts for each in self._truncations(start, truncations)]
        near = [*late, *sorted({*near}, key=self._distance)[: 4 if len(names) > 1 else 1]]
        shares = (1.0,) if not truncations else (_KEPT_SHARE,) if BIASED in names else (1.0, _KEPT_SHARE)
        refined = [
            self._refined(each, continuous, truncations, BIASED in names, share) for share in shares for each in near
        ]
        return min((each for each in refined if each is not None), key=self._distance, default=None)

    def _of_late_places(self, names: Sequence[str]) -> list[Settings]:
        """Returns settings without bias that fit the second halves of answers, which min_tokens leaves alone."""
        is_late = self._places.numbers > self._places.numbers.max() / 2
        others = [name for name in names if name != BIASED]
        if not others or int(is_late.sum()) < _FEWEST_TOKENS:
            return []
        found = _Fit(self._places.chosen(is_late), self._tolerance).found(others)
        return [] if found is None else [self._biased(found)]

    def _values(self, name: str) -> list[dict[str, Any]]:
        size = self._places.logits.shape[-1]
        return [{name: each} for each in (_TIDY if name != "top_k" else [k for k in _USUAL_TOP_K if k < size])]

    def _refined(
        self, settings: Settings, continuous: Sequence[str], truncations: Sequence[str], is_biased: bool, share: float
    ) -> Settings | None:
        """Moves settings to the nearest ones, one kind after another."""
        rounds = 8 if is_biased and (continuous or truncations) else 2 if continuous and truncations else 1
        before = math.inf
        for _ in range(rounds):
            if (now := self._distance(settings)) > 0.5 * before or now <= self._tolerance**2:
                break
            before = now
            if is_biased:
                settings = self._biased(replace(settings, bias=(), num_biased=None, allowed=None))
            tokens = [token for token, value in settings.bias if value != -math.inf]
            settings = self._least_squares(settings, [*continuous, *tokens], share)
            if is_biased and self._distance(settings) > self._tolerance**2:
                settings = self._without_needless(settings)
            if truncations and rounds > 1:
                again = self._truncations(replace(settings, min_p=0.0, top_k=None, top_p=1.0), truncations)
                settings = min([settings, *again], key=self._distance)
        if is_biased and not settings.bias and settings.allowed is None:
            return None
        settings = replace(settings, bias=tuple((token, _tidy_bias(value)) for token, value in settings.bias))
        return self._tidied(settings, continuous)

    def _distance(self, settings: Settings) -> float:
        return float(self._missed(settings).square().mean())

    def _missed(self, settings: Settings) -> Tensor:
        """Returns differences from the engine's log-probabilities, finite even if a token would be cut."""
        if settings not in self._known:
            every = self._places.processed(settings).log_softmax(-1)
            missed = self._places.of_drawn(every) - truncated(every, settings).logsumexp(-1) - self._places.said
            self._known[settings] = missed.nan_to_num(posinf=1e3, neginf=-1e3)
        return self._known[settings]

    def _without_needless(self, settings: Settings) -> Settings:
        """Removes the bias of tokens that the refitted others do not need."""
        tokens = [token for token, value in settings.bias if value != -math.inf]
        for token in tokens if len(settings.bias) > 1 else ():
            bias = tuple(pair for pair in settings.bias if pair[0] != token)
            rest = [other for other, value in bias if value != -math.inf]
            trial = self._least_squares(replace(settings, bias=bias), rest, _KEPT_SHARE)
            if bias and self._distance(trial) <= self._distance(settings):
                settings = trial
        return settings

    def _least_squares(self, settings: Settings, names: Sequence[str | int], share: float = 1.0) -> Settings:
        """Moves the continuous settings and token biases in `names` to the optimum by Levenberg-Marquardt.

        Only the nearest `share` of tokens counts: a truncation that is not right yet spoils others.
        """
        if not names:
            return settings
        damping, now = 1e-3, settings
        missed = self._missed(now)
        count = max(len(names) + 1, round(share * len(missed)))

        def sum_of(differences: Tensor) -> Tensor:
            return differences.square().sort().values[:count].sum()

        for _ in range(40):
            columns = [(self._missed(_moved(now, {name: 1e-6})) - missed) / 1e-6 for name in names]
            rows = missed.abs().argsort()[:count]
            slope = torch.stack(columns, -1)[rows]
            square = slope.T @ slope
            step = torch.linalg.lstsq(square + damping * square.diagonal().diag(), -(slope.T @ missed[rows])).solution
            trial = _moved(now, dict(zip(names, step.clamp(-1, 1).tolist(), strict=True)))
            after = self._missed(trial)
            if sum_of(after) < sum_of(missed):
                now, missed, damping = trial, after, damping / 10
                if float(step.abs().max()) < 1e-10:
                    break
            elif (damping := damping * 10) > 1e9:
                break
        return now

    def _tidied(self, settings: Settings, names: Sequence[str]) -> Settings:
        """Rounds settings in turn if round numbers fit as well after the rest has moved."""
        for number, name in enumerate(names):
            found, most = getattr(settings, name), max(self._distance(settings), (32 * self._tolerance) ** 2)
            for tidy in (round(found, digits) for digits in range(1, 5)):
                if abs(tidy - found) < 1e-3 * abs(found) and (tidy > 0) == (found > 0):
                    rounded: dict[str, Any] = {name: tidy}
                    trial = self._least_squares(replace(settings, **rounded), names[number + 1 :])
                    if self._distance(trial) <= most:
                        settings = trial
                        break
        return settings

    def _truncations(self, settings: Settings, names: Sequence[str]) -> list[Settings]:
        """Returns settings with the nearest truncations: one, or one for each value of the first of two."""
        if not names:
            return [settings]
        if len(names) == 1:
            return [self._truncation(settings, names[0])]
        firsts = [replace(settings, **each) for each in self._values(names[0])]
        return [self._truncation(first, names[1]) for first in firsts]

    def _truncation(self, settings: Settings, name: str) -> Settings:
        """Returns settings whose truncation leaves the probability that the log-probabilities imply."""
        before = self._places.processed(settings).log_softmax(-1)
        ordered = truncated(before, settings).sort(-1, descending=True).values
        ordered = ordered - ordered.logsumexp(-1, keepdim=True)  # relative to what a truncation before it leaves
        wanted = self._places.of_drawn(before) - self._places.said - truncated(before, settings).logsumexp(-1)
        reached = ordered.exp().cumsum(-1)
        distances = (reached.log() - wanted.unsqueeze(-1)).square()  # [tokens, number of tokens that are left - 1]
        if name == "top_k":
            return replace(settings, top_k=int(distances.sum(0).argmin()) + 1)
        values = torch.tensor([*_TIDY, *self._between(name, ordered, reached, wanted)], dtype=torch.float64)
        if name == "top_p":  # as many as do not reach it, and one more
            left = torch.searchsorted(reached, values.expand(len(reached), -1).contiguous())
        else:  # as many as have at least this share of the likeliest one's probability
            share = (ordered - ordered[:, :1]).exp()
            left = torch.searchsorted(-share, -values.expand(len(share), -1).contiguous(), right=True) - 1
        best = distances.gather(-1, left.clamp(max=distances.shape[-1] - 1)).sum(0).argmin()
        found: dict[str, Any] = {name: float(values[best])}
        return replace(settings, **found)

    def _between(self, name: str, ordered: Tensor, reached: Tensor, wanted: Tensor) -> Iterator[float]:
        """Yields a value of top_p or min_p, if any, that leaves as many tokens everywhere as the engine did."""
        fits = (reached.log() - wanted.unsqueeze(-1)).abs() <= 32 * self._tolerance
        if not bool(fits.any(-1).all()):
            return
        first = fits.double().argmax(-1, keepdim=True)
        last = fits.shape[-1] - 1 - fits.flip(-1).double().argmax(-1, keepdim=True)
        if name == "top_p":  # the nucleus is the fewest tokens that reach p: one token fewer does not
            fewer = torch.where(first > 0, reached.gather(-1, (first - 1).clamp(min=0)), 0.0)
            low, high = float(fewer.max()), float(reached.gather(-1, last).min())
        else:  # the least likely token that is left has at least this share of the likeliest one's probability
            share = (ordered - ordered[:, :1]).exp()
            after = torch.where(
                last + 1 < share.shape[-1], share.gather(-1, (last + 1).clamp(max=share.shape[-1] - 1)), 0.0
            )
            low, high = float(after.max()), float(share.gather(-1, first).min())
        if low < high:
            tidy = (math.ceil(low * 10**digits + 1e-9) / 10**digits for digits in range(1, 7))
            yield next((each for each in tidy if low < each <= high), (low + high) / 2)

    def _biased(self, settings: Settings) -> Settings:
        """Returns settings with the biased or forbidden tokens that best fit the engine's log-probabilities."""
        own = self._places.processed(settings).log_softmax(-1)
        kept = truncated(own, settings).logsumexp(-1)
        missed = self._places.of_drawn(own) - kept - self._places.said
        deviates = missed.abs() > 32 * self._tolerance
        found = [self._pushed(settings, own, missed), self._allowed(settings, own, missed)]
        if bool(deviates.any()) and (count := int(self._places.numbers[deviates].max()) + 1) > 1:
            early = self._places.numbers < count
            if not bool(early.all()):
                forbidden = self._pushed(replace(settings, num_biased=count), own, missed.masked_fill(~early, 0.0))
                found.append(forbidden)
        best = min(map(self._distance, found))
        # the first that is near: a token that is forbidden everywhere is likelier than one that is at the beginning
        return next(each for each in found if self._distance(each) <= best + self._tolerance**2)

    def _pushed(self, settings: Settings, own: Tensor, missed: Tensor) -> Settings:
        """Finds biased tokens: the sum of exponentials grows by (e^bias - 1) times their probability."""
        more, shares = missed.exp() - 1, own.exp()
        if settings.num_biased is not None:
            shares = shares * (self._places.numbers < settings.num_biased).unsqueeze(-1)
        chosen: list[int] = []
        best, left = settings, more
        for _ in range(_MOST_BIASED):
            if self._distance(best) <= self._tolerance**2:
                break
            others = shares.masked_fill(
                torch.zeros_like(shares, dtype=torch.bool).scatter(-1, self._places.ids.unsqueeze(-1), True), 0.0
            )
            gains = (left.unsqueeze(-1) * others).sum(0).square() / others.square().sum(0).clamp(min=1e-300)
            gains[chosen] = 0
            chosen.append(int(gains.argmax()))
            rows = ~torch.isin(self._places.ids, torch.tensor(chosen))
            if int(rows.sum()) < 3 * len(chosen) + 1:
                break
            factors = torch.linalg.lstsq(shares[rows][:, chosen], more[rows].unsqueeze(-1)).solution.squeeze(-1)
            left = (more - shares[:, chosen] @ factors).masked_fill(~rows, 0.0)
            # a token that was taken for another one is left without a bias
            kept = [(token, factor) for token, factor in zip(chosen, factors.tolist()) if abs(factor) > 1e-3]
            trial = replace(settings, bias=tuple((token, _bias(factor)) for token, factor in kept))
            best = min(best, trial, key=self._distance)
        return min(
            best, self._pushed_when_drawn(settings, own, missed), self._pushed_often(settings, own), key=self._distance
        )

    def _pushed_often(self, settings: Settings, own: Tensor) -> Settings:
        """Finds biases of tokens that are drawn far more often than predicted."""
        more = torch.bincount(self._places.ids, minlength=own.shape[-1]) - own.exp().sum(0)
        often = [token for token in more.topk(_MOST_OFTEN).indices.tolist() if more[token] > _FEWEST_MORE]
        if len(often) < 2:
            return settings
        start = tuple((token, _tidy_bias(math.log(float(more[token] / own[:, token].exp().sum())))) for token in often)
        return self._least_squares(replace(settings, bias=start), often, _KEPT_SHARE)

    def _pushed_when_drawn(self, settings: Settings, own: Tensor, missed: Tensor) -> Settings:
        """Finds one biased token by its odds of being drawn."""
        drawn, said = self._places.of_drawn(own), self._places.said
        odds = (said - torch.log(-torch.expm1(said.clamp(max=-1e-12)))) - (drawn - torch.log(-torch.expm1(drawn)))
        found = {}
        for token in sorted(set(self._places.ids.tolist())):
            is_drawn = self._places.ids == token
            bias = _tidy_bias(float(odds[is_drawn].median()))
            sums = torch.log1p(own[:, token].exp() * math.expm1(min(bias, 50.0)))
            found[token, bias] = float((missed + bias * is_drawn - sums).square().sum())
        return replace(settings, bias=(min(found, key=lambda each: found[each]),))

    def _allowed(self, settings: Settings, own: Tensor, missed: Tensor) -> Settings:
        """Finds the allowed tokens: those drawn, and a few that hold the rest of the probability."""
        shares, left = own.exp(), missed.exp()
        chosen = sorted(set(self._places.ids.tolist()))
        best = replace(settings, num_biased=None, allowed=tuple(chosen))
        for _ in range(_MOST_BIASED):
            if self._distance(best) <= self._tolerance**2:
                break
            rest = left - shares[:, chosen].sum(-1)
            distances = (rest.unsqueeze(-1) - shares).square().sum(0)
            distances[chosen] = math.inf
            chosen = [*chosen, int(distances.argmin())]
            trial = replace(best, allowed=tuple(sorted(chosen)))
            if self._distance(trial) >= self._distance(best):
                break
            best = trial
        return best


def _moved(settings: Settings, steps: dict[str | int, float]) -> Settings:
    """Returns settings after a step: factors move in log space, and a token names its bias."""
    bias = tuple((token, value + steps.get(token, 0.0)) for token, value in settings.bias)
    moved: dict[str, Any] = {"bias": bias}
    for name, step in steps.items():
        if isinstance(name, str):
            value = getattr(settings, name)
            is_factor = name in ("temperature", "repetition_penalty")
            moved[name] = value * math.exp(step) if is_factor else value + step
    return replace(settings, **moved)


def _bias(factor: float) -> float:
    """Converts e^bias - 1 to the bias of a token."""
    return -math.inf if factor < -0.98 else _tidy_bias(math.log1p(factor))


def _tidy_bias(value: float) -> float:
    tidy = [round(value, digits) for digits in range(4)]
    return next((each for each in tidy if abs(each - value) < 1e-3 * abs(value)), value)


def fitted_padding(answers: Sequence[tuple[Tensor, Rollout]]) -> int:
    """Returns how many rows with logits of 0 the engine's softmax seems to include; at least 0."""
    places = DrawnTokens.drawn(answers, MOST_TOKENS)
    logits = places.processed(Settings())
    rows = (torch.exp(places.of_drawn(logits.log_softmax(-1)) - places.said) - 1) * logits.logsumexp(-1).exp()
    found = float(rows.median())
    return max(0, round(found)) if math.isfinite(found) and found < 1e6 else 0

"""Sampler settings, inferred from log-probabilities."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtrain.verify.core.tolerances import amplified
from mtrain.verify.rollout.columns import Columns, Ordered
from mtrain.verify.rollout.distances import Distances, pushed
from mtrain.verify.rollout.records import Rollout
from mtrain.verify.rollout.settings import TRUNCATIONS, DrawnTokens, Settings, truncated

BIASED = "bias"
"""Name for `logit_bias`, `bad_words`, `allowed_token_ids` and `min_tokens`."""
CONTINUOUS = ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty")
SINGLES = (*((name,) for name in (*CONTINUOUS, *TRUNCATIONS)), (BIASED,))
"""Settings tried alone."""
SEVERAL = (
    *itertools.combinations((*CONTINUOUS, *TRUNCATIONS, BIASED), 2),
    ("temperature", "top_k", "top_p"),  # as many models have them in their generation_config.json
)
"""Settings tried together."""
MOST_TOKENS = 256
"""Tokens that a search uses; all tokens judge its result."""
_MOST_NUMBERS = 2**22
"""Logits that a search reads; a large vocabulary leaves fewer tokens."""
_FEWEST_TOKENS = 8
"""Tokens that a search needs: settings of any kind fit fewer."""
_OF_ANY_NUMBER = (("temperature",), ("top_k",), ("top_p",))
"""Settings so likely that any number of tokens may suggest them."""
_MOST_BIASED = 8
_MOST_STOPS = 64
"""Likeliest tokens that min_tokens may forbid beside a truncation."""
_MOST_STARTS = 12
"""Nearest settings without bias that get one."""
_KEPT_SHARE = 0.75
_LATE_SHARES = (0.5, 0.75)
"""Shares of answers behind which min_tokens may have ended."""
_MOST_OFTEN, _FEWEST_MORE = 3, 3
_NEAR = 3
"""Candidates that are refined, by each of two measures."""
_COLDEST, _HOTTEST = 0.02, 50.0
_STARTS = {
    "temperature": [_COLDEST * (_HOTTEST / _COLDEST) ** (step / 40) for step in range(41)],
    "repetition_penalty": [0.5 * 8 ** (step / 12) for step in range(13)],
    "frequency_penalty": [step / 4 for step in range(-8, 9)],
    "presence_penalty": [step / 4 for step in range(-8, 9)],
}
_TIDY = (*(number / 100 for number in range(1, 100)), 0.001, 0.002, 0.005, 0.995, 0.998, 0.999)
"""Values of top_p and min_p to try in addition to those that log-probabilities imply."""
_USUAL_TOP_K = (*range(1, 101), 120, 128, 150, 200, 250, 256, 300, 400, 500, 512, 1000)
"""Values of top_k to try with other settings."""
_BIASES = (*(step / 5 for step in range(-40, 61) if step), -math.inf)
"""Biases of one token to try with other settings."""
_SCANNED = 32
"""Tokens that decide between all truncations with all biases of a token, or at all temperatures."""
_PROMISING = 0.6
"""Share of missed tokens above which nothing is refined further."""


class Search:
    """Finds the settings of an engine; its searches share what they compute."""

    def __init__(self, answers: Sequence[tuple[Tensor, Rollout]], tolerance: float) -> None:
        """Takes logits as in `Pass`, with their rollouts; `tolerance` is the rounding of a log-probability."""
        self._answers, self.tolerance = answers, tolerance
        self._vocab = answers[0][0].shape[-1]

    def fitted(self, names: Sequence[str]) -> Settings | None:
        """Returns the settings of these names whose log-probabilities are nearest to the engine's.

        Prefers round numbers within 0.1 %. None if none are near, or too few tokens were drawn to tell.
        """
        columns = self._whole if len(names) == 1 and names[0] in TRUNCATIONS else self._condensed
        if len(names) > 1 and len(columns.tokens.ids) > (most := MOST_TOKENS // 4):
            columns = columns.evenly(most)
        if len(columns.tokens.ids) < _FEWEST_TOKENS and tuple(names) not in _OF_ANY_NUMBER:
            return None
        settings = _Fit(columns, self.tolerance).search(names)
        return None if settings is None else columns.named(settings)

    @cached_property
    def _whole(self) -> Columns:
        most = max(2 * _FEWEST_TOKENS, min(MOST_TOKENS, _MOST_NUMBERS // self._vocab))
        return Columns(DrawnTokens.drawn(self._answers, most), torch.zeros(self._vocab), torch.arange(self._vocab))

    @cached_property
    def _condensed(self) -> Columns:
        return self._whole.condensed()


def fitted(answers: Sequence[tuple[Tensor, Rollout]], names: Sequence[str], tolerance: float) -> Settings | None:
    """Searches once; see `Search`."""
    return Search(answers, tolerance).fitted(names)


_NEUTRAL = Settings()
_NOTHING: dict[str, Any] = {"min_p": 0.0, "top_k": None, "top_p": 1.0}


def _numbers_of(values: Sequence[dict[str, Any]]) -> Tensor:
    rows = [{**_NOTHING, **truncation} for truncation in values]
    return torch.tensor([
        [row["min_p"], math.inf if row["top_k"] is None else row["top_k"], row["top_p"]] for row in rows
    ], dtype=torch.float64)  # fmt: skip


class _Fit(Distances):
    def __init__(self, columns: Columns, tolerance: float) -> None:
        super().__init__(columns, tolerance)
        self._biased_columns: dict[int, DrawnTokens] = {}

    def search(self, names: Sequence[str]) -> Settings | None:
        """Returns the nearest settings of these names."""
        continuous = [name for name in CONTINUOUS if name in names]
        truncations = [name for name in TRUNCATIONS if name in names]
        is_biased = BIASED in names
        # several at once are refined from fewer points
        grids = [_STARTS[name][:: 4 if len(continuous) > 1 else 1] for name in continuous]
        starts = [Settings(**dict(zip(continuous, values))) for values in itertools.product(*grids)]
        near: Iterable[Settings]
        if truncations == list(names):
            near = self._truncations(_NEUTRAL, truncations)
        elif is_biased:
            near = self._near_with_bias(starts, names)
        else:
            near = self._near(starts, truncations)
        shares = (1.0, _KEPT_SHARE) if truncations else (1.0,)
        best: Settings | None = None
        for start, share in itertools.product(near, shares):
            refined = self._refined(start, continuous, truncations, is_biased, share)
            best = min((trial for trial in (best, refined) if trial is not None), key=self.distance, default=None)
            if best is not None and self.distance(best) <= amplified(self.tolerance) ** 2:
                break  # with few tokens, settings from a farther start may fit as well
        return best

    def _near(self, starts: Sequence[Settings], truncations: Sequence[str]) -> list[Settings]:
        """Returns the nearest starts, each with its nearest truncations."""
        values, most = self._values(truncations), _SCANNED if len(truncations) > 1 else MOST_TOKENS
        return self._nearest([trial for start in starts for trial in self._scan(start, values, most=most)])

    def _nearest(self, trials: Sequence[Settings], most: int = _NEAR) -> list[Settings]:
        """Returns the best trials by mean square and by the number of tokens that they predict."""
        trials = [*dict.fromkeys(trials)]
        near = [sorted(trials, key=measure)[:most] for measure in (self.score, self.distance)]
        return [*dict.fromkeys(trial for pair in zip(*near) for trial in pair)]

    def _scan(
        self,
        settings: Settings,
        values: Sequence[dict[str, Any]],
        tokens: Sequence[int | None] = (None,),
        most: int = MOST_TOKENS,
    ) -> list[Settings]:
        """Tries all truncations with all biases of each token on `most` drawn tokens.

        Returns the nearest settings by each of two measures.
        """
        nearest = []
        numbers = _numbers_of(values)
        logits = self.tokens.processed(settings)
        rows = slice(None, None, 1 + (len(logits) - 1) // most)
        for token in tokens:
            drawn = self.tokens.of_drawn(logits).unsqueeze(-1)
            if token is None:
                other_logits, extra = logits, torch.full_like(drawn, -math.inf)
            else:
                other_logits = logits.index_fill(-1, torch.tensor([token]), -math.inf)
                extra = self._column(settings, token)
                drawn = torch.where((self.tokens.ids == token).unsqueeze(-1), extra, drawn)
            log_sums = Ordered(other_logits[rows], self.columns.sizes).log_sums(numbers, extra[rows])
            errors = drawn[rows].unsqueeze(-1) - log_sums - self.tokens.engine_log_probs[rows, None, None]
            errors = errors.nan_to_num(posinf=1e3, neginf=-1e3)
            for sums in (errors.square().sum(0), self.misses(errors).sum(0)):
                row, column = divmod(int(sums.argmin()), len(values))
                bias = settings.bias if token is None else (*settings.bias, (token, _BIASES[row]))
                nearest.append(replace(settings, bias=bias, **values[column]))
        return nearest

    def _column(self, settings: Settings, token: int) -> Tensor:
        """Returns the logits of a token under all biases, [tokens, biases]."""
        if token not in self._biased_columns:
            self._biased_columns[token] = self.tokens.biased(token, torch.tensor(_BIASES, dtype=torch.float64))
        penalties = replace(settings, bias=(), stops=(), min_tokens=0, allowed=None)
        return self._biased_columns[token].processed(penalties)

    def _near_with_bias(self, starts: Sequence[Settings], names: Sequence[str]) -> Iterator[Settings]:
        """Yields settings to refine, one group after another; a group is needed only if those before it do not fit."""
        yield from self._late_candidates(names)
        truncations = [name for name in TRUNCATIONS if name in names]
        values = self._values(truncations)
        # which tokens truncation leaves depends on the bias
        whole = [replace(start, **value) for start in starts for value in (values if truncations else [{}])]
        near = self._nearest([self._biased(start) for start in sorted(whole, key=self.distance)[:_MOST_STARTS]])
        if not truncations:
            yield from near
            return
        near = self._promising(near)
        yield from near
        tokens = {token for settings in near for token, _ in settings.bias}
        for start in (_NEUTRAL, *self._scan(_NEUTRAL, values)):
            tokens |= {*self._drawn_often(start), *self._explaining(start)}
        scans = (self._scan(start, values, sorted(tokens), _SCANNED) for start in starts)
        near = self._nearest([*itertools.chain.from_iterable(scans)])
        yield from self._promising(near)
        yield from self._promising([self._with_more(settings, values) for settings in near])

    def _promising(self, near: Sequence[Settings]) -> list[Settings]:
        """Moves biases to the optimum; returns the settings that predict many tokens then."""
        moved = [self.least_squares(settings, pushed(settings), _KEPT_SHARE) for settings in near]
        return [settings for settings in moved if self.score(settings) < _PROMISING]

    def _with_more(self, settings: Settings, values: Sequence[dict[str, Any]]) -> Settings:
        """Pushes or forbids more tokens one by one, each with the truncation that then fits."""
        for _ in range(_MOST_OFTEN - 1):
            settings = self.least_squares(settings, pushed(settings), _KEPT_SHARE)
            tokens = {*self._drawn_often(settings), *self._explaining(settings)} - dict(settings.bias).keys()
            trial = min(self._scan(settings, values, sorted(tokens), _SCANNED), key=self.score, default=settings)
            if self.is_exact(settings) or self.score(trial) >= self.score(settings):
                break
            settings = trial
        return settings

    def _drawn_often(self, settings: Settings) -> list[int]:
        """Returns tokens that are drawn far more often than predicted."""
        shares, count = self.shares(settings), len(self.columns.ids)
        more = (torch.bincount(self.tokens.ids, minlength=shares.shape[-1]) - shares.sum(0))[:count]
        return [token for token in more.topk(min(_MOST_OFTEN, count)).indices.tolist() if more[token] > _FEWEST_MORE]

    def _explaining(self, settings: Settings) -> list[int]:
        """Returns tokens whose bias would best explain the sums of exponentials."""
        shares, count = self.shares(settings), len(self.columns.ids)
        gains = self._gains(shares, torch.expm1(self.errors(settings).clamp(max=50.0)), [])
        tokens: list[int] = gains[:count].topk(min(_MOST_OFTEN, count)).indices.tolist()
        return tokens

    def _late_candidates(self, names: Sequence[str]) -> Iterator[Settings]:
        """Yields settings that fit the ends of answers, where min_tokens does not act, with min_tokens added."""
        other_names = [name for name in names if name != BIASED] or names
        for share in _LATE_SHARES if other_names != names else _LATE_SHARES[:1]:
            is_late = self.tokens.numbers > share * self.tokens.numbers.max()
            fewest = 2 * _FEWEST_TOKENS if other_names == names else _FEWEST_TOKENS
            if not bool(is_late.all()) and int(is_late.sum()) >= fewest:
                settings = _Fit(self.columns.chosen(is_late), self.tolerance).search(other_names)
                yield from [] if settings is None else [self._biased(settings)]

    def _values(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns all combinations of usual values of truncations."""
        size = self.tokens.logits.shape[-1]
        grids = [[k for k in _USUAL_TOP_K if k < size] if name == "top_k" else _TIDY for name in names]
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*grids)]

    def _refined(
        self, settings: Settings, continuous: Sequence[str], truncations: Sequence[str], is_biased: bool, share: float
    ) -> Settings | None:
        """Moves settings to the nearest ones, one kind after another."""
        rounds = 8 if bool(continuous) + bool(truncations) + is_biased > 1 else 1
        before = math.inf
        for _ in range(rounds):
            if (now := self.distance(settings)) > 0.5 * before or now <= self.tolerance**2:
                break
            before = now
            if is_biased:
                rebiased = self._biased(replace(settings, bias=(), min_tokens=0, stops=(), allowed=None))
                settings = min(settings, rebiased, key=self.distance)
            settings = self.least_squares(settings, [*continuous, *pushed(settings)], share)
            if is_biased:
                settings = self._forbidden(self._without_needless(settings))
            if truncations and rounds > 1:
                variants = self._truncations(replace(settings, **_NOTHING), truncations)
                settings = min([settings, *variants], key=self.distance)
        if is_biased and not settings.has_bias:
            return None
        settings = replace(settings, bias=tuple((token, _tidy_bias(value)) for token, value in settings.bias))
        return self._tidied(settings, continuous)

    def _without_needless(self, settings: Settings) -> Settings:
        """Removes each bias without which the other biases, fitted again, fit as well."""
        for token in pushed(settings) if len(settings.bias) > 1 else ():
            trial = replace(settings, bias=tuple(entry for entry in settings.bias if entry[0] != token))
            trial = self.least_squares(trial, pushed(trial), _KEPT_SHARE)
            if self.distance(trial) <= max(self.distance(settings), self.tolerance**2):
                settings = trial
        return settings

    def _forbidden(self, settings: Settings) -> Settings:
        """Forbids each token that is pushed down, if that fits as well."""
        for token, value in settings.bias:
            trial = replace(settings, bias=_merged(settings, {token: -math.inf}))
            if value < 0 and self.distance(trial) <= max(self.distance(settings), self.tolerance**2):
                settings = trial
        return settings

    def _tidied(self, settings: Settings, names: Sequence[str]) -> Settings:
        """Rounds settings in turn if round numbers fit as well after the rest has moved."""
        for number, name in enumerate(names):
            value, most = getattr(settings, name), max(self.distance(settings), (32 * self.tolerance) ** 2)
            for tidy in (round(value, digits) for digits in range(1, 5)):
                if abs(tidy - value) < 1e-3 * abs(value) and (tidy > 0) == (value > 0):
                    rounded: dict[str, Any] = {name: tidy}
                    trial = self.least_squares(replace(settings, **rounded), names[number + 1 :])
                    if self.distance(trial) <= most:
                        settings = trial
                        break
        return settings

    def _truncations(self, settings: Settings, names: Sequence[str]) -> list[Settings]:
        """Returns settings with the nearest truncations; untidy values only of the last name."""
        candidates = self._scan(settings, self._values(names)) if len(names) > 1 else [settings]
        neutral = {names[-1]: _NOTHING[names[-1]]}
        return [*candidates, *(self._truncation(replace(start, **neutral), names[-1]) for start in candidates)]

    def _truncation(self, settings: Settings, name: str) -> Settings:
        """Returns settings whose truncation leaves the probability that the log-probabilities imply."""
        sizes = self.columns.sizes
        before = self.tokens.processed(settings)
        left = truncated(before, settings, sizes)
        ordered = left.sort(-1, descending=True)
        # of the tokens that earlier truncations leave
        shares = (ordered.values + sizes[ordered.indices]).log_softmax(-1)
        log_shares = self.tokens.of_drawn(before) - self.tokens.engine_log_probs - (left + sizes).logsumexp(-1)
        reached = shares.exp().cumsum(-1)
        distances = (reached.log() - log_shares.unsqueeze(-1)).square()  # [tokens, number of columns that are left - 1]
        if name == "top_k":
            return replace(settings, top_k=int(distances.sum(0).argmin()) + 1)
        relative = (ordered.values - ordered.values[:, :1]).exp()
        values = torch.tensor([*_TIDY, *self._between(name, relative, reached, log_shares)], dtype=torch.float64)
        if name == "top_p":  # as many as do not reach it, and one more
            left = torch.searchsorted(reached, values.expand(len(reached), -1).contiguous())
        else:  # as many as have at least this share of the likeliest one's probability
            left = torch.searchsorted(-relative, -values.expand(len(relative), -1).contiguous(), right=True) - 1
        best = distances.gather(-1, left.clamp(max=distances.shape[-1] - 1)).sum(0).argmin()
        nearest: dict[str, Any] = {name: float(values[best])}
        return replace(settings, **nearest)

    def _between(self, name: str, share: Tensor, reached: Tensor, log_shares: Tensor) -> Iterator[float]:
        """Yields a value of top_p or min_p, if any, that leaves as many tokens everywhere as the engine did."""
        fits = (reached.log() - log_shares.unsqueeze(-1)).abs() <= 32 * self.tolerance
        if not bool(fits.any(-1).all()):
            return
        first = fits.double().argmax(-1, keepdim=True)
        last = fits.shape[-1] - 1 - fits.flip(-1).double().argmax(-1, keepdim=True)
        if name == "top_p":  # the nucleus is the fewest tokens that reach p: one token fewer does not
            fewer = torch.where(first > 0, reached.gather(-1, (first - 1).clamp(min=0)), 0.0)
            low, high = float(fewer.max()), float(reached.gather(-1, last).min())
        else:  # the least likely token that is left has at least this share of the likeliest one's probability
            after = torch.where(
                last + 1 < share.shape[-1], share.gather(-1, (last + 1).clamp(max=share.shape[-1] - 1)), 0.0
            )
            low, high = float(after.max()), float(share.gather(-1, first).min())
        if low < high:
            tidy = (math.ceil(low * 10**digits + 1e-9) / 10**digits for digits in range(1, 7))
            yield next((value for value in tidy if low < value <= high), (low + high) / 2)

    def _biased(self, settings: Settings) -> Settings:
        """Returns settings with the biased or forbidden tokens that best fit the engine's log-probabilities."""
        log_probs = (self.tokens.processed(settings) + self.columns.sizes).log_softmax(-1)
        errors = self.errors(settings)
        deviates = errors.abs() > 32 * self.tolerance
        candidates = [self._pushed(settings, log_probs, errors)]
        if settings.allowed is None:
            candidates.append(self._allowed(settings, log_probs, errors))
        if bool(deviates.any()) and (count := int(self.tokens.numbers[deviates].max()) + 1) > 1:
            early = self.tokens.numbers < count
            if not bool(early.all()) and not settings.min_tokens:
                early_errors = errors.masked_fill(~early, 0.0)
                forbidden = self._pushed(replace(settings, min_tokens=count), log_probs, early_errors)
                candidates += [forbidden] if forbidden.stops else []
                if settings.has_truncation:  # other tokens move up, which the sums do not show
                    shares = log_probs.exp()[early, : len(self.columns.ids)].sum(0)
                    likely = shares.argsort(descending=True)[:_MOST_STOPS]
                    stops = [replace(settings, min_tokens=count, stops=(token,)) for token in likely.tolist()]
                    candidates.append(min(stops, key=self.distance))
        best = min(map(self.distance, candidates))
        # the first that is near: a token forbidden everywhere is likelier than one forbidden at the beginning
        return next(candidate for candidate in candidates if self.distance(candidate) <= best + self.tolerance**2)

    def _gains(self, shares: Tensor, left: Tensor, chosen: Sequence[int]) -> Tensor:
        """Returns, by column, how much of the unexplained sums (`left`) its share explains where it is not drawn."""
        undrawn = shares.scatter(-1, self.tokens.ids.unsqueeze(-1), 0.0)
        gains = (left.unsqueeze(-1) * undrawn).sum(0).square() / undrawn.square().sum(0).clamp(min=1e-300)
        gains[[*chosen]] = 0
        gains[len(self.columns.ids) :] = 0
        return gains

    def _pushed(self, settings: Settings, log_probs: Tensor, errors: Tensor) -> Settings:
        """Finds biased tokens: the sum of exponentials grows by (e^bias - 1) times their probability.

        With `min_tokens`, finds those that are forbidden at the beginning.
        """
        more, is_early = torch.expm1(errors.clamp(max=50.0)), settings.min_tokens > 0
        if is_early:
            log_probs = log_probs.masked_fill((self.tokens.numbers >= settings.min_tokens).unsqueeze(-1), -math.inf)
        shares = log_probs.exp()
        chosen: list[int] = []
        best, left = replace(settings, min_tokens=0), more
        for _ in range(_MOST_BIASED):
            if self.is_exact(best):
                break
            chosen.append(int(self._gains(shares, left, chosen).argmax()))
            rows = ~torch.isin(self.tokens.ids, torch.tensor(chosen))
            if int(rows.sum()) < 3 * len(chosen) + 1:
                break
            factors = torch.linalg.lstsq(shares[rows][:, chosen], more[rows].unsqueeze(-1)).solution.squeeze(-1)
            left = (more - shares[:, chosen] @ factors).masked_fill(~rows, 0.0)
            # a token chosen by mistake gets no bias
            biases = [(token, _bias(factor)) for token, factor in zip(chosen, factors.tolist()) if abs(factor) > 1e-3]
            stops = tuple(token for token, bias in biases if bias == -math.inf)
            if is_early and not stops:
                continue
            added = {token: dict(settings.bias).get(token, 0.0) + bias for token, bias in biases}
            trial = replace(settings, **{"stops": stops} if is_early else {"bias": _merged(settings, added)})
            best = min(best, trial, key=self.distance)
        if is_early:
            return best
        single = self._pushed_when_drawn(settings, log_probs, errors)
        return min(best, single, self._pushed_often(settings, log_probs), key=self.distance)

    def _pushed_often(self, settings: Settings, log_probs: Tensor) -> Settings:
        """Finds biases of tokens that are drawn far more often than predicted."""
        more = torch.bincount(self.tokens.ids, minlength=log_probs.shape[-1]) - log_probs.exp().sum(0)
        count = min(_MOST_OFTEN, len(self.columns.ids))
        often = [
            token for token in more[: len(self.columns.ids)].topk(count).indices.tolist() if more[token] > _FEWEST_MORE
        ]
        if len(often) < 2:
            return settings
        start = {token: _tidy_bias(math.log(float(more[token] / log_probs[:, token].exp().sum()))) for token in often}
        return self.least_squares(replace(settings, bias=_merged(settings, start)), often, _KEPT_SHARE)

    def _pushed_when_drawn(self, settings: Settings, log_probs: Tensor, errors: Tensor) -> Settings:
        """Finds one biased token by its odds of being drawn."""
        drawn, engine = self.tokens.of_drawn(log_probs), self.tokens.engine_log_probs
        odds = (engine - torch.log(-torch.expm1(engine.clamp(max=-1e-12)))) - (drawn - torch.log(-torch.expm1(drawn)))
        distances = {}
        for token in sorted(set(self.tokens.ids.tolist())):
            is_drawn = self.tokens.ids == token
            bias = _tidy_bias(float(odds[is_drawn].median()))
            sums = torch.log1p(log_probs[:, token].exp() * math.expm1(min(bias, 50.0)))
            distances[token, bias] = float((errors + bias * is_drawn - sums).square().sum())
        return replace(settings, bias=_merged(settings, dict([min(distances, key=lambda pair: distances[pair])])))

    def _allowed(self, settings: Settings, log_probs: Tensor, errors: Tensor) -> Settings:
        """Finds the allowed tokens: those drawn, and a few that hold the rest of the probability."""
        shares, left = log_probs.exp(), errors.exp()
        chosen = sorted(set(self.tokens.ids.tolist()))
        best = replace(settings, allowed=tuple(chosen))
        for _ in range(_MOST_BIASED):
            if self.distance(best) <= self.tolerance**2:
                break
            unexplained = left - shares[:, chosen].sum(-1)
            distances = (unexplained.unsqueeze(-1) - shares).square().sum(0)
            distances[chosen] = math.inf
            distances[len(self.columns.ids) :] = math.inf
            chosen = [*chosen, int(distances.argmin())]
            trial = replace(best, allowed=tuple(sorted(chosen)))
            if self.distance(trial) >= self.distance(best):
                break
            best = trial
        return best


def _merged(settings: Settings, biases: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Returns the bias of settings with other values for some tokens."""
    return tuple({**dict(settings.bias), **biases}.items())


def _bias(factor: float) -> float:
    """Converts e^bias - 1 to the bias of a token."""
    return -math.inf if factor < -0.98 else _tidy_bias(math.log1p(factor))


def _tidy_bias(value: float) -> float:
    tidy = [round(value, digits) for digits in range(4)]
    return next((rounded for rounded in tidy if abs(rounded - value) < 1e-3 * abs(value)), value)


def fitted_padding(answers: Sequence[tuple[Tensor, Rollout]]) -> int:
    """Returns how many rows with logits of 0 the engine's softmax seems to include; at least 0."""
    tokens = DrawnTokens.drawn(answers, MOST_TOKENS)
    logits = tokens.processed(Settings())
    ratios = torch.exp(tokens.of_drawn(logits.log_softmax(-1)) - tokens.engine_log_probs)
    median = float(((ratios - 1) * logits.logsumexp(-1).exp()).median())
    return max(0, round(median)) if math.isfinite(median) and median < 1e6 else 0

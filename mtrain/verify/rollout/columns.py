"""Large vocabularies condensed for a search: the likeliest tokens, and groups of nearly equal ones."""

import math
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mtrain.verify.rollout.settings import DrawnTokens, Settings

_EXACT_COLUMNS = 1024
"""Number of likeliest tokens of a row that a large vocabulary keeps apart; later ones are merged."""
_GROWTH = 0.01
"""Share of all likelier tokens that are merged; nearly equal logits remain equal enough at any temperature."""


class Columns(NamedTuple):
    """Drawn tokens; each column of their logits is one token of the vocabulary or several nearly equal ones."""

    tokens: DrawnTokens
    sizes: Tensor
    """Logarithm of the number of tokens in each column."""
    ids: Tensor
    """Token ids of the first columns; later columns hold several tokens, which differ from row to row."""

    def condensed(self) -> Self:
        """Merges the unlikely tokens of each row, except for those in a prompt or an answer."""
        tokens = self.tokens
        likely = tokens.logits.topk(min(_EXACT_COLUMNS // 32, len(self.ids)), -1).indices
        ids = torch.unique(torch.cat([likely.flatten(), tokens.ids, *tokens.read]))
        if len(ids) + 2 * _EXACT_COLUMNS > len(self.ids):
            return self
        is_rest = torch.ones(len(self.ids), dtype=torch.bool).index_fill(0, ids, False)
        unlikely = tokens.logits[:, is_rest].sort(-1, descending=True).values
        widths = [1] * _EXACT_COLUMNS
        while (left := unlikely.shape[-1] - sum(widths)) > 0:
            widths.append(min(left, round(_GROWTH * sum(widths))))
        sizes = torch.tensor(widths, dtype=torch.float64).log()
        merged = torch.stack([group.logsumexp(-1) for group in torch.split(unlikely, widths, -1)], -1) - sizes
        moved = DrawnTokens(
            torch.cat([tokens.logits[:, ids], merged], -1),
            torch.searchsorted(ids, tokens.ids),
            tokens.engine_log_probs,
            tokens.temperatures,
            tuple(torch.searchsorted(ids, read) for read in tokens.read),
            tuple((torch.searchsorted(ids, written), counts) for written, counts in tokens.written),
            tokens.numbers,
        )
        return type(self)(moved, torch.cat([torch.zeros(len(ids)), sizes]), ids)

    def chosen(self, mask: Tensor) -> Self:
        """Returns the rows at which a mask, [tokens] bool, is true."""
        return self._replace(tokens=self.tokens.chosen(mask))

    def evenly(self, most: int) -> Self:
        """Returns `most` rows, evenly spread."""
        count = len(self.tokens.ids)
        return self.chosen(torch.zeros(count, dtype=torch.bool).index_fill(0, torch.arange(most) * count // most, True))

    def named(self, settings: Settings) -> Settings:
        """Returns settings that name tokens instead of columns."""
        bias = tuple((int(self.ids[column]), value) for column, value in settings.bias)
        stops = tuple(self.ids[[*settings.stops]].tolist())
        allowed = None if settings.allowed is None else tuple(self.ids[[*settings.allowed]].tolist())
        return replace(settings, bias=bias, stops=stops, allowed=allowed)


class Ordered:
    """Logits of each row in descending order, with the running sums that decide what truncations leave."""

    def __init__(self, logits: Tensor, sizes: Tensor) -> None:
        ordered = logits.sort(-1, descending=True)
        self._falling, self._top = -ordered.values, ordered.values[:, :1]
        shares = (ordered.values - self._top + sizes[ordered.indices]).exp()
        self._sums = torch.nn.functional.pad(shares.cumsum(-1), (1, 0))

    def log_sums(self, values: Tensor, extra: Tensor) -> Tensor:
        """Returns the logarithm of the sum of exponentials that truncations leave, [rows, extras, values].

        Args:
            values: min_p, top_k and top_p, [values, 3]; 0, inf and 1 leave everything.
            extra: Logits of one more token, [rows, extras]; -inf: none.
        """
        min_p, top_k, top_p = values.T
        rows, shape = len(extra), (*extra.shape, len(values))
        one, top = extra.unsqueeze(-1), self._top.unsqueeze(-1)
        share = (one - top).exp()

        def ranks(sequence: Tensor, threshold: Tensor, right: bool = False) -> Tensor:
            positions = torch.searchsorted(sequence, threshold.reshape(rows, -1).contiguous(), right=right)
            return positions.view(threshold.shape)

        def sums(counts: Tensor) -> Tensor:
            return self._sums.gather(-1, counts.reshape(rows, -1)).view(counts.shape)

        before = ranks(self._falling, -one)  # likelier tokens
        is_left, count = one > -math.inf, torch.full_like(before, self._falling.shape[-1])
        if bool((min_p > 0).any()):
            least = torch.maximum(one, top) + min_p.log()
            is_left, count = is_left & (one >= least), ranks(self._falling, -least, right=True)
        if bool((top_k < math.inf).any()):
            is_left = is_left & (before < top_k)
            count = torch.minimum(count, (top_k - is_left.double())).long()
        if bool((top_p < 1).any()):
            threshold = top_p * (sums(count) + share * is_left)
            without = ranks(self._sums, threshold)
            is_left = is_left & (without > before)  # else the likelier ones reach p
            with_one = torch.maximum(ranks(self._sums, threshold - share), before)
            count = torch.minimum(count, torch.where(is_left, with_one, without))
        return ((sums(count) + share * is_left).log() + top).expand(shape)

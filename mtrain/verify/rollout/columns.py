"""What a search reads of a large vocabulary: its likeliest tokens, and groups of nearly equal ones."""

import math
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mtrain.verify.rollout.settings import DrawnTokens, Settings

_EXACT_COLUMNS = 1024
"""Likeliest tokens of a row that are not merged with others of a large vocabulary."""
_GROWTH = 0.01
"""Share of all likelier tokens that are merged; nearly equal logits remain equal enough at any temperature."""


class Columns(NamedTuple):
    """Drawn tokens whose columns are tokens of the vocabulary, or several nearly equal ones."""

    places: DrawnTokens
    sizes: Tensor
    """Logarithm of the number of tokens in each column."""
    ids: Tensor
    """Token ids of the first columns; others hold several tokens, other ones in each row."""

    def condensed(self) -> Self:
        """Merges the unlikely tokens of each row, except for those in a prompt or an answer."""
        places = self.places
        likely = places.logits.topk(min(_EXACT_COLUMNS // 32, len(self.ids)), -1).indices
        ids = torch.unique(torch.cat([likely.flatten(), places.ids, *places.read]))
        if len(ids) + 2 * _EXACT_COLUMNS > len(self.ids):
            return self
        is_rest = torch.ones(len(self.ids), dtype=torch.bool).index_fill(0, ids, False)
        rest = places.logits[:, is_rest].sort(-1, descending=True).values
        widths = [1] * _EXACT_COLUMNS
        while (left := rest.shape[-1] - sum(widths)) > 0:
            widths.append(min(left, round(_GROWTH * sum(widths))))
        sizes = torch.tensor(widths, dtype=torch.float64).log()
        merged = torch.stack([each.logsumexp(-1) for each in torch.split(rest, widths, -1)], -1) - sizes
        moved = DrawnTokens(
            torch.cat([places.logits[:, ids], merged], -1),
            torch.searchsorted(ids, places.ids),
            places.said,
            places.temperatures,
            tuple(torch.searchsorted(ids, each) for each in places.read),
            tuple((torch.searchsorted(ids, each), counts) for each, counts in places.written),
            places.numbers,
        )
        return type(self)(moved, torch.cat([torch.zeros(len(ids)), sizes]), ids)

    def chosen(self, mask: Tensor) -> Self:
        """Returns the rows at which a mask, [tokens] bool, is true."""
        return self._replace(places=self.places.chosen(mask))

    def evenly(self, most: int) -> Self:
        """Returns `most` rows, evenly spread."""
        count = len(self.places.ids)
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

    def kept(self, values: Tensor, extra: Tensor) -> Tensor:
        """Returns the logarithm of the sum of exponentials that truncations leave, [rows, extras, values].

        Args:
            values: min_p, top_k and top_p, [values, 3]; 0, inf and 1 leave everything.
            extra: Logits of one more token, [rows, extras]; -inf: none.
        """
        min_p, top_k, top_p = values.T
        rows, shape = len(extra), (*extra.shape, len(values))
        one, top = extra.unsqueeze(-1), self._top.unsqueeze(-1)
        share = (one - top).exp()

        def ranks(sequence: Tensor, wanted: Tensor, right: bool = False) -> Tensor:
            found = torch.searchsorted(sequence, wanted.reshape(rows, -1).contiguous(), right=right)
            return found.view(wanted.shape)

        def sums(counts: Tensor) -> Tensor:
            return self._sums.gather(-1, counts.reshape(rows, -1)).view(counts.shape)

        before = ranks(self._falling, -one)  # others that are likelier
        is_left, count = one > -math.inf, torch.full_like(before, self._falling.shape[-1])
        if bool((min_p > 0).any()):
            least = torch.maximum(one, top) + min_p.log()
            is_left, count = is_left & (one >= least), ranks(self._falling, -least, right=True)
        if bool((top_k < math.inf).any()):
            is_left = is_left & (before < top_k)
            count = torch.minimum(count, (top_k - is_left.double())).long()
        if bool((top_p < 1).any()):
            wanted = top_p * (sums(count) + share * is_left)
            without = ranks(self._sums, wanted)
            is_left = is_left & (without > before)  # else the likelier ones reach p
            with_one = torch.maximum(ranks(self._sums, wanted - share), before)
            count = torch.minimum(count, torch.where(is_left, with_one, without))
        return ((sums(count) + share * is_left).log() + top).expand(shape)

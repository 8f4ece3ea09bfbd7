"""Sampler settings that change log-probabilities, in the order in which an engine applies them.

Source: vLLM 0.32, v1/sample/sampler.py: forbidden or biased tokens, penalties, temperature, min_p, top_k, top_p. SGLang
and transformers have the same settings under the same names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtrain.verify.rollout.records import Rollout

TRUNCATIONS = ("min_p", "top_k", "top_p")
"""Settings that keep only the likeliest tokens, in order."""


@dataclass(frozen=True)
class Cause:
    """Possible cause of a deviation."""

    name: str
    fact: str
    """What the engine did, or what was found and expected, as a sentence without full stop."""
    remedy: str
    is_rounding: bool = False
    """Whether the engine rounds to bfloat16 somewhere, so that single tokens may be mispredicted."""


@dataclass(frozen=True)
class Settings:
    """Sampler settings; the defaults change nothing."""

    bias: tuple[tuple[int, float], ...] = ()
    """Tokens and the amounts added to their logits; -inf forbids a token."""
    allowed: tuple[int, ...] | None = None
    min_tokens: int = 0
    """Number of first answer tokens that must not be in `stops`."""
    stops: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float | None = None
    """Divisor of the logits; None: the file's."""
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    @property
    def has_truncation(self) -> bool:
        """Says whether unlikely tokens are cut."""
        return self.min_p > 0 or self.top_k is not None or self.top_p < 1

    @property
    def has_bias(self) -> bool:
        """Says whether tokens are pushed, forbidden or chosen by id."""
        return bool(self.bias or self.min_tokens) or self.allowed is not None

    def __str__(self) -> str:
        words = [f"temperature={self.temperature:g}"] if self.temperature is not None else []
        words += [f"{name}={value:g}" for name, value in self._penalties().items()]
        words += [f"min_p={self.min_p:g}"] if self.min_p > 0 else []
        words += [f"top_k={self.top_k}"] if self.top_k is not None else []
        words += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([*words, *self._bias_words()])

    def _penalties(self) -> dict[str, float]:
        every = {
            "repetition_penalty": (self.repetition_penalty, 1.0),
            "frequency_penalty": (self.frequency_penalty, 0.0),
            "presence_penalty": (self.presence_penalty, 0.0),
        }
        return {name: value for name, (value, neutral) in every.items() if value != neutral}

    def _bias_words(self) -> list[str]:
        forbidden = sorted(token for token, value in self.bias if value == -math.inf)
        pushed = {token: value for token, value in sorted(self.bias) if value != -math.inf}
        words = [] if self.allowed is None else [f"allowed_token_ids=[{', '.join(map(str, self.allowed))}]"]
        if self.min_tokens:
            words.append(f"min_tokens={self.min_tokens} without {_tokens(sorted(self.stops))}")
        if forbidden:
            words.append(f"{_tokens(forbidden)} forbidden (bad_words)")
        if pushed:
            words.append("logit_bias={" + ", ".join(f"{token}: {value:g}" for token, value in pushed.items()) + "}")
        return words

    def cause(self, temperatures: Sequence[float]) -> Cause:
        """Returns these settings as a cause; `temperatures` are those in the file."""
        kinds = ["temperature"] if self.temperature is not None else []
        kinds += ["penalties"] if self._penalties() else []
        kinds += ["truncated vocabulary"] if self.has_truncation else []
        kinds += ["biased tokens"] if self.has_bias else []
        name = " and ".join(kinds)
        if name == "temperature":
            values = ", ".join(f"{value:g}" for value in temperatures)
            return Cause(
                name,
                f"the log-probabilities are those at temperature {self.temperature:g}, but the file says {values}",
                "let the engine return those after the temperature (vLLM: logprobs_mode=processed_logprobs), or say "
                f"temperature {self.temperature:g} in the file and in Datum.temperature",
            )
        fact = f"the log-probabilities are those of a sampler with {self}"
        if name == "truncated vocabulary":
            fact = f"the log-probabilities are divided by the probability of the tokens that {self} leaves"
        return Cause(
            name,
            fact,
            "let the engine return those of the whole vocabulary (vLLM: logprobs_mode=raw_logprobs at temperature "
            "1), or draw without these settings, which vLLM also takes from generation_config.json: a loss needs the "
            "whole distribution",
        )


def _tokens(ids: Sequence[int]) -> str:
    return ("token " if len(ids) == 1 else "tokens ") + ", ".join(map(str, ids))


@dataclass(frozen=True)
class DrawnTokens:
    """Drawn tokens, with their logits and the tokens before them."""

    logits: Tensor
    """Predicting logits before temperature, [tokens, vocab] float64."""
    ids: Tensor
    engine_log_probs: Tensor
    """[tokens] float64."""
    temperatures: Tensor
    read: tuple[Tensor, ...]
    """Distinct ids before each token, in prompt or answer."""
    written: tuple[tuple[Tensor, Tensor], ...]
    """Distinct ids before each token in the answer, with their counts."""
    numbers: Tensor

    @classmethod
    def of(cls, logits: Tensor, rollout: Rollout) -> DrawnTokens:
        """Returns the tokens of an answer; `logits` as in `Pass`."""
        count = len(rollout.ids)
        return cls(
            logits[1 : 1 + count],
            torch.tensor(rollout.ids),
            torch.tensor(rollout.log_probs, dtype=torch.float64),
            torch.full((count,), rollout.temperature, dtype=torch.float64),
            tuple(torch.tensor(sorted({*rollout.prompt_ids, *rollout.ids[:number]})) for number in range(count)),
            tuple(_counted(rollout.ids[:number]) for number in range(count)),
            torch.arange(count),
        )

    @classmethod
    def drawn(cls, answers: Sequence[tuple[Tensor, Rollout]], most: int) -> DrawnTokens:
        """Returns at most `most` drawn tokens of all answers, evenly spread."""
        is_drawn = torch.tensor([is_drawn for _, rollout in answers for is_drawn in rollout.mask])
        positions = is_drawn.nonzero().flatten()
        if len(positions) > most:
            positions = positions[torch.arange(most) * len(positions) // most]
        is_chosen = torch.zeros(len(is_drawn), dtype=torch.bool).index_fill(0, positions, True)
        masks = torch.split(is_chosen, [len(rollout.mask) for _, rollout in answers])
        # choose before joining: the logits of all answers may fill most of the memory
        every = [cls.of(*answer).chosen(row_mask) for answer, row_mask in zip(answers, masks, strict=True)]
        return cls(*map(_joined, zip(*(answer._columns() for answer in every), strict=True)))

    def chosen(self, mask: Tensor) -> DrawnTokens:
        """Returns the tokens at which a mask, [tokens] bool, is true."""
        rows = mask.nonzero().flatten().tolist()
        columns: list[Any] = [
            part[mask] if isinstance(part, Tensor) else tuple(part[row] for row in rows) for part in self._columns()
        ]
        return DrawnTokens(*columns)

    def biased(self, token: int, biases: Tensor) -> DrawnTokens:
        """Returns the tokens with a column for each bias of one token, and no other columns."""
        every = torch.arange(len(biases))
        return replace(
            self,
            logits=self.logits[:, token : token + 1] + biases,
            read=tuple(every[: len(biases) * int((ids == token).any())] for ids in self.read),
            written=tuple(
                (every[: len(biases) * len(token_counts)], token_counts.expand(len(biases) * len(token_counts)))
                for token_counts in (counts[ids == token] for ids, counts in self.written)
            ),
        )

    def _columns(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    @cached_property
    def _read_index(self) -> tuple[Tensor, Tensor]:
        return _rows(self.read), torch.cat(self.read)

    @cached_property
    def _written_index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and counts of `written`."""
        ids, counts = zip(*self.written, strict=True)
        return _rows(ids), torch.cat(ids), torch.cat(counts)

    def log_probs(self, settings: Settings) -> Tensor:
        """Returns the log-probability of each drawn token under settings, [tokens]; -inf if cut."""
        return self.of_drawn(truncated(self.processed(settings), settings).log_softmax(-1))

    def of_drawn(self, values: Tensor) -> Tensor:
        """Picks the value of each drawn token, [tokens], from [tokens, vocab]."""
        return values.gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)

    def processed(self, settings: Settings) -> Tensor:
        """Returns the logits after bias, penalties and temperature, [tokens, vocab]."""
        logits = self.logits.clone()
        for token, value in settings.bias:
            logits[:, token] += value
        if settings.allowed is not None:
            allowed = torch.tensor(settings.allowed)
            logits = torch.full_like(logits, -math.inf).index_copy(1, allowed, logits[:, allowed])
        if settings.min_tokens:
            early = (self.numbers < settings.min_tokens).nonzero()
            logits[early, torch.tensor(settings.stops)] = -math.inf
        repetition, frequency, presence = (
            settings.repetition_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
        )
        if repetition != 1:
            values = logits[self._read_index]
            logits[self._read_index] = torch.where(values > 0, values / repetition, values * repetition)
        if frequency or presence:
            *positions, counts = self._written_index
            logits[tuple(positions)] -= frequency * counts + presence
        if settings.temperature is None:
            return logits / self.temperatures.unsqueeze(-1)
        return logits / settings.temperature


def _joined(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(value for part in parts for value in part)


def _rows(ids: Sequence[Tensor]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(row_ids) for row_ids in ids]))


def _counted(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    counts = Counter(ids)
    return torch.tensor([*counts], dtype=torch.int64), torch.tensor([*counts.values()], dtype=torch.int64)


def truncated(logits: Tensor, settings: Settings, sizes: Tensor | None = None) -> Tensor:
    """Applies min_p, top_k and top_p to logits: -inf except for the likeliest tokens.

    `sizes` are logarithms of the number of tokens in each column, [vocab]; one each by default.
    """
    if settings.min_p > 0:
        least = logits.max(-1, keepdim=True).values + math.log(settings.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        least = logits.topk(settings.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if settings.top_p < 1:
        ordered = logits.sort(-1, descending=True)
        masses = ordered.values if sizes is None else ordered.values + sizes[ordered.indices]
        reached = masses.softmax(-1).cumsum(-1)
        # a token stays if those before it do not reach p
        gone = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], -1) >= settings.top_p
        logits = logits.masked_fill(torch.zeros_like(gone).scatter(-1, ordered.indices, gone), -math.inf)
    return logits

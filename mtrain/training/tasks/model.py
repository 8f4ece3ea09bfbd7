"""Interface of a rank's model for tasks: log-likelihoods of continuations, and answers that end at given texts."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.base.heartbeat import tick
from mtrain.config import Config
from mtrain.config.schema.data import MockSection
from mtrain.config.schema.loss import LossSection
from mtrain.core.batch.datum import Datum
from mtrain.core.engine.rank_model import RankModel
from mtrain.hf.tokenizer.tokenizer import Tokenizer
from mtrain.training.batches import AskedScores, GlobalBatches, token_scores
from mtrain.training.sampling.params import SamplingParams
from mtrain.training.sampling.sampler import generate

_TOKENS_OF_A_PASS = 8192
"""Largest number of positions in a microbatch that scores rows; a longer row has its own microbatch."""
_CACHED_TOKENS = 65_536
"""Positions of the key/value cache, which limit the number of simultaneous answers."""
_ASKED = AskedScores(("likeliest",), temperature=1.0)


class ScoredRow(NamedTuple):
    """Tokens of a context and its continuation."""

    ids: Sequence[int]
    num_scored: int
    """Number of tokens of the continuation, at the end of `ids`; the first of `ids` has no context."""


class LogLikelihood(NamedTuple):
    """Score of a continuation."""

    log_prob: float
    """Sum of the log-probabilities of its tokens, in nats."""
    is_greedy: bool
    """Whether greedy decoding would have chosen all of them."""


class Drawing(NamedTuple):
    """How answers are sampled and where they end."""

    max_new_tokens: int
    temperature: float = 0.0
    """Divisor of the logits; 0: greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer as soon as it contains one of them."""


class TaskModel:
    """Model of this rank with a tokenizer. Every method is collective over the world, and no layout changes its result
    by more than rounding. Weights, dropout and random states of a training run do not change."""

    def __init__(self, model: RankModel, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a model that predicts no tokens."""
        if (head := model.config.model.head) is not None:
            raise ConfigError(
                f"tasks need the probabilities of tokens, but {head} is a head; evaluate it by data.valid"
            )
        self._model, self._tokenizer = model, tokenizer

    def log_likelihoods(self, rows: Sequence[ScoredRow]) -> list[LogLikelihood]:
        """Scores each row's continuation. Rows of similar length share a forward pass; equal rows are computed once."""
        distinct = sorted({tuple(row.ids) for row in rows}, key=lambda ids: (-len(ids), ids))
        scores: dict[tuple[int, ...], tuple[list[float], list[bool]]] = {}
        for batch, config in self._batches(distinct):
            tick()
            model = replace(self._model, config=config)
            result = token_scores([Datum(ids) for ids in batch], _ASKED, model, GlobalBatches(config, model.groups))
            for ids, log_probs, likeliest in zip(batch, result.log_probs, result.likeliest, strict=True):
                scores[ids] = log_probs.tolist(), likeliest.tolist()
        return [_of_continuation(*scores[tuple(row.ids)], row.num_scored) for row in rows]

    def answers(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> list[list[int]]:
        """Returns the tokens of the answer to each prompt, including the token that ended it."""
        tick()
        longest = max((len(prompt) for prompt in prompts), default=0) + drawing.max_new_tokens
        self._model.sharded.gather_parameters()
        completions = generate(
            self._model, prompts, self._sampling(drawing), max_sequences=max(1, _CACHED_TOKENS // longest)
        )
        return [completion.token_ids for completion in completions]

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[tuple[Sequence[tuple[int, ...]], Config]]:
        """Yields global batches of rows, the longest first, each with a configuration of matching width."""
        layout, begin = self._model.groups.layout, 0
        # divisible by 2 cp and by tp; whole tiles of matrix products
        unit = 16 * layout.cp * layout.tp
        # enough microbatches to fill a pipeline
        num_microbatches = 2 * layout.pp if layout.pp > 1 else 1
        while begin < len(rows):
            width = -(-max(1, len(rows[begin]) - 1) // unit) * unit
            num_parts = layout.dp * num_microbatches
            # no more than the remaining ones, since empty rows are computed as well
            num_rows = min(max(1, _TOKENS_OF_A_PASS // width), -(-(len(rows) - begin) // num_parts))
            size = num_rows * num_parts
            yield rows[begin : begin + size], self._with_rows(width, num_rows, size)
            begin += size

    def _with_rows(self, width: int, num_rows: int, size: int) -> Config:
        """Returns the configuration of a forward pass over `size` plain rows of tokens, whatever the run's data."""
        config = self._model.config
        rows = {"micro_batch_size": num_rows, "global_batch_size": size, "tokens_per_micro_batch": None}
        train, data = config.train.model_copy(update=rows), MockSection(kind="mock", seq_length=width)
        return config.model_copy(update={"train": train, "data": data, "loss": LossSection()})

    def _sampling(self, drawing: Drawing) -> SamplingParams:
        # a token has at least one byte, so a text of n bytes lies within the last n tokens
        window = max((len(text.encode()) for text in drawing.stop_texts), default=0) + 1

        def is_complete(ids: Sequence[int]) -> bool:
            tail = self._tokenizer.decode(ids[-window:])
            return any(text in tail for text in drawing.stop_texts)

        return SamplingParams(
            drawing.max_new_tokens,
            drawing.temperature,
            drawing.top_p,
            drawing.top_k,
            stop_token_ids=drawing.stop_token_ids,
            is_complete=is_complete if drawing.stop_texts else None,
        )


def _of_continuation(log_probs: list[float], likeliest: list[bool], num_scored: int) -> LogLikelihood:
    first = len(log_probs) - num_scored
    return LogLikelihood(sum(itertools.islice(log_probs, first, None)), all(likeliest[first:]))

"""Text requests of tasks, answered by a model of tokens.

Special tokens, contexts truncated at their beginning, windows over long texts and ends of answers follow lm-eval's own
model of transformers (`hf`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mtrain.base.errors import ConfigError, DataError
from mtrain.base.spelling import counted
from mtrain.hf.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer
from mtrain.training.tasks.model import Drawing, LogLikelihood, ScoredRow

MAX_NEW_TOKENS = 256
"""Largest number of tokens of an answer if the task sets none."""
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_IGNORED_KEYS = frozenset({"until", "do_sample", "temperature", "top_p", "top_k", *_LENGTH_KEYS})


class Answering(Protocol):
    """`TaskModel`, or the leader that calls it on all ranks."""

    def log_likelihoods(self, rows: Sequence[ScoredRow]) -> list[LogLikelihood]: ...
    def answers(self, prompts: Sequence[Sequence[int]], drawing: Drawing) -> list[list[int]]: ...


class TextModel(NamedTuple):
    """A model that answers requests of texts."""

    model: Answering
    tokenizer: Tokenizer
    max_length: int
    """Largest number of tokens that the model reads."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    chat: Callable[[Sequence[Mapping[str, Any]], bool], str] | None = None
    """Function that applies the model's chat template to a conversation, with or without the beginning of an answer;
    None if the run has no template."""

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[LogLikelihood]:
        """Scores the continuation of each context."""
        rows = []
        for context, continuation in requests:
            before, after = self._pair(context, continuation)
            if not after or len(after) > self.max_length:
                raise DataError(
                    f"the continuation {continuation[:60]!r} has {counted(len(after), 'token')}, but the model reads 1 "
                    f"to {self.max_length}; change the task, or raise --max-length"
                )
            rows.append(ScoredRow((before + after)[-(self.max_length + 1) :], len(after)))
        return self.model.log_likelihoods(rows)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text. Windows of max_length tokens divide a longer text and
        predict each token once."""
        windows = [list(self._windows(self._encoded(text))) for text in texts]
        scores = iter(self.model.log_likelihoods([row for rows in windows for row in rows]))
        return [sum(next(scores).log_prob for _ in rows) for rows in windows]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Returns the answer to each context without the text that ended it."""
        drawings = [self._drawing(options) for _, options in requests]
        answers = [""] * len(requests)
        for drawing in dict.fromkeys(drawings):
            numbers = [number for number, other in enumerate(drawings) if other == drawing]
            room = self.max_length - drawing.max_new_tokens
            prompts = [self._encoded(requests[number][0])[-room:] or [self.prefix_id] for number in numbers]
            for number, ids in zip(numbers, self.model.answers(prompts, drawing), strict=True):
                answers[number] = self._text_of(ids, drawing)
        return answers

    @property
    def prefix_id(self) -> int:
        """Token that precedes a text without context."""
        return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes both as one text, so that a token may span the border, and splits after the context's tokens."""
        if not context:
            ids = self._encoded(continuation, begins=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_id] else ([self.prefix_id], ids)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._encoded(stripped)
        return before or [self.prefix_id], self._encoded(stripped + continuation)[len(before) :]

    def _encoded(self, text: str, begins: bool = True) -> list[int]:
        """Encodes a text, recognising special tokens; `begins`: whether to add the tokenizer's begin tokens."""
        tokenizer = self.tokenizer
        is_bare = not begins or text.startswith(tokenizer.name(self.prefix_id))
        if isinstance(tokenizer, SentencePieceTokenizer):
            ids = tokenizer.encode(text)
        else:
            ids = tokenizer.encode_with_offsets(text, special_tokens=True).ids
        return ids if is_bare else [*tokenizer.begin_ids, *ids]

    def _windows(self, ids: Sequence[int]) -> Iterator[ScoredRow]:
        """Yields windows whose scored tokens add up to `ids`; all windows but the last score max_length tokens."""
        for begin in range(0, len(ids), self.max_length):
            end = min(begin + self.max_length, len(ids))
            # as much context as fits
            first = max(0, end - self.max_length - 1)
            row = [self.prefix_id, *ids[:end]] if begin == 0 else ids[first:end]
            yield ScoredRow(row, end - begin)

    def _drawing(self, options: Mapping[str, Any]) -> Drawing:
        """Translates a task's `generation_kwargs`, in which a temperature without do_sample means sampling."""
        if unknown := sorted(options.keys() - _IGNORED_KEYS):
            raise ConfigError(
                f"the task's generation_kwargs have {', '.join(unknown)}, but only {', '.join(sorted(_IGNORED_KEYS))} "
                "are supported; remove the others, or evaluate an export with lm-eval itself"
            )
        until = options.get("until") or []
        texts = [until] if isinstance(until, str) else list(until)
        lengths = [int(options[key]) for key in _LENGTH_KEYS if options.get(key) is not None]
        max_new_tokens = lengths[0] if lengths else MAX_NEW_TOKENS
        if not 0 < max_new_tokens < self.max_length:
            raise ConfigError(
                f"the task asks for answers of {counted(max_new_tokens, 'token')}, but the model reads "
                f"{self.max_length} for context and answer; raise --max-length, or lower max_gen_toks of the task"
            )
        temperature = 0.0 if options.get("do_sample") is False else float(options.get("temperature") or 0.0)
        if options.get("do_sample") is True and "temperature" not in options:
            temperature = 1.0
        top_p, top_k = options.get("top_p"), options.get("top_k")
        return Drawing(
            max_new_tokens,
            temperature,
            1.0 if top_p is None else float(top_p),
            0 if top_k is None else max(0, int(top_k)),
            self.ends | {self.tokenizer.eos_id},
            tuple(text for text in texts if text),
        )

    def _text_of(self, ids: Sequence[int], drawing: Drawing) -> str:
        text = self.tokenizer.decode(ids[:-1] if ids and ids[-1] in drawing.stop_token_ids else ids)
        for end in drawing.stop_texts:
            text = text.partition(end)[0]
        return text

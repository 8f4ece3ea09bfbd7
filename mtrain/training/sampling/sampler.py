"""Generation of answers on any layout.

Each data-parallel and context-parallel replica answers its own prompts: as soon as an answer ends, another prompt gets
its slot in the key/value cache. A pass reads whole prompts or one token of each answer. If experts are distributed over
several replicas, all replicas run the same number of passes.

The random number of a token is a function of the seed, the number of the answer and the position in it, so neither the
layout nor other answers change an answer, and the random states of training are not touched.
"""

import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import NumericError
from mtrain.base.spelling import counted
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.vision import VisionSection
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.numbers import token_ids, whole_number
from mtrain.core.engine.generation import CachedModel, PassTokens, cached_model
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.recorded_choices import RecordedChoices
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import any_rank
from mtrain.training.sampling.params import SamplingParams

_PROMPT_TOKENS_OF_A_PASS = 8192
"""Number of tokens above which a pass accepts no further prompt; bounds the memory of activations."""


@dataclass(frozen=True)
class Completion:
    """Answer to one prompt; the same on all ranks."""

    token_ids: list[int]
    """Tokens of the answer without the prompt; the token that ended it is the last one."""
    log_probs: list[float]
    """Log-probability of each token in nats, under the model itself (temperature 1, no token excluded), or with
    `SamplingParams.log_probs_of_draw` under the distribution that it was drawn from."""
    finish_reason: Literal["stop", "length"]
    """Reason for the end. stop: a stop token or `is_complete` ended the answer; length: it has max_new_tokens."""
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    """Likeliest tokens at each token's position with log-probabilities, the likeliest first; empty if not requested."""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """Experts of the tokens of prompt and answer except the last, [tokens - 1, layers, top_k] int32 on the CPU, for
    `Datum.routed_experts`; -1 in dense layers. None if not requested."""


@dataclass(frozen=True)
class _Prompt:
    """Prompt to answer."""

    ids: list[int]
    images: SampleImages | None

    @property
    def shift(self) -> int:
        """Returns the rotary position after the prompt, minus its length: an image has fewer positions than tokens."""
        return 0 if self.images is None else self.images.next_position - len(self.ids)


@dataclass
class _Answer:
    """Answer that is being generated."""

    number: int
    """Number of the prompt."""
    sequence: int
    """Index of the answer's sequence in the key/value cache."""
    ids: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)


def generate(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | None,
    max_sequences: int = 64,
    routed_experts: bool = False,
    images: Sequence[SampleImages | None] = (),
) -> list[Completion]:
    """Generates an answer to each prompt. Collective over the world; the random states of training do not change.

    One all-reduce of the answers over the replicas at the end; with routed experts, one more over the world for each
    layer with experts.

    Args:
        model: Model of this rank with gathered parameters; unchanged afterwards. Others as for `Engine.generate`.
        images: Images of each prompt, which contains all of their tokens; empty if no prompt has any.
    """
    config, groups, chunks = model.config, model.groups, model.chunks
    ids, sampling = _checked(prompts, config.model.vocab_size, sampling, max_sequences)
    _check_image_tokens(ids, images, config.model.vision)
    asked = [_Prompt(*each) for each in itertools.zip_longest(ids, images)]
    layout, device = groups.layout, groups.device
    replica, num_replicas = groups.dp_rank * layout.cp + groups.cp_rank, layout.dp * layout.cp
    numbers = range(replica, len(prompts), num_replicas)
    # the same on all ranks
    length = max((len(prompt.ids) for prompt in asked), default=0) + sampling.max_new_tokens
    num_sequences = max(1, min(max_sequences, -(-len(prompts) // num_replicas)))
    # ids as float64 as well, which is exact: one all-reduce for all
    drawn = torch.zeros(
        len(prompts), sampling.max_new_tokens, 2 + 2 * sampling.num_likeliest, dtype=torch.float64, device=device
    )
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    experts = RecordedChoices(model, ROUTED_EXPERTS) if routed_experts else None
    with (
        cached_model(config, groups, chunks, num_sequences, length) as cached,
        nullcontext() if experts is None else experts.recording(),
    ):
        replies = _Replies(cached, groups, {number: asked[number] for number in numbers}, sampling, num_sequences)
        while replies.go_on():
            replies.run_pass()
    for number, rows in replies.done.items():
        lengths[number] = len(rows)
        drawn[number, : len(rows)] = torch.tensor(rows, dtype=torch.float64, device=device)
    for values in (drawn, lengths):
        dist.all_reduce(values, group=groups.dp_cp)  # other replicas have zeros
    answers = [
        _completion(rows[:length], sampling) for rows, length in zip(drawn.tolist(), lengths.tolist(), strict=True)
    ]
    if experts is None:
        return answers
    whole = experts.gathered(len(prompts), length - 1, 1, replies.write_choice)
    # the last token is never read
    ends = [len(prompt.ids) + len(answer.token_ids) - 1 for prompt, answer in zip(asked, answers, strict=True)]
    chosen = [table[:end].clone() for table, end in zip(whole, ends, strict=True)]
    return [replace(answer, routed_experts=table) for answer, table in zip(answers, chosen, strict=True)]


def _checked(
    prompts: Sequence[Sequence[int]], vocab_size: int, sampling: SamplingParams | None, max_sequences: int
) -> tuple[list[list[int]], SamplingParams]:
    """Validates prompts and rules, which a program may have passed as any type."""
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise ValueError(f"prompts are of type {type(prompts).__name__}, but must be a list of rows of token ids")
    checked = [token_ids(prompt, f"prompt {number}", vocab_size).tolist() for number, prompt in enumerate(prompts)]
    if [] in checked:
        raise ValueError(f"prompt {checked.index([])} has no token, but needs at least one to continue from")
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling is of type {type(sampling).__name__}, but must be SamplingParams(...)")
    if (whole_number(max_sequences) or 0) < 1:
        raise ValueError(f"max_sequences is {max_sequences!r}, but must be a whole number of at least 1")
    num_likeliest = min(sampling.num_likeliest, vocab_size)
    return checked, replace(sampling, num_likeliest=num_likeliest)


def _check_image_tokens(
    prompts: Sequence[Sequence[int]], images: Sequence[SampleImages | None], vision: VisionSection | None
) -> None:
    """Refuses tokens of images that are missing; `images` are those of each prompt, or empty."""
    if images and len(images) != len(prompts):
        raise ValueError(
            f"there are images for {counted(len(images), 'prompt')}, but {counted(len(prompts), 'prompt')}; give one "
            "list each"
        )
    for number, prompt in enumerate(prompts):
        has_none = not images or images[number] is None
        if vision is not None and has_none and vision.image_token in prompt:
            raise ValueError(
                f"prompt {number} has the image token, {vision.image_token}, but no image; give the image, or remove "
                "the token"
            )


def _completion(rows: list[list[float]], sampling: SamplingParams) -> Completion:
    """Builds an answer from rows of numbers, one per token: the token, its log-probability, and the likeliest ones."""
    ids = [int(row[0]) for row in rows]
    if -1 in ids:
        error = NumericError(
            "the model's logits are not finite, so no token can be drawn; go back to an earlier checkpoint"
        )
        error.on_every_rank = True
        raise error
    end = 2 + sampling.num_likeliest
    likeliest = [[(int(token), value) for token, value in zip(row[2:end], row[end:], strict=True)] for row in rows]
    reason: Literal["stop", "length"] = "stop" if sampling.ends(ids) else "length"
    return Completion(ids, [row[1] for row in rows], reason, likeliest if sampling.num_likeliest else [])


class _Replies:
    """Generates the answers of one replica."""

    def __init__(
        self,
        model: CachedModel,
        groups: Groups,
        prompts: Mapping[int, _Prompt],
        sampling: SamplingParams,
        num_sequences: int,
    ) -> None:
        """`prompts` are the replica's, by their numbers among all; `num_sequences` is the most answers in progress."""
        self._model, self._groups, self._prompts, self._sampling = model, groups, prompts, sampling
        self._waiting = deque(prompts)
        self._free = deque(range(num_sequences))
        self._active: list[_Answer] = []
        self.done: dict[int, list[list[float]]] = {}
        """Rows of finished answers, as `_completion` reads them, by the number of the prompt."""
        self._passes: list[list[tuple[int, int, int]]] = []
        """Pieces of each pass: number of the prompt, position of the first token, number of tokens."""

    def go_on(self) -> bool:
        """Says whether this replica runs another pass; as long as any replica needs one, if a pass of one needs the
        others: with expert parallelism, and where they divide the weights."""
        is_missing, layout = bool(self._waiting or self._active), self._groups.layout
        needs_others = layout.ep > 1 or layout.shard == "weights"
        return any_rank(is_missing, self._groups.device) if needs_others else is_missing

    def run_pass(self) -> None:
        """Begins answers if the cache has room, else continues all by one token."""
        fresh = self._begin_answers()
        current = fresh or self._active
        pieces = [self._unread(answer) for answer in current]
        self._passes.append(
            [(answer.number, piece.start, len(piece.tokens)) for answer, piece in zip(current, pieces, strict=True)]
        )
        # a replica that only serves others reads a dummy row
        logits = self._model.next_logits(pieces, of_prompts=bool(fresh) or not current)
        if not current:
            return
        # ids as float64 as well, which is exact: one broadcast for all
        drawn = torch.empty(
            2 + 2 * self._sampling.num_likeliest, len(current), dtype=torch.float64, device=self._groups.device
        )
        if logits is not None:
            positions = [TokenPosition(answer.number, len(answer.ids)) for answer in current]
            tokens, likely = choose(logits, positions, self._sampling)
            drawn = torch.cat((tokens.double()[None], likely[None], *_likeliest_rows(logits, self._sampling)))
        self._model.from_last_stage(drawn)
        self._take(current, drawn.t().tolist())

    def write_choice(self, table: Tensor, number: int, first: int, chosen: Tensor) -> None:
        """Writes the experts of pass `number` into the table [prompts, tokens, k]; see `RecordedChoices`."""
        begin = 0
        for answer, start, count in self._passes[number]:
            # the part of the piece whose experts this tensor-parallel rank chose
            one, end = max(begin, first), min(begin + count, first + len(chosen))
            if one < end:
                table[answer, start + one - begin : start + end - begin] = chosen[one - first : end - first, 0]
            begin += count

    def _unread(self, answer: _Answer) -> PassTokens:
        """Returns the tokens of an answer that the model has not read: the prompt, or the latest token."""
        prompt = self._prompts[answer.number]
        if not answer.ids:
            return PassTokens(answer.sequence, 0, prompt.ids, prompt.images)
        start, shift = len(prompt.ids) + len(answer.ids) - 1, prompt.shift
        return PassTokens(answer.sequence, start, answer.ids[-1:], shift=shift)

    def _begin_answers(self) -> list[_Answer]:
        """Takes waiting prompts for this pass, as many as the cache and the pass have room for."""
        begun: list[_Answer] = []
        num_tokens = 0
        while self._waiting and self._free and num_tokens < _PROMPT_TOKENS_OF_A_PASS:
            number = self._waiting.popleft()
            num_tokens += len(self._prompts[number].ids)
            begun.append(_Answer(number, self._free.popleft()))
        self._active += begun
        return begun

    def _take(self, answers: Sequence[_Answer], rows: Sequence[list[float]]) -> None:
        for answer, row in zip(list(answers), rows, strict=True):
            answer.ids.append(int(row[0]))
            answer.rows.append(row)
            # -1: the logits were not finite, which `generate` reports on all ranks
            ends = answer.ids[-1] == -1 or self._sampling.ends(answer.ids)
            if ends or len(answer.ids) == self._sampling.max_new_tokens:
                self.done[answer.number] = answer.rows
                self._active.remove(answer)
                self._free.append(answer.sequence)


def _likeliest_rows(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, ...]:
    """Returns tokens and log-probabilities, [num_likeliest, answers] float64 each; empty if not requested."""
    if sampling.num_likeliest == 0:
        return ()
    top = log_probs(logits, sampling).topk(sampling.num_likeliest, dim=-1)
    return top.indices.t().double(), top.values.t()


@dataclass(frozen=True)
class TokenPosition:
    """Position of a token to draw."""

    answer: int
    """Number of the answer's prompt, from 0."""
    token: int
    """Number of the token in the answer, from 0."""


def choose(logits: Tensor, positions: Sequence[TokenPosition], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draws the next token of each row of logits, [rows, vocab_size] float32, finite or -inf.

    Returns:
        Tokens, [rows] int64, and their log-probabilities in nats, [rows] float64; see `log_probs`. The token is -1 if a
            row has nan or only -inf.
    """
    values = logits.double()
    shares = None if sampling.temperature == 0 else _shares(values, sampling)
    if shares is None:
        tokens = values.argmax(-1)  # the first of equals
    else:
        # in the order of the vocabulary: sorting could swap two probabilities that differ by rounding
        sums = _running_sums(shares)
        numbers = [uniform(sampling.seed, position) for position in positions]
        draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(-1) * sums[:, -1:]
        # `right`: a token of probability 0 is never drawn, not even by the number 0
        tokens = torch.searchsorted(sums, draws, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    drawn = _log_probs(values, shares, sampling).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(drawn.isfinite(), tokens, -1), drawn


def log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns log-probabilities in nats, [rows, vocab_size] float64.

    They are those of the model itself (temperature 1, no token excluded); with `sampling.log_probs_of_draw` those of
    the distribution that tokens are drawn from, -inf where a token is excluded. At temperature 0 nothing is drawn, so
    they are the model's.
    """
    values = logits.double()
    is_of_model = sampling.temperature == 0 or not sampling.log_probs_of_draw
    return _log_probs(values, None if is_of_model else _shares(values, sampling), sampling)


def _log_probs(values: Tensor, shares: Tensor | None, sampling: SamplingParams) -> Tensor:
    if shares is None or not sampling.log_probs_of_draw:
        return values.log_softmax(-1)
    return _scaled(values, sampling).masked_fill(shares == 0, -torch.inf).log_softmax(-1)


def _shares(values: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns the share of each token, [rows, vocab_size]; rows need not sum to 1."""
    shares = _scaled(values, sampling).softmax(-1)
    return _likeliest(shares, sampling) if sampling.top_k or sampling.top_p < 1 else shares


def _scaled(values: Tensor, sampling: SamplingParams) -> Tensor:
    # the largest becomes 0, which stays finite for any temperature
    return (values - values.amax(-1, keepdim=True)) / sampling.temperature


def _likeliest(shares: Tensor, sampling: SamplingParams) -> Tensor:
    """Sets the probability of excluded tokens to 0, [rows, vocab_size]; rows need not sum to 1.

    `top_k` is applied first, then `top_p` to the remaining tokens, as in transformers and vLLM; the token that reaches
    top_p is included.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv 1904.09751, section 3.1.
    """
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = 0.0
    before = _running_sums(ranked) - ranked
    ranked = torch.where(before < sampling.top_p * ranked.sum(-1, keepdim=True), ranked, 0.0)
    return torch.zeros_like(shares).scatter(-1, order, ranked)


def _running_sums(values: Tensor) -> Tensor:
    # on a GPU, torch has no deterministic cumsum
    where = values.cpu() if torch.are_deterministic_algorithms_enabled() else values
    return where.cumsum(-1).to(values.device)


def uniform(seed: int, position: TokenPosition) -> float:
    """Returns a number in [0, 1), uniformly distributed over positions."""
    content = struct.pack("<QQQ", seed, position.answer, position.token)
    digest = hashlib.blake2b(content, digest_size=8).digest()
    # 53 bits, which a float holds exactly
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

"""What a client wants from a sampler, checked against the served model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from mtrain.base.errors import DataError
from mtrain.serve.bodies import SampleBody
from mtrain.serve.operations import Sample
from mtrain.training.sampling.params import SamplingParams

_MOST_NUMBERS = 2**26
"""Most tokens and log-probabilities of an answer: a few gigabytes while they are collected."""


@dataclass(frozen=True)
class BaseModel:
    """The served model."""

    name: str
    seq_length: int
    stop_token_ids: frozenset[int]
    """Tokens that end an answer by default."""
    has_tokenizer: bool = False
    """Whether texts can end an answer."""
    has_tied_output: bool = False
    """Whether the output layer shares the embedding table, so that `train_unembed`, the SDK's default, trains
    nothing."""

    def is_called(self, name: str) -> bool:
        """Says whether a client means this model: by its name, or with an owner before it, as on the hub."""
        return name.count("/") <= 1 and name.rpartition("/")[2] == self.name

    def check_name(self, name: str) -> None:
        if not self.is_called(name):
            raise DataError(f"base_model={name[:200]!r} is not served here; take {self.name}")


def asked_of(body: SampleBody, base: BaseModel) -> Sample:
    """Returns the operation for a request; refuses what the model or the service lacks."""
    return Sample(
        body.sampling_session_id,
        [token for chunk in body.prompt.chunks for token in chunk.tokens],
        body.num_samples,
        _sampling(body, base),
        _stop_texts(body, base),
        body.topk_sample_logprobs,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        _last_n(body),
    )


def _last_n(body: SampleBody) -> int | None:
    last_n, length = body.prompt_logprobs_last_n, sum(len(chunk.tokens) for chunk in body.prompt.chunks)
    if last_n is not None and not (body.prompt_logprobs and last_n < length):
        raise DataError(
            f"prompt_logprobs_last_n={last_n} needs prompt_logprobs and a longer prompt than {length} tokens; send both"
        )
    return last_n


def _sampling(body: SampleBody, base: BaseModel) -> SamplingParams:
    given, length = body.sampling_params, sum(len(chunk.tokens) for chunk in body.prompt.chunks)
    room = base.seq_length - length
    if room < 1 or length < 1:
        raise DataError(f"the prompt has {length} tokens; send 1 to {base.seq_length - 1}")
    ids = frozenset(each for each in given.stop or [] if isinstance(each, int))
    # as in other engines, a text that ends an answer leaves the end tokens unchanged
    stops = ids if isinstance(given.stop, list) and len(ids) == len(set(given.stop)) else base.stop_token_ids
    most = room if given.max_tokens is None else min(given.max_tokens, room)
    seed = secrets.randbits(48) if given.seed is None else given.seed
    numbers = body.num_samples * (length + most * (2 + 2 * body.topk_sample_logprobs))
    if numbers > _MOST_NUMBERS:
        raise DataError(
            f"num_samples={body.num_samples} of {most} tokens with topk_sample_logprobs={body.topk_sample_logprobs} "
            f"are {numbers} numbers; ask for less in one call, at most {_MOST_NUMBERS}"
        )
    top_k = max(0, given.top_k)  # -1 means all as well
    # a client takes them for those of the policy that it sampled from
    return SamplingParams(most, given.temperature, given.top_p, top_k, seed, stops, log_probs_of_draw=True)


def _stop_texts(body: SampleBody, base: BaseModel) -> tuple[str, ...]:
    given = body.sampling_params.stop
    texts = (given,) if isinstance(given, str) else tuple(each for each in given or [] if isinstance(each, str))
    if texts and not base.has_tokenizer:
        raise DataError("stop is a text, but this service has no tokenizer; give ids, or set data.tokenizer for it")
    return texts

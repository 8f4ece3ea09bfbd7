"""Texts that end an answer, and the likeliest tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mtrain.api.engine import Engine
from mtrain.core.batch.datum import Datum
from mtrain.core.loss.pair import LossPair, TermInputs, needs_extras, per_token, weigh
from mtrain.hf.tokenizer.tokenizer import Tokenizer
from mtrain.serve.protocol import NO_LOG_PROB, Likeliest

_LONGEST_CHARACTER = 4
"""Bytes of the longest character of UTF-8, each of which can be a token."""


def ends_with(texts: Sequence[str], tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Says whether the latest token completes one of some texts, in which control tokens count by their names."""
    # enough for the longest text, and some more for a first token that is decoded without its blank
    tail = ids[-_LONGEST_CHARACTER * (max(map(len, texts)) + 1) :]
    control, written = tokenizer.special_tokens(), ""
    run: list[int] = []
    for each in tail:
        name = tokenizer.name(each)
        if name in control:
            written, run = written + tokenizer.decode(run) + name, []
        else:
            run.append(each)
    written += tokenizer.decode(run)
    return any(text in written for text in texts)


def log_probs_of_prompt(engine: Engine, prompt: Sequence[int], last_n: int | None) -> NDArray[np.float32]:
    """Returns the log-probability of each token of a prompt; nan for the first one and those outside the last `last_n`
    (None: all)."""
    found = np.full(len(prompt), np.nan, np.float32)
    if len(prompt) > 1:
        found[1:] = engine.forward([Datum(prompt)]).log_probs[0].numpy()
    found[_unasked(prompt, last_n)] = np.nan
    return found


def likeliest_of_prompt(engine: Engine, prompt: Sequence[int], count: int, last_n: int | None) -> Likeliest:
    """Returns the `count` likeliest tokens in the place of each token of a prompt, [tokens, count], and their
    log-probabilities in nats; 0 and NO_LOG_PROB for the first one and those outside the last `last_n` (None: all)."""
    ids = np.zeros((len(prompt), count), np.int32)
    log_probs = np.full(ids.shape, NO_LOG_PROB, np.float32)
    if len(prompt) > 1:
        ids[1:], log_probs[1:] = _likeliest(engine, prompt, count)
    unasked = _unasked(prompt, last_n)
    ids[unasked], log_probs[unasked] = 0, NO_LOG_PROB
    return ids, log_probs


def _unasked(prompt: Sequence[int], last_n: int | None) -> slice:
    return slice(0, 0 if last_n is None else len(prompt) - last_n)


def _likeliest(engine: Engine, prompt: Sequence[int], count: int) -> Likeliest:
    """Returns those of each token but the first. One all-reduce over the world, in addition to a forward pass."""
    length, tp = len(prompt) - 1, engine.config.layout.tp
    # each rank of TP has those among its own columns
    found = torch.zeros(2, tp, length, count, dtype=torch.float64, device=engine.device)

    @needs_extras("place")
    @per_token
    def take(inputs: TermInputs) -> LossPair:
        logits = inputs.logits
        num_real = min(logits.local.shape[-1], logits.vocab_size - logits.first_index)
        values = logits.local[..., : max(0, num_real)].transpose(0, 1).double()
        top = values.topk(min(count, values.shape[-1]), dim=-1)
        kept, at = inputs.weights != 0, slice(0, top.values.shape[-1])
        places, rank = inputs.extras["place"][kept].long() - 1, logits.first_index // logits.local.shape[-1]
        found[1, rank, places] = -torch.inf  # if this rank has fewer columns
        found[0, rank, places, at] = (top.indices[kept] + logits.first_index).double()
        found[1, rank, places, at] = top.values[kept] - logits.logsumexp().double()[kept].unsqueeze(-1)
        return weigh(torch.zeros_like(inputs.weights), inputs)

    places = [float(number + 1) for number in range(length)]
    engine.evaluate([[Datum(prompt, extras={"place": places})]], take)
    dist.all_reduce(found)
    ids, log_probs = (each.transpose(0, 1).reshape(length, -1) for each in found)
    best = log_probs.topk(count, dim=-1)
    return _as_array(ids.gather(-1, best.indices)).astype(np.int32), _as_array(best.values).astype(np.float32)


def _as_array(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.cpu().numpy()
    return found

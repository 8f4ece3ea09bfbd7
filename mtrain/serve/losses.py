"""Losses of the Tinker protocol: undivided sums over tokens, and the outputs of each token.

All inputs of a loss are extras, even targets, which need not be the next token. So a batch has dummy labels and weights
of 1, and `loss.aggregation=sum` sums over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mtrain.api.engine import Engine
from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.core.batch.datum import Datum
from mtrain.core.loss.pair import LossFunction, LossPair, TermInputs, needs_extras, per_token, stacked_extra, weigh
from mtrain.serve.protocol import MOST_COLUMNS, NO_LOG_PROB, Likeliest, SentDatum

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"]
LOSSES: Mapping[str, Loss] = {name: name for name in get_args(Loss)}
_CLIPPED = ("ppo", "cispo", "gspo")
_LOWEST, _HIGHEST = 0.8, 1.2
"""Default bounds of the ratio."""
_POLICY = ("logprobs", "advantages")
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_MASK = "sequence_ratio_mask"
"""Extra that marks the tokens in gspo's sequence ratio; by default those with an advantage."""
_TARGETS, _WEIGHTS, _PLACE = "target_tokens", "weights", "place"
_MOST_TOKENS = 2**24
"""Most tokens of a batch: extras are float32, which counts up to here; more than the largest body has."""


@dataclass
class Batch:
    """Data of one request as samples of the engine, and the outputs of their tokens after a pass."""

    loss: Loss
    data: list[Datum]
    lengths: list[int]
    """Tokens of each datum."""
    width: int | None
    """Targets per token; None if targets lack this axis."""
    names: tuple[str, ...]
    """Extras that the loss reads, as for `needs_extras`."""
    _recorded: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, sent: Sequence[SentDatum], loss: str, options: Mapping[str, float | str], vocab_size: int) -> Batch:
        """Checks a client's data, whose images are written out as tokens, and converts them to samples."""
        if loss not in LOSSES:
            raise DataError(f"loss_fn={loss!r} is not offered here; use {', '.join(LOSSES)}, or a custom loss")
        if not sent:
            raise DataError("data is empty; send at least one datum")
        thresholds = _thresholds(loss, options)
        widths = {datum.inputs[_TARGETS].shape[1:] for datum in sent if _TARGETS in datum.inputs}
        if len(widths) > 1 or any(len(width) > 1 or not 1 <= width[0] <= MOST_COLUMNS for width in widths if width):
            raise DataError(f"target_tokens have {sorted(widths)} targets a token; send the same number, 1 to 1024")
        width = max((size for shape in widths for size in shape), default=None)
        if width is not None and loss != "cross_entropy":
            raise DataError(
                f"loss_fn={loss} reads one target a token, but {width} were sent; send target_tokens [tokens]"
            )
        lengths = [len(datum.tokens) for datum in sent]
        if sum(lengths) > _MOST_TOKENS:
            raise DataError(f"data has {counted(sum(lengths), 'token')}; send at most {_MOST_TOKENS} at once")
        positions = np.split(np.arange(sum(lengths), dtype=np.float32), np.cumsum(lengths)[:-1])
        data = []
        for number, (datum, position) in enumerate(zip(sent, positions, strict=True)):
            extras = _extras(datum, loss, thresholds, f"datum {number}", vocab_size) | {_PLACE: position}
            # clients weigh the tokens of images as well
            weights = [1.0] * (len(datum.tokens) + 1)
            images = [image.content for image in datum.images]
            data.append(Datum(np.append(datum.tokens, 0), weights, extras=extras, images=images))
        names = tuple(f"{name}[width]" if extras[name].ndim == 2 else name for name in extras)
        return cls(LOSSES[loss], data, lengths, width, names)

    @property
    def _num_targets(self) -> int:
        return 1 if self.width is None else self.width

    @property
    def function(self) -> LossFunction:
        """Returns the loss function, which also records the outputs of the tokens of each microbatch."""

        # `width` is the option by which extras of several numbers per token are declared
        def loss(inputs: TermInputs, width: int = self._num_targets) -> LossPair:
            log_probs = _log_probs(inputs, width)
            losses = _losses(self.loss, log_probs, inputs, width)
            if inputs.logits.first_index == 0:  # other tensor-parallel ranks compute the same numbers
                mask = inputs.weights != 0
                self._recorded.append(
                    (inputs.extras[_PLACE][mask].long(), log_probs.detach()[mask], losses.detach()[mask])
                )
            return weigh(losses, inputs)

        # a sequence's ratio needs all of its tokens at once
        marked = loss if self.loss == "gspo" else per_token(loss)
        return needs_extras(*self.names)(marked)

    def outputs(self, device: torch.device) -> tuple[list[NDArray[np.float32]], float]:
        """Returns the log-probabilities of each datum's targets, and the loss. One all-reduce over the world."""
        total, width = sum(self.lengths), self._num_targets
        table = torch.zeros(total, width + 1, dtype=torch.float64, device=device)
        for positions, log_probs, losses in self._recorded:
            table[positions, :width], table[positions, width] = log_probs.double(), losses.double()
        self._recorded.clear()
        if dist.get_world_size() > 1:
            dist.all_reduce(table)
        values = table.cpu().numpy()
        parts = np.split(values[:, :width].astype(np.float32), np.cumsum(self.lengths)[:-1])
        return [part if self.width is not None else part[:, 0] for part in parts], float(values[:, width].sum())


def _thresholds(loss: str, options: Mapping[str, float | str]) -> tuple[float, float] | None:
    known = {_LOW, _HIGH} if loss in _CLIPPED else set()
    wrong = [name for name, value in options.items() if name not in known or not isinstance(value, float | int)]
    if wrong:
        raise DataError(f"loss_fn_config has {', '.join(sorted(wrong))}, but {loss} reads {sorted(known) or 'none'}")
    if not known:
        return None
    low, high = float(options.get(_LOW, _LOWEST)), float(options.get(_HIGH, _HIGHEST))
    if not 0 <= low <= high < float("inf"):
        raise DataError(f"{_LOW}={low} and {_HIGH}={high} are not bounds of a ratio; send 0 <= low <= high")
    return low, high


def _extras(
    sent: SentDatum, loss: str, thresholds: tuple[float, float] | None, name: str, vocab_size: int
) -> dict[str, NDArray[np.float32]]:
    needed = (_TARGETS, _WEIGHTS) if loss == "cross_entropy" else (_TARGETS, *_POLICY)
    optional = {_LOW, _HIGH} if thresholds else set()
    inputs = dict(sent.inputs)
    if loss == "gspo":
        optional |= {_MASK}
        if _MASK not in inputs and "advantages" in inputs:
            inputs[_MASK] = (inputs["advantages"] != 0).astype(np.float32)
    if loss == "cross_entropy" and _WEIGHTS not in inputs and _TARGETS in inputs:
        inputs[_WEIGHTS] = np.ones(inputs[_TARGETS].shape, np.float32)
    for key, bound in zip((_LOW, _HIGH), thresholds or (), strict=False):
        inputs.setdefault(key, np.full(len(sent.tokens), bound, np.float32))
    missing = [key for key in needed if key not in inputs]
    unknown = [key for key in inputs if key not in {*needed, *optional}]
    if missing or unknown:
        raise DataError(
            f"{name} has the loss_fn_inputs {', '.join(sorted(sent.inputs)) or 'none'}, but {loss} reads "
            f"{', '.join(needed)}; send these"
        )
    if not len(sent.tokens):
        raise DataError(f"{name} has no token; send at least one")
    shape = inputs[_TARGETS].shape
    for key, value in inputs.items():
        expected = shape if key in (_TARGETS, _WEIGHTS) else shape[:1]
        if len(shape) not in (1, 2) or shape[0] != len(sent.tokens) or value.shape != expected:
            raise DataError(
                f"{name} has {counted(len(sent.tokens), 'token')}, but {key} of shape {list(value.shape)}; send one "
                "for each token"
            )
        if not np.isfinite(value).all():
            raise DataError(f"{name} has a number in {key} that is not finite; send finite numbers")
    if _MASK in inputs and not np.isin(inputs[_MASK], (0, 1)).all():
        raise DataError(f"{name} has a number in {_MASK} that is neither 0 nor 1; send these")
    targets = inputs[_TARGETS]
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= vocab_size:
        raise DataError(
            f"{name} has target_tokens beyond the vocabulary; send whole numbers from 0 to {vocab_size - 1}"
        )
    return {key: np.asarray(inputs[key], np.float32) for key in (*needed, *sorted(optional))}


def _log_probs(inputs: TermInputs, width: int) -> Tensor:
    """Returns the log-probabilities of the targets, [batch, seq, width]."""
    if _TARGETS in inputs.extras:
        targets = inputs.extras[_TARGETS].unsqueeze(-1)
    else:
        targets = stacked_extra(inputs, _TARGETS, width)
    # padding has target 0, a valid token, and weight 0
    return torch.stack([-inputs.logits.cross_entropy(column) for column in targets.long().unbind(-1)], dim=-1)


def _losses(loss: Loss, log_probs: Tensor, inputs: TermInputs, width: int) -> Tensor:
    """Returns the loss of each token, [batch, seq]."""
    extras = inputs.extras
    if loss == "cross_entropy":
        weights = extras[_WEIGHTS].unsqueeze(-1) if _WEIGHTS in extras else stacked_extra(inputs, _WEIGHTS, width)
        return -(log_probs * weights).sum(-1)
    # where: padding has no log-probability, and exp of its value could be inf
    gap = torch.where(inputs.weights != 0, log_probs[..., 0] - extras["logprobs"], 0.0)
    advantages = extras["advantages"]
    match loss:
        case "importance_sampling":
            return -gap.exp() * advantages
        case "cispo":
            return -gap.detach().exp().clamp(extras[_LOW], extras[_HIGH]) * log_probs[..., 0] * advantages
        case "ppo":
            ratio = gap.exp()
        case "gspo":  # the geometric mean over the tokens of the mask is the ratio of a sequence
            counts = extras[_MASK].to(gap.dtype)
            total = inputs.sum_over_sequence((gap * counts).detach())
            count = inputs.sum_over_sequence(counts.detach())
            mean = torch.where(count > 0, total / count, 0.0)[inputs.sequence_ids].to(gap.dtype)
            ratio = (mean + gap - gap.detach()).exp()
        case _:
            assert_never(loss)
    # clamp passes the whole gradient at a bound; maximum and minimum would pass half of it
    return -torch.minimum(ratio * advantages, ratio.clamp(extras[_LOW], extras[_HIGH]) * advantages)


def log_probs_of_prompt(
    engine: Engine, prompt: Sequence[int], images: Sequence[bytes], last_n: int | None
) -> NDArray[np.float32]:
    """Returns the log-probability of each token of a prompt; nan for the first token, and for all but the last `last_n`
    (None: all)."""
    result = np.full(len(prompt), np.nan, np.float32)
    if len(prompt) > 1:
        result[1:] = engine.forward([Datum(prompt, images=images)]).log_probs[0].numpy()
    result[: 0 if last_n is None else len(prompt) - last_n] = np.nan
    return result


def likeliest_of_prompt(
    engine: Engine, prompt: Sequence[int], images: Sequence[bytes], count: int, last_n: int | None
) -> Likeliest:
    """Returns the `count` likeliest tokens at the position of each token of a prompt, [tokens, count], and their
    log-probabilities in nats; 0 and NO_LOG_PROB for the first token, and for all but the last `last_n` (None: all).

    One all-reduce over the world, in addition to a forward pass.
    """
    ids = np.zeros((len(prompt), count), np.int32)
    log_probs = np.full(ids.shape, NO_LOG_PROB, np.float32)
    length, tp = len(prompt) - 1, engine.config.layout.tp
    if length < 1:
        return ids, log_probs
    # each tensor-parallel rank has the likeliest of its columns
    table = torch.zeros(2, tp, length, count, dtype=torch.float64, device=engine.device)

    @needs_extras("place")
    @per_token
    def take(inputs: TermInputs) -> LossPair:
        logits = inputs.logits
        num_real = min(logits.local.shape[-1], logits.vocab_size - logits.first_index)
        values = logits.local[..., : max(0, num_real)].transpose(0, 1).double()
        top = values.topk(min(count, values.shape[-1]), dim=-1)
        mask, at = inputs.weights != 0, slice(0, top.values.shape[-1])
        positions, rank = inputs.extras["place"][mask].long() - 1, logits.first_index // logits.local.shape[-1]
        table[1, rank, positions] = -torch.inf  # if this rank has fewer columns
        table[0, rank, positions, at] = (top.indices[mask] + logits.first_index).double()
        table[1, rank, positions, at] = top.values[mask] - logits.logsumexp().double()[mask].unsqueeze(-1)
        return weigh(torch.zeros_like(inputs.weights), inputs)

    positions = [float(number + 1) for number in range(length)]
    # tokens of images have a weight only if it is given
    datum = Datum(prompt, [1.0] * len(prompt), extras={"place": positions}, images=images)
    engine.evaluate([[datum]], take)
    dist.all_reduce(table)
    of_ranks, values = (part.transpose(0, 1).reshape(length, -1) for part in table)
    best = values.topk(count, dim=-1)
    selected = slice(1 if last_n is None else max(1, len(prompt) - last_n), None)
    ids[selected] = of_ranks.gather(-1, best.indices).cpu().numpy()[selected.start - 1 :]
    log_probs[selected] = best.values.cpu().numpy()[selected.start - 1 :]
    return ids, log_probs

"""Sequences with token weights from a user's program, and their conversion to samples."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError, NumericError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS, TEMPERATURE, as_configured, column
from mtrain.config.schema.loss import LABEL, NUMBER_LOSSES
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.output import HeadOutput
from mtrain.core.batch.choices import Chosen, checked_experts, open_choice
from mtrain.core.batch.numbers import TOP_K_IDS, TOP_K_LOGPROBS, real_numbers, token_ids, top_k_fault, whole_number
from mtrain.core.batch.sample import Sample, shifted
from mtrain.core.loss.preference.member import ROLES, GroupMember


@dataclass(frozen=True)
class Datum:
    """One sequence for the loss: a text, a question with its answer, or a rollout."""

    input_ids: Sequence[int] | NDArray[np.integer[Any]]
    """Token ids, from 1 to data.seq_length + 1 of them: every token but the last is an input, every token but the first
    is predicted. Integers of Python or numpy, or a tensor of integers; floats and booleans are refused."""
    weights: Sequence[float] | None = None
    """Weight of predicting each token, at least 0: 0 for a prompt, and True in a mask counts as 1. The first is
    ignored. None: every token has weight 1, but those of images."""
    weight: float = 1.0
    """Weight of the whole sequence, at least 0."""
    extras: Mapping[str, Sequence[Sequence[float]] | Sequence[float] | NDArray[np.float32] | float] = field(
        default_factory=dict
    )
    """Values that a loss function reads in addition to the weights, by name, such as advantages: finite numbers in
    float32 precision. Give one number for the whole sequence, one per token (len(input_ids), the first is ignored), or
    one per predicted token (len(input_ids) - 1), like the log-probabilities of `Engine.forward`. Give [tokens, k] for k
    numbers per token, like the teacher's log-probabilities for `topk_distillation`. Names that no loss function needs
    are checked and then ignored."""
    temperature: float | None = None
    """Temperature at which the sequence was sampled, above 0: `ppo`, `gspo`, `cispo`, `kl` and `entropy` divide the
    logits by it, as does `Engine.forward`; other losses ignore it. None: 1."""
    routed_experts: Any = None
    """Experts of each input token, which routers replay in every pass, [tokens, layers, k] integers (lists, an array or
    a tensor): len(input_ids) - 1 rows, as vLLM, SGLang and `Engine.generate` return them, or len(input_ids) rows, and
    then the last is ignored; all layers of the model, where dense ones are ignored. -1 for all k lets the router
    choose. None: the router always chooses."""
    images: Sequence[Any] = ()
    """Images of a model with `model.vision`, in the order of their tokens: the bytes of an image file, its path, or a
    part of a message as in finetuning data, such as {"type": "image", "base64": ...}. `input_ids` have all tokens of
    each image, as the processor of transformers writes them."""
    member: GroupMember | None = None
    """Membership in a group, for losses that compare whole sequences such as dpo; None outside a group."""
    label: float | None = None
    """Class of the sequence, a whole number, if `model.num_labels` is above 1; or the target of a regression. A model
    with a head, even of one label, judges the sequence by its last token, so the sequence has at most data.seq_length
    tokens and no `weights`."""


def sample_of(datum: Datum, name: str, config: Config, needed: Sequence[str] = ()) -> Sample:
    """Checks a datum and turns it into a sample.

    Args:
        name: Name of the datum in messages, such as "sample 3".
        needed: Names of the extras that the loss functions read.

    Raises:
        ConfigError: The datum has routed experts, but the model cannot replay them.
        DataError: The datum is empty or too long, or has invalid ids, weights, extras or routed experts.
        NumericError: An extra is not finite.
    """
    if not isinstance(datum.extras, Mapping):
        raise _fault(f"{name} has extras of type {type(datum.extras).__name__}, but they must be a mapping by name")
    length, size, head = config.data.seq_length, config.model.vocab_size, config.model.head
    most = length + 1 if head is None else length  # a label replaces the token that is only predicted
    ids = _ids(datum.input_ids, name, size)
    if not 1 <= len(ids) <= most:
        raise _fault(
            f"{name} has input_ids of shape {[len(ids)]}, but needs one row of 1 to {counted(most, 'token')} "
            f"(data.seq_length={length}{', plus one that is only predicted' if head is None else ''}); cut it, or "
            "raise data.seq_length"
        )
    datum = replace(datum, input_ids=ids, weight=_number(datum.weight, f"{name}: weight"))
    if head is not None:
        is_number = LABEL in needed or config.loss.function in NUMBER_LOSSES
        datum = _numbered(datum, name) if is_number else _judged(datum, name, head)
        ids = np.asarray(datum.input_ids)
    elif datum.label is not None:
        raise _fault(f"{name} has label={datum.label}, but the model has no head; set model.num_labels, or remove it")
    vision = config.model.vision
    every = np.ones(len(ids)) if vision is None else (ids != vision.image_token).astype(np.float64)
    weights = every if datum.weights is None else _numbers(datum.weights, f"{name}: weights")
    if weights.shape != ids.shape:
        raise _fault(
            f"{name} has {len(ids)} input_ids, but weights of shape {list(weights.shape)}; give one weight per token"
        )
    weights = weights.astype(np.float64)
    if not (np.isfinite(weights).all() and weights.min() >= 0 and math.isfinite(datum.weight) and datum.weight >= 0):
        raise _fault(f"{name} has a weight that is negative or not finite; weights must be finite and at least 0")
    if TEMPERATURE in datum.extras:
        raise _fault(f"{name} has an extra {TEMPERATURE!r}; give it as Datum.temperature, one number per sequence")
    if datum.temperature is not None:
        check_temperature(_number(datum.temperature, f"{name}: temperature"), f"{name}: temperature")
    if TEMPERATURE in needed:
        temperature = 1.0 if datum.temperature is None else float(datum.temperature)
        datum = replace(datum, extras={**datum.extras, TEMPERATURE: temperature})
    if ROUTED_EXPERTS in datum.extras:
        raise _fault(f"{name} has an extra {ROUTED_EXPERTS!r}; give it as Datum.routed_experts")
    experts = _experts(datum, len(ids), name, config.model)
    # position t predicts token t + 1, so the weight of the first token has no position
    extras = _extras(datum, len(ids), name, [extra for extra in needed if extra != ROUTED_EXPERTS])
    _check_top_k(extras, weights[1:] > 0, size, name)
    sample = shifted(ids, weights[1:], datum.weight, extras=extras)
    if experts is not None:
        # a sequence of one token has no input token, and takes one position of padding
        experts = experts if len(experts) else open_choice(sample.width, experts.shape[1:])
        sample = replace(sample, choices={ROUTED_EXPERTS: experts})
    return sample if datum.member is None else sample.as_member(_checked_member(datum.member, name))


def named_choices(batch: Sequence[Datum]) -> tuple[str, ...]:
    """Returns the names of the choices that some sample prescribes."""
    return (ROUTED_EXPERTS,) if any(datum.routed_experts is not None for datum in batch) else ()


def check_temperature(temperature: float, name: str) -> None:
    """Refuses a temperature by which logits cannot be divided.

    Raises:
        DataError: The number is not finite or not above 0 in float32.
    """
    # as float32, the dtype of extras, in which a tiny number becomes 0, the mark of padding
    with np.errstate(over="ignore", under="ignore"):
        divisor = np.float32(temperature)
    if not (np.isfinite(divisor) and divisor > 0):
        raise _fault(
            f"{name} is {temperature}, but must be a finite number above 0 (in float32): at 0 a sampler takes the "
            "likeliest token, which has no log-probability to compare; give the temperature for the loss, such as 1"
        )


def _experts(datum: Datum, num_tokens: int, name: str, model: ModelSection) -> Chosen | None:
    if datum.routed_experts is None:
        return None
    with _refusing():
        return checked_experts(datum.routed_experts, num_tokens, model, name)


def _ids(value: object, name: str, vocab_size: int) -> NDArray[np.int64]:
    with _refusing(f" (model.vocab_size={vocab_size}); use the model's own tokenizer"):
        return token_ids(value, f"{name}: input_ids", vocab_size)


def _numbers(value: object, name: str) -> NDArray[Any]:
    with _refusing():
        return real_numbers(value, name)


@contextmanager
def _refusing(advice: str = "") -> Iterator[None]:
    try:
        yield
    except ValueError as fault:
        raise _fault(f"{fault}{advice}") from None


def _number(value: object, name: str) -> float:
    values = _numbers(value, name)
    if values.ndim:
        raise _fault(f"{name} has the shape {list(values.shape)}, but must be one number")
    return float(values)


def _checked_member(member: GroupMember, name: str) -> GroupMember:
    if not isinstance(member, GroupMember):
        raise _fault(f"{name} has a member of type {type(member).__name__}, but it must be a GroupMember")
    group = whole_number(member.group)
    if group is None or group < 0:
        raise _fault(f"{name}: member.group is {member.group!r}, but must be a whole number of at least 0")
    if member.role not in ROLES:
        raise _fault(f"{name}: member.role is {member.role!r}, but must be one of {', '.join(ROLES)}")
    margin = _number(member.margin, f"{name}: member.margin")
    reference = None if member.reference is None else _number(member.reference, f"{name}: member.reference")
    return replace(member, group=group, margin=margin, reference=reference)


def _judged(datum: Datum, name: str, head: HeadOutput) -> Datum:
    """Appends the class to the sequence, as the token that its last token predicts."""
    label = datum.label
    if head.rows == 1 and label is not None:
        raise _fault(f"{name} has label={label}, but a head of one label has no classes; remove it")
    number = 0 if head.rows == 1 else whole_number(label)
    if number is None or not 0 <= number < head.rows:
        raise _fault(
            f"{name} has label={label}, but needs the number of a class, 0 to {head.rows - 1} ({head}); give "
            "Datum.label"
        )
    return _with_last(datum, number, name)


def _numbered(datum: Datum, name: str) -> Datum:
    """Adds the target of the regression as an extra."""
    if datum.label is None or isinstance(datum.label, bool):
        raise _fault(f"{name} has label={datum.label}, but a regression needs a number; give Datum.label")
    label = _number(datum.label, f"{name}: label")
    return replace(_with_last(datum, 0, name), extras={**datum.extras, LABEL: label})


def _with_last(datum: Datum, last: int, name: str) -> Datum:
    if datum.weights is not None:
        raise _fault(
            f"{name} has weights of tokens, but a head scores the whole sequence; remove them, or give Datum.weight"
        )
    ids = [*datum.input_ids, last]
    return replace(datum, input_ids=ids, weights=[*[0.0] * (len(ids) - 1), 1.0])


def _extras(datum: Datum, num_tokens: int, name: str, needed: Sequence[str]) -> dict[str, NDArray[np.float32] | float]:
    """Returns the checked extras, each with one number per predicted token or one for the whole sequence."""
    checked: dict[str, NDArray[np.float32] | float] = {}
    for extra, values in datum.extras.items():
        checked |= _columns(_checked_extra(values, num_tokens, extra, name), extra)
    needed_columns = as_configured(needed)
    missing = [extra for extra, columns in needed_columns.items() if not {*columns} <= {*checked}]
    if missing:
        present = ", ".join(as_configured(checked))
        raise _fault(
            f"{name} has {'the extras ' + present if present else 'no extras'}, but the loss "
            f"functions need {', '.join(needed_columns)}; give {', '.join(missing)} in Datum.extras"
        )
    return checked


def _columns(values: NDArray[np.float32] | float, extra: str) -> dict[str, NDArray[np.float32] | float]:
    """Splits an extra with several numbers per token into columns, [num_tokens - 1] each."""
    if isinstance(values, float) or values.ndim == 1:
        return {extra: values}
    return {column(extra, number): values[:, number] for number in range(values.shape[1])}


def _check_top_k(
    extras: Mapping[str, NDArray[np.float32] | float], is_counted: NDArray[np.bool_], vocab_size: int, name: str
) -> None:
    top_k_columns = {
        extra: values
        for extra, values in extras.items()
        if extra.startswith((f"{TOP_K_IDS}[", f"{TOP_K_LOGPROBS}[")) and not isinstance(values, float)
    }
    if top_k_columns:
        fault = top_k_fault(np.stack([*top_k_columns.values()], axis=1), [*top_k_columns], is_counted, vocab_size)
        if fault is not None:
            raise _fault(f"{name} has, at predicted token {fault.row}, {fault.why}")


def _checked_extra(
    value: Sequence[Sequence[float]] | Sequence[float] | NDArray[np.float32] | float,
    num_tokens: int,
    extra: str,
    name: str,
) -> NDArray[np.float32] | float:
    """Checks one extra; returns it as [num_tokens - 1], [num_tokens - 1, k], or one number."""
    # a number too large for float32 becomes inf, and is refused below
    with np.errstate(over="ignore"):
        values = _numbers(value, f"{name}: extra {extra!r}").astype(np.float32)
    is_row_a_token = values.ndim in (1, 2) and len(values) in (num_tokens, num_tokens - 1)
    if values.ndim and not is_row_a_token:
        raise _fault(
            f"{name} has {num_tokens} input_ids, but an extra {extra!r} of shape {list(values.shape)}; give one number "
            f"per token ({num_tokens}), one per predicted token ({num_tokens - 1}), or one for the whole sequence"
        )
    if not np.isfinite(values).all():
        position = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
        where = f" at place {', '.join(map(str, position))}" if position else ""
        raise NumericError(
            f"{name} has an extra {extra!r} that is {values[position]}{where}; all its numbers must be finite in "
            "float32, even where the weight is 0: check the program that wrote it, and write 0 for missing numbers"
        )
    if not values.ndim:
        return float(values)
    # position t predicts token t + 1
    return values[1:] if len(values) == num_tokens else values


def _fault(message: str) -> DataError:
    """Makes an error that every rank raises, since all ranks see the same samples."""
    error = DataError(message)
    error.on_every_rank = True
    return error

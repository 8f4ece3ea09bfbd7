"""Records of a step, a validation, an evaluation of tasks or a change, and their lines of JSON.

metrics.jsonl holds one object per line. Floats have enough digits to read back the same float64; numbers that are not
finite are the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mtrain.base.errors import DataError

OF_THE_MACHINE = (
    "seconds",
    "waited_seconds",
    "slow_rank",
    "slow_rank_ratio",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "time_s",
)
"""Fields that depend on the machine and its speed; all others are the same in every repetition of a run."""

_LARGEST_INTEGER = 2**63 - 1

Json = Any


@dataclass(frozen=True, kw_only=True)
class TermRecord:
    """Term of the objective over one global batch."""

    loss: float
    """Mean of the term, numerator / denominator, without its coefficient."""
    numerator: float
    denominator: float


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Record of one optimizer step."""

    step: int
    """Completed optimizer updates, including this one: the first record has step 1."""
    loss: float
    """Main term over the global batch, in nats: numerator / denominator. Meaningless if `empty`."""
    objective: float | None = None
    """Differentiated quantity: sum over terms of coefficient x numerator / denominator; None if not recorded."""
    denominator: float
    """Denominator of the main term."""
    grad_norm: float
    """Global L2 norm of the normalised gradient, before clipping."""
    lr: float
    tokens: int
    """Number of positions of the global batch that hold text, with prompts and without padding. Records without
    `padding_tokens` include padding."""
    seconds: float
    """Wall time of the step."""
    tokens_per_second: float
    """tokens / seconds, over all ranks."""
    padding_tokens: int | None = None
    """Number of padding positions, which the model also processed; None if not recorded."""
    loss_tokens: int | None = None
    """Number of positions that the main term counts; None if not recorded."""
    flops: float | None = None
    """Floating-point operations that training on this batch needs, counting only text, attention inside documents, and
    logits that a term uses; None if not recorded."""
    terms: Mapping[str, TermRecord] = field(default_factory=dict)
    """Every term of the objective by name."""
    sources: Mapping[str, TermRecord] = field(default_factory=dict)
    """Main term over the samples of each source of a blend, by the end of its path, for sources with loss tokens in the
    step. Empty for a single source."""
    empty: bool = False
    """Whether no token of the global batch was in the loss; weights and optimizer state stayed unchanged."""
    skipped: str | None = None
    """Why the update was not applied, such as "fp16 overflow"; None if it was."""
    loss_scale: float | None = None
    """Loss scale of an fp16 run; else None."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None if the device's peak is unknown."""
    layout_dependent: bool = False
    """Whether the run uses something that changes with the layout by definition, so its numbers hold for it only."""
    waited_seconds: float | None = None
    """Part of `seconds` in which the first rank's host waited for other ranks, on GPUs also for its device; None if not
    recorded."""
    slow_rank: int | None = None
    """Rank that the other ranks wait for, by `watch.slow_rank_percent`; None if none is slow."""
    slow_rank_ratio: float | None = None
    """Working time of the slow rank, divided by the median of its pipeline stage; None if no rank is slow."""
    memory_bytes: int | None = None
    """Memory of the first rank: the peak on its GPU, or resident memory on a CPU; None if not recorded."""
    time_s: float | None = None
    """Unix time at which the step ended; None if not recorded."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Values that the loss functions report in addition to their loss, over all tokens or groups of the step
    (docs/training/policy-losses.md, docs/training/preference.md)."""


@dataclass(frozen=True, kw_only=True)
class ValidRecord:
    """Record of one pass over the validation sets; except `seconds` and `valid_sets`, all numbers are of the first."""

    step: int
    """Completed optimizer updates before the pass."""
    valid_loss: float
    """Main term over exactly the samples of the set, numerator / denominator, in nats."""
    denominator: float
    samples: int
    seconds: float
    terms: Mapping[str, TermRecord] = field(default_factory=dict)
    """Every term of the objective by name, over the same samples."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Values that the loss functions report in addition to their loss, over the same samples."""
    valid_sets: Mapping[str, TermRecord] = field(default_factory=dict)
    """Main term over each set, by its name, including the first; empty for a single set."""
    layout_dependent: bool = False
    """Whether the numbers hold only for the run's layout."""


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """Record of one evaluation of the tasks in `eval.tasks`."""

    step: int
    """Completed optimizer updates before the evaluation."""
    tasks: Mapping[str, float]
    """Value by `task/metric`, or `task/metric,filter` with a filter of lm-eval other than none."""
    seconds: float
    layout_dependent: bool = False
    """Whether the numbers hold only for the run's layout."""


@dataclass(frozen=True, kw_only=True)
class ChangeRecord:
    """Configuration key that a start changed from its checkpoint's value, as checkpoint.allow_changed permits."""

    step: int
    """Completed optimizer updates before the change: later updates use the new value."""
    key: str
    """Dotted key."""
    old: str | None = None
    """Old value as JSON; None if the key was missing."""
    new: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.old or 'missing'} -> {self.new or 'missing'}"


Record = StepRecord | ValidRecord | TaskRecord | ChangeRecord

_KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "valid": ValidRecord,
    "tasks": TaskRecord,
    "change": ChangeRecord,
}
"""Records by the kind in their line of JSON."""


def to_json_line(record: Record) -> str:
    """Returns a record as one line, with newline; `from_json_line` reads it back as an equal record."""
    kind = next(name for name, record_type in _KINDS.items() if isinstance(record, record_type))
    return json.dumps({"kind": kind} | _plain_fields(record), allow_nan=False) + "\n"


def from_json_line(line: str) -> Record:
    try:
        values = json.loads(line)
        kind = values.pop("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}")
        return _KINDS[kind](**_fields_read(_KINDS[kind], values))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as fault:
        raise DataError(f"not a record of this program's metrics ({fault}): {line[:80]!r}") from fault


def _plain_fields(record: Record | TermRecord) -> dict[str, Json]:
    return {member.name: _plain(getattr(record, member.name)) for member in fields(record)}


def _plain(value: object) -> Json:
    match value:
        case float() if not math.isfinite(value):
            return json.dumps(value)  # NaN, Infinity or -Infinity, as a string
        case TermRecord():
            return _plain_fields(value)
        case Mapping():
            return {name: _plain(term) for name, term in value.items()}
        case _:
            return value


def _fields_read(record: type[Record | TermRecord], values: dict[str, Json]) -> dict[str, Json]:
    """Converts the fields in `values`; fields that an earlier version did not write keep their defaults."""
    kinds = {member.name: member.type for member in fields(record)}
    return {name: _value_read(name, kinds[name], value) for name, value in values.items()}


def _value_read(name: str, kind: Any, value: Json) -> Json:
    """Converts a value to the type of its field; floats also from integers and from strings, if not finite."""
    if kind == Mapping[str, TermRecord]:
        return {term: TermRecord(**_fields_read(TermRecord, content)) for term, content in value.items()}
    if kind == Mapping[str, float]:
        return {key: _value_read(key, float, number) for key, number in value.items()}
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(0.0, kind) and (is_whole or isinstance(value, str)):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{name} is {str(value)[:80]!r}")
    if is_whole and abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{name} is larger than {_LARGEST_INTEGER}")
    return value


def scalars(record: Record) -> dict[str, float]:
    """Returns the numbers of a record by tag; none for a change."""
    match record:
        case ChangeRecord():
            return {}
        case TaskRecord():
            return {f"tasks/{name}": value for name, value in record.tasks.items()}
        case ValidRecord():
            sets = {f"valid/loss/{name}": term.loss for name, term in record.valid_sets.items()}
            return {"valid/loss": record.valid_loss} | sets | _term_means(record, "valid_terms")
        case StepRecord():
            loss = {} if record.empty else {"train/loss": record.loss}
            known = {
                "train/loss_scale": record.loss_scale,
                "speed/mfu": record.mfu,
                "speed/flops_per_second": _per_second(record.flops, record.seconds),
                "speed/loss_tokens_per_second": _per_second(record.loss_tokens, record.seconds),
                "tokens/padding": record.padding_tokens,
                "tokens/loss": record.loss_tokens,
                "memory/bytes": record.memory_bytes,
            }
            return {
                **loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/denominator": record.denominator,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/seconds": record.seconds,
                "tokens/text": record.tokens,
                **_term_means(record, "terms"),
                **{f"diagnostics/{name}": value for name, value in record.diagnostics.items()},
                **{f"train/loss/{name}": term.loss for name, term in record.sources.items()},
                **{tag: value for tag, value in known.items() if value is not None},
            }


def _per_second(count: float | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def _term_means(record: StepRecord | ValidRecord, prefix: str) -> dict[str, float]:
    return {f"{prefix}/{name}": term.loss for name, term in record.terms.items() if term.denominator != 0}


PACE_STEPS = 50
"""Number of steps whose pace predicts the remaining time, including saves and validation between them."""


def remaining_s(marks: Sequence[tuple[int, float]], num_steps: int) -> float | None:
    """Predicts the seconds until `num_steps` steps are done, from (steps done, time); None if all have one step."""
    (first_step, first_s), (last_step, last_s) = marks[0], marks[-1]
    if last_step == first_step:
        return None
    return (last_s - first_s) / (last_step - first_step) * max(0, num_steps - last_step)

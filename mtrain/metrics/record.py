"""What is known about one step or one validation pass, and its line of JSON.

metrics.jsonl holds one object a line. Floats are written with the digits that give back the same float64. JSON has no
word for the numbers that are none, so they stand there as the strings "NaN", "Infinity" and "-Infinity", which
`float()` reads.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mtrain.base.errors import DataError

MAIN_TERM = "main"
"""The term whose mean is `loss`; all others are beside it."""

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
"""Fields that tell how fast and where a step was made; all others are the same for every repetition of a run."""

_LARGEST_INTEGER = 2**63 - 1

Json = Any
"""What json.loads gives back."""


@dataclass(frozen=True, kw_only=True)
class TermRecord:
    """One term of the objective over one global batch."""

    loss: float
    """numerator / denominator, without the term's coefficient."""
    numerator: float
    denominator: float


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int
    """Optimizer updates completed, this one included: the first record has step 1."""
    loss: float
    """Main term over the global batch, in nats: numerator / denominator. Means nothing where `empty`."""
    objective: float | None = None
    """The quantity that was differentiated: sum over terms of coefficient x numerator / denominator."""
    denominator: float
    """What the main term was divided by."""
    grad_norm: float
    """Global L2 norm of the normalised gradient, before clipping."""
    lr: float
    tokens: int
    """Positions of the global batch that hold text, prompts included and padding apart. Records of version 0.1.0, which
    have no `padding_tokens`, count padding, too."""
    seconds: float
    """Wall time of the step."""
    tokens_per_second: float
    """tokens / seconds, over all ranks."""
    padding_tokens: int | None = None
    """Positions that hold no text, which the model processed beside them; None where it was not recorded."""
    loss_tokens: int | None = None
    """Positions that the main term counts; None where it was not recorded."""
    flops: float | None = None
    """Floating-point operations that training on this batch needs: of text, of pairs inside documents, of logits that a
    term counts; None where it was not recorded."""
    terms: Mapping[str, TermRecord] = field(default_factory=dict)
    """Every term of the objective by name."""
    sources: Mapping[str, TermRecord] = field(default_factory=dict)
    """The main term over the samples of each source of a blend, by the end of its path; of sources that the step held
    something of to learn. Empty where there are not several."""
    empty: bool = False
    """No token of the global batch was in the loss; weights and optimizer state stayed as they were."""
    skipped: str | None = None
    """Why the update was not applied, e.g. "fp16 overflow", or what made the step bad."""
    loss_scale: float | None = None
    """fp16 only."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1, where the device's peak is known."""
    layout_dependent: bool = False
    """The run uses something that changes with the layout by definition: its numbers are those of its layout only."""
    waited_seconds: float | None = None
    """Part of `seconds` in which the first rank's host waited for other ranks, on GPUs also for its device; None where
    it was not recorded."""
    slow_rank: int | None = None
    """The rank that the others wait for, by `watch.slow_rank_percent`; None where none is slow."""
    slow_rank_ratio: float | None = None
    """Its own work, in medians of its pipeline stage."""
    memory_bytes: int | None = None
    """What the first rank needed: the peak on its GPU, or what is resident on a CPU; None where it was not recorded."""
    time_s: float | None = None
    """Unix time at which the step ended; None where it was not recorded."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """What the loss functions report beside their loss, over all tokens or groups of the step
    (docs/policy-losses.md, docs/preference.md)."""


@dataclass(frozen=True, kw_only=True)
class ValidRecord:
    """One pass over the validation sets; all numbers but `seconds` and `valid_sets` are those of the first one."""

    step: int
    """Optimizer updates completed before the pass."""
    valid_loss: float
    """Sum over sum over exactly the samples of the set, in nats."""
    denominator: float
    samples: int
    seconds: float
    terms: Mapping[str, TermRecord] = field(default_factory=dict)
    """Every term of the objective by name, over the same samples."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """As in `StepRecord`, over the same samples."""
    valid_sets: Mapping[str, TermRecord] = field(default_factory=dict)
    """Main term over each set, by its name, the first one too; empty where there is one set only."""
    layout_dependent: bool = False
    """As in `StepRecord`."""


@dataclass(frozen=True, kw_only=True)
class ChangeRecord:
    """A key that a start gave another value than its checkpoint had, as checkpoint.allow_changed let it."""

    step: int
    """Optimizer updates completed before it: those that follow are made with the new value."""
    key: str
    """Dotted."""
    old: str | None = None
    """As JSON; None where the key was missing."""
    new: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.old or 'missing'} -> {self.new or 'missing'}"


Record = StepRecord | ValidRecord | ChangeRecord

_KINDS: dict[type[Record], str] = {StepRecord: "step", ValidRecord: "valid", ChangeRecord: "change"}
"""What a line of JSON calls it."""


def to_json_line(record: Record) -> str:
    """One line, newline included, that `from_json_line` turns back into an equal record."""
    return json.dumps({"kind": _KINDS[type(record)]} | _plain_fields(record), allow_nan=False) + "\n"


def from_json_line(line: str) -> Record:
    """Reads one line of metrics.jsonl.

    Raises:
        DataError: the line is not a record.
    """
    try:
        values = json.loads(line)
        kind, by_name = values.pop("kind"), _terms_read(values, "terms")
        by_set, by_source = _terms_read(values, "valid_sets"), _terms_read(values, "sources")
        seen = {name: _value_read(name, float, each) for name, each in values.pop("diagnostics", {}).items()}
        match kind:
            case "step":
                known: dict[str, Any] = {"terms": by_name, "sources": by_source, "diagnostics": seen}
                return StepRecord(**_fields_read(StepRecord, values), **known)
            case "valid":
                known = {"terms": by_name, "diagnostics": seen, "valid_sets": by_set}
                return ValidRecord(**_fields_read(ValidRecord, values), **known)
            case "change":
                return ChangeRecord(**_fields_read(ChangeRecord, values))
            case other:
                raise ValueError(f"kind is {other!r}")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as fault:
        raise DataError(f"not a record of this program's metrics ({fault}): {line[:80]!r}") from fault


def _plain_fields(record: Record | TermRecord) -> dict[str, Json]:
    return {each.name: _plain(getattr(record, each.name)) for each in fields(record)}


def _plain(value: object) -> Json:
    match value:
        case float() if not math.isfinite(value):
            return json.dumps(value)  # NaN, Infinity or -Infinity, as a string from here on
        case TermRecord():
            return _plain_fields(value)
        case Mapping():
            return {name: _plain(term) for name, term in value.items()}
        case _:
            return value


def _terms_read(values: dict[str, Json], name: str) -> dict[str, TermRecord]:
    """A field of terms, taken out of the values; empty in records of versions that did not have it."""
    return {term: TermRecord(**_fields_read(TermRecord, each)) for term, each in values.pop(name, {}).items()}


def _fields_read(record: type[Record | TermRecord], values: dict[str, Json]) -> dict[str, Json]:
    kinds = {each.name: each.type for each in fields(record)}
    return {name: _value_read(name, kinds[name], value) for name, value in values.items()}


def _value_read(name: str, kind: Any, value: Json) -> Json:
    """A field of the kind that the record has; floats from integers and from the strings of non-finite numbers too."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(0.0, kind) and (is_whole or isinstance(value, str)):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{name} is {str(value)[:80]!r}")
    if is_whole and abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{name} is larger than {_LARGEST_INTEGER}")
    return value

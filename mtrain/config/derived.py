"""Values that follow from several sections of a configuration."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from mtrain.config.schema.data import AnyData, FilesSection, SftSection, SourceSection
from mtrain.config.schema.loss import LABEL, NUMBER_LOSSES, LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.section import Section
from mtrain.config.schema.train import TrainSection


def with_warmup_steps(content: Any) -> Any:
    """Replaces `optimizer.warmup_ratio` with `optimizer.warmup_steps`, once the number of steps is known."""
    match content:
        case {"train": {"num_steps": int(num_steps)}, "optimizer": {"warmup_ratio": int() | float() as ratio}}:
            optimizer = content["optimizer"]
            if num_steps > 0 and 0 <= ratio < 1 and not optimizer.get("warmup_steps"):
                # through text, so that 0.1 is exactly a tenth; at least one step follows the warm-up
                steps = min(math.ceil(Fraction(str(ratio)) * num_steps), num_steps - 1)
                return {**content, "optimizer": {**optimizer, "warmup_ratio": None, "warmup_steps": steps}}
    return content


def row_width(train: TrainSection, data: AnyData) -> int:
    """Returns the number of positions in a row."""
    return data.seq_length if train.tokens_per_micro_batch is None else train.tokens_per_micro_batch


PREFERENCE_FORMATS: dict[str, Literal["pairs", "answers"]] = {"preference": "pairs", "unpaired_preference": "answers"}
"""data.format of preferences -> what its records compare."""


def compared(loss: LossSection, data: AnyData) -> Literal["pairs", "answers"] | None:
    """Returns what a run compares, from its loss or, for a user's own loss, from data.format; None if nothing."""
    if loss.preference is not None:
        return loss.preference.compares
    return PREFERENCE_FORMATS.get(data.format) if isinstance(data, SftSection) else None


def label_columns(loss: LossSection) -> tuple[str, ...]:
    """Returns the extras that hold a real-valued label; empty if labels are classes or missing."""
    return (LABEL,) if loss.function in NUMBER_LOSSES else ()


LAYOUT_DEPENDENT_KEYS = (
    "model.experts.capacity_factor",
    "loss.router.microbatch_balance_coefficient",
    "loss.router.global_balance_coefficient",
)
"""Keys whose effect, if above 0, depends on the layout by definition."""
DROPOUT_KEYS = ("model.attention_dropout", "model.hidden_dropout", "adapter.dropout")
"""Keys that, if above 0, draw different numbers under another layout or micro-batch size."""


def layout_dependent_keys(model: ModelSection, loss: LossSection) -> list[str]:
    """Returns the keys of LAYOUT_DEPENDENT_KEYS that are above 0."""
    return above_zero(LAYOUT_DEPENDENT_KEYS, {"model": model, "loss": loss})


def above_zero(keys: Iterable[str], sections: Mapping[str, Section | None]) -> list[str]:
    """Returns the dotted keys whose value is above 0, without those of missing sections."""

    def value(key: str) -> Any:
        name, *parts = key.split(".")
        current: Any = sections[name]
        for part in parts:
            current = None if current is None else getattr(current, part)
        return current

    return [key for key in keys if value(key)]


@dataclass(frozen=True)
class DataPhase:
    """One blend of `data.train` or `data.curriculum`."""

    from_step: int
    """Updates completed before the blend begins."""
    shares: dict[str, float]
    """Path of a source -> its share of the samples, from 0 to 1."""

    def __str__(self) -> str:
        shares = " + ".join(f"{share:.4g} {path}" for path, share in self.shares.items())
        return f"from step {self.from_step + 1} on: {shares}"


def data_phases(data: AnyData) -> tuple[DataPhase, ...]:
    """Returns the phases in order; empty without a curriculum."""
    if not isinstance(data, FilesSection) or not data.curriculum:
        return ()
    later = [(blend.from_step, blend.sources) for blend in data.curriculum]
    return tuple(DataPhase(step, _shares(sources)) for step, sources in [(0, data.train), *later])


def _shares(sources: Sequence[SourceSection]) -> dict[str, float]:
    total = sum(source.weight for source in sources)
    return {source.path: source.weight / total for source in sources}


def phase_number(phases: Sequence[DataPhase], step: int) -> int:
    """Returns the number of the phase that a step belongs to, both counted from 1; 0 without phases."""
    return sum(phase.from_step < step for phase in phases)

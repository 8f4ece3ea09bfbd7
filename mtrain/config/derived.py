"""What follows from several sections of a configuration together: asked by rules and by the rest of the program."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.data import AnyData, SftSection
from mtrain.config.schema.loss import LABEL, NUMBER_LOSSES, LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.section import Section
from mtrain.config.schema.train import TrainSection


def row_width(train: TrainSection, data: AnyData) -> int:
    """Positions of a row."""
    return data.seq_length if train.tokens_per_micro_batch is None else train.tokens_per_micro_batch


PREFERENCE_FORMATS: dict[str, Literal["pairs", "answers"]] = {"preference": "pairs", "unpaired_preference": "answers"}
"""What records of a data.format are."""


def compared(loss: LossSection, data: AnyData) -> Literal["pairs", "answers"] | None:
    """What a run compares, as its loss says, or where that is the user's own, as data.format does; None: nothing."""
    if loss.preference is not None:
        return loss.preference.compares
    return PREFERENCE_FORMATS.get(data.format) if isinstance(data, SftSection) else None


def sequences_per_sample(loss: LossSection, data: AnyData) -> int:
    """A pair is two sequences; an answer that is judged alone comes with one that KTO measures by."""
    return 1 if compared(loss, data) is None else 2


def label_columns(loss: LossSection) -> tuple[str, ...]:
    """Extras that hold the label of a record, where that is no class."""
    return (LABEL,) if loss.function in NUMBER_LOSSES else ()


LAYOUT_DEPENDENT_KEYS = (
    "model.experts.capacity_factor",
    "loss.router.microbatch_balance_coefficient",
    "loss.router.global_balance_coefficient",
)
"""Knobs whose effect changes with the layout by definition, when they are above 0."""
DROPOUT_KEYS = ("model.attention_dropout", "model.hidden_dropout", "adapter.dropout")
"""Above 0 they draw other numbers under another layout or micro-batch size, so that no two of them are the same run."""


def layout_dependent_keys(model: ModelSection, loss: LossSection) -> list[str]:
    """Those of LAYOUT_DEPENDENT_KEYS that are in use."""
    return _above_zero(LAYOUT_DEPENDENT_KEYS, {"model": model, "loss": loss})


def dropout_keys(model: ModelSection, adapter: AdapterSection | None) -> list[str]:
    """Those of DROPOUT_KEYS that are in use."""
    return _above_zero(DROPOUT_KEYS, {"model": model, "adapter": adapter})


def _above_zero(keys: Iterable[str], sections: Mapping[str, Section | None]) -> list[str]:
    def value(key: str) -> Any:
        name, *parts = key.split(".")
        found: Any = sections[name]
        for part in parts:
            found = None if found is None else getattr(found, part)
        return found

    return [key for key in keys if value(key)]

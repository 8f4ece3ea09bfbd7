"""Heads in config.json: the model's class says whether there is a head, its labels how many outputs it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Entry
from mtrain.hf.schema.values import shown, value_of

_HEAD, _TOKENS = "ForSequenceClassification", "ForCausalLM"


@final
@dataclass(frozen=True)
class Labels(Entry):
    """`LlamaForSequenceClassification` and its like: `score.weight` on the last token, one row a label."""

    prefix: str
    """Beginning of the name of the class in transformers."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("architectures", "num_labels", "id2label", "label2id")

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        if not _has_head(config):
            return {"num_labels": None}
        labels = config.get("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise DataError(f"config.json: id2label={shown(labels)} must be an object of numbers and names; correct it")
        # transformers counts the names where there are any, and has two labels otherwise
        return {"num_labels": len(labels) if labels else value_of(config, "num_labels", int, 2)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        if model.num_labels is None:
            return {"architectures": [f"{self.prefix}{_TOKENS}"]} if _has_head(config) else {}
        names = {str(number): f"LABEL_{number}" for number in range(model.num_labels)}
        return {
            "architectures": [f"{self.prefix}{_HEAD}"],
            "id2label": names,
            "label2id": {name: int(number) for number, name in names.items()},
        }


def _has_head(config: dict[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any(isinstance(each, str) and each.endswith(_HEAD) for each in classes)

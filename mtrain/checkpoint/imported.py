"""What an imported checkpoint says about the model that it holds; of a run, its config.yaml says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mtrain.config.model import ModelSection
from mtrain.errors import DataError

MODEL_NAME = "model.yaml"
"""The part of a configuration that starts from the checkpoint."""


def imported_model(checkpoint: Path) -> ModelSection | None:
    """The model of an import; None where the folder is none.

    Raises:
        DataError: The file that says it cannot be understood.
    """
    path = checkpoint / MODEL_NAME
    if not path.exists():
        return None
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ModelSection.model_validate(content["model"])
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError) as fault:
        raise DataError(
            f"{path} cannot be understood: {str(fault).splitlines()[0]}; import the weights again"
        ) from None

"""Description of the model in an imported checkpoint; a run's checkpoint has a config.yaml instead."""

from pathlib import Path
from typing import Any

from mtrain.base.errors import DataError
from mtrain.base.plain_files import parsed_yaml, read_plain_file
from mtrain.config.renamed import current_names
from mtrain.config.schema.model import ModelSection

MODEL_NAME = "model.yaml"
"""File with the `model` section for runs that start from the checkpoint."""
_MOST_BYTES = 1 << 20


def imported_model(checkpoint: Path) -> ModelSection | None:
    """Reads the model section of an import; None if the folder is not an import."""
    path = checkpoint / MODEL_NAME
    if not path.exists():
        return None
    try:
        content: Any = parsed_yaml(read_plain_file(path, _MOST_BYTES))
        # an import by version 0.1.0 has the field names of that version
        return ModelSection.model_validate(current_names(content, str(path))[0]["model"])
    except (OSError, ValueError, TypeError, KeyError) as fault:
        reason = str(fault).splitlines()[0][:200]
        raise DataError(f"{path} cannot be understood: {reason}; import the weights again") from None

"""Whether a run's model can be written as config.json, found before the run and not at its first export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of, fitting_family

ORIGIN = "hf"
"""Folder in an imported checkpoint with what came with the weights: config.json, index, tokenizer."""
SHARDS_NAME = "shards.json"
"""File in it: the names of tensors in each file of weights, and its metadata."""


def refuse_unexportable(config: Config) -> None:
    """Refuses a run that is to export what no config.json can say.

    Weights from a folder of Hugging Face, or from its import, are exported as its family; others as the first family
    that fits. (Of weights that another run began with, the export itself finds the family.)

    Raises:
        ConfigError: The model cannot be written so.
    """
    if config.checkpoint.export_hf_every_steps == 0:
        return
    try:
        # found before any rank starts: else a run would train for hours up to its first export
        template, family = _template(config), family_of_run(config)
        # the very call of the export, so both refuse the same models
        family.config(config.model, template)
    except DataError as fault:
        raise ConfigError(
            f"checkpoint.export_hf_every_steps={config.checkpoint.export_hf_every_steps} asks for folders of Hugging "
            f"Face, but {fault}; change the model, or set it to 0"
        ) from None


def family_of_run(config: Config) -> Family:
    """The family that a run's model belongs to: of the folder or import that its weights come from, else one that fits.

    Raises:
        DataError: There is none.
    """
    template = _template(config)
    return fitting_family(config.model) if template is None else family_of(template)


def _template(config: Config) -> dict[str, Any] | None:
    start = config.checkpoint.initialize_from
    places = [Path(config.model.hf)] if config.model.hf is not None else []
    places += [Path(start) / ORIGIN] if start is not None else []
    return next((read_json(place / CONFIG_NAME) for place in places if (place / CONFIG_NAME).is_file()), None)

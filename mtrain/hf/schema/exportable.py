"""Check, before a run, that its model can be written as config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, read_json
from mtrain.hf.schema.registry import family_of, fitting_family

ORIGIN = "hf"
"""Folder in an imported checkpoint with the files that came with the weights: config.json, index, tokenizer."""
SHARDS_NAME = "shards.json"
"""File in that folder: the names of tensors in each file of weights, and its metadata."""


def refuse_unexportable(config: Config) -> None:
    """Refuses a run that is to export a model that no config.json can describe.

    Weights from a folder of Hugging Face, or from its import, are exported as its family; others as the first family
    that fits. (For weights of another run, the export itself finds the family.)

    Raises:
        ConfigError: The model cannot be written.
    """
    if config.checkpoint.export_hf_every_steps == 0:
        return
    try:
        # before any rank starts: otherwise a run would train for hours up to its first export
        template, family = _template(config), family_of_run(config)
        # the same call as in the export, so both refuse the same models
        family.config(config.model, template)
    except DataError as fault:
        raise ConfigError(
            f"checkpoint.export_hf_every_steps={config.checkpoint.export_hf_every_steps} asks for folders of Hugging "
            f"Face, but {fault}; change the model, or set it to 0"
        ) from None


def family_of_run(config: Config) -> Family:
    """Finds the family of a run's model: that of the folder or import with its weights, else one that fits.

    Raises:
        DataError: No family fits.
    """
    template = _template(config)
    return fitting_family(config.model) if template is None else family_of(template)


def _template(config: Config) -> dict[str, Any] | None:
    start = config.checkpoint.initialize_from
    places = [Path(config.model.hf)] if config.model.hf is not None else []
    places += [Path(start) / ORIGIN] if start is not None else []
    return next((read_json(place / CONFIG_NAME) for place in places if (place / CONFIG_NAME).is_file()), None)

"""Objective of a run, checked against its data; needs torch, but no device."""

from __future__ import annotations

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.derived import label_columns
from mtrain.config.extras import as_configured
from mtrain.loss.objective import Objective


def objective_of(config: Config) -> Objective:
    """Returns the objective of a run.

    Args:
        config: Configuration of the run.

    Raises:
        ConfigError: A loss function cannot be loaded, or the records lack extras that it reads.
    """
    objective = Objective.from_config(config.loss, config.model.mtp_depths, config.model.num_labels is not None)
    needed = as_configured(objective.extras)
    there = {*config.data.extra_columns, *label_columns(config.loss)}
    missing = [name for name, columns in needed.items() if not {*columns} <= there]
    if missing:
        raise ConfigError(
            f"data.extras={list(config.data.extras)} lacks {', '.join(missing)}, but the loss functions read "
            f"{', '.join(needed)} of each token; set data.extras=[{','.join(needed)}] with "
            "data.kind=sft, and give records these keys"
        )
    return objective

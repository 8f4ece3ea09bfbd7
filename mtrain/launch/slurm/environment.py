"""What the environment of whoever submits says to Slurm: defaults of a few options, and nothing that overrides one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtrain.launch.slurm.options import SlurmOptions

_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
}
"""Variable of sbatch -> the option that it stands for where that is not given: sites set them for all jobs."""
_CONNECTION = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"))
"""Which Slurm it is, and who asks."""


def with_defaults(options: SlurmOptions, environ: Mapping[str, str]) -> tuple[SlurmOptions, list[str]]:
    """The options, completed by the environment, and notes that say what counts of it and what does not.

    Raises:
        ConfigError: A default is not what Slurm takes.
    """
    given = {name: value for name, value in environ.items() if name.startswith("SBATCH_") and value}
    taken = {name: field for name, field in _DEFAULTS.items() if name in given and getattr(options, field) is None}
    notes = [f"note: --{field}={given[name]} is given by {name} of the environment" for name, field in taken.items()]
    ignored = sorted(given.keys() - taken.keys())
    if ignored:
        notes.append(
            f"note: {', '.join(ignored)} of the environment has no effect on the job; what it asks for can be given as "
            "an option here, or as --sbatch name=value"
        )
    values: dict[str, Any] = {field: given[name] for name, field in taken.items()}
    return replace(options, **values), notes


def for_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's commands.

    sbatch prefers SBATCH_* to the options of a script, and hands every SLURM_* on to the job, whose srun reads them;
    within another job there are dozens.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in _CONNECTION or not name.startswith(("SBATCH_", "SLURM_", "SRUN_"))
    }

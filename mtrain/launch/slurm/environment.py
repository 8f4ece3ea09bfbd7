"""Variables of the submitting user's environment for Slurm: defaults of a few options; none overrides an option."""

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
"""Variable of sbatch -> the option for which it is the default: sites set these variables for all jobs."""
_CONNECTION = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"))
"""Variables that say which Slurm it is, and who asks."""


def with_defaults(options: SlurmOptions, environ: Mapping[str, str]) -> tuple[SlurmOptions, list[str]]:
    """Completes the options from the environment; returns them with notes on which variables count.

    Raises:
        ConfigError: A default is not a value that Slurm accepts.
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
    """Returns the environment for Slurm's commands.

    sbatch prefers SBATCH_* to the options of a script, and passes every SLURM_* on to the job, whose srun reads them;
    within another job there are dozens.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in _CONNECTION or not name.startswith(("SBATCH_", "SLURM_", "SRUN_"))
    }

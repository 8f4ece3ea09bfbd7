"""Ranks that warn; the functions for `Pool.run`."""

import warnings

from mtrain.mcore.distributed.groups import Groups


def warn(groups: Groups, module: str) -> str:
    """Warns as if a line of this module did; returns the module where that is no error."""
    warnings.warn_explicit("something is old", DeprecationWarning, f"{module}.py", 1, module)
    return module

"""Ranks that warn; the functions for `Pool.run`."""

import warnings

from mtrain.core.ranks.groups import Groups


def filters_of_warning(groups: Groups, module: str) -> list[str]:
    """Warns as `warn`; returns the filters that let it pass, which code that the rank ran before may have changed."""
    warn(groups, module)
    return [repr(each) for each in warnings.filters]


def warn(groups: Groups, module: str) -> str:
    """Warns as if a line of this module did; returns the module where that is no error."""
    warnings.warn_explicit("something is old", DeprecationWarning, f"{module}.py", 1, module)
    return module

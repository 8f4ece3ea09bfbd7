"""Common parts of the checks: ranks, layouts, samples, tolerances, results."""

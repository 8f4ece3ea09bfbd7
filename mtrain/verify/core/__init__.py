"""What every check shares: ranks, layouts, samples, tolerances, results."""

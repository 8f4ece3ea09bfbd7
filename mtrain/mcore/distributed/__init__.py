"""Process groups, collectives and random numbers of the ranks."""

"""Process groups, collectives and random states of the ranks."""

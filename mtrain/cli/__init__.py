"""Command line: one file per verb, or per group of similar verbs."""

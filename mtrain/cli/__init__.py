"""Command line: a file for each verb, or for a few that are alike."""

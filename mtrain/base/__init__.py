"""Foundations of every package: errors, files, signals, the environment. Imports neither torch nor the
configuration."""

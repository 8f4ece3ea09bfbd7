"""Foundations of every package: errors, files, signals, environment. Imports neither torch nor the configuration."""

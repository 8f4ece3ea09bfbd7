"""Foundations for every package: errors, files, signals, the environment. No torch, no configuration."""

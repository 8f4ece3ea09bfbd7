"""Foundations that every package may use: errors, files, signals, the environment. No torch, no configuration."""

"""Assigns samples to rows and rows to ranks: arithmetic on lengths, without torch."""

"""Rotary positions: frequencies, angles, and rotation."""

"""Rotary positions: frequencies, angles, and what a rank sees of them."""

"""Checks of `mtrain check` on this machine before a run starts."""

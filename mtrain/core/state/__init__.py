"""A rank's state, as values that are saved, loaded and checked."""

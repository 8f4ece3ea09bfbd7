"""The state of a rank, in the form in which it is saved, loaded and checked."""

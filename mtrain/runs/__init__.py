"""Run folder: the files of a run, and the lock on them."""

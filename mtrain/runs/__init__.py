"""Run folder: the files of a run, and who may write them."""
